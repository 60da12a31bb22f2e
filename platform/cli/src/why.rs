//! `mayfly why`: why a pod or a job waits, or how it ended.
//!
//! The reasons for pods are those reported by the scheduler and the kubelet; those for Jobs in a queue come from the
//! plan that the queue's controller executes, and those of single GPUs from the scheduler's function.

mod gpus;

use std::collections::BTreeMap;

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use kube::{Api, ResourceExt as _, api::ListParams};
use mayfly_api::{
    JobQueue, ObjectKey,
    job_queue::{LABEL_QUEUE, QueuedJob, plan::plan, queue_of},
    k8s::api::{
        batch::v1::Job,
        core::v1::{ContainerStatus, Namespace, Pod},
    },
};
use serde::Serialize;

use super::{
    failure::{ErrorCode, Failure},
    output,
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly why pod train-0
  mayfly why job train")]
pub(crate) struct WhyArgs {
    #[arg(value_enum)]
    kind: WhyKind,
    name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WhyKind {
    #[value(alias = "pods", alias = "po")]
    Pod,
    #[value(alias = "jobs")]
    Job,
}

/// The state of an object and the reason for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct WhyRow {
    /// `pod a`
    subject: String,
    /// `Waiting`, `Running`, `Succeeded`, `Failed`
    state: &'static str,
    reason: String,
}

pub(crate) async fn run(args: WhyArgs, session: &Session) -> anyhow::Result<()> {
    let client = session.server().await?.client().clone();
    let namespace = session.namespace().await?;
    let missing = |kind: &str| {
        let what = format!("no {kind} {} in namespace {namespace}", args.name);
        Failure::error(
            ErrorCode::NotFound,
            what,
            format!("see which there are: mayfly get {kind}s -n {namespace}"),
        )
    };
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let rows = match args.kind {
        WhyKind::Pod => {
            let pod = pods.get_opt(&args.name).await?.ok_or_else(|| missing("pod"))?;
            let mut rows = of_pod(&pod);
            if let (Some(why), Some(row)) = (gpus::explain(&pod, &client).await, rows.first_mut()) {
                row.reason = format!("{}; {why}", row.reason);
            }
            rows
        }
        WhyKind::Job => {
            let jobs: Api<Job> = Api::namespaced(client.clone(), &namespace);
            let job = jobs.get_opt(&args.name).await?.ok_or_else(|| missing("job"))?;
            let selector = format!("batch.kubernetes.io/job-name={}", args.name);
            let pods = pods.list(&ListParams::default().labels(&selector)).await?.items;
            match queue_of(&job).filter(|_| waits_for_queue(&job)) {
                Some(queue) => vec![of_queued_job(&job, queue, &client).await?],
                None => of_job(&job, &pods),
            }
        }
    };
    output::result(session.format(), &rows, || text(&rows))
}

fn text(rows: &[WhyRow]) -> String {
    rows.iter().map(|row| format!("{}: {}: {}\n", row.subject, row.state, row.reason)).collect()
}

fn waits_for_queue(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend) == Some(true)
        && QueuedJob::of(job, Timestamp::MIN).is_some()
}

async fn of_queued_job(job: &Job, queue: &str, client: &kube::Client) -> anyhow::Result<WhyRow> {
    let subject = format!("job {}", job.name_any());
    let found = Api::<JobQueue>::all(client.clone()).get_opt(queue).await?;
    let Some(found) = found else {
        let reason =
            format!("its queue {queue} does not exist: make it, or name another by the label {LABEL_QUEUE}");
        return Ok(WhyRow { subject, state: "Waiting", reason });
    };
    let selector = ListParams::default().labels(&format!("{LABEL_QUEUE}={queue}"));
    let jobs = Api::<Job>::all(client.clone()).list(&selector).await?.items;
    let namespaces = Api::<Namespace>::all(client.clone()).list(&ListParams::default()).await?.items;
    Ok(WhyRow { subject, state: "Waiting", reason: turn(job, &found, &jobs, namespaces, Timestamp::now()) })
}

