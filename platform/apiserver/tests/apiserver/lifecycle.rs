//! Ends: finalizers, grace, propagation, namespaces; and the subresources scale, binding, eviction.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};

use crate::support::{Fixture, config_map, function, pod};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";
const SETS: &str = "/apis/apps/v1/namespaces/default/replicasets";

async fn bound_pod(server: &Fixture, name: &str) {
    assert_eq!(server.call("POST", PODS, pod(name)).await.0, StatusCode::CREATED);
    let binding = json!({"metadata": {"name": name}, "target": {"kind": "Node", "name": "n"}});
    let (code, status) = server.call("POST", &format!("{PODS}/{name}/binding"), binding).await;
    assert_eq!(code, StatusCode::CREATED, "{status}");
}

#[tokio::test]
async fn finalizers_hold_an_object() {
    let server = Fixture::new().await;
    let mut body = config_map("a", json!({}));
    body["metadata"]["finalizers"] = json!(["example.com/wait"]);
    server.call("POST", MAPS, body).await;
    let one = format!("{MAPS}/a");
    let (code, marked) = server.call("DELETE", &one, Value::Null).await;
    assert_eq!(code, StatusCode::OK);
    assert!(marked["metadata"]["deletionTimestamp"].is_string(), "{marked}");
    let (_, again) = server.call("DELETE", &one, Value::Null).await;
    assert_eq!(again["metadata"], marked["metadata"], "the second deletion changes nothing");

    let (code, status) = server
        .merge(&one, json!({"metadata": {"finalizers": ["example.com/wait", "example.com/more"]}}))
        .await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        status["message"]
            .as_str()
            .unwrap()
            .contains("no new finalizers can be added if the object is being deleted")
    );
    let mut watch = server
        .watch(&format!(
            "{MAPS}?watch=true&resourceVersion={}",
            marked["metadata"]["resourceVersion"].as_str().unwrap()
        ))
        .await;
    let (code, last) = server.merge(&one, json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(code, StatusCode::OK, "{last}");
    assert_eq!(server.get(&one).await.0, StatusCode::NOT_FOUND);
    assert_eq!(watch.event().await, ("DELETED".into(), "a".into()));
}

#[tokio::test]
async fn a_watch_takes_any_timeout() {
    let server = Fixture::new().await;
    for seconds in [i64::MAX, -1] {
        let mut watch = server.watch(&format!("{MAPS}?watch=true&timeoutSeconds={seconds}")).await;
        let name = format!("a{}", seconds.signum() + 1);
        server.call("POST", MAPS, config_map(&name, json!({}))).await;
        while watch.event().await != ("ADDED".into(), name.clone()) {}
    }
    let (code, status) = server.get(&format!("{MAPS}?watch=true&timeoutSeconds={}", u64::MAX)).await;
    assert_eq!(code, StatusCode::BAD_REQUEST, "{status}");
}

#[tokio::test]
async fn empty_lists_of_metadata_are_not_kept() {
    let server = Fixture::new().await;
    let empty = json!({"finalizers": [], "ownerReferences": [], "labels": {}, "annotations": {}});
    let mut body = config_map("a", json!({}));
    for (field, value) in empty.as_object().unwrap() {
        body["metadata"][field] = value.clone();
    }
    let lists = |object: &Value| -> Vec<String> {
        let fields = object["metadata"].as_object().unwrap().keys().cloned();
        fields.filter(|field| empty.get(field).is_some()).collect()
    };
    let (_, created) = server.call("POST", MAPS, body).await;
    assert_eq!(lists(&created), [""; 0], "{created}");
    let one = format!("{MAPS}/a");
    for wait in [json!(["example.com/wait"]), json!([])] {
        server.merge(&one, json!({"metadata": {"finalizers": wait}})).await;
    }
    let (_, now) = server.get(&one).await;
    assert_eq!(lists(&now), [""; 0], "{now}");
}

