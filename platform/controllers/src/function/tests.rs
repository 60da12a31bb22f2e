//! Plans and conditions, as data.

use std::{collections::BTreeMap, sync::Arc};

use kube::{Resource as _, ResourceExt as _};
use mayfly_api::{
    Digest, Function, Revision, RevisionSpec,
    k8s::{
        api::{apps::v1::ReplicaSet, core::v1::Pod},
        jiff::Timestamp,
    },
    revision_name, wellknown,
};
use serde_json::{Value, json};

use super::{
    Config,
    plan::{self, FunctionSnapshot, Readiness, RevisionState, Step, new_replica_set, readiness},
    status,
};

fn function(change: Value) -> Function {
    let digest = mayfly_api::Digest::of(b"x");
    let mut spec = json!({"source": {"component": digest}});
    for (key, value) in change.as_object().unwrap() {
        spec[key] = value.clone();
    }
    let mut function = Function::new("hello", serde_json::from_value(spec).unwrap());
    function.metadata.namespace = Some("ns".into());
    function.metadata.uid = Some("f".into());
    function
}

/// Revisions with the function's own spec, except where `env` says otherwise.
fn snapshot(function: Function, revisions: &[(u32, &str, Readiness)]) -> FunctionSnapshot {
    let states = revisions.iter().map(|(number, env, readiness)| {
        let mut spec = RevisionSpec::from_function("hello", &function.spec);
        if !env.is_empty() {
            spec.env = vec![serde_json::from_value(json!({"name": env})).unwrap()];
        }
        let mut revision = Revision::new(&revision_name("hello", *number), spec);
        revision.metadata.namespace = Some("ns".into());
        revision.metadata.uid = Some(format!("r{number}"));
        revision.metadata.owner_references = function.controller_owner_ref(&()).map(|owner| vec![owner]);
        let set = new_replica_set(&revision, 0).map(Arc::new);
        (
            *number,
            RevisionState { revision: Arc::new(revision), replica_set: set, readiness: readiness.clone() },
        )
    });
    let revisions: BTreeMap<_, _> = states.collect();
    FunctionSnapshot {
        function: Arc::new(function),
        revisions,
        orphans: Vec::new(),
        name_taken: false,
        lost_hosts: Vec::new(),
        fetched: None,
    }
}

fn told(steps: &[Step]) -> Vec<String> {
    let tell = |step: &Step| match step {
        Step::TakeNumber(number) => format!("take {number}"),
        Step::CreateRevision(revision) => format!("create {}", revision.name_any()),
        Step::CreateReplicaSet(set) => {
            format!("set {} {:?}", set.name_any(), set.spec.as_ref().unwrap().replicas)
        }
        Step::RaiseReplicas { replica_set, replicas } => format!("raise {replica_set} {replicas}"),
        Step::DeleteRevision { name, .. } => format!("delete {name}"),
        Step::AdoptRevision(revision) => format!("adopt {}", revision.name_any()),
        Step::AwaitCollector => "await".into(),
    };
    steps.iter().map(tell).collect()
}

fn missing() -> Readiness {
    Readiness::ComponentMissing { digest: "sha256:x".into() }
}

#[test]
fn a_revision_is_made_when_the_spec_differs_from_the_newest() {
    use Readiness::Ready;
    let annotated = |number: &str| {
        let mut function = function(json!({}));
        function.annotations_mut().insert(wellknown::ANNOTATION_GENERATION.into(), number.into());
        function
    };
    for (given, expected) in [
        (snapshot(function(json!({})), &[]), vec!["take 1", "create hello-00001"]),
        (snapshot(function(json!({})), &[(1, "", Ready)]), vec![]),
        (snapshot(function(json!({})), &[(1, "OLD", Ready)]), vec!["take 2", "create hello-00002"]),
        // Back to the spec of an older revision: only the newest is compared.
        (
            snapshot(function(json!({})), &[(1, "", Ready), (2, "OLD", Ready)]),
            vec!["take 3", "create hello-00003"],
        ),
        // Numbers of deleted revisions are not reused.
        (snapshot(annotated("7"), &[(2, "OLD", Ready)]), vec!["take 8", "create hello-00008"]),
        // An invalid number in the annotation.
        (snapshot(annotated("4294967295"), &[(2, "OLD", Ready)]), vec!["take 3", "create hello-00003"]),
    ] {
        assert_eq!(told(&plan::plan(&given, 10)), expected);
    }
    let taken = FunctionSnapshot { name_taken: true, ..snapshot(function(json!({})), &[]) };
    assert_eq!(told(&plan::plan(&taken, 10)), ["await"]);
}

