//! Cases and properties of the plan.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    JobQueueSpec, QueuedJob, QueuedJobState,
    flavors::JobNodes,
    plan::{QueuePlan, QueueReason, plan, shown},
    request, validate,
};
use crate::{
    k8s::jiff::{SignedDuration, Timestamp},
    names::ObjectKey,
    resources::Amounts,
};

mod flavors;

const GPU: &str = "nvidia.com/gpu";

fn queue(spec: Value) -> JobQueueSpec {
    serde_json::from_value(spec).unwrap()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// `namespace/name`, GPUs; created in the order of the list.
fn job(number: usize, key: &str, gpus: u64) -> QueuedJob {
    let (namespace, name) = key.split_once('/').unwrap();
    QueuedJob {
        key: ObjectKey::new(namespace, name),
        priority: 0,
        created: at(i64::try_from(number).unwrap()),
        request: Amounts(BTreeMap::from([(GPU.to_owned(), gpus)])),
        nodes: JobNodes::default(),
        deadline: None,
        state: QueuedJobState::Waiting,
    }
}

fn running(job: QueuedJob, until: Option<i64>) -> QueuedJob {
    QueuedJob { state: QueuedJobState::Running { until: until.map(at) }, ..job }
}

fn limited(job: QueuedJob, seconds: i64) -> QueuedJob {
    QueuedJob { deadline: Some(SignedDuration::from_secs(seconds)), ..job }
}

fn namespaces() -> BTreeMap<String, BTreeMap<String, String>> {
    let labels = |name: &str| BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), name.to_owned())]);
    ["a", "b"].into_iter().map(|name| (name.to_owned(), labels(name))).collect()
}

/// The names of started jobs, and each that waits with its reason.
fn told(plan: &QueuePlan) -> (Vec<&str>, Vec<(&str, String)>) {
    let waiting = plan.waiting.iter().map(|(key, reason)| (key.name.as_str(), reason.to_string()));
    (plan.start.iter().map(|key| key.name.as_str()).collect(), waiting.collect())
}

#[track_caller]
fn check(spec: Value, jobs: &[QueuedJob], start: &[&str], waiting: &[(&str, &str)]) {
    let plan = plan(&queue(spec), jobs, &namespaces(), at(0));
    let (started, waits) = told(&plan);
    assert_eq!(started, start);
    let waits: Vec<_> = waits.iter().map(|(name, why)| (*name, why.as_str())).collect();
    assert_eq!(waits, waiting);
}

#[test]
fn jobs_start_by_priority_and_age_within_the_quota() {
    let urgent = QueuedJob { priority: 5, ..job(3, "b/urgent", 2) };
    check(
        json!({"quota": {"nvidia.com/gpu": 4}}),
        &[job(0, "a/old", 2), job(1, "a/young", 1), urgent, job(4, "a/huge", 9)],
        &["urgent", "old"],
        &[
            ("young", "needs 1 of nvidia.com/gpu, and 0 of 4 in the queue's quota are free"),
            ("huge", "needs 9 of nvidia.com/gpu, more than the 4 of the queue's quota: it never starts"),
        ],
    );
    let paused = json!({"quota": {"nvidia.com/gpu": 4}, "paused": true});
    check(paused, &[job(0, "a/one", 1)], &[], &[("one", "the queue is paused")]);
}

#[test]
fn backfill_never_takes_what_the_head_waits_for() {
    let busy = |until| running(job(0, "a/busy", 3), until);
    let head = || job(1, "a/head", 4);
    let needs = ("head", "needs 4 of nvidia.com/gpu, and 1 of 4 in the queue's quota are free");
    let behind = ("small", "could delay job a/head, which is before it");
    let spec = || json!({"quota": {"nvidia.com/gpu": 4, "cpu": 8}});
    // It is not known when there will be room.
    check(spec(), &[busy(None), head(), job(2, "a/small", 1)], &[], &[needs, behind]);
    check(spec(), &[busy(None), head(), limited(job(2, "a/small", 1), 10)], &[], &[needs, behind]);
    // It ends before there is room for the head, or not.
    check(spec(), &[busy(Some(100)), head(), limited(job(2, "a/small", 1), 100)], &["small"], &[needs]);
    check(spec(), &[busy(Some(100)), head(), limited(job(2, "a/small", 1), 101)], &[], &[needs, behind]);
    // The head leaves room for it at that time.
    let modest = || job(1, "a/head", 3);
    let short = ("head", "needs 3 of nvidia.com/gpu, and 1 of 4 in the queue's quota are free");
    check(spec(), &[busy(Some(100)), modest(), job(2, "a/small", 1)], &["small"], &[short]);
    // What the head does not request is free for others.
    let cpus = QueuedJob { request: Amounts(BTreeMap::from([("cpu".into(), 8000)])), ..job(2, "a/cpus", 0) };
    check(spec(), &[busy(None), head(), cpus.clone()], &["cpus"], &[needs]);
    let mut strict = spec();
    strict["backfill"] = json!(false);
    check(
        strict,
        &[busy(None), head(), cpus],
        &[],
        &[needs, ("cpus", "could delay job a/head, which is before it")],
    );
}

