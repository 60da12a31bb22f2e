//! The line of a pod in a table: upstream's `printPod`.

use jiff::Timestamp;
use serde_json::Value;

use super::print;
use crate::object::Object;

/// The aggregate of a pod's containers.
struct Summary {
    reason: String,
    ready: usize,
    total: usize,
    restarts: u64,
    /// RFC 3339; empty when nothing ever restarted.
    last_restart: String,
}

pub(super) fn cells(object: &Object, now: Timestamp) -> Vec<Value> {
    let summary = summarise(object);
    let restarts = match (summary.restarts, summary.last_restart.as_str()) {
        (0, _) | (_, "") => summary.restarts.to_string(),
        (number, last) => format!("{number} ({} ago)", print::since(last, now)),
    };
    vec![
        object.name().into(),
        format!("{}/{}", summary.ready, summary.total).into(),
        summary.reason.into(),
        restarts.into(),
        print::age(object, now),
        print::or_none(object.str_at(&["status", "podIP"])),
        print::or_none(object.str_at(&["spec", "nodeName"])),
        print::or_none(object.str_at(&["status", "nominatedNodeName"])),
        readiness_gates(object),
    ]
}

fn readiness_gates(object: &Object) -> Value {
    let gates: Vec<_> = print::items(object, &["spec", "readinessGates"]).collect();
    if gates.is_empty() {
        return "<none>".into();
    }
    let met = |gate: &&&Value| {
        let name = gate["conditionType"].as_str().unwrap_or("");
        print::condition(object, name).is_some_and(|(status, _)| status == "True")
    };
    format!("{}/{}", gates.iter().filter(met).count(), gates.len()).into()
}

fn summarise(object: &Object) -> Summary {
    let phase = object.str_at(&["status", "phase"]);
    let own_reason = object.str_at(&["status", "reason"]);
    let mut summary = Summary {
        reason: if own_reason.is_empty() { phase } else { own_reason }.to_owned(),
        ready: 0,
        total: print::items(object, &["spec", "containers"]).count(),
        restarts: 0,
        last_restart: String::new(),
    };
    if print::condition(object, "PodScheduled").is_some_and(|(_, reason)| reason == "SchedulingGated") {
        summary.reason = "SchedulingGated".into();
    }
    let initialising = init_containers(object, &mut summary);
    if !initialising || print::condition(object, "Initialized").is_some_and(|(status, _)| status == "True") {
        containers(object, &mut summary);
    }
    if object.is_terminating() {
        if own_reason == "NodeLost" {
            summary.reason = "Unknown".into();
        } else if !matches!(phase, "Failed" | "Succeeded") {
            summary.reason = "Terminating".into();
        }
    }
    summary
}

/// Sidecars: init containers that keep running.
fn is_restartable(object: &Object, name: &Value) -> bool {
    print::items(object, &["spec", "initContainers"])
        .any(|c| &c["name"] == name && c["restartPolicy"] == "Always")
}

fn count_restarts(status: &Value, restarts: &mut u64, last: &mut String) {
    *restarts += status["restartCount"].as_u64().unwrap_or(0);
    let finished = status["lastState"]["terminated"]["finishedAt"].as_str().unwrap_or("");
    // RFC 3339 in UTC with equal precision sorts as text.
    if finished > last.as_str() {
        *last = finished.to_owned();
    }
}

