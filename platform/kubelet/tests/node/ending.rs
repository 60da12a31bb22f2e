//! A pod stays in the API while its containers cannot be ended.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use kube::api::DeleteParams;
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, Runtime, RuntimeError, SandboxSpec, SandboxStatus,
    Usage, simulated::SimulatedRuntime,
};
use serde_json::json;
use tokio::sync::watch;

use crate::harness::{KubeletHarness, phase};

/// A runtime that cannot end containers until a test says otherwise.
struct Powerless {
    inner: SimulatedRuntime,
    can_kill: AtomicBool,
    /// The number of failed removals.
    tried: watch::Sender<u32>,
}

impl Powerless {
    fn new() -> Self {
        let inner = SimulatedRuntime::new("powerless");
        Self { inner, can_kill: AtomicBool::new(false), tried: watch::Sender::new(0) }
    }

    fn check(&self) -> Result<(), RuntimeError> {
        match self.can_kill.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(RuntimeError::Internal("a process does not react".into())),
        }
    }
}

#[async_trait]
impl Runtime for Powerless {
    fn class(&self) -> &str {
        self.inner.class()
    }
    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError> {
        self.inner.create_sandbox(sandbox).await
    }
    async fn start_container(&self, spec: ContainerSpec) -> Result<(), RuntimeError> {
        self.inner.start_container(spec).await
    }
    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.check()?;
        self.inner.stop_container(id, grace).await
    }
    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.check().inspect_err(|_| self.tried.send_modify(|count| *count += 1))?;
        self.inner.remove_sandbox(uid).await
    }
    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        self.inner.containers(uid)
    }
    fn sandboxes(&self) -> Vec<PodUid> {
        self.inner.sandboxes()
    }
    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        self.inner.usage()
    }
    fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes()
    }
}

#[tokio::test]
async fn a_deleted_pod_is_in_the_api_as_long_as_it_runs() {
    let cluster = KubeletHarness::stopped().await;
    let runtime = Arc::new(Powerless::new());
    cluster.run_with(runtime.clone());
    let spec = json!({"runtimeClassName": "powerless", "terminationGracePeriodSeconds": 1});
    cluster.create("web", spec, json!({})).await;
    cluster.until("web", "running", |pod| phase(pod) == "Running").await;
    cluster.pods().delete("web", &DeleteParams::default()).await.unwrap();
    // Two removals have failed, and the object is still there after the first.
    runtime.tried.subscribe().wait_for(|count| *count >= 2).await.unwrap();
    assert!(cluster.pods().get_opt("web").await.unwrap().is_some());
    assert_eq!(runtime.sandboxes().len(), 1);
    runtime.can_kill.store(true, Ordering::SeqCst);
    cluster.gone("web").await;
    assert!(runtime.sandboxes().is_empty());
}
