//! A pod under test.

use std::time::Duration;

use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, Runtime, SandboxSpec, SandboxStatus,
};
use tokio::time::{Instant, sleep, timeout};

use crate::{PATIENCE, RuntimeFixture, TestProgram};

/// The end of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObservedEnd {
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
}

/// A pod with one container.
pub(crate) struct TestPod<'a> {
    fixture: &'a dyn RuntimeFixture,
    pub(crate) runtime: &'a dyn Runtime,
    pub(crate) sandbox: SandboxSpec,
    pub(crate) container: ContainerSpec,
}

impl<'a> TestPod<'a> {
    /// A pod that does not exist in the runtime yet.
    pub(crate) async fn new(fixture: &'a dyn RuntimeFixture, name: &str, program: TestProgram) -> Self {
        let (sandbox, container) = fixture.pod(name, program).await;
        assert_eq!(sandbox.uid, container.id.pod, "the fixture's container is in its pod");
        Self { fixture, runtime: fixture.runtime(), sandbox, container }
    }

    /// A pod whose container was started. A program with a grace period handles the request to stop already.
    pub(crate) async fn started(fixture: &'a dyn RuntimeFixture, name: &str, program: TestProgram) -> Self {
        let pod = Self::new(fixture, name, program).await;
        pod.create().await;
        pod.start().await;
        let writes = matches!(program, TestProgram::Waits | TestProgram::IgnoresStop) && fixture.has_grace();
        if let Some(line) = fixture.log_line().filter(|_| writes) {
            pod.log_with(line).await;
        }
        pod
    }

    /// The container's log, once it contains this text.
    pub(crate) async fn log_with(&self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = std::fs::read_to_string(&self.container.log_path).unwrap_or_default();
            if log.contains(text) {
                return log;
            }
            assert!(Instant::now() < deadline, "no {text} in {log:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn uid(&self) -> &PodUid {
        &self.sandbox.uid
    }

    pub(crate) fn id(&self) -> &ContainerId {
        &self.container.id
    }

    pub(crate) async fn create(&self) -> SandboxStatus {
        self.runtime.create_sandbox(self.sandbox.clone()).await.expect("the sandbox is created")
    }

    /// Starts the container, and waits until it is not queued any more.
    pub(crate) async fn start(&self) {
        self.runtime.start_container(self.container.clone()).await.expect("the container starts");
        self.dequeued().await;
    }

    /// Waits until a runtime with a queue runs the container; returns at once for the others.
    pub(crate) async fn dequeued(&self) {
        if self.fixture.starts_at_once() {
            return;
        }
        let mut changes = self.runtime.changes();
        while matches!(self.state(), None | Some(ContainerState::Waiting { .. })) {
            timeout(PATIENCE, changes.changed()).await.expect("the container runs").expect("a runtime");
        }
    }

    pub(crate) async fn stop(&self, grace: Duration) {
        let stopped = self.runtime.stop_container(self.id(), grace);
        timeout(PATIENCE + grace, stopped).await.expect("the stop returns").expect("the container stops");
    }

    pub(crate) async fn remove(&self) {
        let removed = self.runtime.remove_sandbox(self.uid());
        timeout(PATIENCE, removed).await.expect("the removal returns").expect("the sandbox is removed");
    }

    /// The state of a container of the pod; `None` if the runtime does not know it.
    pub(crate) fn state_of(&self, id: &ContainerId) -> Option<ContainerState> {
        let mut known = self.runtime.containers(self.uid()).into_iter();
        known.find(|(container, _)| container == id).map(|(_, state)| state)
    }

    pub(crate) fn state(&self) -> Option<ContainerState> {
        self.state_of(self.id())
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state(), Some(ContainerState::Running { .. }))
    }

    pub(crate) fn is_listed(&self) -> bool {
        self.runtime.sandboxes().contains(self.uid())
    }

    pub(crate) fn has_usage(&self) -> bool {
        self.runtime.usage().iter().any(|(id, _)| id == self.id())
    }

    /// Whether the runtime shows the usage of the running container, if it measures any.
    pub(crate) fn has_usage_if_measured(&self) -> bool {
        self.has_usage() == self.fixture.measures_usage()
    }

    /// The end of the container, if it is known.
    pub(crate) fn end_now(&self) -> Option<ObservedEnd> {
        match self.state()? {
            ContainerState::Waiting { .. } | ContainerState::Running { .. } => None,
            ContainerState::Exited { started, finished, exit_code, reason, .. } => {
                assert!(started <= finished, "{started} is after {finished}");
                Some(ObservedEnd { exit_code, reason })
            }
        }
    }

    /// Waits for the end of the container, woken only by the runtime's change notifications.
    pub(crate) async fn end(&self) -> ObservedEnd {
        let mut changes = self.runtime.changes();
        loop {
            if let Some(end) = self.end_now() {
                return end;
            }
            timeout(PATIENCE, changes.changed()).await.expect("the end is announced").expect("a runtime");
        }
    }
}
