//! The checks, one function each.

use std::{collections::HashSet, time::Duration};

use futures::future::join_all;
use mayfly_runtime::{ContainerState, RuntimeError};
use tokio::time::{Instant, timeout};

use crate::{
    PATIENCE, RuntimeFixture,
    TestProgram::{Exits, IgnoresStop, Waits},
    pod::TestPod,
};

pub(crate) async fn a_sandbox_is_listed_until_it_is_removed(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::new(fixture, "listed", Waits).await;
    assert!(!pod.is_listed());
    pod.create().await;
    assert!(pod.is_listed());
    assert_eq!(pod.runtime.containers(pod.uid()), [], "a sandbox begins without containers");
    pod.remove().await;
    assert!(!pod.is_listed());
}

pub(crate) async fn a_repeated_creation_keeps_the_sandbox(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::new(fixture, "repeated", Waits).await;
    let first = pod.create().await;
    pod.start().await;
    let second = pod.create().await;
    assert_eq!(first, second);
    assert!(pod.is_running(), "{:?}", pod.state());
    assert_eq!(pod.runtime.sandboxes().len(), 1);
    pod.remove().await;
}

pub(crate) async fn pods_have_addresses_of_their_own(fixture: &dyn RuntimeFixture) {
    let one = TestPod::new(fixture, "address-one", Waits).await;
    let two = TestPod::new(fixture, "address-two", Waits).await;
    let (first, second) = (one.create().await, two.create().await);
    for (pod, status) in [(&one, &first), (&two, &second)] {
        if !fixture.has_addresses() {
            assert!(status.addresses.is_empty(), "{:?}", status.addresses);
        } else if pod.runtime.assigns_addresses() {
            assert!(!status.addresses.is_empty(), "the runtime assigns addresses and assigned none");
        } else {
            let reserved: Vec<_> = pod.sandbox.address.into_iter().collect();
            assert_eq!(status.addresses, reserved, "the kubelet's address is the pod's");
        }
    }
    if one.runtime.assigns_addresses() {
        let shared: Vec<_> = first.addresses.iter().filter(|it| second.addresses.contains(it)).collect();
        assert!(shared.is_empty(), "{shared:?} belong to two pods");
    }
    one.remove().await;
    two.remove().await;
}

pub(crate) async fn a_container_needs_a_sandbox(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::new(fixture, "without-sandbox", Waits).await;
    let refused = pod.runtime.start_container(pod.container.clone()).await;
    assert_eq!(refused, Err(RuntimeError::NoSandbox(pod.uid().clone())));
    assert_eq!(pod.runtime.containers(pod.uid()), []);
}

pub(crate) async fn a_started_container_runs(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::started(fixture, "runs", Waits).await;
    assert!(pod.is_running(), "{:?}", pod.state());
    assert!(pod.has_usage_if_measured(), "{:?}", pod.runtime.usage());
    pod.remove().await;
}

pub(crate) async fn a_repeated_start_starts_nothing(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::started(fixture, "started-twice", Waits).await;
    let before = pod.runtime.containers(pod.uid());
    pod.start().await;
    assert_eq!(pod.runtime.containers(pod.uid()), before);
    pod.remove().await;

    let pod = TestPod::started(fixture, "started-after-its-end", Exits(1)).await;
    let end = pod.end().await;
    pod.start().await;
    assert_eq!(pod.end_now(), Some(end), "a restart has another attempt number");
    pod.remove().await;
}

pub(crate) async fn simultaneous_starts_start_one_container(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::new(fixture, "simultaneous", Waits).await;
    pod.create().await;
    let starts = (0..4).map(|_| pod.runtime.start_container(pod.container.clone()));
    for result in join_all(starts).await {
        assert_eq!(result, Ok(()));
    }
    pod.dequeued().await;
    assert_eq!(pod.runtime.containers(pod.uid()).len(), 1);
    assert!(pod.is_running(), "{:?}", pod.state());
    pod.remove().await;
}

pub(crate) async fn an_exit_is_reported_with_its_code(fixture: &dyn RuntimeFixture) {
    for (name, code, reason) in [("exits-well", 0, "Completed"), ("exits-badly", 1, "Error")] {
        let pod = TestPod::started(fixture, name, Exits(code)).await;
        let end = pod.end().await;
        assert_eq!((end.exit_code, end.reason.as_str()), (code, reason));
        assert!(!pod.has_usage(), "an ended container uses nothing");
        assert!(pod.is_listed(), "the sandbox stays until it is removed");
        pod.remove().await;
    }
}

pub(crate) async fn an_exit_is_announced(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::new(fixture, "announced", Exits(0)).await;
    pod.create().await;
    let mut changes = pod.runtime.changes();
    changes.mark_unchanged();
    pod.start().await;
    while pod.end_now().is_none() {
        timeout(PATIENCE, changes.changed()).await.expect("the end is announced").expect("a runtime");
    }
    pod.remove().await;
}

pub(crate) async fn a_stop_ends_a_container(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::started(fixture, "stopped", Waits).await;
    let mut changes = pod.runtime.changes();
    changes.mark_unchanged();
    let began = Instant::now();
    pod.stop(PATIENCE).await;
    assert!(pod.end_now().is_some(), "the container has ended when the stop returns: {:?}", pod.state());
    assert!(began.elapsed() < PATIENCE, "a program that obeys does not use up its grace");
    assert!(changes.has_changed().expect("a runtime"), "the end is announced");
    assert!(!pod.has_usage(), "an ended container uses nothing");
    pod.remove().await;
}

