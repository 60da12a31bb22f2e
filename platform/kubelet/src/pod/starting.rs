//! Starts the containers of a pod, one at a time.

use std::{sync::Arc, time::Duration};

use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Container, Pod},
        jiff::Timestamp,
    },
};
use mayfly_informer::reconcile::Outcome;
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, DeviceError, PodUid, Runtime, RuntimeError,
};
use tokio::time::Instant;

use super::{
    container::{self, EnvironmentSources},
    devices,
    fields::NodeView,
    hooks::{Hook, LifecycleMoment},
    local::{ContainerPhase, LocalPod, REASON_CONFIG, REASON_CREATING, REASON_PULL, REASON_RUN},
    plan, service_links,
    worker::Worker,
};
use crate::{
    job::{self, TransferError},
    volumes::{self, ContainerVolumeError, VolumeSources},
};

/// A start that takes longer than this is reported in the status before it has completed.
const SLOW_START: Duration = Duration::from_millis(100);
/// The reason in `kubectl get pods` while the plugin of a device is not available.
const REASON_DEVICES: &str = "WaitingForDevices";
/// The reason of a pod whose inputs cannot be fetched.
const REASON_INPUTS: &str = "ArtifactNotFetched";
/// The pause before a pod with an unknown runtime class is retried.
const NO_RUNTIME_RETRY: Duration = Duration::from_secs(300);

impl Worker {
    /// Starts one container, or records why it cannot be started.
    pub(super) async fn start(
        &self,
        spec: &Container,
        pod: &Pod,
        local: &mut LocalPod,
        runtime: &Arc<dyn Runtime>,
    ) {
        if !self.ensure_image(spec, pod, local, &**runtime).await {
            return;
        }
        let attempt = local.container(&spec.name).attempt;
        self.forget_old_log(&local.uid, &spec.name, attempt).await;
        if container::names_sources(spec) || volumes::names_sources(pod) {
            self.sources.follow().await;
        }
        self.services.synced().await;
        let services = self.services.list();
        let addresses: Vec<_> = local.address.iter().chain(&local.more_addresses).copied().collect();
        let sources = EnvironmentSources {
            objects: &self.sources,
            node: self.view(),
            addresses: &addresses,
            services: service_links::variables(pod, services.iter().map(|service| &**service)),
        };
        let resolved = container::resolve(pod, spec, attempt, sources, &self.logs);
        let resolved = match resolved {
            Ok(resolved) => match self.with_volumes(pod, spec, local, resolved).await {
                Ok(resolved) => Ok(resolved),
                Err(ContainerVolumeError::Config(why)) => Err(why),
                Err(ContainerVolumeError::Setup(why)) => {
                    self.events.warning(pod, "FailedMount", why.clone());
                    let container = local.containers.entry(spec.name.clone()).or_default();
                    container.start_failed(REASON_CREATING, why, Instant::now());
                    return;
                }
            },
            Err(error) => Err(error.to_string()),
        };
        let resolved = match resolved {
            Ok(resolved) => {
                let filled =
                    Box::pin(self.with_progress_status(pod, local, self.with_files(pod, local, resolved)));
                match self.unless_deleted(pod, filled).await {
                    None => return,
                    Some(Ok(resolved)) => Ok(resolved),
                    Some(Err(TransferError::Transient(why))) => Err(why),
                    Some(Err(TransferError::Permanent(why))) => {
                        self.events.warning(pod, REASON_INPUTS, why.clone());
                        local.ended.get_or_insert((REASON_INPUTS, why));
                        return;
                    }
                }
            }
            Err(why) => Err(why),
        };
        let resolved = match resolved {
            Ok(resolved) => {
                let given = self.with_progress_status(pod, local, self.with_devices(pod, resolved));
                match self.unless_deleted(pod, Box::pin(given)).await {
                    None => return,
                    Some(Ok(resolved)) => Ok(resolved),
                    Some(Err(DeviceError::NotReady(why))) => Err((REASON_DEVICES, why)),
                    Some(Err(DeviceError::Refused(why))) => {
                        let message = format!("Allocate failed due to {why}, which is unexpected");
                        self.events.warning(pod, "UnexpectedAdmissionError", message.clone());
                        local.ended.get_or_insert(("UnexpectedAdmissionError", message));
                        return;
                    }
                }
            }
            Err(message) => Err((REASON_CONFIG, message)),
        };
        let (reason, message) = match resolved {
            Err(waiting) => waiting,
            Ok(resolved) => match self
                .unless_deleted(pod, self.with_progress_status(pod, local, runtime.start_container(resolved)))
                .await
            {
                None => return,
                Some(Ok(())) => {
                    self.events.normal(pod, "Created", format!("Created container: {}", spec.name));
                    let id = ContainerId { pod: local.uid.clone(), name: spec.name.clone(), attempt };
                    let known = runtime.containers(&local.uid);
                    let is_queued = |(of, state): &(ContainerId, ContainerState)| {
                        *of == id && matches!(state, ContainerState::Waiting { .. })
                    };
                    if known.iter().any(is_queued) {
                        // The runtime reports the start later. There are no hooks: such a host runs no commands.
                        local.observe(&known);
                        return;
                    }
                    self.events.normal(pod, "Started", format!("Started container {}", spec.name));
                    Box::pin(self.post_start(spec, pod, local, runtime, id)).await;
                    local.containers.entry(spec.name.clone()).or_default().started(Timestamp::now());
                    return;
                }
                Some(Err(RuntimeError::ImageMissing(why))) => {
                    self.pull_failed(spec, pod, local, &why, false);
                    return;
                }
                Some(Err(RuntimeError::StartFailed(why))) => {
                    self.events.normal(pod, "Created", format!("Created container: {}", spec.name));
                    self.events.warning(pod, "Failed", format!("Error: {why}"));
                    let container = local.containers.entry(spec.name.clone()).or_default();
                    container.process_failed(why, Timestamp::now());
                    return;
                }
                Some(Err(error)) => {
                    local.sandbox &= !matches!(error, RuntimeError::NoSandbox(_));
                    (waiting_reason(&error), error.to_string())
                }
            },
        };
        self.events.warning(pod, "Failed", format!("Error: {message}"));
        let container = local.containers.entry(spec.name.clone()).or_default();
        container.start_failed(reason, message, Instant::now());
    }

