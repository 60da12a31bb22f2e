//! The rules of probes, sidecars, restart policies and ephemeral containers, as scripts of states.

use serde_json::{Value, json};

use super::*;
use crate::pod::local::ProbeVerdicts;

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec})).unwrap()
}

/// `name=state`, where a state is `wait`, `run`, `0` to `9` (an exit code), or `run` with probe results: `+s` the
/// startup probe succeeded, `-l` the liveness probe failed.
fn local(pod: &Pod, states: &str) -> LocalPod {
    let mut local = LocalPod::from_status(pod, &[]);
    local.sandbox_made();
    for state in states.split_whitespace() {
        let (name, state) = state.split_once('=').unwrap();
        let container = local.containers.entry(name.into()).or_default();
        let at = Timestamp::now();
        match (state, state.parse::<i32>()) {
            (_, Ok(exit_code)) => {
                let (reason, message) = (String::new(), String::new());
                container.now =
                    ContainerPhase::Exited(Exit { started: at, finished: at, exit_code, reason, message });
            }
            ("wait", _) => {}
            _ => container.now = ContainerPhase::Running { started: at },
        }
        container.probes = ProbeVerdicts {
            startup: state.contains("+s").then_some(true).or(state.contains("-s").then_some(false)),
            liveness: state.contains("-l").then_some(false),
            readiness: None,
        };
    }
    local
}

/// The next step in a word.
fn next(pod: &Pod, states: &str) -> String {
    match plan(pod, &local(pod, states), Clocks::now()) {
        Step::Start(container) => format!("start {}", container.name),
        Step::Restart(name) => format!("restart {name}"),
        Step::Kill(failure) => format!("kill {} {}s", failure.container.name, failure.grace.as_secs()),
        Step::Finish { grace } => format!("finish {}s", grace.as_secs()),
        Step::Wait(_) => "wait".into(),
        step => format!("{step:?}"),
    }
}

fn check(spec: Value, script: &[(&str, &str)]) {
    let pod = pod(spec);
    for (states, step) in script {
        assert_eq!(next(&pod, states), *step, "{states}");
    }
}

#[test]
fn sidecars_start_in_the_order_of_the_init_containers() {
    check(
        json!({"initContainers": [{"name": "i1"}, {"name": "s", "restartPolicy": "Always"}, {"name": "i2"}],
            "containers": [{"name": "a"}]}),
        &[
            ("", "start i1"),
            ("i1=run", "wait"),
            ("i1=0", "start s"),
            ("i1=0 s=run", "start i2"),
            ("i1=0 s=run i2=run", "wait"),
            ("i1=0 s=1 i2=run", "restart s"),
            ("i1=0 s=run i2=0", "start a"),
            ("i1=0 s=run i2=0 a=run", "wait"),
            ("i1=0 s=0 i2=0 a=run", "restart s"),
            ("i1=0 s=1 i2=0 a=1", "restart s"),
        ],
    );
}

#[test]
fn a_sidecar_holds_the_next_container_up_until_its_startup_probe_has_succeeded() {
    let sidecar = json!({"name": "s", "restartPolicy": "Always", "startupProbe": {"exec": {}}});
    check(
        json!({"initContainers": [sidecar], "containers": [{"name": "a"}]}),
        &[
            ("s=run", "wait"),
            ("s=run+s", "start a"),
            ("s=run-s", "kill s 30s"),
            // A restart of the sidecar blocks nothing any more.
            ("s=run a=1", "restart a"),
        ],
    );
}

