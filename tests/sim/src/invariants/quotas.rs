//! Rules of ResourceQuotas: at rest, the status shows what exists.

use serde_json::{Value, json};

use super::pods::requests;
use crate::model::{Model, is_finished, is_terminating, text};

/// The amount of a resource in a namespace, as the status of a quota shows it; `None` for one that is not counted here.
fn used(model: &Model, namespace: &str, name: &str) -> Option<String> {
    let inside = |resource: &'static str| {
        model.of(resource).filter(|(key, _)| &*key.namespace == namespace).map(|(_, object)| object)
    };
    let pods = || inside("pods").filter(|pod| !is_finished(pod));
    Some(match name {
        "pods" => pods().count().to_string(),
        "requests.cpu" => {
            let millis: u64 = pods().map(|pod| requests(pod, "cpu")).sum();
            if millis.is_multiple_of(1000) { (millis / 1000).to_string() } else { format!("{millis}m") }
        }
        "services" | "persistentvolumeclaims" => {
            let resource = if name == "services" { "services" } else { "persistentvolumeclaims" };
            inside(resource).count().to_string()
        }
        "count/cronjobs.batch" => inside("cronjobs.batch").count().to_string(),
        _ => return None,
    })
}

pub(super) fn unconverged(model: &Model, namespace: &str, quota: &Value) -> Option<String> {
    if is_terminating(quota) {
        return None;
    }
    let hard = quota["spec"]["hard"].as_object().cloned().unwrap_or_default();
    if quota["status"]["hard"] != json!(hard) {
        return Some(format!("the status shows the limits {}", quota["status"]["hard"]));
    }
    hard.keys().find_map(|name| {
        let (shown, exists) = (text(&quota["status"]["used"][name], ""), used(model, namespace, name)?);
        (shown != exists).then(|| format!("{name}: {shown:?} is shown as used and {exists:?} exists"))
    })
}