#[test]
fn replicas_are_lifted_only_where_traffic_goes() {
    use Readiness::Ready;
    let without_sets = |mut snapshot: FunctionSnapshot| {
        snapshot.revisions.values_mut().for_each(|state| state.replica_set = None);
        snapshot
    };
    let min = json!({"scaling": {"min": 2}});
    let pinned = json!({"scaling": {"min": 2}, "traffic": [{"revision": "hello-00001", "percent": 100}]});
    for (given, expected) in [
        (without_sets(snapshot(function(min.clone()), &[(1, "", Ready)])), vec!["set hello-00001 Some(2)"]),
        (without_sets(snapshot(function(json!({})), &[(1, "", Ready)])), vec!["set hello-00001 Some(0)"]),
        (without_sets(snapshot(function(min.clone()), &[(1, "", missing())])), vec![]),
        (snapshot(function(min.clone()), &[(1, "", Ready)]), vec!["raise hello-00001 2"]),
        (snapshot(function(pinned.clone()), &[(1, "", Ready), (2, "", Ready)]), vec!["raise hello-00001 2"]),
        // The latest is not ready: traffic goes to the one before.
        (snapshot(function(min), &[(1, "", Ready), (2, "", missing())]), vec!["raise hello-00001 2"]),
    ] {
        assert_eq!(told(&plan::plan(&given, 10)), expected);
    }
}

#[test]
fn history_keeps_what_is_needed() {
    use Readiness::Ready;
    let traffic =
        json!({"traffic": [{"revision": "hello-00002", "percent": 50}, {"latest": true, "percent": 50}]});
    let revisions: Vec<_> =
        (1..=5).map(|number| (number, "", if number == 5 { missing() } else { Ready })).collect();
    let given = snapshot(function(traffic), &revisions);
    assert_eq!(told(&plan::plan(&given, 10)), Vec::<String>::new());
    assert_eq!(told(&plan::plan(&given, 1)), ["delete hello-00001"]);
    assert_eq!(told(&plan::plan(&given, 0)), ["delete hello-00001", "delete hello-00003"]);
}

#[test]
fn readiness_is_read_from_the_store_and_the_pods() {
    let pod = |status: Value| {
        Arc::new(serde_json::from_value::<Pod>(json!({"metadata": {}, "status": status})).unwrap())
    };
    let refused = pod(json!({"containerStatuses": [{"name": "function", "ready": false, "restartCount": 0,
        "image": "", "imageID": "", "state": {"waiting": {"reason": "CreateContainerError", "message": "no such import"}}}]}));
    let ready = pod(json!({"conditions": [{"type": "Ready", "status": "True"}]}));
    let component = Revision::new("r", RevisionSpec::from_function("f", &function(json!({})).spec));
    let looked_at = |status: Value| {
        let status = serde_json::from_value(json!({"component": status})).unwrap();
        Revision { status: Some(status), ..component.clone() }
    };
    let compiled = looked_at(json!({"state": "Compiled"}));
    let job = looked_at(json!({"state": "Refused", "message": "a job"}));
    let image = function(json!({"source": {"image": "x"}}));
    let image = Revision::new("r", RevisionSpec::from_function("f", &image.spec));
    let oci = function(json!({"source": {"oci": "x"}}));
    let oci = Revision::new("r", RevisionSpec::from_function("f", &oci.spec));
    let invalid = Readiness::ComponentInvalid { message: "no such import".into() };
    for (revision, present, pods, expected) in [
        (&component, true, vec![], Readiness::Compiling { message: None }),
        (&compiled, true, vec![], Readiness::Ready),
        (&job, true, vec![], Readiness::ComponentInvalid { message: "a job".into() }),
        (&compiled, true, vec![refused.clone()], invalid),
        (&component, true, vec![refused, ready.clone()], Readiness::Ready),
        (&image, true, vec![], Readiness::Ready),
        (&image, false, vec![], Readiness::RuntimeMissing { source: "image" }),
        (&oci, false, vec![], Readiness::RuntimeMissing { source: "oci" }),
    ] {
        assert_eq!(readiness(revision, present, None, Ok(()), &pods), expected);
    }
    assert!(matches!(readiness(&component, false, None, Ok(()), &[]), Readiness::ComponentMissing { .. }));
    let files = Digest::of(b"files");
    let lacking = Readiness::ComponentMissing { digest: files.to_string() };
    assert_eq!(readiness(&compiled, true, Some(files), Ok(()), &[]), lacking);
    let missing = mayfly_api::env::EnvError::Unsupported { variable: "X".into() };
    let readiness = readiness(&compiled, true, None, Err(missing), &[ready]);
    assert!(matches!(readiness, Readiness::EnvironmentMissing { .. }));
}

