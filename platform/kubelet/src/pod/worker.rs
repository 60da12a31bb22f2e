//! Carries out one pod's steps until there is nothing to do.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use mayfly_api::{
    ObjectKey,
    job_io::ANNOTATION_OUTPUTS,
    k8s::{
        api::core::v1::{Container, Pod},
        jiff::{SignedDuration, Timestamp},
    },
};
use mayfly_informer::{EventRecorder, Informer, reconcile::Outcome};
use mayfly_runtime::{ContainerSpec, PodUid, Runtime, RuntimeError, logs::LogLayout};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::watch;

use super::{
    container::{self, Sources},
    local::{LocalPod, Now, REASON_ENVIRONMENT},
    plan::{Step, is_over, needs_collecting, plan},
    status,
};
use crate::{
    addresses::Addresses,
    job::{self, JobFiles},
};

/// Steps for one pod in a row; a pod that needs more comes back at once.
const STEPS_MAX: usize = 64;
/// A start that takes longer than this is told before it has ended.
const SLOW_START: Duration = Duration::from_millis(100);
/// How long to wait for a runtime class that this node does not have.
const NO_RUNTIME_RETRY: Duration = Duration::from_secs(300);

/// What all pods of the node share.
pub(crate) struct Worker {
    pub(crate) node: String,
    pub(crate) client: Client,
    pub(crate) pods: Informer<Pod>,
    pub(crate) sources: Sources,
    pub(crate) runtimes: HashMap<String, Arc<dyn Runtime>>,
    pub(crate) logs: LogLayout,
    pub(crate) jobs: Option<JobFiles>,
    pub(crate) events: EventRecorder,
    pub(crate) local: Mutex<HashMap<ObjectKey, LocalPod>>,
    pub(crate) addresses: Mutex<Addresses>,
    /// Changes when a pod of this node is deleted, or its deletion is hurried.
    pub(crate) deletions: watch::Sender<u64>,
}

impl Worker {
    /// Brings one pod closer to what it should be.
    pub(crate) async fn reconcile(&self, key: ObjectKey) -> kube::Result<Outcome> {
        let pod = self.pods.get(&key).filter(|pod| self.is_mine(pod));
        self.forget_replaced(&key, pod.as_deref()).await;
        let Some(mut pod) = pod else { return Ok(Outcome::Done) };
        let Some(runtime) = self.runtime(&pod) else { return self.no_runtime(&pod).await };
        let mut local = self.local_of(&key, &pod, &*runtime);
        for _ in 0..STEPS_MAX {
            local.observe(&runtime.containers(&local.uid));
            let now = Timestamp::now();
            match plan(&pod, &local, now) {
                Step::Wait(at) => {
                    self.keep(&key, &local);
                    self.write_status(&pod, &local, now).await?;
                    return Ok(at.map_or(Outcome::Done, |at| Outcome::RequeueAfter(until(at))));
                }
                Step::Terminate { grace } => {
                    return self.terminate(&key, &pod, &local, &*runtime, grace).await;
                }
                Step::Collect => self.collect(&key, &pod, &mut local).await?,
                step => self.act(step, &pod, &mut local, &*runtime).await,
            }
            self.keep(&key, &local);
            // The step may have taken long: what it says now counts.
            match self.pods.get(&key).filter(|known| known.metadata.uid == pod.metadata.uid) {
                Some(known) => pod = known,
                None => return Ok(Outcome::RequeueAfter(Duration::ZERO)),
            }
        }
        self.write_status(&pod, &local, Timestamp::now()).await?;
        Ok(Outcome::RequeueAfter(Duration::ZERO))
    }

    pub(crate) fn is_mine(&self, pod: &Pod) -> bool {
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(self.node.as_str())
    }

