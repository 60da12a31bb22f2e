//! Plans, as data; and a whole Job against a small simulation of pods.

use std::{sync::Arc, time::Duration};

use mayfly_api::k8s::{
    api::{batch::v1::Job, core::v1::Pod},
    jiff::{SignedDuration, Timestamp},
};
use mayfly_informer::Backoff;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    COMPLETION_INDEX, Config, FINALIZER,
    conditions::{COMPLETE, FAILED, FAILURE_TARGET, SUCCESS_CRITERIA_MET, SUSPENDED, holding},
    plan::{JobPlan, JobPods, plan},
};

pub(super) fn job(spec: Value, status: Value) -> Job {
    let mut spec = spec;
    spec["template"] = json!({"spec": {"restartPolicy": "Never", "containers": []}});
    serde_json::from_value(json!({"metadata": {"name": "j", "uid": "j"}, "spec": spec, "status": status}))
        .unwrap()
}

fn pod(name: &str, phase: &str, tracked: bool) -> Arc<Pod> {
    pod_with(name, phase, tracked, json!({}))
}

pub(super) fn pod_with(name: &str, phase: &str, tracked: bool, end: Value) -> Arc<Pod> {
    let finalizers = if tracked { json!([FINALIZER]) } else { json!([]) };
    let mut terminated =
        json!({"exitCode": i32::from(phase == "Failed"), "finishedAt": "2026-01-01T00:00:00Z"});
    terminated.as_object_mut().unwrap().extend(end.as_object().unwrap().clone());
    let state = match phase {
        "Succeeded" | "Failed" => json!({"terminated": terminated}),
        _ => json!({"running": {}}),
    };
    let status = json!({"phase": phase, "containerStatuses": [{"name": "c", "image": "", "imageID": "",
        "ready": phase == "Running", "restartCount": 0, "state": state}]});
    let pod = json!({"metadata": {"name": name, "uid": name, "finalizers": finalizers}, "status": status,
        "spec": {"containers": []}});
    Arc::new(serde_json::from_value(pod).unwrap())
}

pub(super) fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

fn look(job: &Job, pods: &[Arc<Pod>]) -> JobPlan {
    plan(job, pods, &[], &Config::default(), now())
}

pub(super) fn created(plan: &JobPlan) -> Vec<Option<i32>> {
    match &plan.pods {
        JobPods::Create(indexes) => indexes.clone(),
        JobPods::Nothing | JobPods::Delete { .. } => vec![],
    }
}

fn deleted(plan: &JobPlan) -> usize {
    match &plan.pods {
        JobPods::Delete { pods, .. } => pods.len(),
        JobPods::Nothing | JobPods::Create(_) => 0,
    }
}

#[test]
fn a_pod_that_does_not_start_is_told_of() {
    let waiting = |reason: &str| {
        let pod = json!({"metadata": {"name": "p", "uid": "p", "finalizers": [FINALIZER]}, "spec": {"containers": []},
            "status": {"phase": "Pending", "containerStatuses": [{"name": "c", "image": "", "imageID": "",
                "ready": false, "restartCount": 0, "state": {"waiting": {"reason": reason, "message": "it is away"}}}]}});
        Arc::new(serde_json::from_value::<Pod>(pod).unwrap())
    };
    let told = |pod| look(&job(json!({"completions": 1, "parallelism": 1}), json!({})), &[pod]).stuck;
    let expected = "Pod p does not start: ImagePullBackOff: it is away";
    assert_eq!(told(waiting("ImagePullBackOff")).as_deref(), Some(expected));
    assert_eq!(told(waiting("ContainerCreating")), None);
    assert_eq!(told(waiting("ErrImagePull")), None, "it is tried once more first");
    assert_eq!(told(pod("p", "Running", true)), None);
}

