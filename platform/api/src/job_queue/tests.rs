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

const MODEL: &str = "nvidia.com/gpu.product";

/// A queue with two GPUs of the model `a`, and four of `b`.
fn two_models() -> Value {
    let flavor =
        |name: &str, gpus: u64| json!({"name": name, "nodeLabels": {MODEL: name}, "quota": {GPU: gpus}});
    json!({"quota": {GPU: 5}, "flavors": [flavor("a", 2), flavor("b", 4)]})
}

/// The Job with this model in its node selector.
fn of_model(job: QueuedJob, model: &str) -> QueuedJob {
    let selector = BTreeMap::from([(MODEL.to_owned(), model.to_owned())]);
    QueuedJob { nodes: JobNodes { selector, ..JobNodes::default() }, ..job }
}

/// The Job with this requirement in its node affinity.
fn requiring(job: QueuedJob, key: &str, operator: &str, values: &[&str]) -> QueuedJob {
    let terms = json!({"nodeSelectorTerms": [{"matchExpressions": [
        {"key": key, "operator": operator, "values": values}]}]});
    let required = serde_json::from_value(terms).unwrap();
    QueuedJob { nodes: JobNodes { required: Some(required), ..JobNodes::default() }, ..job }
}

#[track_caller]
fn check_flavors(spec: Value, jobs: &[QueuedJob], start: &[(&str, &str)], waiting: &[(&str, &str)]) {
    let spec = queue(spec);
    let plan = plan(&spec, jobs, &namespaces(), at(0));
    let flavor = |key| plan.flavors.get(key).map_or("none", |id| &*spec.flavors[*id].name);
    let started: Vec<_> = plan.start.iter().map(|key| (&*key.name, flavor(key))).collect();
    assert_eq!(started, start);
    let (_, waits) = told(&plan);
    let waits: Vec<_> = waits.iter().map(|(name, why)| (*name, why.as_str())).collect();
    assert_eq!(waits, waiting);
}

#[test]
fn jobs_start_in_the_first_flavor_with_room() {
    let cpus = QueuedJob { request: Amounts(BTreeMap::from([("cpu".into(), 8000)])), ..job(4, "a/cpus", 0) };
    check_flavors(
        two_models(),
        &[job(0, "a/one", 2), job(1, "a/two", 3), job(2, "a/three", 1), cpus, job(5, "a/huge", 5)],
        &[("one", "a"), ("two", "b"), ("cpus", "none")],
        &[
            ("three", "needs 1 of nvidia.com/gpu, and 0 of 2 in the quota of flavor a are free"),
            ("huge", "needs 5 of nvidia.com/gpu, more than the 2 of the quota of flavor a: it never starts"),
        ],
    );
    // The first flavor can never hold it: it waits for the second.
    check_flavors(
        two_models(),
        &[running(of_model(job(0, "a/busy", 2), "b"), None), job(1, "a/large", 3)],
        &[],
        &[("large", "needs 3 of nvidia.com/gpu, and 2 of 4 in the quota of flavor b are free")],
    );
}

#[test]
fn a_job_starts_only_in_flavors_that_it_permits() {
    check_flavors(
        two_models(),
        &[
            of_model(job(0, "a/b", 1), "b"),
            requiring(job(1, "a/not-a", 1), MODEL, "NotIn", &["a"]),
            requiring(job(2, "a/zone", 1), "zone", "In", &["z"]),
            of_model(job(3, "a/other", 1), "c"),
            requiring(job(4, "a/missing", 1), MODEL, "DoesNotExist", &[]),
        ],
        &[("b", "b"), ("not-a", "b"), ("zone", "a")],
        &["other", "missing"].map(|name| {
            (name, "its node selector or affinity excludes the nodes of all flavors of the queue: it never starts")
        }),
    );
}