#[test]
fn a_namespace_that_is_full_does_not_hold_up_others() {
    let of = |name: &str| json!({"matchLabels": {"kubernetes.io/metadata.name": name}});
    let spec = json!({"quota": {"nvidia.com/gpu": 4},
        "namespaceQuotas": [{"namespaceSelector": of("a"), "quota": {"nvidia.com/gpu": 2}}]});
    let jobs = [
        job(0, "a/one", 2),
        job(1, "a/two", 1),
        job(2, "b/three", 2),
        job(3, "a/four", 1),
        job(4, "a/five", 3),
    ];
    let full = |name| (name, "needs 1 of nvidia.com/gpu, and 0 of 2 in the namespace's quota are free");
    let never = "needs 3 of nvidia.com/gpu, more than the 2 of the namespace's quota: it never starts";
    check(spec, &jobs, &["one", "three"], &[full("two"), full("four"), ("five", never)]);
    let only = json!({"quota": {"nvidia.com/gpu": 4}, "namespaceSelector": of("b")});
    check(only, &jobs[1..3], &["three"], &[("two", "the queue is not for the job's namespace")]);
}

#[test]
fn a_job_requests_what_its_pods_request_at_once() {
    let limits = json!({"cpu": "500m", "memory": "1Gi", "tencent.com/vcuda-core": 50});
    let job = json!({"spec": {"parallelism": 4, "completions": 3, "template": {"spec": {"containers": [
        {"name": "c", "resources": {"limits": limits}}]}}}});
    let amounts = request(&serde_json::from_value(job).unwrap());
    let shown: Vec<_> =
        amounts.0.iter().map(|(name, amount)| format!("{name} {}", shown(name, *amount))).collect();
    assert_eq!(shown, ["cpu 1500m", "mayfly.dev/vcuda-core 150", "memory 3Gi"]);
}

#[test]
fn quotas_and_selectors_are_checked() {
    let spec = json!({"quota": {"cpu": "many"}, "namespaceQuotas": [{"quota": {},
        "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Is", "values": ["b"]}]}}]});
    let paths: Vec<_> = validate(&queue(spec)).into_iter().map(|error| error.path).collect();
    let selector = "spec.namespaceQuotas[0].namespaceSelector";
    assert_eq!(paths, ["spec.quota[cpu]", selector, "spec.namespaceQuotas[0].quota"]);
}

/// GPUs, priority, deadline, and the time that the job takes in fact.
#[derive(Clone, Debug)]
struct SimulatedJob {
    gpus: u64,
    priority: i64,
    deadline: Option<i64>,
    takes: i64,
    arrives: i64,
}

const QUOTA: u64 = 6;

fn simulated_job() -> impl Strategy<Value = SimulatedJob> {
    (1..=QUOTA + 1, 0..2i64, proptest::option::of(1..20i64), 1..20i64, 0..30i64).prop_map(
        |(gpus, priority, deadline, takes, arrives)| SimulatedJob {
            gpus,
            priority,
            deadline,
            takes: deadline.map_or(takes, |deadline| takes.min(deadline)),
            arrives,
        },
    )
}

/// The jobs at a time, from when each started.
fn seen(jobs: &[SimulatedJob], started: &BTreeMap<usize, i64>, now: i64) -> Vec<QueuedJob> {
    let is_here = |number: &usize| {
        let ended = started.get(number).is_some_and(|at| at + jobs[*number].takes <= now);
        jobs[*number].arrives <= now && !ended
    };
    let numbers = (0..jobs.len()).filter(is_here);
    numbers
        .map(|number| {
            let SimulatedJob { gpus, priority, deadline, arrives, .. } = jobs[number].clone();
            let queued = job(0, &format!("a/{number:03}"), gpus);
            let queued = QueuedJob { priority, created: at(arrives), ..queued };
            let queued = deadline.map_or(queued.clone(), |seconds| limited(queued, seconds));
            match started.get(&number) {
                Some(start) => running(queued, deadline.map(|seconds| start + seconds)),
                None => queued,
            }
        })
        .collect()
}