#[tokio::test]
async fn propagation_becomes_finalizers() {
    let server = Fixture::new().await;
    for (policy, finalizer) in [("Foreground", "foregroundDeletion"), ("Orphan", "orphan")] {
        server.call("POST", MAPS, config_map("a", json!({}))).await;
        let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy});
        let (_, marked) = server.call("DELETE", &format!("{MAPS}/a"), options).await;
        assert_eq!(marked["metadata"]["finalizers"], json!([finalizer]), "{marked}");
        server.merge(&format!("{MAPS}/a"), json!({"metadata": {"finalizers": null}})).await;
    }
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    let (_, gone) =
        server.call("DELETE", &format!("{MAPS}/a?propagationPolicy=Background"), Value::Null).await;
    assert_eq!(gone["status"], "Success");
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    let (code, _) = server.call("DELETE", &format!("{MAPS}/a?propagationPolicy=Sideways"), Value::Null).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn finalizers_choose_the_propagation_that_a_deletion_leaves_open() {
    let server = Fixture::new().await;
    for (before, after) in [
        (json!(["orphan", "foregroundDeletion"]), json!(["orphan"])),
        (json!(["foregroundDeletion", "a.b/c", "orphan"]), json!(["a.b/c", "foregroundDeletion"])),
        (json!(["foregroundDeletion", "a.b/c"]), json!(["foregroundDeletion", "a.b/c"])),
    ] {
        let mut body = config_map("a", json!({}));
        body["metadata"]["finalizers"] = before.clone();
        server.call("POST", MAPS, body).await;
        let (_, marked) = server.call("DELETE", &format!("{MAPS}/a"), Value::Null).await;
        assert_eq!(marked["metadata"]["finalizers"], after, "{before}");
        server.merge(&format!("{MAPS}/a"), json!({"metadata": {"finalizers": null}})).await;
    }
}

#[tokio::test]
async fn preconditions_guard_a_deletion() {
    let server = Fixture::new().await;
    let (_, created) = server.call("POST", MAPS, config_map("a", json!({}))).await;
    for preconditions in [json!({"uid": "other"}), json!({"resourceVersion": "1"})] {
        let (code, status) =
            server.call("DELETE", &format!("{MAPS}/a"), json!({"preconditions": preconditions})).await;
        assert_eq!(code, StatusCode::CONFLICT);
        assert!(status["message"].as_str().unwrap().to_lowercase().contains("precondition"), "{status}");
    }
    let right = json!({"preconditions": {"uid": created["metadata"]["uid"], "resourceVersion": created["metadata"]["resourceVersion"]}});
    assert_eq!(server.call("DELETE", &format!("{MAPS}/a"), right).await.0, StatusCode::OK);
}

#[tokio::test]
async fn collections_are_deleted_by_selector() {
    let server = Fixture::new().await;
    for (name, label) in [("a", "x"), ("b", "x"), ("c", "y")] {
        let mut body = config_map(name, json!({}));
        body["metadata"]["labels"] = json!({"l": label});
        server.call("POST", MAPS, body).await;
    }
    let (code, list) = server.call("DELETE", &format!("{MAPS}?labelSelector=l=x"), Value::Null).await;
    assert_eq!((code, list["items"].as_array().unwrap().len()), (StatusCode::OK, 2));
    let (_, left) = server.get(MAPS).await;
    assert_eq!(left["items"][0]["metadata"]["name"], "c");
}

