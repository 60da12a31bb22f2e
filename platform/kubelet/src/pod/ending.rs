//! Ending a pod: its containers, its outputs, and its object.

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures::stream::{self, StreamExt as _};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use mayfly_api::{
    ObjectKey,
    job_io::{ANNOTATION_GPU_SECONDS, ANNOTATION_OUTPUTS, gpu_seconds},
    k8s::{api::core::v1::Pod, jiff::Timestamp},
};
use mayfly_informer::reconcile::Outcome;
use mayfly_runtime::{ContainerState, PodUid, Runtime};
use serde_json::json;
use tokio::{
    task::spawn_blocking,
    time::{Instant, timeout},
};

use super::{
    local::{ContainerPhase, LocalPod},
    plan::{is_over, needs_collecting},
    worker::{Worker, is_gone},
};
use crate::{job, volumes};

/// The pause between attempts to end the containers of a pod, or to unmount its volumes.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// The longest wait for the GPU time of a pod that ends: a broken driver may never answer.
const GPU_TIME_WAIT: Duration = Duration::from_secs(5);
/// The number of pods whose leftovers are removed concurrently.
const REMOVALS_MAX: usize = 16;

impl Worker {
    pub(super) async fn remove_sandbox(&self, local: &mut LocalPod, runtime: &dyn Runtime) {
        kill_sandbox(&local.uid, runtime).await;
        self.forget_sandbox(local).await;
    }

    async fn forget_sandbox(&self, local: &mut LocalPod) {
        local.sandbox = false;
        // The time is known only as long as the pod has its devices.
        local.gpu_time = self.gpu_time(&local.uid).await.or(local.gpu_time);
        if let Some(devices) = &self.devices {
            devices.release(&local.uid);
        }
    }

    /// The GPU time that the pod used so far; `None`: it has no GPU, or the driver does not answer in time.
    async fn gpu_time(&self, uid: &PodUid) -> Option<Duration> {
        let (gpus, uid) = (self.gpus.clone()?, uid.clone());
        let read = spawn_blocking(move || gpus.time_used(&uid));
        timeout(GPU_TIME_WAIT, read).await.ok()?.ok()?
    }