/// The position of a Job in its queue, and the reason why it waits.
fn turn(job: &Job, queue: &JobQueue, jobs: &[Job], namespaces: Vec<Namespace>, now: Timestamp) -> String {
    let queued: Vec<_> = jobs.iter().filter_map(|job| QueuedJob::of(job, now)).collect();
    let namespaces: BTreeMap<_, _> =
        namespaces.into_iter().map(|one| (one.name_any(), one.labels().clone())).collect();
    let plan = plan(&queue.spec, &queued, &namespaces, now);
    let (name, key) = (queue.name_any(), ObjectKey::of(job));
    let place = plan.waiting.iter().position(|(other, _)| *other == key);
    match place {
        Some(place) => {
            let (reason, of) = (&plan.waiting[place].1, plan.waiting.len());
            format!("number {} of {of} that wait in queue {name}: {reason}", place + 1)
        }
        None => format!("queue {name} has room for it: it is being started"),
    }
}

fn of_job(job: &Job, pods: &[Pod]) -> Vec<WhyRow> {
    let subject = format!("job {}", job.name_any());
    let conditions = job.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let holds = |name: &str| conditions.iter().find(|one| one.type_ == name && one.status == "True");
    for (name, state) in [("Complete", "Succeeded"), ("Failed", "Failed")] {
        if let Some(condition) = holds(name) {
            let told = [&condition.reason, &condition.message].map(|text| text.clone().unwrap_or_default());
            let reason = told.join(": ").trim_matches([':', ' ']).to_owned();
            let reason = if reason.is_empty() { "all of its pods have succeeded".to_owned() } else { reason };
            return std::iter::once(WhyRow { subject, state, reason }).chain(failed(pods)).collect();
        }
    }
    if job.spec.as_ref().and_then(|spec| spec.suspend) == Some(true) {
        let reason = "it is suspended: spec.suspend is true".to_owned();
        return vec![WhyRow { subject, state: "Waiting", reason }];
    }
    let own: Vec<WhyRow> = pods.iter().flat_map(of_pod).collect();
    let waiting = own.iter().filter(|row| row.state == "Waiting").count();
    let (state, reason) = match (waiting, own.len()) {
        (0, 0) => ("Waiting", "its pods are not created yet".to_owned()),
        (0, _) => ("Running", "its pods run".to_owned()),
        (waiting, all) => ("Waiting", format!("{waiting} of its {all} pods wait")),
    };
    std::iter::once(WhyRow { subject, state, reason }).chain(own).collect()
}

fn failed(pods: &[Pod]) -> Vec<WhyRow> {
    pods.iter().flat_map(of_pod).filter(|row| row.state == "Failed").collect()
}

/// A pod's state, with each container that is the reason for it.
fn of_pod(pod: &Pod) -> Vec<WhyRow> {
    let status = pod.status.clone().unwrap_or_default();
    let name = pod.name_any();
    let row = |state, reason: String| WhyRow { subject: format!("pod {name}"), state, reason };
    let containers: Vec<_> =
        [status.init_container_statuses, status.container_statuses].into_iter().flatten().flatten().collect();
    match status.phase.as_deref() {
        Some("Succeeded") => {
            return vec![row("Succeeded", "all of its containers have succeeded".to_owned())];
        }
        Some("Failed") => {
            let told = [status.reason, status.message].map(Option::unwrap_or_default).join(": ");
            let told = told.trim_matches([':', ' ']).to_owned();
            let ended: Vec<_> = containers.iter().filter_map(ended).collect();
            let reasons = std::iter::once(told).chain(ended).filter(|text| !text.is_empty());
            return vec![row("Failed", reasons.collect::<Vec<_>>().join("; "))];
        }
        _ => {}
    }
    let gates = pod.spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
    let gates: Vec<_> = gates.map(|gate| gate.name.as_str()).collect();
    if !gates.is_empty() {
        return vec![row("Waiting", format!("its scheduling gates are not removed: {}", gates.join(", ")))];
    }
    let conditions = status.conditions.unwrap_or_default();
    let unscheduled = conditions.iter().find(|one| one.type_ == "PodScheduled" && one.status == "False");
    if let Some(condition) = unscheduled {
        return vec![row("Waiting", condition.message.clone().unwrap_or_default())];
    }
    if pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).is_none_or(str::is_empty) {
        return vec![row("Waiting", "the scheduler has not processed it yet".to_owned())];
    }
    let reasons: Vec<_> = containers.iter().filter_map(waiting).collect();
    match (reasons.is_empty(), status.phase.as_deref()) {
        (false, _) => vec![row("Waiting", reasons.join("; "))],
        (true, Some("Running")) => vec![row("Running", "its containers run".to_owned())],
        (true, _) => vec![row("Waiting", "its node is preparing it".to_owned())],
    }
}