/// `Signal:9`, `ExitCode:1`, for a state without a reason.
fn exit_reason(terminated: &Value) -> String {
    match (terminated["reason"].as_str().unwrap_or(""), terminated["signal"].as_i64().unwrap_or(0)) {
        ("", 0) => format!("ExitCode:{}", terminated["exitCode"].as_i64().unwrap_or(0)),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

/// Whether the pod is still initialising; the first unfinished init container gives the reason.
fn init_containers(object: &Object, summary: &mut Summary) -> bool {
    let specs = print::items(object, &["spec", "initContainers"]).count();
    let (mut sidecar_restarts, mut sidecar_last) = (0, String::new());
    summary.total +=
        print::items(object, &["spec", "initContainers"]).filter(|c| c["restartPolicy"] == "Always").count();
    let mut initialising = false;
    for (at, status) in print::items(object, &["status", "initContainerStatuses"]).enumerate() {
        count_restarts(status, &mut summary.restarts, &mut summary.last_restart);
        let sidecar = is_restartable(object, &status["name"]);
        if sidecar {
            count_restarts(status, &mut sidecar_restarts, &mut sidecar_last);
        }
        let (terminated, waiting) = (&status["state"]["terminated"], &status["state"]["waiting"]);
        if terminated.is_object() && terminated["exitCode"].as_i64() == Some(0) {
            continue;
        }
        if sidecar && status["started"] == true {
            summary.ready += usize::from(status["ready"] == true);
            continue;
        }
        let reason = waiting["reason"].as_str().unwrap_or("");
        summary.reason = if terminated.is_object() {
            format!("Init:{}", exit_reason(terminated))
        } else if !reason.is_empty() && reason != "PodInitializing" {
            format!("Init:{reason}")
        } else {
            format!("Init:{at}/{specs}")
        };
        initialising = true;
        break;
    }
    if !initialising || print::condition(object, "Initialized").is_some_and(|(status, _)| status == "True") {
        (summary.restarts, summary.last_restart) = (sidecar_restarts, sidecar_last);
    }
    initialising
}

fn containers(object: &Object, summary: &mut Summary) {
    let statuses: Vec<_> = print::items(object, &["status", "containerStatuses"]).collect();
    let mut running = false;
    for status in statuses.into_iter().rev() {
        count_restarts(status, &mut summary.restarts, &mut summary.last_restart);
        let state = &status["state"];
        let waiting = state["waiting"]["reason"].as_str().unwrap_or("");
        if !waiting.is_empty() {
            summary.reason = waiting.to_owned();
        } else if state["terminated"].is_object() {
            summary.reason = exit_reason(&state["terminated"]);
        } else if status["ready"] == true && state["running"].is_object() {
            running = true;
            summary.ready += 1;
        }
    }
    if summary.reason == "Completed" && running {
        let ready = print::condition(object, "Ready").is_some_and(|(status, _)| status == "True");
        summary.reason = if ready { "Running" } else { "NotReady" }.into();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reasons_as_upstream_prints_them() {
        let running = json!({"name": "a", "ready": true, "restartCount": 0, "state": {"running": {}}});
        let done = json!({"name": "b", "ready": false, "restartCount": 0, "state": {"terminated": {"reason": "Completed", "exitCode": 0}}});
        let crashed = json!({"name": "a", "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"finishedAt": "2026-01-01T00:00:00Z"}}});
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let spec = json!({"containers": [{"name": "a"}, {"name": "b"}]});
        let with_init =
            json!({"containers": [{"name": "a"}], "initContainers": [{"name": "i"}, {"name": "j"}]});
        for (pod, expected) in [
            (json!({"spec": spec, "status": {"phase": "Pending"}}), ["0/2", "Pending", "0"]),
            (
                json!({"spec": spec, "status": {"phase": "Failed", "reason": "Evicted"}}),
                ["0/2", "Evicted", "0"],
            ),
            (
                json!({"spec": spec, "status": {"phase": "Running", "containerStatuses": [running, crashed]}}),
                ["1/2", "CrashLoopBackOff", "3 (60s ago)"],
            ),
            (
                json!({"spec": spec, "status": {"phase": "Running", "containerStatuses": [done, running], "conditions": ready}}),
                ["1/2", "Running", "0"],
            ),
            (
                json!({"spec": spec, "status": {"phase": "Running", "containerStatuses": [done, running]}}),
                ["1/2", "NotReady", "0"],
            ),
            (
                json!({"spec": spec, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running", "containerStatuses": [running]}}),
                ["1/2", "Terminating", "0"],
            ),
            (
                json!({"spec": with_init, "status": {"phase": "Pending", "initContainerStatuses": [
                {"name": "i", "state": {"terminated": {"exitCode": 0}}}, {"name": "j", "state": {"running": {}}}]}}),
                ["0/1", "Init:1/2", "0"],
            ),
            (
                json!({"spec": with_init, "status": {"phase": "Pending", "initContainerStatuses": [
                {"name": "i", "state": {"terminated": {"exitCode": 2}}}]}}),
                ["0/1", "Init:ExitCode:2", "0"],
            ),
            (
                json!({"spec": spec, "status": {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"signal": 9, "exitCode": 137}}}]}}),
                ["0/2", "Signal:9", "0"],
            ),
        ] {
            let now = "2026-01-01T00:01:00Z".parse().unwrap();
            let cells = cells(&Object(pod.as_object().unwrap().clone()), now);
            assert_eq!(cells[1..4], expected.map(Value::from), "{pod}");
        }
    }
}