#[test]
fn running_jobs_count_against_their_flavor() {
    let unselected = running(job(1, "a/unselected", 1), None);
    let fixed = of_model(job(2, "a/fixed", 4), "b");
    let fixed = QueuedJob { nodes: JobNodes { is_fixed: true, ..fixed.nodes.clone() }, ..fixed };
    let jobs = [running(of_model(job(0, "a/b", 3), "b"), None), unselected, fixed];
    let plan = plan(&queue(two_models()), &jobs, &namespaces(), at(0));
    let used: Vec<u64> = plan.used_by_flavor.iter().map(|used| used.get(GPU)).collect();
    assert_eq!((used, plan.used.get(GPU)), (vec![1, 3], 4));
    let waits = "needs 4 of nvidia.com/gpu, and 1 of 4 in the quota of flavor b are free";
    assert_eq!(told(&plan).1, [("fixed", waits.to_owned())]);
}

#[test]
fn a_job_counts_as_one_of_the_flavor_with_the_most_labels() {
    let flavor = |name: &str, labels: Value| json!({"name": name, "nodeLabels": labels, "quota": {GPU: 1}});
    let spec = json!({"quota": {GPU: 9},
        "flavors": [flavor("any", json!({MODEL: "a"})), flavor("zone", json!({MODEL: "a", "zone": "z"}))]});
    let zoned = |job: QueuedJob| {
        let mut job = of_model(job, "a");
        job.nodes.selector.insert("zone".into(), "z".into());
        job
    };
    let jobs = [
        running(of_model(job(0, "a/one", 1), "a"), None),
        running(zoned(job(1, "a/two", 1)), None),
        job(2, "a/three", 1),
        zoned(job(3, "a/four", 1)),
    ];
    let full = |name, flavor| {
        (name, format!("needs 1 of nvidia.com/gpu, and 0 of 1 in the quota of flavor {flavor} are free"))
    };
    let (three, four) = (full("three", "any"), full("four", "zone"));
    check_flavors(spec.clone(), &jobs, &[], &[(three.0, &three.1), (four.0, &four.1)]);
    check_flavors(spec, &[zoned(job(0, "a/first", 1))], &[("first", "zone")], &[]);
}

#[test]
fn a_flavor_that_is_full_does_not_hold_up_others() {
    let busy = running(of_model(job(0, "a/busy", 1), "a"), None);
    let jobs = [
        busy,
        of_model(job(1, "a/head", 2), "a"),
        of_model(job(2, "a/small", 1), "a"),
        of_model(job(3, "a/other", 2), "b"),
    ];
    check_flavors(
        two_models(),
        &jobs,
        &[("other", "b")],
        &[
            ("head", "needs 2 of nvidia.com/gpu, and 1 of 2 in the quota of flavor a are free"),
            ("small", "could delay job a/head, which is before it"),
        ],
    );
    // What the flavor lacks is released in the whole queue, too.
    let mut exact = two_models();
    exact["quota"] = json!({GPU: 6});
    check_flavors(
        exact,
        &[
            running(of_model(job(0, "a/busy", 2), "a"), None),
            of_model(job(1, "a/head", 2), "a"),
            of_model(job(2, "a/other", 4), "b"),
        ],
        &[("other", "b")],
        &[("head", "needs 2 of nvidia.com/gpu, and 0 of 2 in the quota of flavor a are free")],
    );
    // What the head needs of the whole queue is kept for it.
    let mut tight = two_models();
    tight["quota"] = json!({GPU: 3});
    check_flavors(
        tight,
        &jobs,
        &[],
        &[
            ("head", "needs 2 of nvidia.com/gpu, and 1 of 2 in the quota of flavor a are free"),
            ("small", "could delay job a/head, which is before it"),
            ("other", "could delay job a/head, which is before it"),
        ],
    );
}

