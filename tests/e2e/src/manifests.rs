//! Objects as tests write and read them.

use serde_json::{Value, json};

/// A Function in the namespace `default`; `extra` is laid over its spec.
pub fn function(name: &str, component: &str, extra: Value) -> Value {
    let mut spec = json!({"source": {"component": component}});
    if let (Some(spec), Value::Object(extra)) = (spec.as_object_mut(), extra) {
        spec.extend(extra);
    }
    json!({
        "apiVersion": "mayfly.dev/v1",
        "kind": "Function",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    })
}

/// Whether the controller has seen the newest spec and found it good.
pub fn is_ready(object: &Value) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    let ready = conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True");
    ready && object["status"]["observedGeneration"] == object["metadata"]["generation"]
}

pub fn ready_replicas(function: &Value) -> i64 {
    function["status"]["readyReplicas"].as_i64().unwrap_or(0)
}
