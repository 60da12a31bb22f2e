//! Jobs whose failures are counted for each index.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use mayfly_api::k8s::api::{batch::v1::Job, core::v1::Pod};
use mayfly_informer::Backoff;
use serde_json::{Value, json};

use super::{
    COMPLETION_INDEX, Config,
    conditions::{COMPLETE, FAILED, FAILURE_TARGET, holding},
    per_index::{FAILURE_COUNT, IGNORED_FAILURE_COUNT, IndexFailures},
    plan::{JobPlan, plan},
    tests::{created, job, now, pod_with},
};

fn no_pause() -> Config {
    Config { backoff: Backoff { first: Duration::ZERO, most: Duration::ZERO }, ..Config::default() }
}

fn indexed(change: Value) -> Value {
    let mut spec =
        json!({"completionMode": "Indexed", "completions": 3, "parallelism": 3, "backoffLimitPerIndex": 1});
    spec.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    spec
}

/// A pod of an index that failed as often before it.
fn pod_of(index: i32, before: IndexFailures, phase: &str, exit_code: i32) -> Arc<Pod> {
    let name = format!("p{index}-{}-{}", before.counted, before.ignored);
    let mut pod = pod_with(&name, phase, true, json!({"exitCode": exit_code}));
    let annotations =
        [(COMPLETION_INDEX, index), (FAILURE_COUNT, before.counted), (IGNORED_FAILURE_COUNT, before.ignored)];
    let annotations = annotations.map(|(name, number)| (name.to_owned(), number.to_string()));
    Arc::make_mut(&mut pod).metadata.annotations = Some(annotations.into_iter().collect());
    pod
}

fn failed(index: i32, counted: i32) -> Arc<Pod> {
    pod_of(index, IndexFailures { counted, ignored: 0 }, "Failed", 1)
}

fn running(index: i32) -> Arc<Pod> {
    pod_of(index, IndexFailures::default(), "Running", 0)
}

fn look(job: &Job, pods: &[Arc<Pod>]) -> JobPlan {
    plan(job, pods, &[], &no_pause(), now())
}

fn failed_indexes(plan: &JobPlan) -> &str {
    plan.status.failed_indexes.as_deref().unwrap()
}

#[test]
fn a_failed_index_is_tried_again_up_to_its_limit_and_the_others_go_on() {
    let spec = indexed(json!({}));
    let first = look(&job(spec.clone(), json!({})), &[failed(0, 0), running(1), running(2)]);
    assert_eq!((created(&first), failed_indexes(&first)), (vec![Some(0)], ""));
    let expected = BTreeMap::from([(0, IndexFailures { counted: 1, ignored: 0 })]);
    assert_eq!(first.failures, expected, "the next pod records the failure");
    assert!(first.release.is_empty(), "the pod is held until the next one is there");
    let pods = [failed(0, 0), pod_of(0, expected[&0], "Running", 0), running(1), running(2)];
    let second = look(&job(spec.clone(), json!({})), &pods);
    assert_eq!((created(&second).len(), second.release.len()), (0, 1));
    let pods = [failed(0, 1), running(1), running(2)];
    let third = look(&job(spec, json!({})), &pods);
    assert_eq!((created(&third).len(), failed_indexes(&third)), (0, "0"), "not once more");
    assert_eq!(third.release.len(), 1, "no pod follows that the numbers would be for");
    assert!(holding(&third.status, FAILURE_TARGET).is_none(), "the others go on");
}

#[test]
fn the_job_fails_when_its_other_indexes_have_ended() {
    let spec = indexed(json!({}));
    let status = json!({"failedIndexes": "0", "completedIndexes": "1,2"});
    let ended = look(&job(spec.clone(), status), &[]);
    let why = holding(&ended.status, FAILED).unwrap();
    assert_eq!(
        (why.reason.as_deref(), why.message.as_deref()),
        (Some("FailedIndexes"), Some("Job has failed indexes"))
    );
    let status = json!({"failedIndexes": "0", "completedIndexes": "1"});
    let going_on = look(&job(spec.clone(), status), &[]);
    assert_eq!(created(&going_on), [Some(2)]);
    let all = look(&job(spec, json!({"completedIndexes": "0-2"})), &[]);
    assert!(holding(&all.status, COMPLETE).is_some());
}

#[test]
fn too_many_failed_indexes_fail_the_job_at_once() {
    let spec = indexed(json!({"maxFailedIndexes": 1}));
    let one = look(&job(spec.clone(), json!({"failedIndexes": "0"})), &[running(1), running(2)]);
    assert!(holding(&one.status, FAILURE_TARGET).is_none());
    let two = look(&job(spec.clone(), json!({"failedIndexes": "0,1"})), &[running(2)]);
    let why = holding(&two.status, FAILURE_TARGET).unwrap();
    assert_eq!(why.reason.as_deref(), Some("MaxFailedIndexesExceeded"));
    assert!(holding(&two.status, FAILED).is_none(), "a pod still runs");
    // Without the pods the reason is the same.
    let mut left = job(spec, json!({}));
    left.status = Some(two.status);
    let ended = look(&left, &[]);
    assert_eq!(holding(&ended.status, FAILED).unwrap().reason.as_deref(), Some("MaxFailedIndexesExceeded"));
}

#[test]
fn the_failure_policy_fails_an_index_or_ignores_a_failure_of_it() {
    let rule = |action: &str| {
        let codes = json!({"operator": "In", "values": [9]});
        indexed(json!({"podFailurePolicy": {"rules": [{"action": action, "onExitCodes": codes}]}}))
    };
    let pods = |code: i32| [pod_of(0, IndexFailures::default(), "Failed", code), running(1), running(2)];
    let fails = look(&job(rule("FailIndex"), json!({})), &pods(9));
    assert_eq!((created(&fails).len(), failed_indexes(&fails)), (0, "0"));
    let other = look(&job(rule("FailIndex"), json!({})), &pods(1));
    assert_eq!((created(&other), failed_indexes(&other)), (vec![Some(0)], ""));
    let ignored = look(&job(rule("Ignore"), json!({})), &pods(9));
    assert_eq!(ignored.failures[&0], IndexFailures { counted: 0, ignored: 1 });
    assert_eq!((created(&ignored), ignored.release.len()), (vec![Some(0)], 0));
}

#[test]
fn each_index_pauses_for_itself() {
    let spec = indexed(json!({"backoffLimitPerIndex": 5, "parallelism": 2, "completions": 3}));
    let plan = plan(&job(spec, json!({})), &[failed(0, 0)], &[], &Config::default(), now());
    assert_eq!(created(&plan), [Some(1), Some(2)], "these have not failed");
    assert_eq!(plan.again, Some(Duration::from_secs(10)));
}