#[test]
fn a_namespace_has_a_quota_of_one_flavor() {
    let mut spec = two_models();
    spec["namespaceQuotas"] = json!([{"flavor": "a", "quota": {GPU: 1},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "a"}}}]);
    let jobs = [
        of_model(job(0, "a/one", 1), "a"),
        of_model(job(1, "a/two", 1), "a"),
        of_model(job(2, "b/three", 1), "a"),
        of_model(job(3, "a/four", 2), "b"),
    ];
    check_flavors(
        spec,
        &jobs,
        &[("one", "a"), ("three", "a"), ("four", "b")],
        &[("two", "needs 1 of nvidia.com/gpu, and 0 of 1 in the namespace's quota of flavor a are free")],
    );
}

#[test]
fn flavors_limit_shares_of_gpus_by_either_name() {
    let spec = json!({"quota": {"cpu": 8}, "flavors": [{"name": "t4", "nodeLabels": {MODEL: "Tesla-T4"},
        "quota": {"tencent.com/vcuda-core": 100, "tencent.com/vcuda-memory": 32}}]});
    let request = |core: u64, memory: u64| {
        let amounts = [("mayfly.dev/vcuda-core", core), ("mayfly.dev/vcuda-memory", memory)];
        Amounts(amounts.map(|(name, amount)| (name.to_owned(), amount)).into())
    };
    let share =
        |number, name, core, memory| QueuedJob { request: request(core, memory), ..job(number, name, 0) };
    let jobs =
        [running(share(0, "a/half", 50, 8), None), share(1, "a/memory", 10, 30), share(2, "a/fits", 50, 8)];
    let limits = "needs 30 of mayfly.dev/vcuda-memory, and 24 of 32 in the quota of flavor t4 are free";
    check_flavors(
        spec.clone(),
        &jobs,
        &[],
        &[("memory", limits), ("fits", "could delay job a/memory, which is before it")],
    );
    let plan = plan(&queue(spec), &jobs[..1], &namespaces(), at(0));
    assert_eq!(plan.used_by_flavor[0].get("tencent.com/vcuda-core"), 50, "as the quota names it");
}

#[test]
fn flavors_are_checked() {
    let flavor =
        |name: &str, quota: Value| json!({"name": name, "nodeLabels": {MODEL: name}, "quota": quota});
    let mut nameless = flavor("Not A Name", json!({GPU: 1}));
    nameless["nodeLabels"] = json!({});
    let spec = json!({"quota": {GPU: 1},
        "flavors": [flavor("a", json!({GPU: 1})), flavor("a", json!({GPU: "x"})), flavor("b", json!({"cpu": 1})), nameless],
        "namespaceQuotas": [{"namespaceSelector": {}, "quota": {GPU: 1}, "flavor": "none"}]});
    let told: Vec<_> = validate(&queue(spec))
        .into_iter()
        .map(|error| format!("{}: {}", error.path, error.message()))
        .collect();
    let expected = [
        "spec.flavors[1].name: Invalid value: \"a\": must be unique",
        "spec.flavors[1].quota[nvidia.com/gpu]: ",
        "spec.flavors[2].quota: Invalid value: \"cpu\": must name the same resources as the first flavor: nvidia.com/gpu",
        "spec.flavors[3].name: ",
        "spec.flavors[3].nodeLabels: Required value",
        "spec.namespaceQuotas[0].flavor: Invalid value: \"none\": must be the name of one of spec.flavors",
    ];
    assert_eq!(told.len(), expected.len(), "{told:#?}");
    for (told, expected) in told.iter().zip(expected) {
        assert!(told.starts_with(expected), "{told}");
    }
}

#[test]
fn a_jobs_nodes_are_those_of_its_template() {
    let job = json!({"spec": {"suspend": true, "template": {"spec": {"containers": [],
        "nodeSelector": {MODEL: "a"}}}}, "status": {"startTime": "2026-01-01T00:00:00Z"}});
    let queued = QueuedJob::of(&serde_json::from_value(job).unwrap(), at(0)).unwrap();
    let selector = BTreeMap::from([(MODEL.to_owned(), "a".to_owned())]);
    assert_eq!(queued.nodes, JobNodes { selector, required: None, is_fixed: true });
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
