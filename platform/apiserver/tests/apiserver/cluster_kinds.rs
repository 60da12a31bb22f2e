//! Kinds about the server itself: components, API services, priority and fairness; and the older form of a binding.

use axum::body::Body;
use http::{StatusCode, header};
use serde_json::{Value, json};

use crate::support::{Fixture, pod, request};

const SERVICES: &str = "/apis/apiregistration.k8s.io/v1/apiservices";
const SCHEMAS: &str = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
const LEVELS: &str = "/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations";
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

fn cells(table: &Value) -> Vec<&Value> {
    table["rows"].as_array().unwrap().iter().map(|row| &row["cells"]).collect()
}

#[tokio::test]
async fn the_components_are_healthy() {
    let server = Fixture::new().await;
    let (code, table) = server.get_as("/api/v1/componentstatuses", TABLE).await;
    assert_eq!(code, StatusCode::OK);
    let healthy = |name: &str| json!([name, "Healthy", "ok", ""]);
    assert_eq!(
        json!(cells(&table)),
        json!([healthy("controller-manager"), healthy("scheduler"), healthy("store")])
    );
    let (_, one) = server.get("/api/v1/componentstatuses/scheduler").await;
    assert_eq!((&one["kind"], &one["conditions"][0]["type"]), (&json!("ComponentStatus"), &json!("Healthy")));
    assert_eq!(server.get("/api/v1/componentstatuses/absent").await.0, StatusCode::NOT_FOUND);
    let response =
        server.send(request("GET", "/api/v1/componentstatuses").body(Body::empty()).unwrap()).await;
    let warning = response.headers()[header::WARNING].to_str().unwrap();
    assert_eq!(warning, "299 - \"v1 ComponentStatus is deprecated in v1.19+\"");
}