    /// Runs a container's postStart hook. A container whose hook fails is killed; its restart policy decides whether it
    /// is restarted.
    async fn post_start(
        &self,
        spec: &Container,
        pod: &Pod,
        local: &LocalPod,
        runtime: &Arc<dyn Runtime>,
        id: ContainerId,
    ) {
        let hook = Hook::of(LifecycleMoment::PostStart, spec, id.clone(), local, runtime);
        let Some(hook) = hook else { return };
        let mut changes = runtime.changes();
        let ended = async {
            let is_running = || {
                let known = runtime.containers(&id.pod);
                known
                    .iter()
                    .any(|(known, state)| *known == id && matches!(state, ContainerState::Running { .. }))
            };
            while is_running() && changes.changed().await.is_ok() {}
        };
        let hooked = async {
            tokio::select! {
                biased;
                done = hook.run() => done,
                () = ended => Err("the container ended before it".into()),
            }
        };
        let done = Box::pin(self.unless_deleted(pod, self.with_progress_status(pod, local, hooked))).await;
        let Some(Err(why)) = done else { return };
        self.events.warning(pod, "FailedPostStartHook", format!("PostStartHook failed: {why}"));
        self.events.normal(pod, "Killing", "FailedPostStartHook");
        let grace = pod.spec.as_ref().map(plan::grace_of).unwrap_or_default();
        if let Some(Err(error)) = self.unless_deleted(pod, runtime.stop_container(&id, grace)).await {
            tracing::warn!(container = %id, %error, "could not end a container whose postStart hook failed");
        }
    }