#[test]
fn as_many_as_are_missing_and_may_run() {
    let spec = json!({"completions": 5, "parallelism": 3});
    let running = [pod("a", "Running", true)];
    for (status, pods, expected) in [
        (json!({}), &[][..], 3),
        (json!({}), &running[..], 2),
        (json!({"succeeded": 4}), &[][..], 1),
        (json!({"succeeded": 4}), &running[..], 0),
        (json!({"uncountedTerminatedPods": {"succeeded": ["x", "y", "z"]}}), &[][..], 2),
    ] {
        let plan = look(&job(spec.clone(), status.clone()), pods);
        assert_eq!(created(&plan).len(), expected, "{status}");
    }
    let surplus = look(&job(spec, json!({"succeeded": 4})), &[running[0].clone(), pod("b", "Pending", true)]);
    assert_eq!(deleted(&surplus), 1);
}

#[test]
fn a_pod_is_counted_once() {
    let spec = json!({"completions": 2, "parallelism": 2});
    let ended = [pod("a", "Succeeded", true)];
    let first = look(&job(spec.clone(), json!({})), &ended);
    let uncounted = first.status.uncounted_terminated_pods.clone().unwrap();
    assert_eq!((uncounted.succeeded.as_deref(), first.status.succeeded), (Some(&["a".to_owned()][..]), None));
    assert_eq!(first.release.len(), 1);
    // The finalizer is still set: the numbers do not change.
    let mut same = job(spec.clone(), json!({}));
    same.status = Some(first.status);
    let second = look(&same, &ended);
    assert_eq!(second.status.uncounted_terminated_pods.as_ref(), Some(&uncounted));
    // The finalizer is removed, with the pod or without.
    for pods in [&[pod("a", "Succeeded", false)][..], &[]] {
        let counted = look(&same, pods);
        assert_eq!(counted.status.succeeded, Some(1));
        assert_eq!(counted.status.uncounted_terminated_pods.clone().unwrap().succeeded, None);
        let mut after = same.clone();
        after.status = Some(counted.status);
        assert_eq!(look(&after, pods).status.succeeded, Some(1));
    }
}

