//! Pods: replicas of functions, programs that run to completion, and components that serve HTTP.
//!
//! ```text
//! a container:  start ──▶ Running ──(ends by itself)──────▶ Exited (its code)
//!                            └─stop─▶ stopping ──(ends)──▶ Exited (its code)
//!                                        └──(grace is over)──▶ Exited (137)
//! ```
//! A program has no way to receive a signal: a stop ends it at once. A component that serves HTTP finishes its running
//! requests. A replica of a function executes nothing: it keeps the revision's component loaded, and is Running until
//! it is stopped.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use mayfly_api::{Digest, ObjectKey, component_of_image, wellknown};
use mayfly_runtime::{
    CallError, ContainerId, ContainerSpec, ContainerState, PodUid, Runtime, RuntimeError, SandboxSpec,
    SandboxStatus, Usage,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    WasmHost,
    cache::{CacheEntry, Pre},
    host::HostContext,
};

mod command;
mod meter;
mod service;
mod task;

use meter::Meter;
use task::{ContainerExit, RunningTask};

/// The exit code of a killed program, as shells report it (128 + SIGKILL).
const EXIT_KILLED: i32 = 137;

/// The pods on this host.
pub(crate) struct Pods {
    shared: Arc<HostContext>,
    pods: Mutex<HashMap<PodUid, Pod>>,
    changes: watch::Sender<u64>,
}

struct Pod {
    sandbox: Arc<SandboxSpec>,
    containers: Vec<Container>,
}

struct Container {
    id: ContainerId,
    state: ContainerState,
    work: Work,
}

/// The work of a container.
enum Work {
    /// Keeps a revision's component in memory.
    Replica {
        _component: Arc<CacheEntry>,
    },
    Task(RunningTask),
    TaskEnd,
}

impl Pod {
    /// The revision that this pod is a replica of, if it is one.
    fn revision(&self) -> Option<ObjectKey> {
        let name = self.sandbox.labels.get(wellknown::LABEL_REVISION)?;
        Some(ObjectKey::new(&self.sandbox.pod.namespace, name))
    }
}

impl Pods {
    pub(crate) fn new(shared: Arc<HostContext>) -> Self {
        Self { shared, pods: Mutex::default(), changes: watch::Sender::new(0) }
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    async fn start(self: &Arc<Self>, spec: ContainerSpec) -> Result<(), RuntimeError> {
        let uid = spec.id.pod.clone();
        let (sandbox, revision) = {
            let pods = self.pods.lock();
            let pod = pods.get(&uid).ok_or_else(|| RuntimeError::NoSandbox(uid.clone()))?;
            if pod.containers.iter().any(|known| known.id == spec.id) {
                return Ok(());
            }
            (pod.sandbox.clone(), pod.revision())
        };
        let digest = component_of(&spec.image)?;
        let function = revision.and_then(|revision| self.shared.function(&revision));
        let component = match &function {
            Some(function) if function.spec.component == digest => function.component().await,
            _ => self.shared.cache.get(digest, &sandbox.pod.namespace).await,
        };
        let component = component.map_err(runtime_error)?;
        let id = spec.id.clone();
        let is_replica = sandbox.labels.contains_key(wellknown::LABEL_REVISION);
        let work = match &component.loaded().pre {
            Pre::HttpWasi0_2(_) | Pre::HttpWasi0_3(_) if is_replica => {
                Work::Replica { _component: component }
            }
            Pre::HttpWasi0_2(_) | Pre::HttpWasi0_3(_) => {
                Work::Task(service::start(self, &sandbox, spec, digest).await?)
            }
            Pre::CommandWasi0_2(_) | Pre::CommandWasi0_3(_) => {
                Work::Task(command::start(self, &sandbox, spec, component).await?)
            }
        };
        let state = ContainerState::Running { started: jiff::Timestamp::now() };
        {
            let mut pods = self.pods.lock();
            // The pod was removed, or the container started twice, meanwhile: dropping the work ends it.
            let pod = pods.get_mut(&uid).ok_or(RuntimeError::NoSandbox(uid))?;
            if pod.containers.iter().any(|known| known.id == id) {
                return Ok(());
            }
            let mut container = Container { id, state, work };
            // The task may have ended before it was listed here.
            if let Work::Task(task) = &container.work
                && let Some(exit) = task.exit()
            {
                container.end(exit);
            }
            pod.containers.push(container);
        }
        self.changed();
        Ok(())
    }

    /// Called when a container's task ends.
    fn ended(&self, id: &ContainerId, exit: ContainerExit) {
        if let Some(pod) = self.pods.lock().get_mut(&id.pod) {
            for container in pod.containers.iter_mut().filter(|container| container.id == *id) {
                container.end(exit.clone());
            }
        }
        self.changed();
    }

    async fn stop(&self, id: &ContainerId, grace: Duration) {
        let ended = {
            let mut pods = self.pods.lock();
            let container = pods
                .get_mut(&id.pod)
                .and_then(|pod| pod.containers.iter_mut().find(|container| container.id == *id));
            match container.map(|container| (&container.work, &container.id)) {
                Some((Work::Task(task), _)) => task.stop(grace),
                _ => None,
            }
        };
        match ended {
            Some(ended) => ended.wait().await,
            None => self.ended(id, ContainerExit::completed()),
        }
    }

    /// Replicas of a revision share its instances: each reports an equal part of their usage.
    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        let pods = self.pods.lock();
        let mut replicas: HashMap<ObjectKey, Vec<ContainerId>> = HashMap::new();
        let mut usage = Vec::new();
        for pod in pods.values() {
            for container in &pod.containers {
                match (&container.work, pod.revision()) {
                    (Work::Task(task), _) => usage.push((container.id.clone(), task.meter().usage())),
                    (Work::Replica { .. }, Some(revision)) => {
                        replicas.entry(revision).or_default().push(container.id.clone());
                    }
                    (Work::Replica { .. } | Work::TaskEnd, _) => {}
                }
            }
        }
        drop(pods);
        for (revision, containers) in replicas {
            let all = self.shared.function(&revision).map_or(0, |function| function.memory_bytes());
            let part = Usage { memory_bytes: all / containers.len() as u64, cpu: None };
            usage.extend(containers.into_iter().map(|id| (id, part)));
        }
        usage
    }