    /// Keeps the logs of a container's current and previous attempt, as upstream keeps one dead container.
    async fn forget_old_log(&self, pod: &PodUid, name: &str, attempt: u32) {
        let Some(old) = attempt.checked_sub(2) else { return };
        let id = ContainerId { pod: pod.clone(), name: name.to_owned(), attempt: old };
        let layout = self.logs.clone();
        let remove = move || {
            if let Err(error) = layout.remove_container(&id) {
                tracing::warn!(container = %id, %error, "could not remove an old log");
            }
        };
        // Fails only when the Tokio runtime shuts down.
        let _ = tokio::task::spawn_blocking(remove).await;
    }

    /// Adds the container's volumes.
    async fn with_volumes(
        &self,
        pod: &Pod,
        spec: &Container,
        local: &LocalPod,
        mut container: ContainerSpec,
    ) -> Result<ContainerSpec, ContainerVolumeError> {
        let uses_none = spec.volume_mounts.as_ref().is_none_or(Vec::is_empty)
            && spec.volume_devices.as_ref().is_none_or(Vec::is_empty);
        if uses_none {
            return Ok(container);
        }
        let none = || "this node does not support volumes".to_owned();
        let volumes = self.volumes.clone().ok_or_else(none)?;
        let (pod, spec, address) = (pod.clone(), spec.clone(), local.address);
        let (objects, environment) = (self.sources.clone(), container.env.clone());
        let (name, host, allocatable) = (self.node.clone(), self.host_address, self.allocatable.clone());
        let tokens = self.tokens.of_pod(&pod).await.map_err(ContainerVolumeError::Setup)?;
        let claimed = self.claims.of_pod(&pod).await.map_err(ContainerVolumeError::Setup)?;
        let made = tokio::task::spawn_blocking(move || {
            let node = NodeView { name: &name, address: host, allocatable: &allocatable };
            let sources =
                VolumeSources { objects: &objects, node, address, tokens: &tokens, claimed: &claimed };
            let mounts = volumes.mounts(&pod, &spec, &environment, &sources)?;
            Ok::<_, ContainerVolumeError>((mounts, volumes.devices(&pod, &spec, &sources)?))
        });
        let (mounts, devices) = made.await.map_err(|error| error.to_string())??;
        container.process.mounts = mounts;
        container.process.devices = devices;
        Ok(container)
    }

