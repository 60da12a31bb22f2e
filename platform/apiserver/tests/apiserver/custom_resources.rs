//! CustomResourceDefinitions and their objects.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};

use crate::{kubectl::KubectlServer, support::Fixture};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const DEFINITION: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.example.dev";
pub(crate) const WIDGETS: &str = "/apis/example.dev/v1/namespaces/default/widgets";
const WIDGET: &str = "/apis/example.dev/v1/namespaces/default/widgets/one";

fn definition() -> Value {
    let schema = json!({"type": "object", "required": ["spec"], "properties": {
        "spec": {"type": "object", "description": "What the widget is.", "required": ["size"], "properties": {
            "size": {"type": "integer", "minimum": 1, "description": "How large the widget is."},
            "color": {"type": "string", "default": "red", "enum": ["red", "blue"]},
            "replicas": {"type": "integer"},
            "ports": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                      "items": {"type": "object", "required": ["name"], "properties": {
                          "name": {"type": "string"}, "port": {"x-kubernetes-int-or-string": true}}}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}},
        "status": {"type": "object", "properties": {
            "replicas": {"type": "integer"}, "phase": {"type": "string"}}}}});
    let version = |name: &str, storage: bool| {
        json!({"name": name, "served": true, "storage": storage, "schema": {"openAPIV3Schema": schema},
               "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas",
                                                        "statusReplicasPath": ".status.replicas"}},
               "additionalPrinterColumns": [
                   {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
                   {"name": "Color", "type": "string", "jsonPath": ".spec.color", "priority": 1}]})
    };
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
           "metadata": {"name": "widgets.example.dev"},
           "spec": {"group": "example.dev", "scope": "Namespaced",
                    "names": {"plural": "widgets", "kind": "Widget", "shortNames": ["wd"], "categories": ["all"]},
                    "versions": [version("v1", true), version("v1beta1", false)]}})
}

pub(crate) fn widget(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "example.dev/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec})
}

pub(crate) async fn with_definition() -> Fixture {
    let fixture = Fixture::new().await;
    let (code, created) = fixture.call("POST", DEFINITIONS, definition()).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    // As upstream, the response is older than the acceptance of the names.
    assert_eq!(created["status"]["conditions"], Value::Null);
    let (_, found) = fixture.get(&format!("{DEFINITIONS}/widgets.example.dev")).await;
    let conditions = found["status"]["conditions"].as_array().unwrap();
    for name in ["NamesAccepted", "Established"] {
        let found = conditions.iter().find(|condition| condition["type"] == name);
        assert_eq!(found.unwrap()["status"], "True", "{created}");
    }
    assert_eq!(created["status"]["storedVersions"], json!(["v1"]));
    assert_eq!(created["spec"]["names"]["listKind"], "WidgetList");
    fixture
}