    /// Records the GPU time of a pod whose containers have ended. It is not part of the pod's status.
    pub(super) async fn record_gpu_time(&self, pod: &Pod, local: &LocalPod) -> kube::Result<()> {
        let Some(time) = local.gpu_time else { return Ok(()) };
        let seconds = gpu_seconds(time);
        let known = pod.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_GPU_SECONDS));
        if known == Some(&seconds) {
            return Ok(());
        }
        self.annotate(&ObjectKey::of(pod), local, ANNOTATION_GPU_SECONDS, &seconds).await
    }

    /// Sets an annotation of a pod, unless the pod was removed or replaced.
    async fn annotate(&self, key: &ObjectKey, local: &LocalPod, name: &str, value: &str) -> kube::Result<()> {
        let patch = json!({"metadata": {"uid": local.uid.0, "annotations": {name: value}}});
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        match api.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(error) if is_gone(&error) => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// Ends a deleted pod, and then removes its object unless it has finalizers.
    pub(super) async fn terminate(
        &self,
        key: &ObjectKey,
        pod: &Pod,
        local: &LocalPod,
        runtime: &Arc<dyn Runtime>,
        grace: Duration,
    ) -> kube::Result<Outcome> {
        self.probes.forget(&local.uid);
        self.stop_gracefully(pod, local, runtime, grace).await;
        let mut local = local.clone();
        local.observe(&runtime.containers(&local.uid));
        let is_forced = pod.metadata.deletion_grace_period_seconds == Some(0);
        if kill_sandbox(&local.uid, &**runtime).await && !is_forced {
            // Its address, devices and volumes are still used, and clients may rely on it that a pod that is gone does
            // not run: a StatefulSet starts the next pod of the same name.
            self.keep(key, &local);
            return Ok(Outcome::RequeueAfter(TRY_AGAIN));
        }
        self.forget_sandbox(&mut local).await;
        self.keep(key, &local);
        self.record_gpu_time(pod, &local).await?;
        if needs_collecting(pod, &local) && local.collect_not_before.is_none_or(|at| at <= Instant::now()) {
            self.collect(key, pod, &mut local).await?;
        }
        self.keep(key, &local);
        if pod.metadata.finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty()) {
            // The object stays until its finalizers are removed, so the status reports the end.
            let over = pod.spec.as_ref().is_some_and(|spec| is_over(spec, &local));
            if !over {
                local.ended.get_or_insert(("Terminated", "The pod was deleted".into()));
            }
            if needs_collecting(pod, &local) && !is_forced {
                self.write_status(pod, &local, Timestamp::now()).await?;
                let rest = local.collect_not_before.map(|at| at.saturating_duration_since(Instant::now()));
                return Ok(Outcome::RequeueAfter(rest.unwrap_or_default()));
            }
            // A forced deletion does not wait, not even for disk space.
            local.collected = true;
            self.write_status(pod, &local, Timestamp::now()).await?;
            self.keep(key, &local);
            if is_forced {
                return Ok(Outcome::Done);
            }
        }
        // A volume must not be detached while it is mounted here, and the controller detaches it once no pod refers to
        // it.
        if volumes::may_have_csi(pod) && !self.remove_volumes(&local.uid).await {
            return Ok(Outcome::RequeueAfter(TRY_AGAIN));
        }
        self.remove_object(pod).await?;
        Ok(Outcome::Done)
    }

    /// Removes the pod's object, after everything of the pod on this node is removed.
    pub(super) async fn remove_object(&self, pod: &Pod) -> kube::Result<()> {
        let api: Api<Pod> =
            Api::namespaced(self.client.clone(), pod.metadata.namespace.as_deref().unwrap_or_default());
        let preconditions = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(preconditions),
            ..Default::default()
        };
        match api.delete(pod.metadata.name.as_deref().unwrap_or_default(), &params).await {
            Err(error) if is_gone(&error) => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// Stores a job's outputs and records them on the pod, before the pod's phase becomes final. Outputs that cannot be
    /// stored now stay in the pod's folder for another attempt.
    pub(super) async fn collect(&self, key: &ObjectKey, pod: &Pod, local: &mut LocalPod) -> kube::Result<()> {
        let Some(jobs) = &self.jobs else {
            local.collected = true;
            return Ok(());
        };
        if job::is_job(pod) {
            self.sources.follow().await;
        }
        match job::collect(jobs, pod, &local.uid, ended(pod, local), &self.sources).await {
            Ok(collected) => {
                if let Some(why) = &collected.unsent {
                    self.events.warning(pod, job::UNSENT, why.clone());
                    local.ended.get_or_insert((job::UNSENT, why.clone()));
                }
                self.annotate(key, local, ANNOTATION_OUTPUTS, &json!(collected).to_string()).await?;
                jobs.remove(&local.uid).await;
            }
            Err(why) => {
                let message = format!("Error: cannot store the job's outputs: {why}");
                self.events.warning(pod, "FailedCollect", message);
                local.collect_failed(Instant::now());
                return Ok(());
            }
        }
        local.collected = true;
        Ok(())
    }

    /// Kills what still runs of a pod whose object was removed, or replaced by another pod of the same name.
    pub(super) async fn forget_replaced(&self, key: &ObjectKey, pod: Option<&Pod>) {
        let uid = pod.and_then(|pod| pod.metadata.uid.as_deref());
        let old = self.local.lock().get(key).filter(|local| uid != Some(local.uid.0.as_str())).cloned();
        let Some(old) = old else { return };
        for runtime in self.runtimes.all() {
            if runtime.sandboxes().contains(&old.uid)
                && let Err(error) = runtime.remove_sandbox(&old.uid).await
            {
                tracing::warn!(pod = %key, uid = %old.uid, %error, "could not remove the sandbox of a deleted pod");
                self.leftovers.notify_one();
            }
        }
        self.probes.forget(&old.uid);
        self.tokens.forget(&old.uid);
        if let Some(devices) = &self.devices {
            devices.release(&old.uid);
        }
        self.addresses.lock().release(&old.uid);
        self.local.lock().remove(key);
        if let Some(jobs) = &self.jobs {
            jobs.remove(&old.uid).await;
        }
        if !self.remove_volumes(&old.uid).await {
            self.leftovers.notify_one();
        }
        self.remove_logs(vec![old.uid]).await;
    }

    /// Returns whether all of the volumes are removed.
    pub(super) async fn remove_volumes(&self, uid: &PodUid) -> bool {
        let Some(volumes) = self.volumes.clone() else { return true };
        let removed = {
            let uid = uid.clone();
            spawn_blocking(move || volumes.remove(&uid)).await
        };
        if let Ok(Err(error)) = &removed {
            tracing::warn!(%uid, %error, "could not remove the volumes of a deleted pod; will try again");
        }
        matches!(removed, Ok(Ok(())))
    }

    async fn remove_logs(&self, uids: Vec<PodUid>) {
        let layout = self.logs.clone();
        let remove = move || {
            for uid in uids {
                if let Err(error) = layout.remove_pod(&uid) {
                    tracing::warn!(%uid, %error, "could not remove the logs of a deleted pod; will try again");
                }
            }
        };
        // Fails only when the Tokio runtime shuts down.
        let _ = spawn_blocking(remove).await;
    }

    /// Removes sandboxes and files of pods that neither the API nor this worker knows. Returns whether everything was
    /// removed.
    pub(crate) async fn remove_orphans(&self) -> bool {
        let mut is_clean = true;
        let known = || -> HashSet<String> {
            let local = self.local.lock();
            let bound = self.pods.list().into_iter().filter(|pod| self.is_bound_here(pod));
            let bound = bound.filter_map(|pod| pod.metadata.uid.clone());
            bound.chain(local.values().map(|pod| pod.uid.0.clone())).collect()
        };
        if let Some(jobs) = &self.jobs {
            jobs.sweep(known).await;
        }
        if let Some(devices) = &self.devices {
            devices.retain(&known());
        }
        for runtime in self.runtimes.all() {
            let sandboxes = runtime.sandboxes();
            let known = known();
            for uid in sandboxes.iter().filter(|uid| !known.contains(&uid.0)) {
                tracing::info!(%uid, "ending a pod that is not in the API any more");
                if let Err(error) = runtime.remove_sandbox(uid).await {
                    tracing::warn!(%uid, %error, "could not remove a sandbox without a pod; will try again");
                    is_clean = false;
                }
            }
        }
        if let Some(volumes) = self.volumes.clone() {
            // Listed before the known pods, for the same reason as the logs below.
            let listed = spawn_blocking(move || volumes.pods()).await.unwrap_or_default();
            let known = known();
            let strangers = listed.into_iter().filter(|uid| !known.contains(&uid.0));
            let removals: Vec<_> =
                strangers.map(|uid| async move { self.remove_volumes(&uid).await }).collect();
            // A hanging driver delays its removal until the timeout.
            let removed: Vec<bool> = stream::iter(removals).buffer_unordered(REMOVALS_MAX).collect().await;
            is_clean &= removed.iter().all(|is_removed| *is_removed);
        }
        // Listed before the known pods: a new pod has no log before it is known.
        let layout = self.logs.clone();
        let mut logs = spawn_blocking(move || layout.pod_uids()).await.unwrap_or_default();
        let known = known();
        logs.retain(|uid| !known.contains(&uid.0));
        if !logs.is_empty() {
            self.remove_logs(logs).await;
        }
        is_clean
    }
}