    fn view(&self) -> NodeView<'_> {
        NodeView { name: &self.node, address: self.host_address, allocatable: &self.allocatable }
    }

    /// Updates the volumes of a running pod.
    pub(crate) async fn refresh_volumes(&self, pod: &std::sync::Arc<Pod>) {
        let Some(volumes) = self.volumes.clone().filter(|_| volumes::names_sources(pod)) else { return };
        self.sources.follow().await;
        let address = self.local.lock().get(&ObjectKey::of(&**pod)).and_then(|local| local.address);
        let (pod, objects) = (pod.clone(), self.sources.clone());
        let (name, host, allocatable) = (self.node.clone(), self.host_address, self.allocatable.clone());
        let tokens = match self.tokens.of_pod(&pod).await {
            Ok(tokens) => tokens,
            Err(why) => {
                tracing::warn!(pod = %ObjectKey::of(&*pod), why, "could not renew the tokens of a running pod; keeping the old ones");
                return;
            }
        };
        // Only the size of a claim's volume is refreshed, so missing claims do not matter.
        let claimed = self.claims.of_pod(&pod).await.unwrap_or_default();
        let refresh = move || {
            let node = NodeView { name: &name, address: host, allocatable: &allocatable };
            let sources =
                VolumeSources { objects: &objects, node, address, tokens: &tokens, claimed: &claimed };
            volumes.refresh(&pod, &sources);
        };
        // Fails only when the Tokio runtime shuts down.
        let _ = tokio::task::spawn_blocking(refresh).await;
    }

    /// Adds the container's devices, which are allocated for the whole pod at once.
    async fn with_devices(
        &self,
        pod: &Pod,
        mut container: ContainerSpec,
    ) -> Result<ContainerSpec, DeviceError> {
        let Some(claims) = devices::claims(pod) else { return Ok(container) };
        let devices = self.devices.as_ref();
        let devices =
            devices.ok_or_else(|| DeviceError::NotReady("this node has no device manager".into()))?;
        let given = devices.prepare(&claims, &container.id.name).await?;
        devices::apply(given, &mut container);
        Ok(container)
    }

    /// Adds the folders of a job's inputs and outputs.
    async fn with_files(
        &self,
        pod: &Pod,
        local: &LocalPod,
        mut container: ContainerSpec,
    ) -> Result<ContainerSpec, TransferError> {
        if job::is_job(pod) {
            let none =
                || TransferError::Transient("this node does not run jobs with inputs or outputs".into());
            let jobs = self.jobs.as_ref().ok_or_else(none)?;
            let afresh = container.id.attempt > 0;
            self.sources.follow().await;
            container.files = Some(jobs.stage(pod, &local.uid, afresh, &self.sources).await?);
        }
        Ok(container)
    }

    /// Runs `work`, and writes the status `ContainerCreating` when it takes longer than [`SLOW_START`].
    pub(super) async fn with_progress_status<T>(
        &self,
        pod: &Pod,
        local: &LocalPod,
        work: impl Future<Output = T>,
    ) -> T {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = tokio::time::sleep(SLOW_START) => {}
        }
        let (done, told) = tokio::join!(work, self.write_status(pod, local, Timestamp::now()));
        if let Err(error) = told {
            tracing::debug!(pod = %ObjectKey::of(pod), %error, "could not write the status of a starting pod");
        }
        done
    }

    /// Runs work that may take long, and drops it when the pod is deleted: the sandbox is removed then.
    pub(super) async fn unless_deleted<T>(&self, pod: &Pod, work: impl Future<Output = T>) -> Option<T> {
        let key = ObjectKey::of(pod);
        let mut deletions = self.deletions.subscribe();
        let deleted = async {
            loop {
                let known = self.pods.get(&key).filter(|known| known.metadata.uid == pod.metadata.uid);
                if known.is_none_or(|known| known.metadata.deletion_timestamp.is_some()) {
                    return;
                }
                // Cannot fail: the sender lives in `self`.
                let _ = deletions.changed().await;
            }
        };
        tokio::select! {
            biased;
            done = work => Some(done),
            () = deleted => None,
        }
    }

    /// No runtime of this node can run the pod: reports it, and releases the pod when it is deleted.
    pub(super) async fn no_runtime(&self, pod: &Pod) -> kube::Result<Outcome> {
        let message = format!("Failed to create pod sandbox: {}", self.runtimes.refusal(pod));
        if pod.metadata.deletion_timestamp.is_some() {
            self.remove_object(pod).await?;
            return Ok(Outcome::Done);
        }
        self.events.warning(pod, "FailedCreatePodSandBox", message.clone());
        let mut local = LocalPod::from_status(pod, &[]);
        for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
            let waiting =
                ContainerPhase::Waiting { reason: "ContainerCreating".into(), message: message.clone() };
            local.containers.entry(container.name.clone()).or_default().now = waiting;
        }
        self.write_status(pod, &local, Timestamp::now()).await?;
        Ok(Outcome::RequeueAfter(NO_RUNTIME_RETRY))
    }
}

/// The reason in `kubectl get pods` for a container that could not be started.
fn waiting_reason(error: &RuntimeError) -> &'static str {
    match error {
        RuntimeError::ImageMissing(_) => REASON_PULL,
        RuntimeError::ImageName(_) => "InvalidImageName",
        RuntimeError::NoSandbox(_) => "ContainerCreating",
        RuntimeError::NoRoom(_) => "OutOfmemory",
        RuntimeError::ConfigRefused(_) => REASON_CONFIG,
        // The runtime refuses this component.
        RuntimeError::Invalid(_) => "CreateContainerError",
        RuntimeError::StartFailed(_) | RuntimeError::Internal(_) => REASON_RUN,
    }
}