/// Repeats a request until a path answers with a code.
async fn until(fixture: &Fixture, path: &str, wanted: StatusCode) {
    let wait = async {
        while fixture.call("GET", path, Value::Null).await.0 != wanted {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect(path);
}

#[tokio::test]
async fn a_definition_is_discovered_and_described_at_once() {
    let fixture = with_definition().await;
    let (_, groups) = fixture.call("GET", "/apis", Value::Null).await;
    let group = groups["groups"].as_array().unwrap().iter().find(|group| group["name"] == "example.dev");
    assert_eq!(group.unwrap()["preferredVersion"]["version"], "v1");
    let (_, resources) = fixture.call("GET", "/apis/example.dev/v1", Value::Null).await;
    let names: Vec<_> =
        resources["resources"].as_array().unwrap().iter().map(|resource| resource["name"].clone()).collect();
    assert_eq!(names, ["widgets", "widgets/status", "widgets/scale"]);
    assert_eq!(resources["resources"][0]["shortNames"], json!(["wd"]));
    let (_, index) = fixture.call("GET", "/openapi/v3", Value::Null).await;
    let path = index["paths"]["apis/example.dev/v1"]["serverRelativeURL"].as_str().unwrap().to_owned();
    let (code, document) = fixture.call("GET", &path, Value::Null).await;
    assert_eq!(code, StatusCode::OK);
    let schema = &document["components"]["schemas"]["dev.example.v1.Widget"];
    assert_eq!(schema["properties"]["spec"]["properties"]["size"]["type"], "integer", "{document}");
    assert_eq!(schema["x-kubernetes-group-version-kind"][0]["kind"], "Widget");
}

#[tokio::test]
async fn objects_are_defaulted_pruned_and_validated() {
    let fixture = with_definition().await;
    let spec = json!({"size": 3, "sise": 1, "free": {"any": [1]}, "ports": [{"name": "a", "port": "http"}]});
    let (code, created) = fixture.call("POST", WIDGETS, widget("one", spec)).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    let expected =
        json!({"size": 3, "color": "red", "free": {"any": [1]}, "ports": [{"name": "a", "port": "http"}]});
    assert_eq!(created["spec"], expected);
    assert_eq!(created["metadata"]["generation"], 1);

    let strict = format!("{WIDGETS}?fieldValidation=Strict");
    let (code, refused) = fixture.call("POST", &strict, widget("two", json!({"size": 1, "sise": 1}))).await;
    assert_eq!(code, StatusCode::BAD_REQUEST);
    assert!(refused["message"].as_str().unwrap().contains("unknown field \"spec.sise\""), "{refused}");

    for (spec, text) in [
        (json!({}), "spec.size: Required value"),
        (
            json!({"size": 0}),
            "spec.size: Invalid value: 0: spec.size in body should be greater than or equal to 1",
        ),
        (
            json!({"size": "1"}),
            "spec.size: Invalid value: \"string\": spec.size in body must be of type integer: \"string\"",
        ),
        (json!({"size": 1, "color": "green"}), "spec.color: Unsupported value: \"green\""),
        (json!({"size": 1, "ports": [{"name": "a"}, {"name": "a"}]}), "spec.ports[1]: Duplicate value"),
    ] {
        let (code, refused) = fixture.call("POST", WIDGETS, widget("bad", spec)).await;
        assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{refused}");
        let message = refused["message"].as_str().unwrap();
        assert!(message.contains(text), "{message}");
    }
    let mut gadget = widget("bad", json!({"size": 1}));
    gadget["kind"] = "Gadget".into();
    let (code, refused) = fixture.call("POST", WIDGETS, gadget).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{refused}");
    assert_eq!(
        refused["message"],
        "Gadget.example.dev \"bad\" is invalid: kind: Invalid value: \"Gadget\": must be Widget"
    );
    assert_eq!(refused["details"]["kind"], "Gadget");
}

#[tokio::test]
async fn status_scale_versions_and_apply() {
    let fixture = with_definition().await;
    let (code, _) = fixture.call("POST", WIDGETS, widget("one", json!({"size": 1}))).await;
    assert_eq!(code, StatusCode::CREATED);

    // The status is a part of its own.
    let patch = |body: Value| body.to_string();
    let merge = "application/merge-patch+json";
    let body = patch(json!({"status": {"phase": "Ready", "replicas": 2}, "spec": {"size": 9}}));
    let (code, patched) = fixture.call_as("PATCH", &format!("{WIDGET}/status"), merge, body).await;
    assert_eq!((code, &patched["spec"]["size"]), (StatusCode::OK, &json!(1)), "{patched}");
    assert_eq!(patched["status"]["phase"], "Ready");
    let bad = patch(json!({"status": {"phase": 1}}));
    let (code, _) = fixture.call_as("PATCH", &format!("{WIDGET}/status"), merge, bad).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);

    let body = patch(json!({"spec": {"replicas": 4}}));
    let (code, scale) = fixture.call_as("PATCH", &format!("{WIDGET}/scale"), merge, body).await;
    assert_eq!(code, StatusCode::OK, "{scale}");
    assert_eq!((&scale["spec"]["replicas"], &scale["status"]["replicas"]), (&json!(4), &json!(2)));

    // The other version is the same object.
    let beta = "/apis/example.dev/v1beta1/namespaces/default/widgets/one";
    let (code, other) = fixture.call("GET", beta, Value::Null).await;
    assert_eq!((code, &other["apiVersion"]), (StatusCode::OK, &json!("example.dev/v1beta1")));
    assert_eq!(other["spec"]["replicas"], 4);

    // Two managers own an item each of a map list.
    for name in ["a", "b"] {
        let body = widget("one", json!({"size": 1, "ports": [{"name": name, "port": 80}]}));
        let path = format!("{WIDGET}?fieldManager={name}");
        let (code, applied) =
            fixture.call_as("PATCH", &path, "application/apply-patch+yaml", body.to_string()).await;
        assert_eq!(code, StatusCode::OK, "{applied}");
    }
    let (_, both) = fixture.call("GET", WIDGET, Value::Null).await;
    assert_eq!(both["spec"]["ports"].as_array().unwrap().len(), 2, "{both}");
    let (code, _) = fixture
        .call_as("PATCH", WIDGET, "application/strategic-merge-patch+json", patch(json!({"spec": {}})))
        .await;
    assert_eq!(code, StatusCode::UNSUPPORTED_MEDIA_TYPE);
}

#[tokio::test]
async fn a_deleted_definition_takes_its_objects_with_it() {
    let fixture = with_definition().await;
    let mut held = widget("one", json!({"size": 1}));
    held["metadata"]["finalizers"] = json!(["example.dev/hold"]);
    assert_eq!(fixture.call("POST", WIDGETS, held).await.0, StatusCode::CREATED);
    let (code, _) = fixture.call("POST", WIDGETS, widget("two", json!({"size": 1}))).await;
    assert_eq!(code, StatusCode::CREATED);
    let mut watch = fixture.watch(&format!("{WIDGETS}?watch=true&resourceVersion=0")).await;
    assert_eq!(fixture.call("DELETE", DEFINITION, json!({})).await.0, StatusCode::OK);
    // The object without a finalizer is removed; the definition waits for the other.
    until(&fixture, &format!("{WIDGETS}/two"), StatusCode::NOT_FOUND).await;
    assert_eq!(fixture.call("GET", DEFINITION, Value::Null).await.0, StatusCode::OK);
    let merge = "application/merge-patch+json";
    let release = json!({"metadata": {"finalizers": null}}).to_string();
    assert_eq!(fixture.call_as("PATCH", WIDGET, merge, release).await.0, StatusCode::OK);
    until(&fixture, DEFINITION, StatusCode::NOT_FOUND).await;
    until(&fixture, "/apis/example.dev/v1", StatusCode::NOT_FOUND).await;
    let mut deleted = Vec::new();
    while deleted.len() < 2 {
        let (event, name) = watch.event().await;
        if event == "DELETED" {
            deleted.push(name);
        }
    }
    assert_eq!(deleted, ["two", "one"]);
}

#[tokio::test]
async fn a_namespace_takes_custom_objects_with_it() {
    let fixture = with_definition().await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}});
    assert_eq!(fixture.call("POST", "/api/v1/namespaces", namespace).await.0, StatusCode::CREATED);
    let widgets = "/apis/example.dev/v1/namespaces/team/widgets";
    assert_eq!(fixture.call("POST", widgets, widget("x", json!({"size": 1}))).await.0, StatusCode::CREATED);
    assert_eq!(fixture.call("DELETE", "/api/v1/namespaces/team", json!({})).await.0, StatusCode::OK);
    until(&fixture, "/api/v1/namespaces/team", StatusCode::NOT_FOUND).await;
    until(&fixture, &format!("{widgets}/x"), StatusCode::NOT_FOUND).await;
}

