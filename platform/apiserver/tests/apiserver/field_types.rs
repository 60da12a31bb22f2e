//! Values of a type that a field does not have, and quantities in all their forms.

use http::StatusCode;
use serde_json::{Value, json};

use crate::{
    custom_resources::{WIDGETS, widget, with_definition},
    support::{Fixture, function, pod},
};

const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";
const PODS: &str = "/api/v1/namespaces/default/pods";
const MERGE: &str = "application/merge-patch+json";
const APPLY: &str = "application/apply-patch+yaml";

/// Checks that every kind of write refuses `bad`, which has a text where `field` is an integer.
async fn refuses_text(server: &Fixture, path: &str, good: Value, bad: Value, field: &str) {
    let name = good["metadata"]["name"].as_str().unwrap().to_owned();
    let one = format!("{path}/{name}");
    let cause = json!({"reason": "FieldValueTypeInvalid", "field": field,
        "message": format!("Invalid value: \"string\": {field} in body must be of type integer: \"string\"")});
    let refused = |way: &str, (code, status): (StatusCode, Value)| {
        assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{way}: {status}");
        assert_eq!((&status["reason"], &status["code"]), (&json!("Invalid"), &json!(422)), "{way}: {status}");
        assert_eq!(status["details"]["causes"][0], cause, "{way}: {status}");
    };
    let applied = format!("{one}?fieldManager=tester&force=true");
    refused("create", server.call("POST", path, bad.clone()).await);
    refused("apply of a new object", server.call_as("PATCH", &applied, APPLY, bad.to_string()).await);
    let (code, stored) = server.call("POST", path, good).await;
    assert_eq!(code, StatusCode::CREATED, "{stored}");
    let mut update = bad.clone();
    update["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"].clone();
    refused("update", server.call("PUT", &one, update).await);
    let patch = json!({"spec": bad["spec"]});
    refused("merge patch", server.call_as("PATCH", &one, MERGE, patch.to_string()).await);
    let pointer = format!("/{}", field.replace('.', "/"));
    let patch = json!([{"op": "add", "path": "/spec", "value": bad["spec"]}, {"op": "test", "path": pointer, "value": "x"}]);
    let patched = server.call_as("PATCH", &one, "application/json-patch+json", patch.to_string()).await;
    refused("JSON patch", patched);
    refused("apply", server.call_as("PATCH", &applied, APPLY, bad.to_string()).await);
    let (_, found) = server.get(&one).await;
    assert_eq!(found["metadata"]["resourceVersion"], stored["metadata"]["resourceVersion"], "{found}");
}

#[tokio::test]
async fn a_custom_object_with_a_wrong_type_is_invalid() {
    let server = with_definition().await;
    let (good, bad) = (widget("one", json!({"size": 1})), widget("one", json!({"size": "x"})));
    refuses_text(&server, WIDGETS, good, bad, "spec.size").await;
}

#[tokio::test]
async fn a_function_with_a_wrong_type_is_invalid() {
    let server = Fixture::new().await;
    let mut bad = function("one");
    bad["spec"]["scaling"] = json!({"min": "x"});
    refuses_text(&server, FUNCTIONS, function("one"), bad, "spec.scaling.min").await;
    for (spec, causes) in [
        (
            json!({"scaling": [], "source": {}}),
            &["spec.scaling in body must be of type object: \"array\""][..],
        ),
        (
            json!({"scaling": {"min": 1.5}}),
            &["spec.scaling.min in body must be of type integer: \"number\"", "spec.source"],
        ),
        (
            json!({"limits": {"memory": true}, "source": {}}),
            &["spec.limits.memory in body must be of type integer,string: \"boolean\""],
        ),
        (
            json!({"limits": {"memory": "1K"}, "source": {}}),
            &["spec.limits.memory: Invalid value: \"1K\": unable to parse quantity's suffix"],
        ),
    ] {
        let body = json!({"metadata": {"name": "two"}, "spec": spec});
        let (code, status) = server.call("POST", FUNCTIONS, body).await;
        assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{status}");
        assert_eq!(status["details"]["causes"].as_array().unwrap().len(), causes.len(), "{status}");
        for cause in causes {
            assert!(status["message"].as_str().unwrap().contains(cause), "{status}");
        }
    }
    // Metadata is decoded as Go's type, for every kind.
    let body = json!({"metadata": {"name": "two", "labels": {"a": 1}}, "spec": function("two")["spec"]});
    assert_eq!(server.call("POST", FUNCTIONS, body).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn quantities_are_read_and_written_as_upstream() {
    let server = Fixture::new().await;
    let with = |name: &str, cpu: &Value| {
        let mut pod = pod(name);
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
        pod
    };
    for (at, (sent, stored)) in [
        (json!(1.5), "1500m"),
        (json!("1.5"), "1500m"),
        (json!(2), "2"),
        (json!(0.1), "100m"),
        (json!("0.0001"), "1m"),
        (json!("1e3"), "1e3"),
        (json!("1e1"), "10"),
        (json!("+1"), "+1"),
        (json!("m"), "0"),
    ]
    .iter()
    .enumerate()
    {
        let (code, created) = server.call("POST", PODS, with(&format!("p{at}"), sent)).await;
        assert_eq!(code, StatusCode::CREATED, "{sent}: {created}");
        let found = &created["spec"]["containers"][0]["resources"]["requests"]["cpu"];
        assert_eq!(found, stored, "{sent}");
    }
    const FORM: &str =
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
    for (sent, why) in [
        (json!("1K"), "unable to parse quantity's suffix"),
        (json!("1e"), "unable to parse quantity's suffix"),
        (json!("Ei"), "unable to parse numeric part of quantity"),
        (json!("1.2.3"), FORM),
        (json!(""), FORM),
        (json!(true), FORM),
        (json!([1]), FORM),
        (json!({}), FORM),
    ] {
        let (code, status) = server.call("POST", PODS, with("bad", &sent)).await;
        let message = format!("Pod in version \"v1\" cannot be handled as a Pod: {why}");
        assert_eq!((code, &status["message"]), (StatusCode::BAD_REQUEST, &json!(message)), "{sent}");
    }
}

/// Upstream applies JSON patches and merge patches to texts, and a strategic patch to values.
#[tokio::test]
async fn a_quantity_in_a_patch_keeps_its_form() {
    let server = Fixture::new().await;
    let quotas = "/api/v1/namespaces/default/resourcequotas";
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"limits.memory": "1"}}});
    server.call("POST", quotas, quota).await;
    let merge = r#"{"spec": {"hard": {"limits.memory": 1e3}}}"#;
    let operation = r#"[{"op": "replace", "path": "/spec/hard/limits.memory", "value": 2e3},
                        {"op": "add", "path": "/spec/hard", "value": {"limits.memory": 3e3}}]"#;
    for (form, patch, expected) in [
        ("application/merge-patch+json", merge, "1e3"),
        ("application/json-patch+json", operation, "3e3"),
        ("application/strategic-merge-patch+json", merge, "1k"),
    ] {
        let (code, changed) = server.call_as("PATCH", &format!("{quotas}/q"), form, patch.into()).await;
        assert_eq!(code, StatusCode::OK, "{changed}");
        assert_eq!(changed["spec"]["hard"]["limits.memory"], expected, "{form}");
    }
}