    fn runtime(&self, pod: &Pod) -> Option<Arc<dyn Runtime>> {
        let class = pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref()).unwrap_or("");
        self.runtimes.get(class).cloned()
    }

    fn keep(&self, key: &ObjectKey, local: &LocalPod) {
        self.local.lock().insert(key.clone(), local.clone());
    }

    fn local_of(&self, key: &ObjectKey, pod: &Pod, runtime: &dyn Runtime) -> LocalPod {
        if let Some(local) = self.local.lock().get(key) {
            return local.clone();
        }
        let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
        let mut local = LocalPod::learn(pod, &runtime.containers(&uid));
        local.sandbox |= runtime.sandboxes().contains(&uid);
        let mut addresses = self.addresses.lock();
        if let Some(address) = local.address {
            addresses.claim(&uid, address);
        }
        local.address = addresses.of(&uid);
        local
    }

    /// The object is gone, or another one has its name: what still runs of the old one is ended at once.
    async fn forget_replaced(&self, key: &ObjectKey, pod: Option<&Pod>) {
        let uid = pod.and_then(|pod| pod.metadata.uid.as_deref());
        let old = self.local.lock().get(key).filter(|local| uid != Some(local.uid.0.as_str())).cloned();
        let Some(old) = old else { return };
        for runtime in self.runtimes.values() {
            if runtime.sandboxes().contains(&old.uid)
                && let Err(error) = runtime.remove_sandbox(&old.uid).await
            {
                tracing::warn!(pod = %key, uid = %old.uid, %error, "could not remove what ran of a deleted pod");
            }
        }
        self.addresses.lock().release(&old.uid);
        self.local.lock().remove(key);
        if let Some(jobs) = &self.jobs {
            jobs.remove(&old.uid).await;
        }
        let folder = self.logs.pod(&old.uid.0);
        // Function replicas and pods that never started have none.
        let _ = tokio::fs::remove_dir_all(folder).await;
    }

    /// Ends what the runtimes have of pods that neither the API nor this worker knows.
    pub(crate) async fn remove_strangers(&self) {
        let known = || -> HashSet<String> {
            let local = self.local.lock();
            let bound = self.pods.list().into_iter().filter(|pod| self.is_mine(pod));
            let bound = bound.filter_map(|pod| pod.metadata.uid.clone());
            bound.chain(local.values().map(|pod| pod.uid.0.clone())).collect()
        };
        if let Some(jobs) = &self.jobs {
            jobs.sweep(&known()).await;
        }
        for runtime in self.runtimes.values() {
            let sandboxes = runtime.sandboxes();
            let known = known();
            for uid in sandboxes.iter().filter(|uid| !known.contains(&uid.0)) {
                tracing::info!(%uid, "ending a pod that is not in the API any more");
                if let Err(error) = runtime.remove_sandbox(uid).await {
                    tracing::warn!(%uid, %error, "could not remove a sandbox without a pod");
                }
            }
        }
    }

    async fn act(&self, step: Step, pod: &Pod, local: &mut LocalPod, runtime: &dyn Runtime) {
        match step {
            Step::CreateSandbox => {
                let made = runtime.create_sandbox(container::sandbox(pod, local.address));
                match self.unless_deleted(pod, made).await {
                    None => {}
                    Some(Ok(())) => local.sandbox_made(),
                    Some(Err(error)) => {
                        let message = format!("Failed to create pod sandbox: {error}");
                        self.events.warning(pod, "FailedCreatePodSandBox", message.clone());
                        let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice());
                        local.sandbox_failed(containers.unwrap_or_default(), &message, Timestamp::now());
                    }
                }
            }
            Step::Start(container) => self.start(&container, pod, local, runtime).await,
            Step::Restart(name) => {
                let title = format!("container={name} pod={}", ObjectKey::of(pod));
                local.containers.entry(name).or_default().restart_later(&title);
            }
            Step::End { reason, message } => {
                self.events.warning(pod, reason, message.clone());
                local.ended = Some((reason, message));
            }
            Step::Finish => {
                self.stop_all(local, runtime, Duration::ZERO).await;
                local.observe(&runtime.containers(&local.uid));
                self.remove_sandbox(local, runtime).await;
            }
            Step::Collect | Step::Terminate { .. } | Step::Wait(_) => {}
        }
    }

    async fn start(&self, spec: &Container, pod: &Pod, local: &mut LocalPod, runtime: &dyn Runtime) {
        let attempt = local.container(&spec.name).attempt;
        let resolved =
            container::resolve(pod, spec, attempt, local.address, &self.node, &self.sources, &self.logs);
        let resolved = match resolved {
            Ok(resolved) => self.with_files(pod, local, resolved).await,
            Err(error) => Err(error.to_string()),
        };
        let (reason, message) = match resolved {
            Err(message) => (REASON_ENVIRONMENT, message),
            Ok(resolved) => match self
                .unless_deleted(pod, self.slowly(pod, local, runtime.start_container(resolved)))
                .await
            {
                None => return,
                Some(Ok(())) => {
                    local.containers.entry(spec.name.clone()).or_default().started(Timestamp::now());
                    self.events.normal(pod, "Started", format!("Started container {}", spec.name));
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
        container.start_failed(reason, message, Timestamp::now());
    }

    /// A job's container gets its files.
    async fn with_files(
        &self,
        pod: &Pod,
        local: &LocalPod,
        mut container: ContainerSpec,
    ) -> Result<ContainerSpec, String> {
        if job::is_job(pod) {
            let jobs =
                self.jobs.as_ref().ok_or("this node keeps no artifacts, and runs no job that has any")?;
            let afresh = container.id.attempt > 0;
            container.files = Some(jobs.stage(pod, &local.uid, afresh).await?);
        }
        Ok(container)
    }

    /// Takes in what a job left, and names it on the pod, before the pod is told to be over.
    async fn collect(&self, key: &ObjectKey, pod: &Pod, local: &mut LocalPod) -> kube::Result<()> {
        let Some(jobs) = &self.jobs else {
            local.collected = true;
            return Ok(());
        };
        match job::collect(jobs, &local.uid, ended(pod, local)).await {
            Ok(collected) => {
                let annotations = json!({ANNOTATION_OUTPUTS: json!(collected).to_string()});
                let patch = json!({"metadata": {"uid": local.uid.0, "annotations": annotations}});
                let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
                match api.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                    Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
                    result => drop(result?),
                }
                jobs.remove(&local.uid).await;
            }
            Err(why) => {
                let message = format!("Error: what the job left could not be stored: {why}");
                self.events.warning(pod, "FailedCollect", message);
            }
        }
        local.collected = true;
        Ok(())
    }

    /// Tells the pod's readers that its containers are being created, when that takes long enough to wonder.
    async fn slowly<T>(&self, pod: &Pod, local: &LocalPod, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = tokio::time::sleep(SLOW_START) => {}
        }
        let (done, told) = tokio::join!(work, self.write_status(pod, local, Timestamp::now()));
        if let Err(error) = told {
            tracing::debug!(pod = %ObjectKey::of(pod), %error, "could not write that a pod is starting");
        }
        done
    }

    /// Does something that may take long, and gives it up when the pod is deleted: its sandbox goes then.
    async fn unless_deleted<T>(&self, pod: &Pod, work: impl Future<Output = T>) -> Option<T> {
        let key = ObjectKey::of(pod);
        let mut deletions = self.deletions.subscribe();
        let deleted = async {
            loop {
                let known = self.pods.get(&key).filter(|known| known.metadata.uid == pod.metadata.uid);
                if known.is_none_or(|known| known.metadata.deletion_timestamp.is_some()) {
                    return;
                }
                // The sender lives in `self`.
                let _ = deletions.changed().await;
            }
        };
        tokio::select! {
            biased;
            done = work => Some(done),
            () = deleted => None,
        }
    }

    /// Waits until the pod has to be gone earlier than `ends`; gives the new grace.
    async fn hurried(&self, pod: &Pod, ends: Option<Timestamp>) -> Duration {
        let key = ObjectKey::of(pod);
        let mut deletions = self.deletions.subscribe();
        loop {
            let known = self.pods.get(&key).filter(|known| known.metadata.uid == pod.metadata.uid);
            let Some(known) = known else { return Duration::ZERO };
            let now_ends = known.metadata.deletion_timestamp.as_ref().map(|time| time.0);
            if now_ends < ends {
                return now_ends.map_or(Duration::ZERO, until);
            }
            // The sender lives in `self`.
            let _ = deletions.changed().await;
        }
    }

    /// Ends what runs, within the grace or less if somebody hurries.
    async fn stop_gracefully(&self, pod: &Pod, local: &LocalPod, runtime: &dyn Runtime, grace: Duration) {
        let mut grace = grace;
        let mut ends = pod.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        loop {
            tokio::select! {
                biased;
                () = self.stop_all(local, runtime, grace) => return,
                less = self.hurried(pod, ends) => {
                    grace = less;
                    ends = Some(Timestamp::now().saturating_add(SignedDuration::try_from(less).unwrap_or_default()).unwrap_or_default());
                    if less.is_zero() {
                        return self.stop_all(local, runtime, Duration::ZERO).await;
                    }
                }
            }
        }
    }

    async fn stop_all(&self, local: &LocalPod, runtime: &dyn Runtime, grace: Duration) {
        let running = runtime.containers(&local.uid).into_iter();
        let running = running
            .filter(|(_, state)| matches!(state, mayfly_runtime::ContainerState::Running { .. }))
            .map(|(id, _)| async move {
                if let Err(error) = runtime.stop_container(&id, grace).await {
                    tracing::warn!(container = %id, %error, "could not stop a container");
                }
            });
        futures::future::join_all(running).await;
    }

    async fn remove_sandbox(&self, local: &mut LocalPod, runtime: &dyn Runtime) {
        if let Err(error) = runtime.remove_sandbox(&local.uid).await {
            tracing::warn!(uid = %local.uid, %error, "could not remove a sandbox");
        }
        local.sandbox = false;
    }

    async fn terminate(
        &self,
        key: &ObjectKey,
        pod: &Pod,
        local: &LocalPod,
        runtime: &dyn Runtime,
        grace: Duration,
    ) -> kube::Result<Outcome> {
        let runs = local.containers.values().any(|container| matches!(container.now, Now::Running { .. }));
        if runs {
            self.events.normal(pod, "Killing", "Stopping the pod's containers");
        }
        self.stop_gracefully(pod, local, runtime, grace).await;
        let mut local = local.clone();
        local.observe(&runtime.containers(&local.uid));
        self.remove_sandbox(&mut local, runtime).await;
        if needs_collecting(pod, &local) {
            self.collect(key, pod, &mut local).await?;
        }
        self.keep(key, &local);
        if pod.metadata.finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty()) {
            // Its object stays for somebody who wants to know how it ended.
            let over = pod.spec.as_ref().is_some_and(|spec| is_over(spec, &local));
            if !over {
                local.ended.get_or_insert(("Terminated", "The pod was deleted".into()));
            }
            self.write_status(pod, &local, Timestamp::now()).await?;
            self.keep(key, &local);
            if pod.metadata.deletion_grace_period_seconds == Some(0) {
                return Ok(Outcome::Done);
            }
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let preconditions = Preconditions { uid: Some(local.uid.0.clone()), resource_version: None };
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(preconditions),
            ..Default::default()
        };
        match api.delete(&key.name, &params).await {
            Ok(_) => Ok(Outcome::Done),
            // Gone already, or replaced: then the informer says so.
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {
                Ok(Outcome::Done)
            }
            Err(error) => Err(error),
        }
    }

    async fn no_runtime(&self, pod: &Pod) -> kube::Result<Outcome> {
        let class = pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref()).unwrap_or("");
        let have: Vec<_> = self.runtimes.keys().map(String::as_str).collect();
        let message = if class.is_empty() {
            format!(
                "Failed to create pod sandbox: this node runs no OCI containers (its runtime classes: {}); set \
                 spec.runtimeClassName: wasm for a wasm component",
                have.join(", ")
            )
        } else {
            format!(
                "Failed to create pod sandbox: no runtime for {class:?} is configured (there are: {})",
                have.join(", ")
            )
        };
        if pod.metadata.deletion_timestamp.is_some() {
            let key = ObjectKey::of(pod);
            let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
            let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
            return match api.delete(&key.name, &params).await {
                Err(error) if !matches!(&error, kube::Error::Api(status) if status.is_not_found()) => {
                    Err(error)
                }
                _ => Ok(Outcome::Done),
            };
        }
        self.events.warning(pod, "FailedCreatePodSandBox", message.clone());
        let mut local = LocalPod::learn(pod, &[]);
        for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
            let waiting = Now::Waiting { reason: "ContainerCreating".into(), message: message.clone() };
            local.containers.entry(container.name.clone()).or_default().now = waiting;
        }
        self.write_status(pod, &local, Timestamp::now()).await?;
        Ok(Outcome::RequeueAfter(NO_RUNTIME_RETRY))
    }

    async fn write_status(&self, pod: &Pod, local: &LocalPod, now: Timestamp) -> kube::Result<()> {
        let wanted = status::status(pod, local, now);
        if pod.status.as_ref() == Some(&wanted) {
            return Ok(());
        }
        let key = ObjectKey::of(pod);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        // The uid makes the API refuse the status of a pod that was replaced.
        let patch = json!({"metadata": {"uid": local.uid.0}, "status": wanted});
        match api.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// How a job's first container ended, which is what its outputs tell.
fn ended(pod: &Pod, local: &LocalPod) -> job::Ended {
    let name = pod.spec.as_ref().and_then(|spec| spec.containers.first()).map(|container| &container.name);
    let container = name.map(|name| local.container(name)).unwrap_or_default();
    let exit = match container.now {
        Now::Exited(exit) => Some(exit),
        Now::Running { .. } | Now::Waiting { .. } => container.last,
    };
    let now = Timestamp::now();
    let mut ended = match exit {
        Some(exit) => job::Ended {
            exit_code: exit.exit_code,
            reason: exit.reason,
            message: exit.message,
            started: exit.started,
            finished: exit.finished,
        },
        None => {
            let (reason, message) = ("Error".to_owned(), "it never ran".to_owned());
            job::Ended { exit_code: 137, reason, message, started: now, finished: now }
        }
    };
    if let Some((reason, message)) = &local.ended {
        (ended.reason, ended.message) = ((*reason).to_owned(), message.clone());
    }
    ended
}

/// What `kubectl get pods` shows of a container that could not be started.
fn waiting_reason(error: &RuntimeError) -> &'static str {
    match error {
        RuntimeError::ImageMissing(_) => "ErrImagePull",
        RuntimeError::NoSandbox(_) => "ContainerCreating",
        RuntimeError::NoRoom(_) => "OutOfmemory",
        // The one that says: not with this component.
        RuntimeError::Invalid(_) => "CreateContainerError",
        RuntimeError::Internal(_) => "RunContainerError",
    }
}

fn until(at: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default()
}
