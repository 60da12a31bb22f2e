//! Cases of queues with flavors.

use super::*;

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