#[test]
fn fails_in_upstreams_words() {
    for (spec, status, pods, reason) in [
        (json!({"backoffLimit": 1}), json!({"failed": 2}), vec![], "BackoffLimitExceeded"),
        (json!({"backoffLimit": 0}), json!({}), vec![pod("a", "Failed", true)], "BackoffLimitExceeded"),
        (
            json!({"activeDeadlineSeconds": 5}),
            json!({"startTime": "2025-12-31T23:59:55Z"}),
            vec![pod("a", "Running", true)],
            "DeadlineExceeded",
        ),
        (
            json!({"podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}]}}),
            json!({}),
            vec![pod_with("a", "Failed", true, json!({"exitCode": 3}))],
            "PodFailurePolicy",
        ),
    ] {
        let first = look(&job(spec.clone(), status), &pods);
        let target = holding(&first.status, FAILURE_TARGET).expect("it is to fail");
        assert_eq!(target.reason.as_deref(), Some(reason), "{}", target.message.as_deref().unwrap_or(""));
        assert!(
            holding(&first.status, FAILED).is_none() || pods.is_empty(),
            "pods are ended and counted first"
        );
        let mut next = job(spec, json!({}));
        next.status = Some(first.status);
        let last = look(&next, &[]);
        assert_eq!(holding(&last.status, FAILED).and_then(|failed| failed.reason.as_deref()), Some(reason));
        assert!(last.status.completion_time.is_none());
    }
}

/// A pod whose init container has this state and number of restarts.
fn with_init(phase: &str, state: Value, restarts: i32) -> Arc<Pod> {
    let mut pod = Pod::clone(&pod("a", phase, true));
    let status = json!([{"name": "setup", "image": "", "imageID": "", "ready": false, "restartCount": restarts,
        "state": state}]);
    pod.status.as_mut().unwrap().container_statuses = None;
    pod.status.as_mut().unwrap().init_container_statuses = serde_json::from_value(status).unwrap();
    Arc::new(pod)
}

#[test]
fn restarts_of_init_containers_count_towards_the_limit() {
    let reason = |restarts: i32| {
        let mut job = job(json!({"backoffLimit": 2, "completions": 1}), json!({}));
        job.spec.as_mut().unwrap().template.spec.as_mut().unwrap().restart_policy = Some("OnFailure".into());
        let plan = look(&job, &[with_init("Pending", json!({"running": {}}), restarts)]);
        holding(&plan.status, FAILURE_TARGET).and_then(|failed| failed.reason.clone())
    };
    assert_eq!(reason(1), None);
    assert_eq!(reason(2).as_deref(), Some("BackoffLimitExceeded"));
}

#[test]
fn a_failure_policy_reads_the_exit_codes_of_init_containers() {
    let codes = json!({"operator": "In", "values": [42]});
    let rules = json!([{"action": "FailJob", "onExitCodes": codes}]);
    let spec = json!({"completions": 1, "podFailurePolicy": {"rules": rules}});
    let end = |code: i32| json!({"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}});
    let message = |code: i32| {
        let plan = look(&job(spec.clone(), json!({})), &[with_init("Failed", end(code), 0)]);
        holding(&plan.status, FAILURE_TARGET).and_then(|failed| failed.message.clone())
    };
    assert_eq!(message(1), None);
    let expected = "Container setup for pod /a failed with exit code 42 matching FailJob rule at index 0";
    assert_eq!(message(42).as_deref(), Some(expected));
}

#[test]
fn what_is_ignored_is_replaced_at_once() {
    let rules =
        json!([{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]);
    let spec = json!({"backoffLimit": 0, "completions": 1, "podFailurePolicy": {"rules": rules}});
    let mut lost = Pod::clone(&pod("a", "Failed", true));
    let conditions = json!([{"type": "DisruptionTarget", "status": "True"}]);
    lost.status.as_mut().unwrap().conditions = serde_json::from_value(conditions).unwrap();
    let plan = look(&job(spec, json!({})), &[Arc::new(lost)]);
    assert_eq!((created(&plan).len(), plan.release.len(), plan.status.failed), (1, 1, None));
    assert!(holding(&plan.status, FAILURE_TARGET).is_none());
}

fn terminating(name: &str, phase: &str, index: &str) -> Arc<Pod> {
    let mut pod = Pod::clone(&pod(name, phase, true));
    pod.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    pod.metadata.deletion_grace_period_seconds = Some(30);
    pod.metadata.annotations = Some([(COMPLETION_INDEX.to_owned(), index.to_owned())].into());
    Arc::new(pod)
}

/// With `Failed` a pod whose deletion was requested fails and is replaced at its end: it still has its GPUs until then.
#[test]
fn a_terminating_pod_is_replaced_as_the_policy_says() {
    for (policy, at_once) in [(None, true), (Some("TerminatingOrFailed"), true), (Some("Failed"), false)] {
        let spec = json!({"completions": 2, "parallelism": 1, "podReplacementPolicy": policy});
        let plan = look(&job(spec.clone(), json!({})), &[terminating("a", "Running", "0")]);
        assert_eq!(created(&plan).len(), usize::from(at_once), "{policy:?}");
        let failed = plan.status.uncounted_terminated_pods.clone().unwrap().failed.unwrap_or_default();
        assert_eq!((plan.status.terminating, failed.len()), (Some(1), usize::from(at_once)), "{policy:?}");
        assert_eq!(plan.release.len(), usize::from(at_once), "{policy:?}");
        // The pod has ended, and is counted.
        let plan = look(&job(spec.clone(), json!({"failed": 1})), &[]);
        assert_eq!(created(&plan).len(), 1, "{policy:?}");

        let mut indexed = spec;
        indexed["completionMode"] = "Indexed".into();
        indexed["parallelism"] = 2.into();
        let plan = look(&job(indexed, json!({})), &[terminating("a", "Running", "0")]);
        let expected = if at_once { vec![Some(0), Some(1)] } else { vec![Some(1)] };
        assert_eq!(created(&plan), expected, "{policy:?}");
    }
}

#[test]
fn a_deleted_pod_that_ends_well_has_failed_all_the_same() {
    let spec = json!({"completions": 1});
    let first = look(&job(spec.clone(), json!({})), &[terminating("a", "Running", "0")]);
    let mut next = job(spec, json!({}));
    next.status = Some(first.status);
    let second = look(&next, &[terminating("a", "Succeeded", "0")]);
    assert!(holding(&second.status, SUCCESS_CRITERIA_MET).is_none());
    let uncounted = second.status.uncounted_terminated_pods.unwrap();
    assert_eq!((uncounted.succeeded, uncounted.failed), (None, Some(vec!["a".to_owned()])));
}

#[test]
fn the_pods_of_a_job_with_inputs_are_counted_with_their_results() {
    let mut job = job(json!({"completions": 1}), json!({}));
    let annotations = json!({"annotations": {mayfly_api::job_io::ANNOTATION_INPUTS: "[]"}});
    job.spec.as_mut().unwrap().template.metadata = serde_json::from_value(annotations).unwrap();
    let plan = look(&job, &[terminating("a", "Running", "0")]);
    assert_eq!((plan.release.len(), created(&plan).len(), plan.status.terminating), (0, 1, Some(1)));
    let ended = look(&job, &[terminating("a", "Failed", "0")]);
    assert_eq!((ended.release.len(), ended.outcomes.len()), (1, 1));
}

#[test]
fn the_status_records_a_limited_number_of_pods_at_a_time() {
    let pods: Vec<_> = (0..700).map(|number| pod(&format!("p{number}"), "Succeeded", true)).collect();
    let spec = json!({"completions": 701, "parallelism": 701});
    let first = look(&job(spec.clone(), json!({})), &pods);
    let recorded = first.status.uncounted_terminated_pods.clone().unwrap().succeeded.unwrap();
    assert_eq!((recorded.len(), first.release.len()), (500, 500));
    assert_eq!(created(&first).len(), 1, "all are counted for new pods");
    let mut next = job(spec, json!({}));
    next.status = Some(first.status);
    let second = look(&next, &pods[500..]);
    assert_eq!((second.status.succeeded, second.release.len()), (Some(500), 200));
}

#[test]
fn waits_longer_after_each_failure_in_a_row() {
    let failed = |name: &str| pod(name, "Failed", false);
    for (pods, seconds) in [
        (vec![failed("a")], 10),
        (vec![failed("a"), failed("b")], 20),
        (vec![failed("a"), failed("b"), failed("c")], 40),
        ((0..40).map(|n| failed(&n.to_string())).collect(), 600),
    ] {
        let job = job(json!({"completions": 1, "backoffLimit": 100}), json!({}));
        let plan = look(&job, &pods);
        assert_eq!((created(&plan).len(), plan.again), (0, Some(Duration::from_secs(seconds))));
        let later = now().checked_add(SignedDuration::from_secs(600)).unwrap();
        let plan = super::plan::plan(&job, &pods, &[], &Config::default(), later);
        assert_eq!(created(&plan).len(), 1);
    }
}

#[test]
fn indexes_are_given_once_and_again_after_a_failure() {
    let spec = json!({"completions": 4, "parallelism": 3, "completionMode": "Indexed"});
    let indexed = |name: &str, phase: &str, index: i32| {
        let mut pod = Pod::clone(&pod(name, phase, true));
        let annotation = (super::COMPLETION_INDEX.to_owned(), index.to_string());
        pod.metadata.annotations = Some([annotation].into());
        Arc::new(pod)
    };
    assert_eq!(created(&look(&job(spec.clone(), json!({})), &[])), [Some(0), Some(1), Some(2)]);
    let pods = [indexed("a", "Succeeded", 0), indexed("b", "Running", 2)];
    let next = look(&job(spec.clone(), json!({})), &pods);
    assert_eq!(created(&next), [Some(1), Some(3)]);
    assert_eq!((next.status.completed_indexes.as_deref(), next.status.succeeded), (Some("0"), Some(1)));
    let twice = [indexed("c", "Succeeded", 0)];
    let again = look(&job(spec, json!({"completedIndexes": "0", "succeeded": 1})), &twice);
    assert_eq!(again.status.succeeded, Some(1), "an index counts once");
}

#[test]
fn an_indexed_job_that_shrinks_keeps_the_indexes_that_are_left() {
    let indexed = |name: &str, index: i32| {
        let mut pod = Pod::clone(&pod(name, "Running", true));
        pod.metadata.annotations = Some([(COMPLETION_INDEX.to_owned(), index.to_string())].into());
        Arc::new(pod)
    };
    let names = |plan: &JobPlan| match &plan.pods {
        JobPods::Delete { pods, .. } => {
            pods.iter().filter_map(|pod| pod.metadata.name.clone()).collect::<Vec<_>>()
        }
        JobPods::Nothing | JobPods::Create(_) => vec![],
    };
    let spec = |count: i32| json!({"completions": count, "parallelism": count, "completionMode": "Indexed"});
    let pods = ["a", "b", "c", "d"].into_iter().zip(0..).map(|(name, index)| indexed(name, index));
    let mut pods: Vec<_> = pods.collect();
    let mut shrunk = names(&look(&job(spec(2), json!({})), &pods));
    shrunk.sort();
    assert_eq!(shrunk, ["c", "d"]);
    // A second pod of an index goes, too, although there are not too many.
    pods.truncate(2);
    pods.push(indexed("again", 1));
    let twice = look(&job(spec(4), json!({})), &pods);
    assert_eq!(names(&twice).len(), 1);
    assert_ne!(names(&twice), ["a"]);
    // The completed indexes past the end do not count, nor do their failures.
    let status = json!({"completedIndexes": "0,3", "succeeded": 2});
    let mut failed = Pod::clone(&pod("f", "Failed", true));
    failed.metadata.annotations = Some([(COMPLETION_INDEX.to_owned(), "3".to_owned())].into());
    let plan = look(&job(spec(2), status), &[Arc::new(failed)]);
    assert_eq!((plan.status.completed_indexes.as_deref(), plan.status.succeeded), (Some("0"), Some(1)));
    assert_eq!(plan.status.uncounted_terminated_pods.unwrap().failed, None);
    assert_eq!(plan.release.len(), 1);
}

#[test]
fn the_gpu_time_of_pods_is_recorded_for_any_job() {
    let job = job(json!({"completions": 2, "parallelism": 2}), json!({}));
    let plain = pod("a", "Succeeded", true);
    assert!(!super::act::keeps_outcomes(&job, &look(&job, std::slice::from_ref(&plain)).outcomes));
    let mut with_gpu = Pod::clone(&pod("b", "Failed", true));
    with_gpu.metadata.annotations = Some([("mayfly.dev/gpu-seconds".to_owned(), "2.500".to_owned())].into());
    let outcomes = look(&job, &[plain, Arc::new(with_gpu)]).outcomes;
    assert!(super::act::keeps_outcomes(&job, &outcomes));
    let times: Vec<_> = outcomes.iter().map(|outcome| (outcome.pod.as_str(), outcome.gpu_ms)).collect();
    assert_eq!(times, [("a", None), ("b", Some(2500))]);
}

#[test]
fn a_suspended_job_rests() {
    let spec = json!({"completions": 1, "suspend": true});
    let old = json!({"startTime": "2025-01-01T00:00:00Z"});
    let plan = look(&job(spec, old), &[pod("a", "Running", true)]);
    assert!(matches!(&plan.pods, JobPods::Delete { pods, forget: true } if pods.len() == 1));
    let numbers = (plan.status.active, plan.status.ready, plan.status.terminating);
    assert_eq!(numbers, (None, Some(0), Some(1)));
    assert!(holding(&plan.status, SUSPENDED).is_some());
    assert!(plan.status.start_time.is_some(), "it stays until the Job is resumed");
    assert_eq!(reasons(&plan), ["Suspended"]);
    // The deadline starts again.
    let mut resumed = job(json!({"completions": 1, "activeDeadlineSeconds": 60}), json!({}));
    resumed.status = Some(plan.status);
    let plan = look(&resumed, &[]);
    assert!(holding(&plan.status, SUSPENDED).is_none());
    assert_eq!(plan.status.start_time.as_ref().map(|time| time.0), Some(now()));
    assert_eq!(reasons(&plan), ["Resumed"]);
    assert_eq!(created(&plan).len(), 1);
}

fn reasons(plan: &JobPlan) -> Vec<&'static str> {
    plan.events.iter().map(|(_, reason, _)| *reason).collect()
}

#[test]
fn a_suspended_job_with_all_its_completions_is_complete() {
    let spec = json!({"completions": 2, "suspend": true});
    let plan = look(&job(spec.clone(), json!({"succeeded": 2})), &[]);
    assert!(holding(&plan.status, COMPLETE).is_some() && holding(&plan.status, SUSPENDED).is_none());
    assert_eq!(reasons(&plan), ["Completed"]);
    // A pod that still runs is deleted without being counted, and Complete follows its end.
    let surplus = look(&job(spec.clone(), json!({"succeeded": 2})), &[pod("a", "Running", true)]);
    assert!(matches!(&surplus.pods, JobPods::Delete { pods, forget: true } if pods.len() == 1));
    assert!(holding(&surplus.status, SUCCESS_CRITERIA_MET).is_some());
    assert!(holding(&surplus.status, COMPLETE).is_none());
    let rests = look(&job(spec, json!({"succeeded": 1})), &[]);
    assert!(holding(&rests.status, SUCCESS_CRITERIA_MET).is_none());
}

#[test]
fn a_failed_job_says_so_once_its_pods_have_ended() {
    let spec = json!({"backoffLimit": 0, "completions": 2, "parallelism": 2});
    let pods = [pod("a", "Failed", true), pod("b", "Running", true)];
    let first = look(&job(spec.clone(), json!({})), &pods);
    assert!(reasons(&first).is_empty() && holding(&first.status, FAILURE_TARGET).is_some());
    assert!(matches!(&first.pods, JobPods::Delete { forget: false, .. }));
    let mut next = job(spec, json!({}));
    next.status = Some(first.status);
    let second = look(&next, &[terminating("b", "Running", "0")]);
    let failed = second.status.uncounted_terminated_pods.clone().unwrap().failed;
    assert_eq!((second.status.failed, failed), (Some(1), Some(vec!["b".to_owned()])));
    assert!(holding(&second.status, FAILED).is_none(), "a pod is terminating");
    next.status = Some(second.status);
    let last = look(&next, &[]);
    assert!(holding(&last.status, FAILED).is_some());
    assert_eq!((last.status.failed, reasons(&last)), (Some(2), vec!["BackoffLimitExceeded"]));
}

#[test]
fn goes_when_its_time_is_over() {
    let done =
        |at: &str| json!({"conditions": [{"type": COMPLETE, "status": "True", "lastTransitionTime": at}]});
    let spec = json!({"ttlSecondsAfterFinished": 30});
    let plan = look(&job(spec.clone(), done("2025-12-31T23:59:40Z")), &[]);
    assert_eq!((plan.expired, plan.again), (false, Some(Duration::from_secs(10))));
    assert!(look(&job(spec, done("2025-12-31T23:59:30Z")), &[]).expired);
    assert!(!look(&job(json!({}), done("2020-01-01T00:00:00Z")), &[]).expired);
}

#[test]
fn a_success_policy_ends_the_job_before_all_indexes_have_succeeded() {
    let spec = json!({"completionMode": "Indexed", "completions": 3, "parallelism": 3,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]}});
    let mut met = job(spec, json!({"completedIndexes": "0", "succeeded": 1}));
    let running = pod("p1", "Running", true);
    let plan = look(&met, &[running]);
    let reason = holding(&plan.status, SUCCESS_CRITERIA_MET).and_then(|condition| condition.reason.clone());
    assert_eq!(reason.as_deref(), Some("SuccessPolicy"));
    assert!(matches!(&plan.pods, JobPods::Delete { pods, .. } if pods.len() == 1));
    assert!(holding(&plan.status, COMPLETE).is_none(), "a pod still runs");
    // A pod that was deleted fails; the Job succeeds all the same.
    met.status = Some(plan.status);
    let plan = look(&met, &[pod("p1", "Failed", true)]);
    met.status = Some(plan.status);
    let plan = look(&met, &[pod("p1", "Failed", false)]);
    assert!(holding(&plan.status, COMPLETE).is_some() && holding(&plan.status, FAILED).is_none());
}

proptest! {
    /// With pods that end in any order, and a controller that is notified late and restarts between evaluations, the
    /// Job ends with exactly its number of completions, never runs more pods than its parallelism, and fails just
    /// past its limit.
    #[test]
    fn a_job_comes_to_its_end(
        completions in 1..8_i32, parallelism in 1..5_i32, limit in 0..4_i32,
        fates in prop::collection::vec((any::<bool>(), any::<bool>()), 200),
    ) {
        let no_pause = Backoff { first: Duration::ZERO, most: Duration::ZERO };
        let config = Config { backoff: no_pause, ..Config::default() };
        let spec = json!({"completions": completions, "parallelism": parallelism, "backoffLimit": limit});
        let mut job = job(spec, json!({}));
        let mut pods: Vec<Arc<Pod>> = Vec::new();
        let (mut made, mut good, mut bad) = (0, 0, 0);
        for (step, (ends, well)) in fates.into_iter().enumerate() {
            let plan = plan(&job, &pods, &[], &config, now());
            job.status = Some(plan.status);
            // The controller may be killed between any two writes.
            if step % 7 == 3 { continue; }
            for gone in &plan.release {
                let found = pods.iter_mut().find(|pod| pod.metadata.uid == gone.metadata.uid);
                Arc::make_mut(found.unwrap()).metadata.finalizers = None;
            }
            match plan.pods {
                JobPods::Nothing => {}
                JobPods::Create(new) => for _ in new {
                    made += 1;
                    pods.push(pod(&format!("p{made}"), "Running", true));
                },
                JobPods::Delete { pods: doomed, .. } => for gone in doomed {
                    let at = pods.iter().position(|pod| pod.metadata.uid == gone.metadata.uid).unwrap();
                    let name = pods[at].metadata.name.clone().unwrap();
                    pods[at] = pod(&name, "Failed", true);
                    bad += 1;
                },
            }
            let running = pods.iter().filter(|pod| super::pods::count_state(job.spec.as_ref().unwrap(), pod) == super::pods::PodCountState::Active);
            prop_assert!(i32::try_from(running.count()).unwrap() <= parallelism);
            let at = pods.iter().position(|pod| super::pods::count_state(job.spec.as_ref().unwrap(), pod) == super::pods::PodCountState::Active);
            if let Some(at) = at.filter(|_| ends) {
                let name = pods[at].metadata.name.clone().unwrap();
                pods[at] = pod(&name, if well { "Succeeded" } else { "Failed" }, true);
                if well { good += 1 } else { bad += 1 }
            }
        }
        let status = job.status.unwrap();
        if holding(&status, COMPLETE).is_some() {
            prop_assert_eq!(status.succeeded, Some(completions));
            prop_assert_eq!(good, completions);
            prop_assert!(bad <= limit);
        } else if holding(&status, FAILED).is_some() {
            prop_assert!(status.failed.unwrap_or(0) > limit);
            prop_assert_eq!(status.failed, Some(bad));
        } else {
            prop_assert!(good < completions && bad <= limit + parallelism, "it hangs: {:?}", status);
        }
    }
}