    fn remove(&self, uid: &PodUid) {
        let removed = self.pods.lock().remove(uid);
        let Some(revision) = removed.as_ref().and_then(Pod::revision) else { return };
        drop(removed);
        let others = self.pods.lock().values().any(|pod| pod.revision().as_ref() == Some(&revision));
        if !others && let Some(function) = self.shared.function(&revision) {
            function.drop_component();
            self.shared.unloaded(&function);
        }
    }
}

impl Container {
    fn end(&mut self, exit: ContainerExit) {
        self.work = Work::TaskEnd;
        if let ContainerState::Running { started } = self.state {
            let ContainerExit { code: exit_code, reason, message } = exit;
            let finished = jiff::Timestamp::now();
            self.state =
                ContainerState::Exited { started, finished, exit_code, reason: reason.into(), message };
        }
    }
}

/// The component that a container's image names.
fn component_of(image: &str) -> Result<Digest, RuntimeError> {
    component_of_image(image).ok_or_else(|| {
        RuntimeError::ImageName(format!(
            "the wasm runtime runs components, and {image:?} is none: name one as sha256:<64 hexadecimal digits>, \
             which mayfly artifact push prints"
        ))
    })
}

fn runtime_error(error: CallError) -> RuntimeError {
    match error {
        CallError::ComponentMissing(digest) => RuntimeError::ImageMissing(format!(
            "component {digest} is not in the artifact store: upload it with mayfly artifact push"
        )),
        CallError::ComponentUnavailable { why, .. } => RuntimeError::ImageMissing(why),
        CallError::ComponentInvalid(_) => RuntimeError::Invalid(error.to_string()),
        CallError::Overloaded { .. } => RuntimeError::NoRoom(error.to_string()),
        other => RuntimeError::Internal(other.to_string()),
    }
}

#[async_trait]
impl Runtime for WasmHost {
    fn class(&self) -> &str {
        wellknown::RUNTIME_CLASS_WASM
    }

    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError> {
        let (uid, addresses) = (sandbox.uid.clone(), sandbox.address.into_iter().collect());
        let pod = || Pod { sandbox: Arc::new(sandbox), containers: Vec::new() };
        self.pods.pods.lock().entry(uid).or_insert_with(pod);
        Ok(SandboxStatus { addresses })
    }

    async fn start_container(&self, container: ContainerSpec) -> Result<(), RuntimeError> {
        self.pods.start(container).await
    }

    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.pods.stop(id, grace).await;
        Ok(())
    }

    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let running: Vec<ContainerId> = self
            .containers(uid)
            .into_iter()
            .filter(|(_, state)| is_running(state))
            .map(|(id, _)| id)
            .collect();
        for id in running {
            self.pods.stop(&id, Duration::ZERO).await;
        }
        self.pods.remove(uid);
        self.pods.changed();
        Ok(())
    }

    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        let pods = self.pods.pods.lock();
        let containers = pods.get(uid).map(|pod| pod.containers.as_slice()).unwrap_or_default();
        containers.iter().map(|container| (container.id.clone(), container.state.clone())).collect()
    }

    fn sandboxes(&self) -> Vec<PodUid> {
        self.pods.pods.lock().keys().cloned().collect()
    }

    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        self.pods.usage()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.pods.changes.subscribe()
    }
}

fn is_running(state: &ContainerState) -> bool {
    matches!(state, ContainerState::Running { .. })
}