#[tokio::test]
async fn pods_go_when_their_kubelet_says_so() {
    let server = Fixture::new().await;
    server.call("POST", PODS, pod("loose")).await;
    let (_, gone) = server.call("DELETE", &format!("{PODS}/loose"), Value::Null).await;
    assert_eq!(
        (gone["kind"].as_str(), gone["metadata"]["name"].as_str()),
        (Some("Pod"), Some("loose")),
        "no node, no grace"
    );
    assert_eq!(server.get(&format!("{PODS}/loose")).await.0, StatusCode::NOT_FOUND);

    bound_pod(&server, "p").await;
    let one = format!("{PODS}/p");
    let (_, marked) = server.call("DELETE", &one, Value::Null).await;
    assert_eq!(marked["metadata"]["deletionGracePeriodSeconds"], 30);
    let (_, longer) = server.call("DELETE", &format!("{one}?gracePeriodSeconds=60"), Value::Null).await;
    assert_eq!(longer["metadata"]["deletionGracePeriodSeconds"], 30, "it can only become shorter");
    let (_, shorter) = server.call("DELETE", &format!("{one}?gracePeriodSeconds=5"), Value::Null).await;
    assert_eq!(shorter["metadata"]["deletionGracePeriodSeconds"], 5);
    assert!(
        shorter["metadata"]["deletionTimestamp"].as_str() < marked["metadata"]["deletionTimestamp"].as_str()
    );
    let status = json!({"status": {"phase": "Succeeded"}});
    assert_eq!(
        server.merge(&format!("{one}/status"), status).await.0,
        StatusCode::OK,
        "its status can still be written"
    );
    let (code, _) = server.call("DELETE", &format!("{one}?gracePeriodSeconds=0"), Value::Null).await;
    assert_eq!(code, StatusCode::OK);
    assert_eq!(server.get(&one).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn pods_are_bound_once() {
    let server = Fixture::new().await;
    bound_pod(&server, "p").await;
    let (_, bound) = server.get(&format!("{PODS}/p")).await;
    assert_eq!(bound["spec"]["nodeName"], "n");
    assert_eq!(bound["status"]["conditions"][0]["type"], "PodScheduled");
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "m"}});
    let (code, status) = server.call("POST", &format!("{PODS}/p/binding"), binding).await;
    assert_eq!(code, StatusCode::CONFLICT);
    assert!(status["message"].as_str().unwrap().contains("pod p is already assigned to node \"n\""));
    let nowhere = json!({"metadata": {"name": "p"}, "target": {}});
    assert_eq!(
        server.call("POST", &format!("{PODS}/p/binding"), nowhere).await.0,
        StatusCode::INTERNAL_SERVER_ERROR,
        "as upstream"
    );

    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}, "deleteOptions": {"gracePeriodSeconds": 7}});
    assert_eq!(server.call("POST", &format!("{PODS}/p/eviction"), eviction).await.0, StatusCode::CREATED);
    let (_, evicted) = server.get(&format!("{PODS}/p")).await;
    assert_eq!(evicted["metadata"]["deletionGracePeriodSeconds"], 7);
    let conditions = evicted["status"]["conditions"].as_array().unwrap();
    let marked = conditions.iter().find(|condition| condition["type"] == "DisruptionTarget");
    assert_eq!(
        marked.map(|condition| (&condition["status"], &condition["reason"])),
        Some((&json!("True"), &json!("EvictionByEvictionAPI")))
    );
}

/// Nothing is written to a pod that the preconditions of its eviction do not fit, and dry runs change nothing.
#[tokio::test]
async fn an_eviction_that_does_not_happen_leaves_no_mark() {
    let server = Fixture::new().await;
    bound_pod(&server, "p").await;
    let (_, before) = server.get(&format!("{PODS}/p")).await;
    let path = format!("{PODS}/p/eviction");
    let evict = |options: Value| json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}, "deleteOptions": options});
    let other = evict(json!({"preconditions": {"uid": "other"}}));
    assert_eq!(server.call("POST", &path, other).await.0, StatusCode::CONFLICT);
    let dry = server.call("POST", &path, evict(json!({"dryRun": ["All"]}))).await;
    assert_eq!(dry.0, StatusCode::CREATED, "{}", dry.1);
    assert_eq!(server.get(&format!("{PODS}/p")).await.1, before);
    // The version that the eviction names is that of the pod before the mark.
    let version = &before["metadata"]["resourceVersion"];
    let this = evict(json!({"preconditions": {"resourceVersion": version}}));
    let (code, answer) = server.call("POST", &path, this).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
    assert_ne!(server.get(&format!("{PODS}/p")).await.1["metadata"]["deletionTimestamp"], Value::Null);
}

