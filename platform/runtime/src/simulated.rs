//! A host that runs nothing, for tests and capacity planning: containers run until they are stopped, or exit as an
//! annotation says; functions return a fixed text after a fixed time.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use mayfly_api::ObjectKey;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::{
    Answer, Body, CallError, ContainerId, ContainerSpec, ContainerState, FunctionHost, HostedFunction,
    HostedSpec, PodUid, Runtime, RuntimeError, SandboxSpec, SandboxStatus, Timings, Usage,
};

/// A pod annotation: containers exit with this code as soon as they have started.
pub const ANNOTATION_EXIT_CODE: &str = "simulated.mayfly.dev/exit-code";
/// A pod annotation: containers cannot start, with this text as the reason.
pub const ANNOTATION_START_ERROR: &str = "simulated.mayfly.dev/start-error";
/// A pod annotation: the processes of containers cannot be started, with this text as the reason.
pub const ANNOTATION_PROCESS_ERROR: &str = "simulated.mayfly.dev/process-error";

/// A runtime whose pods use no resources.
pub struct SimulatedRuntime {
    class: String,
    pods: Mutex<HashMap<PodUid, SimulatedPod>>,
    changes: watch::Sender<u64>,
}

impl std::fmt::Debug for SimulatedRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedRuntime").field("class", &self.class).finish_non_exhaustive()
    }
}

struct SimulatedPod {
    sandbox: SandboxSpec,
    containers: Vec<(ContainerId, ContainerState)>,
}

impl SimulatedRuntime {
    /// `class` is the runtime class of the accepted pods.
    pub fn new(class: impl Into<String>) -> Self {
        Self { class: class.into(), pods: Mutex::default(), changes: watch::Sender::new(0) }
    }

    /// Ends a running container as if its program had exited.
    pub fn exit(&self, id: &ContainerId, exit_code: i32) {
        if let Some(pod) = self.pods.lock().get_mut(&id.pod) {
            for (known, state) in &mut pod.containers {
                if known == id {
                    end(state, exit_code, if exit_code == 0 { "Completed" } else { "Error" });
                }
            }
        }
        self.changed();
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }
}

fn end(state: &mut ContainerState, exit_code: i32, reason: &str) {
    if let ContainerState::Running { started } = *state {
        *state = ContainerState::Exited {
            started,
            finished: jiff::Timestamp::now(),
            exit_code,
            reason: reason.into(),
            message: String::new(),
        };
    }
}

#[async_trait]
impl Runtime for SimulatedRuntime {
    fn class(&self) -> &str {
        &self.class
    }

    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError> {
        let mut pods = self.pods.lock();
        let (uid, addresses) = (sandbox.uid.clone(), sandbox.address.into_iter().collect());
        pods.entry(uid).or_insert(SimulatedPod { sandbox, containers: Vec::new() });
        Ok(SandboxStatus { addresses })
    }

    async fn start_container(&self, container: ContainerSpec) -> Result<(), RuntimeError> {
        {
            let mut pods = self.pods.lock();
            let uid = &container.id.pod;
            let pod = pods.get_mut(uid).ok_or_else(|| RuntimeError::NoSandbox(uid.clone()))?;
            if let Some(why) = pod.sandbox.annotations.get(ANNOTATION_START_ERROR) {
                return Err(RuntimeError::Invalid(why.clone()));
            }
            if let Some(why) = pod.sandbox.annotations.get(ANNOTATION_PROCESS_ERROR) {
                return Err(RuntimeError::StartFailed(why.clone()));
            }
            if pod.containers.iter().any(|(known, _)| *known == container.id) {
                return Ok(());
            }
            let mut state = ContainerState::Running { started: jiff::Timestamp::now() };
            if let Some(code) = pod.sandbox.annotations.get(ANNOTATION_EXIT_CODE) {
                let code = code.parse().unwrap_or(1);
                end(&mut state, code, if code == 0 { "Completed" } else { "Error" });
            }
            pod.containers.push((container.id, state));
        }
        self.changed();
        Ok(())
    }