#[test]
fn a_function_is_ready_when_every_target_can_answer() {
    use Readiness::Ready;
    let to = |traffic: Value| function(json!({"traffic": traffic}));
    let pinned = json!([{"revision": "hello-00001", "percent": 100}]);
    for (given, expected) in [
        (snapshot(function(json!({})), &[(1, "", Ready)]), "Ready"),
        (snapshot(function(json!({})), &[(1, "OLD", Ready)]), "RevisionPending"),
        (snapshot(function(json!({})), &[(1, "", Ready), (2, "", missing())]), "ComponentMissing"),
        (snapshot(to(pinned.clone()), &[(1, "", Ready), (2, "", missing())]), "Ready"),
        (snapshot(to(pinned), &[(2, "", Ready)]), "RevisionMissing"),
    ] {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let status = status::function(&given, &Config::default(), now);
        assert_eq!(status.conditions[0].reason, expected);
        assert_eq!(status.conditions[0].status == "True", expected == "Ready");
    }
}

#[test]
fn a_condition_keeps_the_time_of_its_last_change() {
    let first: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let later: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
    let given = snapshot(function(json!({})), &[(1, "", Readiness::Ready)]);
    let config = Config::default();
    let before = status::function(&given, &config, first);
    let mut again = (*given.function).clone();
    again.status = Some(before.clone());
    let same = FunctionSnapshot {
        function: Arc::new(again.clone()),
        ..snapshot(again, &[(1, "", Readiness::Ready)])
    };
    assert_eq!(status::function(&same, &config, later), before);
}

#[test]
fn a_replica_set_runs_the_component() {
    let given = snapshot(
        function(json!({"limits": {"memory": "32Mi", "timeout": "1500ms"}})),
        &[(1, "", Readiness::Ready)],
    );
    let set: &ReplicaSet = given.revisions[&1].replica_set.as_ref().unwrap();
    let spec = set.spec.as_ref().unwrap();
    let pod = spec.template.as_ref().unwrap().spec.as_ref().unwrap();
    assert_eq!(pod.termination_grace_period_seconds, Some(2));
    assert_eq!(pod.automount_service_account_token, Some(false));
    assert_eq!(pod.enable_service_links, Some(false));
    let limits = pod.containers[0].resources.as_ref().unwrap().limits.as_ref().unwrap();
    assert_eq!(limits["memory"].0, "32Mi");
    assert_eq!(
        spec.selector.match_labels.as_ref(),
        spec.template.as_ref().unwrap().metadata.as_ref().unwrap().labels.as_ref()
    );
    assert_eq!(set.owner_references()[0].kind, "Revision");
}

#[test]
fn orphans_are_adopted_before_anything_is_made() {
    let orphan = |owner: bool| {
        let mut revision =
            Revision::new("hello-00003", RevisionSpec::from_function("hello", &function(json!({})).spec));
        let other = function(json!({})).controller_owner_ref(&()).filter(|_| owner);
        revision.metadata.owner_references = other.map(|owner| vec![owner]);
        Arc::new(revision)
    };
    assert!(plan::is_orphan_of(&orphan(false), "hello"));
    assert!(!plan::is_orphan_of(&orphan(true), "hello"));
    assert!(!plan::is_orphan_of(&orphan(false), "other"));
    let given = FunctionSnapshot { orphans: vec![orphan(false)], ..snapshot(function(json!({})), &[]) };
    assert_eq!(told(&plan::plan(&given, 10)), ["adopt hello-00003"]);
}

