use super::*;

#[test]
fn failed_pulls_and_crashes_have_their_own_pauses() {
    let (mut container, now) = (LocalContainer::default(), Clocks::now());
    let crash = |container: &mut LocalContainer| {
        container.started(now.wall);
        let (reason, message) = ("Error".into(), String::new());
        let (started, finished) = (now.wall, now.wall);
        container.now = ContainerPhase::Exited(Exit { started, finished, exit_code: 1, reason, message });
        container.restart_later("main", now)
    };
    for _ in 0..6 {
        container.pull_failed("app:1", "not found", true, now.steady);
    }
    assert_eq!(container.not_before, Some(now.steady + PULL_REMOTE.most));
    assert!(!crash(&mut container), "the first restart is immediate, whatever was before the first start");
    for crashes in 1..6 {
        assert!(crash(&mut container));
        assert_eq!(container.not_before, Some(now.steady + CRASH.full(crashes)), "{crashes}");
    }
    container.pull_failed("app:1", "not found", true, now.steady);
    assert_eq!(container.not_before, Some(now.steady + PULL_REMOTE.first));
    container.start_failed("RunContainerError", String::new(), now.steady);
    assert!(crash(&mut container));
    assert_eq!(container.not_before, Some(now.steady + CRASH.full(6)), "pulls do not reset the crashes");
}
