//! Lists and watches: selectors, pages, versions, representations, bookmarks.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};

use crate::support::{self, Fixture, config_map, function, pod};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";

async fn with_maps(names: &[&str]) -> Fixture {
    let server = Fixture::new().await;
    for name in names {
        let mut body = config_map(name, json!({"k": "v"}));
        body["metadata"]["labels"] = json!({"letter": name, "kind": "test"});
        assert_eq!(server.call("POST", MAPS, body).await.0, StatusCode::CREATED);
    }
    server
}

fn names(list: &Value) -> Vec<&str> {
    list["items"].as_array().unwrap().iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn version(object: &Value) -> String {
    text(&object["metadata"]["resourceVersion"]).to_owned()
}

#[tokio::test]
async fn lists_by_selector() {
    let server = with_maps(&["a", "b", "c"]).await;
    let (code, list) = server.get(MAPS).await;
    assert_eq!((code, list["kind"].as_str()), (StatusCode::OK, Some("ConfigMapList")));
    assert_eq!(names(&list), ["a", "b", "c"]);
    for item in list["items"].as_array().unwrap() {
        assert!(item["metadata"]["resourceVersion"].is_string(), "{item}");
    }
    for (query, expected) in [
        ("labelSelector=letter%20in%20(a,c)", vec!["a", "c"]),
        ("labelSelector=kind=test,letter!=a", vec!["b", "c"]),
        ("fieldSelector=metadata.name=b", vec!["b"]),
        ("fieldSelector=metadata.name!=b", vec!["a", "c"]),
        ("fieldSelector=metadata.name=b&labelSelector=letter=a", vec![]),
    ] {
        assert_eq!(names(&server.get(&format!("{MAPS}?{query}")).await.1), expected, "{query}");
        let everywhere = server.get(&format!("/api/v1/configmaps?{query}")).await.1;
        assert_eq!(names(&everywhere), expected, "{query} in all namespaces");
    }
    let (code, status) = server.get(&format!("{MAPS}?labelSelector=a%20in")).await;
    assert_eq!(code, StatusCode::BAD_REQUEST, "{status}");
    let (code, status) = server.get(&format!("{MAPS}?fieldSelector=data.k=v")).await;
    assert_eq!(code, StatusCode::BAD_REQUEST);
    let refusal = "\"data.k\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"";
    assert_eq!(status["message"], refusal);
}

#[tokio::test]
async fn pages_are_consistent() {
    let server = with_maps(&["a", "b", "c", "d", "e"]).await;
    let (_, first) = server.get(&format!("{MAPS}?limit=2")).await;
    assert_eq!((names(&first), &first["metadata"]["remainingItemCount"]), (vec!["a", "b"], &json!(3)));
    server.call("DELETE", &format!("{MAPS}/c"), Value::Null).await;
    server.call("POST", MAPS, config_map("bb", json!({}))).await;
    let token = first["metadata"]["continue"].as_str().unwrap();
    let (_, second) = server.get(&format!("{MAPS}?limit=2&continue={token}")).await;
    assert_eq!(names(&second), ["c", "d"], "as it was at the first page");
    assert_eq!(version(&second), version(&first));
    let token = second["metadata"]["continue"].as_str().unwrap();
    let (_, third) = server.get(&format!("{MAPS}?limit=2&continue={token}")).await;
    assert_eq!(names(&third), ["e"]);
    assert!(third["metadata"].get("continue").is_none());

    let (_, selected) = server.get(&format!("{MAPS}?limit=2&labelSelector=kind=test")).await;
    assert_eq!(names(&selected), ["a", "b"]);
    let token = selected["metadata"]["continue"].as_str().unwrap();
    let (_, rest) = server.get(&format!("{MAPS}?limit=9&labelSelector=kind=test&continue={token}")).await;
    assert_eq!(names(&rest), ["d", "e"]);
    for bad in ["continue=x", "continue=e30"] {
        assert_eq!(server.get(&format!("{MAPS}?{bad}")).await.0, StatusCode::BAD_REQUEST, "{bad}");
    }
    for (options, expected) in [
        (
            "resourceVersionMatch=Never&resourceVersion=1",
            "resourceVersionMatch: Unsupported value: \"Never\": supported values: \"\", \"Exact\", \"NotOlderThan\"",
        ),
        (
            "resourceVersionMatch=Exact&resourceVersion=0",
            "resourceVersionMatch: Forbidden: resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
        ),
        (
            "watch=1&resourceVersionMatch=Exact",
            "[resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is \
             provided, resourceVersionMatch: Unsupported value: \"Exact\": supported values: \"NotOlderThan\"]",
        ),
        ("sendInitialEvents=true", "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"),
    ] {
        let (code, status) = server.get(&format!("{MAPS}?{options}")).await;
        let message = format!("ListOptions.meta.k8s.io \"\" is invalid: {expected}");
        assert_eq!(
            (code, &status["message"]),
            (StatusCode::UNPROCESSABLE_ENTITY, &json!(message)),
            "{options}"
        );
    }
}

#[tokio::test]
async fn versions_of_lists() {
    let server = with_maps(&["a"]).await;
    let (_, then) = server.get(MAPS).await;
    server.call("POST", MAPS, config_map("b", json!({}))).await;
    let exact = format!("{MAPS}?resourceVersion={}&resourceVersionMatch=Exact", version(&then));
    assert_eq!(names(&server.get(&exact).await.1), ["a"]);
    let newer = format!("{MAPS}?resourceVersion={}&resourceVersionMatch=NotOlderThan", version(&then));
    assert_eq!(names(&server.get(&newer).await.1), ["a", "b"]);
    let (code, status) = server.get(&format!("{MAPS}?resourceVersion=1000000")).await;
    assert_eq!((code, status["reason"].as_str()), (StatusCode::GATEWAY_TIMEOUT, Some("Timeout")));
    assert_eq!(status["details"]["causes"][0]["reason"], "ResourceVersionTooLarge");
    assert_eq!(server.get(&format!("{MAPS}?resourceVersion=x")).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn tables_and_metadata() {
    let server = with_maps(&["a"]).await;
    let (_, table) = server.get_as(MAPS, TABLE).await;
    assert_eq!(table["kind"], "Table");
    let columns: Vec<_> =
        table["columnDefinitions"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(columns, ["Name", "Data", "Age"]);
    let row = &table["rows"][0];
    assert_eq!((&row["cells"][0], &row["cells"][1]), (&json!("a"), &json!(1)));
    assert_eq!((&row["object"]["kind"], row["object"].get("data")), (&json!("PartialObjectMetadata"), None));
    let (_, table) = server.get_as(&format!("{MAPS}/a?includeObject=Object"), TABLE).await;
    assert_eq!(table["rows"][0]["object"]["data"]["k"], "v");
    let (_, partial) =
        server.get_as(MAPS, "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").await;
    assert_eq!(partial["kind"], "PartialObjectMetadataList");
    assert_eq!((names(&partial), partial["items"][0].get("data")), (vec!["a"], None));
    assert_eq!(server.get_as(MAPS, "application/json;as=Chart;v=v1").await.0, StatusCode::NOT_ACCEPTABLE);
}

#[tokio::test]
async fn the_tables_of_kubectl_have_larger_pages() {
    let names: Vec<String> = (0..510).map(|number| format!("m{number}")).collect();
    let server = with_maps(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let lengths = async |query: &str, accept: &str, items: &str| {
        let (_, list) = server.get_as(&format!("{MAPS}?{query}"), accept).await;
        (list[items].as_array().unwrap().len(), list["metadata"]["continue"].is_string())
    };
    assert_eq!(lengths("limit=500", TABLE, "rows").await, (510, false));
    assert_eq!(lengths("limit=500&includeObject=Object", TABLE, "rows").await, (500, true));
    assert_eq!(lengths("limit=499", TABLE, "rows").await, (499, true));
    assert_eq!(lengths("limit=500", "application/json", "items").await, (500, true));
}

/// An object of each stored kind: its path, its content, and the cells of its table row. A null stands for a value
/// that differs between runs.
fn one_of_each() -> Vec<(&'static str, Value, Value)> {
    let template = json!({"metadata": {"labels": {"app": "one"}},
                          "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x:1"}]}});
    let mut endless = template.clone();
    endless["spec"]["restartPolicy"] = json!("Always");
    let mut revision = function("one");
    revision["kind"] = json!("Revision");
    revision["spec"]["function"] = json!("f");
    let source = "sha256:000000000000";
    let named = |rest: Value| {
        let mut object = json!({"metadata": {"name": "one"}});
        object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        object
    };
    vec![
        ("/api/v1/namespaces", named(json!({})), json!(["one", "Active", null])),
        (
            "/api/v1/nodes",
            named(json!({})),
            json!([
                "one",
                "Unknown",
                "<none>",
                null,
                "",
                "<none>",
                "<none>",
                "<unknown>",
                "<unknown>",
                "<unknown>"
            ]),
        ),
        (
            PODS,
            pod("one"),
            json!(["one", "0/1", "Pending", "0", null, "<none>", "<none>", "<none>", "<none>"]),
        ),
        (MAPS, config_map("one", json!({"k": "v"})), json!(["one", 1, null])),
        (
            "/api/v1/namespaces/default/secrets",
            named(json!({"data": {"k": "dg=="}})),
            json!(["one", "Opaque", 1, null]),
        ),
        (
            "/api/v1/namespaces/default/events",
            named(
                json!({"type": "Normal", "reason": "Tested", "message": "said", "source": {"component": "c"},
                         "involvedObject": {"kind": "Pod", "name": "p", "fieldPath": "spec"}}),
            ),
            json!([null, "Normal", "Tested", "pod/p", "spec", "c", "said", null, 1, "one"]),
        ),
        (
            "/apis/apps/v1/namespaces/default/replicasets",
            named(
                json!({"spec": {"replicas": 2, "selector": {"matchLabels": {"app": "one"}}, "template": endless}}),
            ),
            json!(["one", 2, 0, 0, null, "c", "x:1", "app=one"]),
        ),
        (
            "/apis/batch/v1/namespaces/default/jobs",
            named(json!({"spec": {"template": template}})),
            json!(["one", "Running", "0/1", "", null, "c", "x:1", null]),
        ),
        (
            "/apis/coordination.k8s.io/v1/namespaces/default/leases",
            named(json!({"spec": {"holderIdentity": "me"}})),
            json!(["one", "me", null]),
        ),
        (
            "/apis/mayfly.dev/v1/namespaces/default/functions",
            function("one"),
            json!(["one", "", "", "Unknown", 0, null, source]),
        ),
        (
            "/apis/mayfly.dev/v1/namespaces/default/revisions",
            revision,
            json!(["one", "f", "Unknown", 0, null, source]),
        ),
        (
            "/apis/mayfly.dev/v1/namespaces/default/workflows",
            named(json!({"spec": {"definition": {"StartAt": "A", "States": {"A": {"Type": "Succeed"}}}}})),
            json!(["one", "STANDARD", "Unknown", "<none>", null, "<none>", "<none>"]),
        ),
    ]
}

#[tokio::test]
async fn every_kind_fills_its_columns() {
    let server = Fixture::new().await;
    let each = one_of_each();
    for (path, object, expected) in &each {
        let (code, created) = server.call("POST", path, object.clone()).await;
        assert_eq!(code, StatusCode::CREATED, "{path}: {created}");
        let (code, table) = server.get_as(path, TABLE).await;
        assert_eq!(code, StatusCode::OK, "{path}: {table}");
        let row =
            table["rows"].as_array().unwrap().iter().find(|row| row["object"]["metadata"]["name"] == "one");
        let cells = row.unwrap_or_else(|| panic!("{path}: {table}"))["cells"].as_array().unwrap();
        let columns = table["columnDefinitions"].as_array().unwrap();
        assert_eq!(cells.len(), columns.len(), "{path}: {table}");
        assert_eq!(cells.len(), expected.as_array().unwrap().len(), "{path}: {table}");
        for (at, (cell, expected)) in cells.iter().zip(expected.as_array().unwrap()).enumerate() {
            let fits = match expected {
                Value::Null => cell.as_str().is_some_and(|text| !text.is_empty() && !text.starts_with('<')),
                _ => cell == expected,
            };
            assert!(fits, "{path}: {} is {cell}, not {expected}", columns[at]["name"]);
        }
    }
    // Every other kind has a table too; its cells are compared with recorded tables.
    let groups = server.get("/apis").await.1;
    let groups = groups["groups"].as_array().unwrap().iter();
    let groups = groups.map(|group| format!("/apis/{}", text(&group["preferredVersion"]["groupVersion"])));
    for group in groups.chain(["/api/v1".to_owned()]) {
        for resource in server.get(&group).await.1["resources"].as_array().unwrap() {
            let verbs = resource["verbs"].as_array().unwrap();
            if ["create", "list"].iter().all(|verb| verbs.contains(&json!(verb))) {
                let (_, table) = server.get_as(&format!("{group}/{}", text(&resource["name"])), TABLE).await;
                assert!(
                    table["columnDefinitions"].as_array().is_some_and(|c| c.len() > 1),
                    "{group}: {table}"
                );
                let columns = table["columnDefinitions"].as_array().unwrap().len();
                for row in table["rows"].as_array().unwrap() {
                    assert_eq!(row["cells"].as_array().unwrap().len(), columns, "{group}: {row}");
                }
            }
        }
    }
}

#[tokio::test]
async fn watches_follow_objects() {
    let server = with_maps(&["a"]).await;
    let since = version(&server.get(MAPS).await.1);
    let mut watch = server.watch(&format!("{MAPS}?watch=true&resourceVersion={since}")).await;
    server.call("POST", MAPS, config_map("b", json!({}))).await;
    server.merge(&format!("{MAPS}/b"), json!({"data": {"x": "y"}})).await;
    server
        .call("POST", "/api/v1/namespaces/kube-system/configmaps", config_map("elsewhere", json!({})))
        .await;
    server.call("DELETE", &format!("{MAPS}/b"), Value::Null).await;
    let mut versions = Vec::new();
    for (kind, data) in
        [("ADDED", Value::Null), ("MODIFIED", json!({"x": "y"})), ("DELETED", json!({"x": "y"}))]
    {
        let line = watch.next().await.unwrap();
        assert_eq!(
            (line["type"].as_str(), line["object"]["data"].get("x")),
            (Some(kind), data.get("x")),
            "{line}"
        );
        versions.push(version(&line["object"]).parse::<u64>().unwrap());
    }
    assert!(versions.is_sorted() && versions[2] > versions[1], "{versions:?}");

    let mut state = server.watch(&format!("{MAPS}?watch=true&timeoutSeconds=1")).await;
    assert_eq!(state.event().await, ("ADDED".into(), "a".into()));
    assert_eq!(state.next().await, None, "it ends in time");
}

#[tokio::test]
async fn objects_enter_and_leave_a_selection() {
    let server = with_maps(&["a", "b"]).await;
    let mut watch = server.watch(&format!("{MAPS}?watch=true&labelSelector=letter=a")).await;
    assert_eq!(watch.event().await, ("ADDED".into(), "a".into()));
    server.merge(&format!("{MAPS}/b"), json!({"metadata": {"labels": {"letter": "a"}}})).await;
    assert_eq!(watch.event().await, ("ADDED".into(), "b".into()));
    server.merge(&format!("{MAPS}/b"), json!({"data": {"n": "1"}})).await;
    assert_eq!(watch.event().await, ("MODIFIED".into(), "b".into()));
    server.merge(&format!("{MAPS}/a"), json!({"metadata": {"labels": {"letter": "z"}}})).await;
    let line = watch.next().await.unwrap();
    assert_eq!(
        (line["type"].as_str(), line["object"]["metadata"]["labels"]["letter"].as_str()),
        (Some("DELETED"), Some("a"))
    );
    let current = version(&server.get(&format!("{MAPS}/a")).await.1);
    assert_eq!(version(&line["object"]), current, "the state before, the version after");
    server.merge(&format!("{MAPS}/a"), json!({"data": {"n": "2"}})).await;
    server.call("DELETE", &format!("{MAPS}/b"), Value::Null).await;
    assert_eq!(watch.event().await, ("DELETED".into(), "b".into()), "an unselected object causes no event");

    let mut one = server
        .watch(&format!("{MAPS}?watch=true&fieldSelector=metadata.name=c&resourceVersion={current}"))
        .await;
    server.call("POST", MAPS, config_map("d", json!({}))).await;
    server.call("POST", MAPS, config_map("c", json!({}))).await;
    assert_eq!(one.event().await, ("ADDED".into(), "c".into()));
}

#[tokio::test]
async fn pods_are_selected_by_node() {
    let server = Fixture::new().await;
    for name in ["p", "q"] {
        server.call("POST", PODS, pod(name)).await;
    }
    let mut watch = server.watch("/api/v1/pods?watch=true&fieldSelector=spec.nodeName=n").await;
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    let (code, status) = server.call("POST", &format!("{PODS}/p/binding"), binding).await;
    assert_eq!(code, StatusCode::CREATED, "{status}");
    assert_eq!(watch.event().await, ("ADDED".into(), "p".into()));
    let unbound = server.get("/api/v1/pods?fieldSelector=spec.nodeName=,status.phase=Pending").await.1;
    assert_eq!(names(&unbound), ["q"]);
}

#[tokio::test]
async fn initial_events_end_with_a_bookmark() {
    let server = with_maps(&["a", "b"]).await;
    let query =
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut watch = server.watch(&format!("{MAPS}?{query}")).await;
    assert_eq!(watch.event().await, ("ADDED".into(), "a".into()));
    assert_eq!(watch.event().await, ("ADDED".into(), "b".into()));
    let line = watch.next().await.unwrap();
    assert_eq!(line["type"], "BOOKMARK");
    assert_eq!(line["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    assert_eq!(line["object"]["kind"], "ConfigMap");
    server.call("POST", MAPS, config_map("c", json!({}))).await;
    assert_eq!(watch.event().await, ("ADDED".into(), "c".into()));
    for bad in [
        "watch=true&sendInitialEvents=true",
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
        "watch=true&resourceVersionMatch=NotOlderThan",
    ] {
        assert_eq!(server.get(&format!("{MAPS}?{bad}")).await.0, StatusCode::UNPROCESSABLE_ENTITY, "{bad}");
    }
}

#[tokio::test]
async fn quiet_watches_get_bookmarks() {
    let server = Fixture::with(|config| config.bookmark_interval = Duration::from_millis(50), |_| {}).await;
    let mut watch = server.watch(&format!("{MAPS}?watch=true&allowWatchBookmarks=true")).await;
    let (_, other) = server.call("POST", "/api/v1/namespaces", json!({"metadata": {"name": "other"}})).await;
    loop {
        let line = watch.next().await.unwrap();
        assert_eq!(line["type"], "BOOKMARK");
        if version(&line["object"]).parse::<u64>().unwrap() >= version(&other).parse().unwrap() {
            break;
        }
    }
}

#[tokio::test]
async fn the_past_is_bounded() {
    let server = Fixture::new().await;
    let since = version(&server.get(MAPS).await.1);
    let path = format!("{MAPS}/a");
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    // More than the history keeps of one kind, by bytes and by number.
    for round in 0..9 {
        let writes = (0..1000).map(|n| server.merge(&path, json!({"data": {"n": format!("{round}-{n}")}})));
        futures::future::join_all(writes).await;
    }
    let (code, status) = server.get(&format!("{MAPS}?watch=true&resourceVersion={since}")).await;
    assert_eq!((code, status["reason"].as_str()), (StatusCode::GONE, Some("Expired")), "{status}");
    assert!(status["message"].as_str().unwrap().starts_with("too old resource version"));
}

#[tokio::test]
async fn table_watches_send_their_columns_once() {
    let server = with_maps(&["a", "b"]).await;
    let request =
        support::request("GET", &format!("{MAPS}?watch=true&timeoutSeconds=1")).header("accept", TABLE);
    let response = server.send(request.body(axum::body::Body::empty()).unwrap()).await;
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    let lines: Vec<Value> = bytes
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect();
    let columns: Vec<_> =
        lines.iter().map(|line| line["object"]["columnDefinitions"].as_array().map_or(0, Vec::len)).collect();
    assert_eq!(columns, [3, 0]);
    assert_eq!(lines[1]["object"]["rows"][0]["cells"][0], "b");
}

#[tokio::test]
async fn watches_are_bounded() {
    let server = Fixture::with(|config| config.watches_max = 1, |_| {}).await;
    let first = server.watch(&format!("{MAPS}?watch=true")).await;
    assert_eq!(server.get(&format!("{MAPS}?watch=true")).await.0, StatusCode::TOO_MANY_REQUESTS);
    // Components of the process do not share the limit.
    let own = http::Request::get(format!("{MAPS}?watch=true&timeoutSeconds=1")).body(Vec::new()).unwrap();
    server.client().request_text(own).await.unwrap();
    drop(first);
    server.watch(&format!("{MAPS}?watch=true")).await;
    server.server.shut_down();
    assert_eq!(server.get(&format!("{MAPS}?watch=true")).await.0, StatusCode::SERVICE_UNAVAILABLE);
}