pub(crate) async fn a_stop_of_an_ended_or_unknown_container_is_no_error(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::started(fixture, "ended-before", Exits(1)).await;
    let end = pod.end().await;
    pod.stop(PATIENCE).await;
    pod.stop(Duration::ZERO).await;
    assert_eq!(pod.end_now(), Some(end), "a stop changes no end");
    pod.remove().await;
    pod.stop(Duration::ZERO).await;
    assert_eq!(pod.state(), None, "a stop makes no container");
}

pub(crate) async fn a_program_that_ignores_the_stop_is_killed(fixture: &dyn RuntimeFixture) {
    const GRACE: Duration = Duration::from_secs(1);
    let pod = TestPod::started(fixture, "ignores-stop", IgnoresStop).await;
    let began = Instant::now();
    pod.stop(GRACE).await;
    if fixture.has_grace() {
        assert!(began.elapsed() >= GRACE, "the grace is the program's: {:?}", began.elapsed());
    }
    let end = pod.end_now().expect("the container has ended when the stop returns");
    assert_eq!(end.exit_code, 137, "128 and SIGKILL: {end:?}");
    pod.remove().await;
}

pub(crate) async fn a_restart_is_a_container_of_its_own(fixture: &dyn RuntimeFixture) {
    let mut pod = TestPod::started(fixture, "attempts", Exits(1)).await;
    let end = pod.end().await;
    let first = pod.id().clone();
    pod.container.id.attempt = 1;
    pod.start().await;
    assert_eq!(pod.end().await, end);
    let earlier = pod.state_of(&first);
    assert!(matches!(earlier, Some(ContainerState::Exited { .. })), "{earlier:?}");
    assert_eq!(pod.runtime.containers(pod.uid()).len(), 2);
    pod.remove().await;
}

pub(crate) async fn a_removal_ends_what_runs(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::started(fixture, "removed-while-running", IgnoresStop).await;
    pod.remove().await;
    assert!(!pod.is_listed());
    assert_eq!(pod.runtime.containers(pod.uid()), []);
    assert!(!pod.has_usage(), "{:?}", pod.runtime.usage());
    let refused = pod.runtime.start_container(pod.container.clone()).await;
    assert_eq!(refused, Err(RuntimeError::NoSandbox(pod.uid().clone())));
}

pub(crate) async fn a_repeated_removal_is_no_error(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::new(fixture, "removed-twice", Waits).await;
    pod.remove().await;
    pod.create().await;
    pod.remove().await;
    pod.remove().await;
}

pub(crate) async fn a_removed_pod_can_come_back(fixture: &dyn RuntimeFixture) {
    let pod = TestPod::started(fixture, "comes-back", Exits(1)).await;
    pod.end().await;
    pod.remove().await;
    pod.create().await;
    assert_eq!(pod.runtime.containers(pod.uid()), [], "nothing is known of the first life");
    pod.start().await;
    assert_eq!(pod.end().await.exit_code, 1);
    pod.remove().await;
}

pub(crate) async fn pods_are_independent(fixture: &dyn RuntimeFixture) {
    let stays = TestPod::started(fixture, "stays", Waits).await;
    let ends = TestPod::started(fixture, "ends", Exits(1)).await;
    ends.end().await;
    assert!(stays.is_running(), "{:?}", stays.state());
    ends.remove().await;
    assert!(stays.is_running(), "{:?}", stays.state());
    assert!(stays.is_listed() && stays.has_usage_if_measured());
    stays.remove().await;
}

pub(crate) async fn many_pods_start_at_once(fixture: &dyn RuntimeFixture) {
    let count = fixture.pods_at_once();
    let pods = (0..count).map(async |number| {
        let pod = TestPod::new(fixture, &format!("many-{number}"), Waits).await;
        let status = pod.create().await;
        pod.start().await;
        (pod, status)
    });
    let pods = join_all(pods).await;
    assert!(pods.iter().all(|(pod, _)| pod.is_running()));
    assert_eq!(pods[0].0.runtime.sandboxes().len(), count);
    if fixture.has_addresses() && fixture.runtime().assigns_addresses() {
        let addresses = pods.iter().flat_map(|(_, status)| status.addresses.first());
        assert_eq!(addresses.collect::<HashSet<_>>().len(), count, "no address is given twice");
    }
    join_all(pods.iter().map(|(pod, _)| pod.remove())).await;
}

pub(crate) async fn the_output_is_in_the_log(fixture: &dyn RuntimeFixture) {
    let Some(line) = fixture.log_line() else { return };
    let pod = TestPod::started(fixture, "writes", Exits(0)).await;
    pod.end().await;
    let log = pod.log_with(line).await;
    let written = log.lines().find(|it| it.contains(line)).expect("the line");
    let fields: Vec<_> = written.splitn(4, ' ').collect();
    assert_eq!(&fields[1..], ["stdout", "F", line], "the CRI's form: time, stream, full or partial, text");
    pod.remove().await;
}