/// Kills what runs in a pod's sandbox and removes it. Returns whether that failed and a container still runs.
async fn kill_sandbox(uid: &PodUid, runtime: &dyn Runtime) -> bool {
    let Err(error) = runtime.remove_sandbox(uid).await else { return false };
    tracing::warn!(%uid, %error, "could not remove a sandbox");
    runtime.containers(uid).iter().any(|(_, state)| matches!(state, ContainerState::Running { .. }))
}

/// The exit of a job's first container, which is part of its outputs.
fn ended(pod: &Pod, local: &LocalPod) -> job::ContainerResult {
    let name = pod.spec.as_ref().and_then(|spec| spec.containers.first()).map(|container| &container.name);
    let container = name.map(|name| local.container(name)).unwrap_or_default();
    let exit = match container.now {
        ContainerPhase::Exited(exit) => Some(exit),
        ContainerPhase::Running { .. } | ContainerPhase::Waiting { .. } => container.last,
    };
    let now = Timestamp::now();
    let mut ended = match exit {
        Some(exit) => job::ContainerResult {
            exit_code: exit.exit_code,
            reason: exit.reason,
            message: exit.message,
            started: exit.started,
            finished: exit.finished,
            gpu_time: local.gpu_time,
        },
        None => {
            let (reason, message) = ("Error".to_owned(), "it never ran".to_owned());
            job::ContainerResult {
                exit_code: 137,
                reason,
                message,
                started: now,
                finished: now,
                gpu_time: local.gpu_time,
            }
        }
    };
    if let Some((reason, message)) = &local.ended {
        (ended.reason, ended.message) = ((*reason).to_owned(), message.clone());
    }
    ended
}
