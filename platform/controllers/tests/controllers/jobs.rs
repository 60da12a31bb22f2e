//! The job controller against the real API, on a node whose containers end as instructed.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use crate::support::{ControllersHarness, is_ready, key, stays, until};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use mayfly_api::{
    job_io::{ANNOTATION_GPU_SECONDS, ANNOTATION_INPUTS, ANNOTATION_OUTCOMES, JobOutcome},
    k8s::api::{
        batch::v1::Job,
        core::v1::{Node, Pod},
    },
};
use mayfly_kubelet::JobFiles;
use mayfly_runtime::{Runtime as _, simulated::ANNOTATION_EXIT_CODE};
use serde_json::{Value, json};

/// A Job whose containers exit with this code as soon as they run; with none, they run on.
fn job(name: &str, exit_code: Option<i32>, spec: Value) -> Value {
    let mut annotations = json!({ANNOTATION_INPUTS: "{\"parameters\": {\"who\": \"Ada\"}}"});
    if let Some(code) = exit_code {
        annotations[ANNOTATION_EXIT_CODE] = json!(code.to_string());
    }
    let mut job = json!({"metadata": {"name": name}, "spec": {"template": {
        "metadata": {"annotations": annotations},
        "spec": {"runtimeClassName": "wasm", "restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}}});
    job["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    job
}

/// A complete cluster, without a pause after a failure.
async fn cluster() -> ControllersHarness {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.job.backoff.first = Duration::ZERO;
    cluster.jobs = Some(JobFiles::new(cluster.artifacts.clone(), cluster.folder.path().join("jobs")));
    cluster.run_controllers();
    cluster.run_node();
    cluster
}

fn known(cluster: &ControllersHarness, name: &str) -> Option<Arc<Job>> {
    cluster.informers.of::<Job>().get(&key(name))
}

fn holds(cluster: &ControllersHarness, name: &str, condition: &str) -> bool {
    let status = known(cluster, name).and_then(|job| job.status.clone());
    let conditions = status.and_then(|status| status.conditions).unwrap_or_default();
    conditions.iter().any(|known| known.type_ == condition && known.status == "True")
}

async fn until_job(cluster: &ControllersHarness, why: &str, what: impl Fn() -> bool) {
    until(&cluster.informers.of::<Job>(), why, what).await;
}

#[tokio::test]
async fn makes_exactly_as_many_as_asked_and_counts_each_once() {
    let cluster = cluster().await;
    let spec = json!({"completions": 12, "parallelism": 4});
    cluster.create::<Job>(job("well", Some(0), spec)).await;
    until_job(&cluster, "it is complete", || holds(&cluster, "well", "Complete")).await;
    let done = known(&cluster, "well").unwrap();
    let status = done.status.clone().unwrap();
    assert_eq!((status.succeeded, status.failed, status.active), (Some(12), None, None));
    assert!(status.start_time.is_some() && status.completion_time.is_some());
    stays("there are no more", || cluster.pods().len() == 12).await;
    // The Job records the outcomes of its pods, and the store has their outputs.
    let outcomes: Vec<JobOutcome> = serde_json::from_str(&done.annotations()[ANNOTATION_OUTCOMES]).unwrap();
    let pods: BTreeSet<_> = outcomes.iter().map(|outcome| outcome.pod.as_str()).collect();
    assert_eq!((outcomes.len(), pods.len()), (12, 12));
    for outcome in &outcomes {
        assert!(outcome.succeeded && outcome.exit_code == Some(0));
        assert!(cluster.artifacts.path(&outcome.outputs.as_ref().unwrap().document).is_some());
    }
    // Pods that a user removes were counted.
    for pod in cluster.pods().list() {
        cluster.api::<Pod>().delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    }
    until(&cluster.pods(), "the pods are gone", || cluster.pods().is_empty()).await;
    stays("none is made again", || cluster.pods().is_empty()).await;
}

#[tokio::test]
async fn gives_up_past_its_limit() {
    let cluster = cluster().await;
    cluster.create::<Job>(job("badly", Some(3), json!({"backoffLimit": 2}))).await;
    until_job(&cluster, "it has failed", || holds(&cluster, "badly", "Failed")).await;
    let status = known(&cluster, "badly").unwrap().status.clone().unwrap();
    assert_eq!((status.failed, status.succeeded, status.completion_time), (Some(3), None, None));
    stays("no more is tried", || cluster.pods().len() == 3).await;
}

#[tokio::test]
async fn every_index_comes_to_its_end() {
    let cluster = cluster().await;
    let spec = json!({"completions": 5, "parallelism": 2, "completionMode": "Indexed"});
    cluster.create::<Job>(job("indexed", Some(0), spec)).await;
    until_job(&cluster, "it is complete", || holds(&cluster, "indexed", "Complete")).await;
    let status = known(&cluster, "indexed").unwrap().status.clone().unwrap();
    assert_eq!((status.completed_indexes.as_deref(), status.succeeded), (Some("0-4"), Some(5)));
}

#[tokio::test]
async fn a_deleted_job_and_a_suspended_one_let_their_pods_go() {
    let cluster = cluster().await;
    cluster.create::<Job>(job("gone", None, json!({"parallelism": 3, "completions": 3}))).await;
    cluster.create::<Job>(job("rests", None, json!({"parallelism": 2, "completions": 2}))).await;
    let running = |prefix: &str| {
        let pods = cluster.pods_of(prefix);
        pods.iter().filter(|pod| is_ready(pod)).count()
    };
    until(&cluster.pods(), "all run", || running("gone-") == 3 && running("rests-") == 2).await;
    let suspend = Patch::Merge(json!({"spec": {"suspend": true}}));
    cluster.api::<Job>().patch("rests", &PatchParams::default(), &suspend).await.unwrap();
    cluster.api::<Job>().delete("gone", &DeleteParams::background()).await.unwrap();
    until(&cluster.pods(), "all are gone", || cluster.pods().is_empty()).await;
    until_job(&cluster, "its condition Suspended is set", || holds(&cluster, "rests", "Suspended")).await;
    let status = known(&cluster, "rests").unwrap().status.clone().unwrap();
    assert_eq!((status.failed, status.active), (None, None), "what was stopped did not fail");
    let resume = Patch::Merge(json!({"spec": {"suspend": false}}));
    cluster.api::<Job>().patch("rests", &PatchParams::default(), &resume).await.unwrap();
    until(&cluster.pods(), "it goes on", || running("rests-") == 2).await;
}

#[tokio::test]
async fn what_ran_past_the_deadline_is_ended_first() {
    let cluster = cluster().await;
    cluster.create::<Job>(job("slow", None, json!({"activeDeadlineSeconds": 1}))).await;
    until_job(&cluster, "it has failed", || holds(&cluster, "slow", "Failed")).await;
    let done = known(&cluster, "slow").unwrap();
    let status = done.status.clone().unwrap();
    let failed =
        status.conditions.unwrap().into_iter().find(|condition| condition.type_ == "Failed").unwrap();
    assert_eq!((failed.reason.as_deref(), status.failed), (Some("DeadlineExceeded"), Some(1)));
    let outcomes: Vec<JobOutcome> = serde_json::from_str(&done.annotations()[ANNOTATION_OUTCOMES]).unwrap();
    assert!(!outcomes[0].succeeded && outcomes[0].outputs.is_some(), "{outcomes:?}");
    until(&cluster.pods(), "its pod is gone", || cluster.pods().is_empty()).await;
    assert!(cluster.runtime.sandboxes().is_empty());
}

/// A failed attempt, one that is stopped because the Job is suspended, and one that succeeds. The test stands for the
/// node.
#[tokio::test]
async fn the_gpu_time_of_a_job_is_that_of_all_its_pods() {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.job.backoff.first = Duration::ZERO;
    cluster.run_controllers();
    let node = serde_json::from_value(json!({"metadata": {"name": "elsewhere"}})).unwrap();
    Api::<Node>::all(cluster.client.clone()).create(&PostParams::default(), &node).await.unwrap();
    let container = json!({"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}});
    let template =
        json!({"spec": {"nodeName": "elsewhere", "restartPolicy": "Never", "containers": [container]}});
    cluster
        .create::<Job>(
            json!({"metadata": {"name": "train"}, "spec": {"backoffLimit": 3, "template": template}}),
        )
        .await;
    let phase = |pod: &Pod| pod.status.clone().and_then(|status| status.phase).unwrap_or_default();
    let started = async || {
        let open = || cluster.pods_of("train-").into_iter().find(|pod| phase(pod) == "Pending");
        until(&cluster.pods(), "it has a pod", || open().is_some()).await;
        open().unwrap().name_any()
    };
    let ends = async |pod: &str, phase: &str, seconds: &str| {
        let time = json!({"metadata": {"annotations": {ANNOTATION_GPU_SECONDS: seconds}}});
        cluster.api::<Pod>().patch(pod, &PatchParams::default(), &Patch::Merge(time)).await.unwrap();
        let end = json!({"status": {"phase": phase}});
        cluster.api::<Pod>().patch_status(pod, &PatchParams::default(), &Patch::Merge(end)).await.unwrap();
    };
    let used = async |expected: &str| {
        let known = || known(&cluster, "train")?.annotations().get(ANNOTATION_GPU_SECONDS).cloned();
        until_job(&cluster, "its GPU time is recorded", || known().as_deref() == Some(expected)).await;
    };
    let suspends = async |suspend: bool| {
        let patch = Patch::Merge(json!({"spec": {"suspend": suspend}}));
        cluster.api::<Job>().patch("train", &PatchParams::default(), &patch).await.unwrap();
    };
    ends(&started().await, "Failed", "2.500").await;
    used("2.500").await;

    let stopped = started().await;
    suspends(true).await;
    let of_stopped = || cluster.pods().get(&key(&stopped));
    let is_stopping = || of_stopped().is_some_and(|pod| pod.metadata.deletion_timestamp.is_some());
    until(&cluster.pods(), "its pod is asked to end", is_stopping).await;
    assert_eq!(of_stopped().unwrap().finalizers(), ["mayfly.dev/gpu-time"]);
    ends(&stopped, "Failed", "4.000").await;
    used("6.500").await;
    cluster.api::<Pod>().delete(&stopped, &DeleteParams::default().grace_period(0)).await.unwrap();
    until(&cluster.pods(), "the pod is gone", || of_stopped().is_none()).await;

    suspends(false).await;
    ends(&started().await, "Succeeded", "1.000").await;
    until_job(&cluster, "it is complete", || holds(&cluster, "train", "Complete")).await;
    used("7.500").await;
    let status = known(&cluster, "train").unwrap().status.clone().unwrap();
    assert_eq!((status.succeeded, status.failed), (Some(1), Some(1)), "the stopped pod does not count");
}