/// A full budget protects ready pods; a pod that is not ready goes, and is not counted.
#[tokio::test]
async fn a_pod_that_is_not_ready_is_evicted_from_a_met_budget() {
    let server = Fixture::new().await;
    let budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    let budget = json!({"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "a"}}}});
    let (code, created) = server.call("POST", budgets, budget).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    let status = json!({"status": {"observedGeneration": 1, "disruptionsAllowed": 0, "currentHealthy": 1,
        "desiredHealthy": 1, "expectedPods": 2}});
    assert_eq!(server.merge(&format!("{budgets}/b/status"), status).await.0, StatusCode::OK);
    for (name, ready) in [("well", "True"), ("ill", "False")] {
        let mut labelled = pod(name);
        labelled["metadata"]["labels"] = json!({"app": "a"});
        assert_eq!(server.call("POST", PODS, labelled).await.0, StatusCode::CREATED);
        let status =
            json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}});
        assert_eq!(server.merge(&format!("{PODS}/{name}/status"), status).await.0, StatusCode::OK);
    }
    for (name, code) in [("well", StatusCode::TOO_MANY_REQUESTS), ("ill", StatusCode::CREATED)] {
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}});
        let (found, answer) = server.call("POST", &format!("{PODS}/{name}/eviction"), eviction).await;
        assert_eq!(found, code, "{name}: {answer}");
    }
    let (_, budget) = server.get(&format!("{budgets}/b")).await;
    assert_eq!(budget["status"]["disruptedPods"], Value::Null, "{budget}");
}

fn replica_set(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "x:1"}]}}}})
}

#[tokio::test]
async fn replica_sets_are_scaled() {
    let server = Fixture::new().await;
    let (code, created) = server.call("POST", SETS, replica_set("s")).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    assert_eq!(created["spec"]["template"]["spec"]["restartPolicy"], "Always");
    let scale = format!("{SETS}/s/scale");
    let (_, found) = server.get(&scale).await;
    assert_eq!(
        (&found["kind"], &found["spec"]["replicas"], &found["status"]["selector"]),
        (&json!("Scale"), &json!(1), &json!("a=b"))
    );
    let mut wanted = found.clone();
    wanted["spec"]["replicas"] = json!(3);
    let (code, scaled) = server.call("PUT", &scale, wanted.clone()).await;
    assert_eq!((code, &scaled["spec"]["replicas"]), (StatusCode::OK, &json!(3)));
    assert_eq!(server.call("PUT", &scale, wanted).await.0, StatusCode::CONFLICT, "the version is stale now");
    let (_, patched) = server.merge(&scale, json!({"spec": {"replicas": 0}})).await;
    assert_eq!(patched["spec"], json!({}), "zero is left out, as upstream's Go type does");
    assert_eq!(
        server.merge(&scale, json!({"spec": {"replicas": -1}})).await.0,
        StatusCode::UNPROCESSABLE_ENTITY
    );
    let (_, set) = server.get(&format!("{SETS}/s")).await;
    assert_eq!((&set["spec"]["replicas"], &set["metadata"]["generation"]), (&json!(0), &json!(3)));

    let mut mismatch = replica_set("t");
    mismatch["spec"]["selector"]["matchLabels"]["a"] = json!("c");
    let (code, status) = server.call("POST", SETS, mismatch).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        status["message"].as_str().unwrap().contains("`selector` does not match template `labels`"),
        "{status}"
    );
}