fn gpus(job: &QueuedJob) -> u64 {
    job.request.get(GPU)
}

fn until(job: &QueuedJob, now: i64) -> Option<Timestamp> {
    match job.state {
        QueuedJobState::Running { until } => until,
        QueuedJobState::Waiting => job.deadline.map(|span| at(now) + span),
    }
}

/// The head must start no later than it would without the jobs that were started in its stead.
fn check_head(jobs: &[QueuedJob], plan: &QueuePlan, now: i64) -> Result<(), TestCaseError> {
    let head = plan.waiting.iter().find(|(_, reason)| matches!(reason, QueueReason::NoRoom { .. }));
    let Some((head, _)) = head else { return Ok(()) };
    let find = |key: &ObjectKey| jobs.iter().find(|job| job.key == *key).unwrap();
    let head = find(head);
    let turn = |job: &QueuedJob| (-job.priority, job.created, job.key.clone());
    let started: Vec<_> = plan.start.iter().map(find).collect();
    let (before, filled): (Vec<_>, Vec<_>) = started.into_iter().partition(|job| turn(job) < turn(head));
    let is_running = |job: &&QueuedJob| matches!(job.state, QueuedJobState::Running { .. });
    let held: Vec<_> = jobs.iter().filter(is_running).chain(before).collect();
    // By deadlines alone, there is room at this time.
    let mut ends: Vec<_> = held.iter().filter_map(|job| until(job, now)).collect();
    ends.sort_unstable();
    let used = |jobs: &[&QueuedJob], time: Timestamp| -> u64 {
        let lasting = jobs.iter().filter(|job| until(job, now).is_none_or(|until| until > time));
        lasting.map(|job| gpus(job)).sum()
    };
    match ends.into_iter().find(|end| used(&held, *end) + gpus(head) <= QUOTA) {
        Some(room_at) => prop_assert!(
            used(&held, room_at) + used(&filled, room_at) + gpus(head) <= QUOTA,
            "{head:?} has no room at {room_at}: {filled:?}"
        ),
        // Whichever of the others end, the head must not miss what was started in its stead.
        None => {
            for kept in 0..1_u32 << held.len().min(12) {
                let is_kept = |at: &usize| kept & (1 << at) != 0;
                let kept: u64 = (0..held.len()).filter(is_kept).map(|at| gpus(held[at])).sum();
                let filled: u64 = filled.iter().map(|job| gpus(job)).sum();
                prop_assert!(kept + gpus(head) > QUOTA || kept + filled + gpus(head) <= QUOTA);
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_queue_of_jobs_drains_within_its_quota(
        jobs in proptest::collection::vec(simulated_job(), 1..14),
        backfill: bool,
    ) {
        let spec = queue(json!({"quota": {GPU: QUOTA}, "backfill": backfill}));
        let mut started: BTreeMap<usize, i64> = BTreeMap::new();
        // Each job takes less than 20 seconds, so that one after the other they end by then.
        let end = 30 + 20 * i64::try_from(jobs.len()).unwrap();
        for now in 0..=end {
            let seen = seen(&jobs, &started, now);
            let plan = plan(&spec, &seen, &namespaces(), at(now));
            check_head(&seen, &plan, now)?;
            let number = |key: &ObjectKey| key.name.parse::<usize>().unwrap();
            if !backfill {
                let overtaken = plan.waiting.iter().filter(|(_, why)| !matches!(why, QueueReason::TooLarge { .. }));
                let turn = |at: usize| (-jobs[at].priority, jobs[at].arrives, at);
                let first = overtaken.map(|(key, _)| turn(number(key))).min();
                let last = plan.start.iter().map(|key| turn(number(key))).max();
                prop_assert!(first.is_none_or(|first| last.is_none_or(|last| last < first)));
            }
            started.extend(plan.start.iter().map(|key| (number(key), now)));
            let active = started.iter().filter(|(at, start)| **start + jobs[**at].takes > now);
            prop_assert!(active.map(|(at, _)| jobs[*at].gpus).sum::<u64>() <= QUOTA);
        }
        let ran: BTreeSet<usize> = started.into_keys().collect();
        let can_run: BTreeSet<usize> = (0..jobs.len()).filter(|at| jobs[*at].gpus <= QUOTA).collect();
        prop_assert_eq!(ran, can_run);
    }
}