#[tokio::test]
async fn each_group_has_its_local_api_service() {
    let server = Fixture::new().await;
    let definition = json!({"metadata": {"name": "cats.zoo.example"}, "spec": {"group": "zoo.example",
        "scope": "Namespaced", "names": {"plural": "cats", "kind": "Cat"},
        "versions": [{"name": "v1", "served": true, "storage": true,
                      "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
    let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    assert_eq!(server.call("POST", path, definition).await.0, StatusCode::CREATED);
    let (_, table) = server.get_as(SERVICES, TABLE).await;
    let rows = cells(&table);
    for name in ["v1.", "v1.apps", "v2.autoscaling", "v1.zoo.example", "v1.apiregistration.k8s.io"] {
        let row = rows.iter().find(|row| row[0] == name);
        let row = row.unwrap_or_else(|| panic!("{name} is absent"));
        assert_eq!((&row[1], &row[2]), (&json!("Local"), &json!("True")), "{name}");
    }
    let spec = |name: &str| {
        let path = format!("{SERVICES}/{name}");
        let server = &server;
        async move { server.get(&path).await.1["spec"].clone() }
    };
    let expected = |group: &str, group_priority: i64, priority: i64| json!({"group": group, "version": "v1", "groupPriorityMinimum": group_priority, "versionPriority": priority});
    assert_eq!(spec("v1.zoo.example").await, expected("zoo.example", 1000, 100));
    assert_eq!(spec("v1.apps").await, expected("apps", 17800, 15));
    // Others cannot be added.
    let foreign = json!({"metadata": {"name": "v1.a.b"}, "spec": {"group": "a.b", "version": "v1",
        "groupPriorityMinimum": 1, "versionPriority": 1, "service": {"namespace": "a", "name": "b"}}});
    let (code, status) = server.call("POST", SERVICES, foreign).await;
    assert_eq!(code, StatusCode::METHOD_NOT_ALLOWED);
    assert!(status["message"].as_str().unwrap().contains("no aggregated API servers"), "{status}");
}

#[tokio::test]
async fn flow_schemas_and_priority_levels_exist_and_are_validated() {
    let server = Fixture::new().await;
    let (_, table) = server.get_as(LEVELS, TABLE).await;
    let high = cells(&table).into_iter().find(|row| row[0] == "workload-high").unwrap();
    assert_eq!(json!(high.as_array().unwrap()[..6]), json!(["workload-high", "Limited", 40, 128, 6, 50]));
    let (_, table) = server.get_as(SCHEMAS, TABLE).await;
    assert_eq!(table["rows"].as_array().unwrap().len(), 13);
    let probes = cells(&table).into_iter().find(|row| row[0] == "probes").unwrap();
    assert_eq!((&probes[1], &probes[2], &probes[3]), (&json!("exempt"), &json!(2), &json!("<none>")));

    let level = json!({"metadata": {"name": "mine"}, "spec": {"type": "Limited",
        "limited": {"limitResponse": {"type": "Queue", "queuing": {}}}}});
    let (code, created) = server.call("POST", LEVELS, level).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    let limited = json!({"nominalConcurrencyShares": 30, "lendablePercent": 0, "limitResponse": {
        "type": "Queue", "queuing": {"queues": 64, "handSize": 8, "queueLengthLimit": 50}}});
    assert_eq!(created["spec"]["limited"], limited);
    for (patch, message) in [
        (json!({"type": "Exempt"}), "type must be 'Exempt' if and only if name is 'exempt'"),
        (json!({"limited": {"lendablePercent": 101}}), "must be between 0 and 100, inclusive"),
        (json!({"limited": {"limitResponse": {"type": "Reject"}}}), "must be nil if"),
        (
            json!({"limited": {"limitResponse": {"queuing": {"queues": 4}}}}),
            "should not be greater than queues (4)",
        ),
        (
            json!({"limited": {"limitResponse": {"queuing": {"queues": 10_000_000, "handSize": 4}}}}),
            "required entropy bits",
        ),
    ] {
        let (code, status) = server.merge(&format!("{LEVELS}/mine"), json!({"spec": patch})).await;
        assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{patch}");
        assert!(status["message"].as_str().unwrap().contains(message), "{status}");
    }

    let schema = |rule: Value| {
        json!({"metadata": {"name": "mine"},
               "spec": {"priorityLevelConfiguration": {"name": "mine"}, "rules": [rule]}})
    };
    let subject = json!({"kind": "User", "user": {"name": "u"}});
    let resources = json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"], "namespaces": ["a"]});
    for (rule, message) in [
        (json!({"subjects": [subject]}), "at least one of resourceRules and nonResourceRules"),
        (
            json!({"subjects": [{"kind": "Robot"}], "resourceRules": [resources]}),
            "spec.rules[0].subjects[0].kind: Unsupported value",
        ),
        (
            json!({"subjects": [{"kind": "User"}], "resourceRules": [resources]}),
            "user is required when subject kind is 'User'",
        ),
        (
            json!({"subjects": [subject],
                   "nonResourceRules": [{"verbs": ["get"], "nonResourceURLs": ["/a*"]}]}),
            "wildcard can only do suffix matching",
        ),
        (
            json!({"subjects": [subject], "resourceRules": [
                {"verbs": ["grab"], "apiGroups": ["*", "a"], "resources": ["pods"]}]}),
            "if '*' is present, must not specify other api groups",
        ),
    ] {
        let (code, status) = server.call("POST", SCHEMAS, schema(rule.clone())).await;
        assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{rule}");
        assert!(status["message"].as_str().unwrap().contains(message), "{status}");
    }
    let (code, created) = server
        .call("POST", SCHEMAS, schema(json!({"subjects": [subject], "resourceRules": [resources]})))
        .await;
    assert_eq!(
        (code, &created["spec"]["matchingPrecedence"]),
        (StatusCode::CREATED, &json!(1000)),
        "{created}"
    );
}

#[tokio::test]
async fn a_binding_may_be_posted_beside_its_pod() {
    let server = Fixture::new().await;
    let (pods, bindings) = ("/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/bindings");
    server.call("POST", pods, pod("p")).await;
    let binding = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
               "target": {"kind": "Node", "name": "n"}})
    };
    let (code, status) = server.call("POST", bindings, binding("p")).await;
    assert_eq!((code, &status["status"]), (StatusCode::CREATED, &json!("Success")), "{status}");
    let (_, bound) = server.get(&format!("{pods}/p")).await;
    assert_eq!(bound["spec"]["nodeName"], "n");
    assert_eq!(server.call("POST", bindings, binding("absent")).await.0, StatusCode::NOT_FOUND);
    assert_eq!(server.call("POST", bindings, binding("p")).await.0, StatusCode::CONFLICT);
}

#[tokio::test]
async fn the_fields_of_a_node_have_owners_from_its_creation() {
    let server = Fixture::new().await;
    let nodes: kube::Api<k8s_openapi::api::core::v1::Node> = kube::Api::all(server.client());
    let node = json!({"metadata": {"name": "n", "labels": {"a": "b"}}});
    let created = nodes.create(&Default::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    let owners = json!(created.metadata.managed_fields);
    assert_eq!(owners[0]["fieldsV1"]["f:metadata"]["f:labels"]["f:a"], json!({}), "{owners}");
}

#[tokio::test]
async fn events_are_selected_by_the_object_that_they_are_about() {
    let server = Fixture::new().await;
    let events = "/apis/events.k8s.io/v1/namespaces/default/events";
    for (name, kind) in [("e1", "Pod"), ("e2", "Job")] {
        let event = json!({"metadata": {"name": name}, "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": "a.example/b", "reportingInstance": "b-1", "action": "Look",
            "reason": "Seen", "type": "Normal",
            "regarding": {"kind": kind, "name": "x", "namespace": "default"}});
        let (code, created) = server.call("POST", events, event).await;
        assert_eq!(code, StatusCode::CREATED, "{created}");
    }
    for selector in ["regarding.kind=Job", "regarding.kind=Job,regarding.name=x", "regarding.kind!=Pod"] {
        let (code, list) = server.get(&format!("{events}?fieldSelector={selector}")).await;
        let names: Vec<_> =
            list["items"].as_array().into_iter().flatten().map(|event| &event["metadata"]["name"]).collect();
        assert_eq!((code, names), (StatusCode::OK, vec![&json!("e2")]), "{selector}: {list}");
    }
}