#[test]
fn sidecars_do_not_keep_a_pod_alive() {
    let spec = |policy: &str| {
        json!({"restartPolicy": policy, "terminationGracePeriodSeconds": 7,
            "initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]})
    };
    check(spec("Never"), &[("s=run a=0", "finish 7s"), ("s=run a=1", "finish 7s")]);
    check(spec("OnFailure"), &[("s=run a=0", "finish 7s"), ("s=run a=1", "restart a")]);
}

#[test]
fn a_container_that_fails_its_liveness_probe_is_killed_within_the_probes_grace() {
    let probe = json!({"exec": {}, "terminationGracePeriodSeconds": 3});
    check(
        json!({"terminationGracePeriodSeconds": 9, "containers": [
            {"name": "a", "livenessProbe": probe}, {"name": "b", "livenessProbe": {"exec": {}}}]}),
        &[("a=run b=run", "wait"), ("a=run-l b=run", "kill a 3s"), ("a=run b=run-l", "kill b 9s")],
    );
}

#[test]
fn a_container_that_a_probe_killed_starts_again_unless_it_never_does() {
    for (policy, step) in [("Always", "restart a"), ("OnFailure", "restart a"), ("Never", "finish 30s")] {
        let pod = pod(json!({"restartPolicy": policy, "containers": [{"name": "a"}]}));
        let mut local = local(&pod, "a=0");
        local.containers.get_mut("a").unwrap().killed_by_probe = true;
        let said = match plan(&pod, &local, Clocks::now()) {
            Step::Restart(name) => format!("restart {name}"),
            Step::Finish { grace } => format!("finish {}s", grace.as_secs()),
            step => format!("{step:?}"),
        };
        assert_eq!(said, step, "{policy}");
    }
}

#[test]
fn messages_about_failed_probes_are_upstreams() {
    for (policy, message) in [
        ("Always", "Container a failed liveness probe, will be restarted"),
        ("Never", "Container a failed liveness probe"),
    ] {
        let probe = json!({"exec": {}});
        let spec = json!({"restartPolicy": policy, "containers": [{"name": "a", "livenessProbe": probe}]});
        let pod = pod(spec);
        let Step::Kill(failure) = plan(&pod, &local(&pod, "a=run-l"), Clocks::now()) else {
            panic!("{policy}")
        };
        assert_eq!(failure.message, message);
    }
}

#[test]
fn a_containers_own_restart_policy_is_stronger_than_the_pods() {
    check(
        json!({"restartPolicy": "Never", "containers": [
            {"name": "a", "restartPolicy": "OnFailure"}, {"name": "b"}]}),
        &[
            ("a=1 b=run", "restart a"),
            ("a=0 b=run", "wait"),
            ("a=0 b=1", "finish 30s"),
            ("a=1 b=1", "restart a"),
        ],
    );
}

#[test]
fn init_containers_run_again_in_a_new_sandbox() {
    let pod = pod(json!({"initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
        "containers": [{"name": "a"}, {"name": "b"}]}));
    let spec = pod.spec.as_ref().unwrap();
    let step = |local: &LocalPod| match plan(&pod, local, Clocks::now()) {
        Step::Start(container) => format!("start {}", container.name),
        Step::Restart(name) => format!("restart {name}"),
        Step::Wait(_) => "wait".into(),
        step => format!("{step:?}"),
    };
    let set = |local: &mut LocalPod, name: &str, exit_code: Option<i32>| {
        let at = Timestamp::now();
        let (reason, message) = (String::new(), String::new());
        local.containers.get_mut(name).unwrap().now = match exit_code {
            Some(exit_code) => {
                ContainerPhase::Exited(Exit { started: at, finished: at, exit_code, reason, message })
            }
            None => ContainerPhase::Running { started: at },
        };
    };
    // The machine has restarted: all containers are lost, only the init container had ended before.
    let mut local = local(&pod, "i=0 s=9 a=9 b=9");
    local.initialise_again(spec);
    assert_eq!(local.container("i").attempt, 1);
    assert_eq!(step(&local), "start i");
    set(&mut local, "i", None);
    assert_eq!(step(&local), "wait");
    set(&mut local, "i", Some(0));
    assert_eq!(step(&local), "restart s");
    set(&mut local, "s", None);
    assert_eq!(step(&local), "restart a");
    local.containers.get_mut("a").unwrap().restart_later("a", Clocks::now());
    set(&mut local, "a", None);
    // From now on they block nothing, even where one would not be done.
    set(&mut local, "i", Some(1));
    assert_eq!(step(&local), "restart b");
    // The first sandbox of a pod changes nothing.
    let mut new = LocalPod::from_status(&pod, &[]);
    let before = new.clone();
    new.initialise_again(spec);
    assert_eq!(new, before);
}

#[test]
fn a_pod_past_its_deadline_has_its_grace_period_and_an_evicted_one_has_none() {
    let pod = pod(json!({"containers": [{"name": "a"}], "terminationGracePeriodSeconds": 7}));
    for (reason, seconds) in [(DEADLINE_EXCEEDED, 7), (crate::pod::evicting::EVICTED, 0)] {
        let mut local = local(&pod, "a=run");
        local.ended = Some((reason, String::new()));
        let grace = Duration::from_secs(seconds);
        assert_eq!(plan(&pod, &local, Clocks::now()), Step::Finish { grace }, "{reason}");
    }
}

#[test]
fn ephemeral_containers_start_at_any_time_and_once() {
    check(
        json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}],
            "ephemeralContainers": [{"name": "debugger", "image": "x"}]}),
        &[
            ("i=run", "start debugger"),
            ("i=0 a=run", "start debugger"),
            ("i=0 a=run debugger=1", "wait"),
            ("i=0 a=run debugger=run", "wait"),
        ],
    );
}

#[test]
fn a_container_is_ready_once_it_started_and_its_probe_succeeds() {
    let pod = pod(
        json!({"containers": [{"name": "a", "startupProbe": {"exec": {}}, "readinessProbe": {"exec": {}}}]}),
    );
    let container = &pod.spec.as_ref().unwrap().containers[0];
    for (startup, readiness, ready) in [
        (None, None, false),
        (Some(true), None, false),
        (Some(true), Some(false), false),
        (None, Some(true), false),
        (Some(true), Some(true), true),
    ] {
        let mut known = local(&pod, "a=run").container("a");
        known.probes = ProbeVerdicts { startup, readiness, liveness: None };
        assert_eq!(is_ready(container, &known), ready, "{startup:?} {readiness:?}");
    }
}