    async fn stop_container(&self, id: &ContainerId, _: Duration) -> Result<(), RuntimeError> {
        self.exit(id, 137);
        Ok(())
    }

    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.pods.lock().remove(uid);
        self.changed();
        Ok(())
    }

    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        self.pods.lock().get(uid).map(|pod| pod.containers.clone()).unwrap_or_default()
    }

    fn sandboxes(&self) -> Vec<PodUid> {
        self.pods.lock().keys().cloned().collect()
    }

    /// Nothing runs, so nothing is used.
    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        let pods = self.pods.lock();
        let containers = pods.values().flat_map(|pod| &pod.containers);
        let running = containers.filter(|(_, state)| matches!(state, ContainerState::Running { .. }));
        let none = Usage { memory_bytes: 0, cpu: Some(Duration::ZERO) };
        running.map(|(id, _)| (id.clone(), none)).collect()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// Functions that return their revision's name after `delay`.
#[derive(Default)]
pub struct SimulatedFunctions {
    delay: Duration,
    known: Mutex<HashMap<ObjectKey, Arc<SimulatedFunction>>>,
}

impl std::fmt::Debug for SimulatedFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedFunctions").field("delay", &self.delay).finish_non_exhaustive()
    }
}

/// One simulated revision, with counters for tests.
pub struct SimulatedFunction {
    spec: HostedSpec,
    delay: Duration,
    loaded: AtomicBool,
    loads: AtomicU64,
    running: Arc<AtomicUsize>,
}

impl std::fmt::Debug for SimulatedFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedFunction").field("delay", &self.delay).finish_non_exhaustive()
    }
}

impl SimulatedFunctions {
    /// Each call takes `delay` of Tokio's clock, which tests can pause.
    pub fn new(delay: Duration) -> Self {
        Self { delay, known: Mutex::default() }
    }

    /// The handle that was returned for a revision.
    pub fn function(&self, revision: &ObjectKey) -> Option<Arc<SimulatedFunction>> {
        self.known.lock().get(revision).cloned()
    }
}

impl FunctionHost for SimulatedFunctions {
    fn prepare(&self, spec: HostedSpec) -> Arc<dyn HostedFunction> {
        let mut known = self.known.lock();
        if let Some(function) = known.get(&spec.revision)
            && function.spec == spec
        {
            return function.clone();
        }
        let function = Arc::new(SimulatedFunction {
            spec: spec.clone(),
            delay: self.delay,
            loaded: AtomicBool::new(false),
            loads: AtomicU64::new(0),
            running: Arc::default(),
        });
        known.insert(spec.revision, function.clone());
        function
    }

    fn forget(&self, revision: &ObjectKey) {
        self.known.lock().remove(revision);
    }
}

impl SimulatedFunction {
    /// Calls that have started and have neither ended nor been dropped.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// The number of transitions from cold to warm.
    pub fn loads(&self) -> u64 {
        self.loads.load(Ordering::SeqCst)
    }

    fn warm(&self) -> bool {
        let warm = self.loaded.swap(true, Ordering::SeqCst);
        if !warm {
            self.loads.fetch_add(1, Ordering::SeqCst);
        }
        warm
    }
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl HostedFunction for SimulatedFunction {
    fn call(
        &self,
        request: Request<Body>,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Answer, CallError>> {
        let cold = !self.warm();
        let (delay, limit) = (self.delay, self.spec.timeout);
        let text = format!("{} {} {}\n", self.spec.revision, request.method(), request.uri());
        self.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.running.clone());
        Box::pin(async move {
            let _running = running;
            let started = Instant::now();
            if tokio::time::timeout_at(deadline, tokio::time::sleep(delay)).await.is_err() {
                return Err(CallError::TimedOut { limit });
            }
            let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
            let timings = Timings { cold, run: started.elapsed(), ..Timings::default() };
            Ok(Answer { response: Response::new(body), timings })
        })
    }

    fn load(&self) -> BoxFuture<'static, Result<(), CallError>> {
        self.warm();
        Box::pin(std::future::ready(Ok(())))
    }

    fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::SeqCst)
    }

    fn unload(&self) {
        self.loaded.store(false, Ordering::SeqCst);
    }
}