fn waiting(container: &ContainerStatus) -> Option<String> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().filter(|reason| !matches!(*reason, "PodInitializing"))?;
    let message = waiting.message.as_deref().filter(|message| !message.is_empty());
    let message = message.map_or_else(String::new, |message| format!(": {message}"));
    Some(format!("container {} {reason}{message}", container.name))
}

fn ended(container: &ContainerStatus) -> Option<String> {
    let ended = container.state.as_ref()?.terminated.as_ref().filter(|ended| ended.exit_code != 0)?;
    let reason = ended.reason.as_deref().unwrap_or("Error");
    Some(format!("container {} {reason}, exit code {}", container.name, ended.exit_code))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(pod: Value, expected: &str) {
        let mut whole = json!({"metadata": {"name": "a"}, "spec": {"containers": [], "nodeName": "n"}});
        for (field, value) in pod.as_object().unwrap() {
            match value {
                Value::Object(inner) => {
                    inner.iter().for_each(|(key, value)| whole[field][key] = value.clone())
                }
                other => whole[field] = other.clone(),
            }
        }
        assert_eq!(text(&of_pod(&serde_json::from_value(whole).unwrap())), format!("pod a: {expected}\n"));
    }

    #[test]
    fn pods() {
        let unscheduled =
            json!([{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]);
        let states = |state: Value| {
            json!([{"name": "c", "ready": false, "restartCount": 0, "image": "", "imageID": "",
            "state": state}])
        };
        check(
            json!({"status": {"phase": "Pending", "conditions": unscheduled}}),
            "Waiting: 0/1 nodes are available",
        );
        check(json!({"spec": {"nodeName": ""}}), "Waiting: the scheduler has not processed it yet");
        let gated = json!({"spec": {"schedulingGates": [{"name": "g"}]}});
        check(gated, "Waiting: its scheduling gates are not removed: g");
        let pull = states(json!({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}));
        let pull = json!({"status": {"phase": "Pending", "containerStatuses": pull}});
        check(pull, "Waiting: container c ImagePullBackOff: not found");
        let failed = states(json!({"terminated": {"exitCode": 3, "reason": "Error"}}));
        let failed = json!({"status": {"phase": "Failed", "containerStatuses": failed}});
        check(failed, "Failed: container c Error, exit code 3");
        check(json!({"status": {"phase": "Running"}}), "Running: its containers run");
        check(json!({"status": {"phase": "Pending"}}), "Waiting: its node is preparing it");
    }

    fn job(value: Value) -> Job {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn jobs() {
        let failed =
            json!({"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "too long"});
        let ended = job(json!({"metadata": {"name": "j"}, "status": {"conditions": [failed]}}));
        assert_eq!(text(&of_job(&ended, &[])), "job j: Failed: DeadlineExceeded: too long\n");
        let template = json!({"spec": {"containers": []}});
        let held = job(json!({"metadata": {"name": "j"}, "spec": {"suspend": true, "template": template}}));
        assert_eq!(text(&of_job(&held, &[])), "job j: Waiting: it is suspended: spec.suspend is true\n");
        let open = job(json!({"metadata": {"name": "j"}}));
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": []}});
        let shown = text(&of_job(&open, &[serde_json::from_value(pod).unwrap()]));
        let expected =
            "job j: Waiting: 1 of its 1 pods wait\npod p: Waiting: the scheduler has not processed it yet\n";
        assert_eq!(shown, expected);
    }

    #[test]
    fn jobs_in_a_queue() {
        let queue = json!({"apiVersion": "mayfly.dev/v1", "kind": "JobQueue", "metadata": {"name": "q"},
            "spec": {"quota": {"cpu": "1"}}});
        let queue: JobQueue = serde_json::from_value(queue).unwrap();
        let jobs = ["a", "b", "c"].map(|name| {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": "1"}}});
            let spec = json!({"suspend": true, "template": {"spec": {"containers": [container]}}});
            job(json!({"metadata": {"name": name, "namespace": "n"}, "spec": spec}))
        });
        let turn = |at: usize| turn(&jobs[at], &queue, &jobs, Vec::new(), Timestamp::UNIX_EPOCH);
        assert_eq!(turn(0), "queue q has room for it: it is being started");
        let waits =
            "number 2 of 2 that wait in queue q: needs 1 of cpu, and 0 of 1 in the queue's quota are free";
        assert_eq!(turn(2), waits);
    }
}