#[test]
fn a_tag_s_host_belongs_to_a_function_of_that_name_first() {
    let tagged = |name: &str, tag: &str| {
        let mut function = function(json!({"traffic": [{"latest": true, "percent": 100, "tag": tag}]}));
        function.metadata.name = Some(name.into());
        Arc::new(function)
    };
    let (one, other) = (tagged("b-c", "a"), tagged("c", "a-b"));
    for (asks, tag, same_name, claimants, holder) in [
        (&one, "a", true, vec![&one], Some("function a-b-c")),
        (&one, "a", false, vec![&one], None),
        (&one, "a", false, vec![&one, &other], None),
        (&other, "a-b", false, vec![&one, &other], Some("tag a of function b-c")),
    ] {
        let claimants: Vec<_> = claimants.into_iter().cloned().collect();
        let found = plan::host_holder(asks, tag, "a-b-c", same_name, &claimants);
        assert_eq!(found.as_deref(), holder, "{tag}");
    }
    let lost = plan::LostHost { tag: "a".into(), label: "a-b-c".into(), holder: "function a-b-c".into() };
    let given = snapshot((*one).clone(), &[(1, "", Readiness::Ready)]);
    let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    for (lost_hosts, reason) in [(vec![], "Claimed"), (vec![lost], "RouteConflict")] {
        let given = FunctionSnapshot {
            lost_hosts,
            ..snapshot((*given.function).clone(), &[(1, "", Readiness::Ready)])
        };
        assert_eq!(status::function(&given, &Config::default(), now).conditions[1].reason, reason);
    }
}

#[test]
fn a_source_in_a_registry_is_resolved_when_a_revision_is_made() {
    let component = mayfly_api::Digest::of(b"component");
    let pulled = function(json!({"source": {"oci": "r.example.com/a:1"}}));
    let with = |revisions, fetched| FunctionSnapshot { fetched, ..snapshot(pulled.clone(), revisions) };

    let away = with(&[], Some(Err("not found".into())));
    assert_eq!(told(&plan::plan(&away, 10)), [""; 0]);
    let ready = &status::function(&away, &Config::default(), Timestamp::UNIX_EPOCH).conditions[0];
    assert_eq!((&*ready.reason, &*ready.message), ("SourceUnavailable", "not found"));

    let there = with(&[], Some(Ok(component)));
    let steps = plan::plan(&there, 10);
    assert_eq!(told(&steps), ["take 1", "create hello-00001"]);
    let Step::CreateRevision(revision) = &steps[1] else { panic!("no revision") };
    assert_eq!(revision.spec.source.component, Some(component));
    assert_eq!(revision.spec.source.oci.as_deref(), Some("r.example.com/a:1"));

    // The tag may refer to another component since: the revision stays until the reference changes.
    let mut kept = with(&[], None);
    kept.revisions = snapshot(pulled.clone(), &[(1, "", Readiness::Ready)]).revisions;
    let made = Arc::new((**revision).clone());
    kept.revisions.get_mut(&1).unwrap().revision = made;
    assert!(!kept.needs_revision());
    kept.function = Arc::new(function(json!({"source": {"oci": "r.example.com/a:2"}})));
    assert!(kept.needs_revision());
}

#[test]
fn the_pods_of_an_image_are_ordinary_containers() {
    let source = json!({"image": "app:local", "port": 3000});
    let spec = function(json!({"source": source, "env": [{"name": "K_SERVICE", "value": "own"}]})).spec;
    let revision = Revision::new("f-00001", RevisionSpec::from_function("f", &spec));
    let set = new_replica_set(&revision, 0).unwrap();
    let pod = set.spec.unwrap().template.unwrap().spec.unwrap();
    assert_eq!(pod.runtime_class_name, None);
    let container = &pod.containers[0];
    assert_eq!(container.image.as_deref(), Some("app:local"));
    assert_eq!(container.ports.as_ref().unwrap()[0].container_port, 3000);
    let env = container.env.iter().flatten();
    let env: Vec<_> = env.map(|var| (var.name.as_str(), var.value.as_deref().unwrap())).collect();
    assert_eq!(env, [("PORT", "3000"), ("K_REVISION", "f-00001"), ("K_SERVICE", "own")]);
}