type Edit = fn(&mut Value);

#[tokio::test]
async fn wrong_definitions_are_refused() {
    let fixture = Fixture::new().await;
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/size";
    let cases: [(Edit, &str); 7] = [
        (|value| value["metadata"]["name"] = json!("other.example.dev"), "must be spec.names.plural"),
        (|value| value["spec"]["scope"] = json!("World"), "spec.scope: Unsupported value"),
        (
            |value| value["spec"]["versions"][0]["storage"] = json!(false),
            "exactly one version marked as storage",
        ),
        (
            |value| value["spec"]["conversion"] = json!({"strategy": "Webhook"}),
            "spec.conversion.strategy: Unsupported value",
        ),
        (|value| value["spec"]["versions"][0]["schema"] = json!({}), "schemas are required"),
        (
            |value| {
                let spec =
                    &mut value["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
                spec["properties"]["size"] = json!({"description": "no type"});
            },
            "properties[spec].properties[size].type: Required value",
        ),
        (
            |value| {
                let spec =
                    &mut value["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
                spec["x-kubernetes-validations"] = json!([{"rule": "self.size >"}]);
            },
            "x-kubernetes-validations[0].rule: Invalid value: \"self.size >\": compilation failed",
        ),
    ];
    assert!(definition().pointer(schema).is_some());
    for (edit, text) in cases {
        let mut wrong = definition();
        edit(&mut wrong);
        let (code, refused) = fixture.call("POST", DEFINITIONS, wrong).await;
        assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{text}: {refused}");
        assert!(refused["message"].as_str().unwrap().contains(text), "{text}: {refused}");
    }
}

#[tokio::test]
async fn kubectl_applies_gets_explains_and_scales() {
    let Some(cluster) = KubectlServer::start().await else { return };
    cluster.ok_with("apply -f -", &definition().to_string()).await;
    cluster.ok("wait --for=condition=Established crd/widgets.example.dev --timeout=20s").await;
    let one = widget("one", json!({"size": 3})).to_string();
    assert!(cluster.ok_with("apply -f -", &one).await.contains("widget.example.dev/one created"));
    let larger = widget("one", json!({"size": 5})).to_string();
    assert!(cluster.ok_with("apply -f -", &larger).await.contains("configured"));
    let table = cluster.ok("get wd -o wide").await;
    assert!(table.starts_with("NAME   SIZE   COLOR"), "{table}");
    assert!(table.contains("one    5      red"), "{table}");
    assert!(cluster.ok("explain widget.spec.size").await.contains("How large the widget is."));
    cluster.ok("scale widget one --replicas=2").await;
    assert_eq!(cluster.json("get widget one").await["spec"]["replicas"], 2);
    let wrong = widget("bad", json!({"size": 0})).to_string();
    assert!(cluster.fails("apply -f -", &wrong).await.contains("should be greater than or equal to 1"));
    cluster.ok("delete crd widgets.example.dev --timeout=20s").await;
    let error = cluster.fails("get widgets", "").await;
    // With cached discovery kubectl requests a path that does not exist; without, it knows no such kind.
    let texts = ["could not find the requested resource", "doesn't have a resource type"];
    assert!(texts.iter().any(|text| error.contains(text)), "{error}");
}
