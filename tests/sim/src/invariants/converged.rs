//! Rules for the end of a run: faults are over, and nothing happens any more.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{cron_jobs, jobs::is_ended, quotas, rollouts::is_complete, volumes};
use crate::model::{
    Model, finalizers, is_active, is_finished, is_ready, is_terminating, list, number, owners, text, uid,
};

/// What is not as it should be, each as a sentence. `is_user_finalizer`: finalizers that only a user removes.
pub fn unconverged(model: &Model, is_user_finalizer: impl Fn(&str) -> bool) -> Vec<String> {
    let mut problems = Vec::new();
    for (key, object) in model.all() {
        if is_terminating(object) && !finalizers(object).any(&is_user_finalizer) {
            let left: Vec<&str> = finalizers(object).collect();
            problems.push(format!("{key} is still being deleted, with the finalizers {left:?}"));
        }
        let is_dangling = |owner: &Value| model.by_uid(text(owner, "/uid")).is_none();
        if !owners(object).is_empty() && owners(object).iter().all(is_dangling) {
            problems.push(format!("{key} has only owners that do not exist"));
        }
        let problem = match &*key.resource {
            "deployments.apps" => deployment(model, object),
            "replicasets.apps" | "replicationcontrollers" => replica_set(model, object),
            "statefulsets.apps" => stateful_set(model, object),
            "daemonsets.apps" => daemon_set(model, object),
            "jobs.batch" => job(model, object),
            "cronjobs.batch" => cron_jobs::unconverged(model, object),
            "resourcequotas" => quotas::unconverged(model, &key.namespace, object),
            "persistentvolumeclaims" => volumes::unconverged_claim(model, object),
            "persistentvolumes" => volumes::unconverged_volume(model, &key.name, object),
            "pods" => pod(model, object),
            "services" => service(model, &key.namespace, object),
            "poddisruptionbudgets.policy" => budget(model, &key.namespace, object),
            _ => None,
        };
        problems.extend(problem.map(|problem| format!("{key}: {problem}")));
    }
    problems
}

fn pods<'a>(model: &'a Model, owner: &'a Value) -> Vec<&'a Value> {
    model.controlled("pods", uid(owner)).map(|(_, pod)| pod).filter(|pod| is_active(pod)).collect()
}

fn count(pods: &[&Value], is: impl Fn(&Value) -> bool) -> i64 {
    i64::try_from(pods.iter().filter(|pod| is(pod)).count()).unwrap_or(i64::MAX)
}

/// Some fields of the status against what they should be.
fn status(object: &Value, expected: &[(&str, i64)]) -> Option<String> {
    let wrong =
        expected.iter().find(|(field, value)| number(object, &format!("/status/{field}"), 0) != *value);
    wrong.map(|(field, value)| format!("status.{field} is not {value}: {}", object["status"]))
}

fn deployment(model: &Model, deployment: &Value) -> Option<String> {
    if deployment["spec"]["paused"] == true || is_terminating(deployment) {
        return None;
    }
    let problem = format!("the rollout is not complete: {}", deployment["status"]);
    (!is_complete(model, deployment)).then_some(problem)
}

fn replica_set(model: &Model, set: &Value) -> Option<String> {
    if is_terminating(set) {
        return None;
    }
    let (wanted, pods) = (number(set, "/spec/replicas", 1), pods(model, set));
    if count(&pods, |_| true) != wanted || count(&pods, is_ready) != wanted {
        return Some(format!("{} pods, {} ready, {wanted} wanted", pods.len(), count(&pods, is_ready)));
    }
    status(set, &[("replicas", wanted), ("readyReplicas", wanted), ("availableReplicas", wanted)])
}