#[tokio::test]
async fn namespaces_are_emptied() {
    let server = Fixture::new().await;
    let (_, list) = server.get("/api/v1/namespaces").await;
    let names: Vec<_> =
        list["items"].as_array().unwrap().iter().map(|n| n["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["default", "kube-node-lease", "kube-public", "kube-system"]);

    let (code, created) =
        server.call("POST", "/api/v1/namespaces", json!({"metadata": {"name": "team"}})).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    assert_eq!(
        (&created["status"]["phase"], &created["spec"]["finalizers"]),
        (&json!("Active"), &json!(["kubernetes"]))
    );
    assert_eq!(created["metadata"]["labels"]["kubernetes.io/metadata.name"], "team");
    server.call("POST", "/api/v1/namespaces/team/configmaps", config_map("a", json!({}))).await;
    server.call("POST", "/apis/mayfly.dev/v1/namespaces/team/functions", function("f")).await;
    let mut held = config_map("held", json!({}));
    held["metadata"]["finalizers"] = json!(["example.com/wait"]);
    server.call("POST", "/api/v1/namespaces/team/configmaps", held).await;

    let since =
        server.get("/api/v1/configmaps").await.1["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let mut maps =
        server.watch(&format!("/api/v1/namespaces/team/configmaps?watch=true&resourceVersion={since}")).await;
    let mut spaces = server.watch(&format!("/api/v1/namespaces?watch=true&resourceVersion={since}")).await;
    let (code, marked) = server.call("DELETE", "/api/v1/namespaces/team", Value::Null).await;
    assert_eq!((code, marked["status"]["phase"].as_str()), (StatusCode::OK, Some("Terminating")));
    assert_eq!(spaces.event().await, ("MODIFIED".into(), "team".into()));

    let (code, status) =
        server.call("POST", "/api/v1/namespaces/team/configmaps", config_map("late", json!({}))).await;
    assert_eq!(code, StatusCode::FORBIDDEN);
    assert_eq!(
        status["message"],
        "configmaps \"late\" is forbidden: unable to create new content in namespace team because it is being terminated"
    );
    assert_eq!(maps.event().await, ("DELETED".into(), "a".into()));
    assert_eq!(maps.event().await, ("MODIFIED".into(), "held".into()));
    let waits = async {
        loop {
            let (code, team) = server.get("/api/v1/namespaces/team").await;
            assert_eq!(code, StatusCode::OK, "it waits for the finalizer");
            let conditions = team["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let of = |name: &str| conditions.iter().find(|condition| condition["type"] == name).cloned();
            if let (Some(content), Some(finalizers)) =
                (of("NamespaceContentRemaining"), of("NamespaceFinalizersRemaining"))
            {
                return (content["message"].clone(), finalizers["message"].clone());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let (content, finalizers) = tokio::time::timeout(Duration::from_secs(10), waits).await.unwrap();
    assert_eq!(content, "Some resources are remaining: configmaps. has 1 resource instances");
    assert_eq!(
        finalizers,
        "Some content in the namespace has finalizers remaining: example.com/wait in 1 resource instances"
    );
    server.merge("/api/v1/namespaces/team/configmaps/held", json!({"metadata": {"finalizers": null}})).await;
    loop {
        let event = tokio::time::timeout(Duration::from_secs(10), spaces.event()).await.unwrap();
        if event == ("DELETED".into(), "team".into()) {
            break;
        }
    }
    assert_eq!(server.get("/apis/mayfly.dev/v1/namespaces/team/functions/f").await.0, StatusCode::NOT_FOUND);
    assert_eq!(
        server.call("POST", "/api/v1/namespaces", json!({"metadata": {"name": "team"}})).await.0,
        StatusCode::CREATED
    );
}

/// Whether the objects that pods use stay until the pods have ended.
#[tokio::test]
async fn the_pods_of_a_namespace_go_first() {
    let server = Fixture::new().await;
    server.call("POST", "/api/v1/namespaces", json!({"metadata": {"name": "team"}})).await;
    server.call("POST", "/api/v1/namespaces/team/configmaps", config_map("used", json!({}))).await;
    let mut held = pod("held");
    held["metadata"]["finalizers"] = json!(["example.com/wait"]);
    let (code, created) = server.call("POST", "/api/v1/namespaces/team/pods", held).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    let since =
        server.get("/api/v1/namespaces").await.1["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let mut spaces = server.watch(&format!("/api/v1/namespaces?watch=true&resourceVersion={since}")).await;
    server.call("DELETE", "/api/v1/namespaces/team", Value::Null).await;
    // The conditions are written after a round of deletions.
    let content = loop {
        let line = spaces.next().await.expect("the namespace");
        let conditions = line["object"]["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.into_iter().find(|known| known["type"] == "NamespaceContentRemaining");
        if let Some(found) = found {
            break found;
        }
    };
    assert_eq!(content["message"], "Some resources are remaining: pods. has 1 resource instances");
    assert_eq!(server.get("/api/v1/namespaces/team/configmaps/used").await.0, StatusCode::OK);
    server.merge("/api/v1/namespaces/team/pods/held", json!({"metadata": {"finalizers": null}})).await;
    while spaces.event().await != ("DELETED".into(), "team".into()) {}
    assert_eq!(server.get("/api/v1/namespaces/team/configmaps/used").await.0, StatusCode::NOT_FOUND);
}