fn stateful_set(model: &Model, set: &Value) -> Option<String> {
    if is_terminating(set) {
        return None;
    }
    let (wanted, pods) = (number(set, "/spec/replicas", 1), pods(model, set));
    let names: BTreeSet<&str> = pods.iter().map(|pod| text(pod, "/metadata/name")).collect();
    let expected: BTreeSet<String> =
        (0..wanted).map(|at| format!("{}-{at}", text(set, "/metadata/name"))).collect();
    if !names.iter().copied().eq(expected.iter().map(String::as_str)) || count(&pods, is_ready) != wanted {
        return Some(format!("{wanted} wanted, has {names:?}, {} ready", count(&pods, is_ready)));
    }
    let update = text(set, "/status/updateRevision");
    let is_updated = |pod: &Value| text(pod, "/metadata/labels/controller-revision-hash") == update;
    if text(set, "/spec/updateStrategy/type") == "RollingUpdate" && count(&pods, is_updated) != wanted {
        return Some("pods of an old revision".into());
    }
    status(set, &[("replicas", wanted), ("readyReplicas", wanted)])
}

fn daemon_set(model: &Model, set: &Value) -> Option<String> {
    if is_terminating(set) {
        return None;
    }
    let pods = pods(model, set);
    let on: BTreeSet<&str> = pods.iter().map(|pod| text(pod, "/spec/nodeName")).collect();
    let nodes: BTreeSet<&str> = model.of("nodes").map(|(key, _)| &*key.name).collect();
    if on != nodes || pods.len() != nodes.len() || count(&pods, is_ready) != count(&pods, |_| true) {
        return Some(format!("{} pods on {on:?}, {} ready", pods.len(), count(&pods, is_ready)));
    }
    let wanted = i64::try_from(nodes.len()).unwrap_or(i64::MAX);
    status(set, &[("desiredNumberScheduled", wanted), ("numberReady", wanted), ("numberMisscheduled", 0)])
}

fn job(model: &Model, job: &Value) -> Option<String> {
    if is_terminating(job) || job["spec"]["suspend"] == true {
        return None;
    }
    if !is_ended(job) {
        return Some(format!("the Job has not ended: {}", job["status"]));
    }
    if !pods(model, job).is_empty() {
        return Some("the Job has ended and has active pods".into());
    }
    let completions = number(job, "/spec/completions", 1);
    let is_complete = crate::model::condition(job, "Complete") == "True";
    is_complete.then(|| status(job, &[("succeeded", completions), ("active", 0)])).flatten()
}

fn pod(model: &Model, pod: &Value) -> Option<String> {
    let node = text(pod, "/spec/nodeName");
    if node.is_empty() && !is_finished(pod) {
        return Some(format!("the pod is not bound: {}", pod["status"]));
    }
    (!node.is_empty() && model.named("nodes", "", node).is_none()).then(|| format!("the node {node} is gone"))
}

fn selects(selector: &Value, pod: &Value) -> bool {
    let labels = selector.as_object().filter(|labels| !labels.is_empty());
    labels.is_some_and(|labels| labels.iter().all(|(key, value)| pod["metadata"]["labels"][key] == *value))
}

fn service(model: &Model, namespace: &str, service: &Value) -> Option<String> {
    let selector = &service["spec"]["selector"];
    if selector.is_null() || is_terminating(service) {
        return None;
    }
    let inside = model.of("pods").filter(|(key, _)| &*key.namespace == namespace);
    let ready = inside.filter(|(_, pod)| selects(selector, pod) && is_ready(pod));
    let ready: BTreeSet<&str> = ready.map(|(_, pod)| text(pod, "/status/podIP")).collect();
    let slices = model.controlled("endpointslices.discovery.k8s.io", uid(service));
    let ends = slices.flat_map(|(_, slice)| list(slice, "/endpoints"));
    let served = ends.filter(|end| end["conditions"]["ready"] == true);
    let served: BTreeSet<&str> = served.map(|end| text(end, "/addresses/0")).collect();
    (ready != served).then(|| format!("the endpoints are {served:?} and the ready pods {ready:?}"))
}

fn budget(model: &Model, namespace: &str, budget: &Value) -> Option<String> {
    let selector = &budget["spec"]["selector"]["matchLabels"];
    let inside = model.of("pods").filter(|(key, _)| &*key.namespace == namespace);
    let healthy = inside.filter(|(_, pod)| selects(selector, pod) && is_ready(pod)).count();
    let healthy = i64::try_from(healthy).unwrap_or(i64::MAX);
    status(
        budget,
        &[("currentHealthy", healthy), ("observedGeneration", number(budget, "/metadata/generation", 0))],
    )
}
