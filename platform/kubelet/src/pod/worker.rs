//! Executes one pod's steps until there is nothing to do.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Pod, ResourceStatus, Service},
        jiff::Timestamp,
    },
    resources::Amounts,
};
use mayfly_informer::{EnvObjects, EventRecorder, Informer, reconcile::Outcome};
use mayfly_runtime::{NodeDevices, NodeGpus, PodUid, Runtime, RuntimeError, logs::LogLayout};
use parking_lot::Mutex;
use serde_json::json;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use super::{
    admission, container, devices,
    dns::ClusterDnsServer,
    evicting::EVICTED,
    local::{Clocks, LocalPod},
    plan::{Step, plan},
    status,
    withdrawal::ServedEndpoints,
};
use crate::{
    addresses::Addresses,
    job::JobFiles,
    local_storage::MeasuredStorage,
    probe::ProbeTasks,
    runtimes::NodeRuntimes,
    volumes::{Volumes, claims::PodClaims, tokens::ServiceAccountTokens},
};

/// The number of consecutive steps for one pod; a pod that needs more is queued again at once.
const STEPS_MAX: usize = 64;

/// The state that all pods of the node share.
pub(crate) struct Worker {
    pub(crate) node: String,
    /// The node's own address.
    pub(crate) host_address: IpAddr,
    /// The resources that pods may request.
    pub(crate) allocatable: Arc<Amounts>,
    pub(crate) client: Client,
    pub(crate) pods: Informer<Pod>,
    pub(crate) sources: EnvObjects,
    pub(crate) services: Informer<Service>,
    pub(crate) runtimes: NodeRuntimes,
    pub(crate) logs: LogLayout,
    pub(crate) jobs: Option<JobFiles>,
    pub(crate) volumes: Option<Volumes>,
    pub(crate) claims: PodClaims,
    pub(crate) devices: Option<Arc<dyn NodeDevices>>,
    pub(crate) gpus: Option<Arc<dyn NodeGpus>>,
    pub(crate) events: EventRecorder,
    pub(crate) local: Mutex<HashMap<ObjectKey, LocalPod>>,
    pub(crate) addresses: Mutex<Addresses>,
    /// Changes when a pod of this node is deleted, or its grace period is shortened.
    pub(crate) deletions: watch::Sender<u64>,
    /// Notified when files or mounts of a removed pod remain: the next sweep removes them.
    pub(crate) leftovers: Notify,
    pub(crate) probes: ProbeTasks,
    pub(crate) storage: Arc<MeasuredStorage>,
    pub(crate) tokens: ServiceAccountTokens,
    pub(crate) cluster_dns: Option<ClusterDnsServer>,
    pub(crate) served_endpoints: Option<Arc<dyn ServedEndpoints>>,
    pub(crate) allowed_unsafe_sysctls: Vec<String>,
}

impl Worker {
    /// Executes the next steps for one pod.
    pub(crate) async fn reconcile(&self, key: ObjectKey) -> kube::Result<Outcome> {
        let pod = self.pods.get(&key).filter(|pod| self.is_bound_here(pod));
        self.forget_replaced(&key, pod.as_deref()).await;
        let Some(mut pod) = pod else { return Ok(Outcome::Done) };
        let Some(runtime) = self.runtimes.of_pod(&pod).cloned() else { return self.no_runtime(&pod).await };
        let mut local = self.local_of(&key, &pod, &*runtime);
        self.admit(&pod, &mut local);
        for _ in 0..STEPS_MAX {
            for started in local.observe_starts(&runtime.containers(&local.uid)) {
                self.events.normal(&*pod, "Started", format!("Started container {started}"));
            }
            local.observe_probes(self.probes.verdicts(&local.uid));
            self.probes.sync(&pod, &local, &runtime);
            if let Some(devices) = self.devices_of(&local) {
                local.devices = devices;
            }
            let now = Clocks::now();
            match plan(&pod, &local, now) {
                Step::Wait(rest) => {
                    self.keep(&key, &local);
                    self.record_gpu_time(&pod, &local).await?;
                    self.write_status(&pod, &local, now.wall).await?;
                    let left = |rest: Duration| rest.saturating_sub(now.steady.elapsed());
                    return Ok(rest.map_or(Outcome::Done, |rest| Outcome::RequeueAfter(left(rest))));
                }
                Step::Terminate { grace } => {
                    return self.terminate(&key, &pod, &local, &runtime, grace).await;
                }
                Step::Collect => self.collect(&key, &pod, &mut local).await?,
                step => self.act(step, &pod, &mut local, &runtime).await,
            }
            self.keep(&key, &local);
            // The step may have taken long: read the pod's latest version.
            match self.pods.get(&key).filter(|known| known.metadata.uid == pod.metadata.uid) {
                Some(known) => pod = known,
                None => return Ok(Outcome::RequeueAfter(Duration::ZERO)),
            }
        }
        self.write_status(&pod, &local, Timestamp::now()).await?;
        Ok(Outcome::RequeueAfter(Duration::ZERO))
    }

    /// Ends a pod that this node does not accept, before anything of it is made.
    fn admit(&self, pod: &Pod, local: &mut LocalPod) {
        if local.sandbox || local.ended.is_some() || is_over(pod) {
            return;
        }
        if let Some((reason, message)) = admission::refusal(pod, &self.allowed_unsafe_sysctls) {
            local.ended = Some((reason, format!("Pod was rejected: {message}")));
            self.events.warning(pod, reason, message);
        }
    }

    pub(crate) fn is_bound_here(&self, pod: &Pod) -> bool {
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(self.node.as_str())
    }

    pub(super) fn keep(&self, key: &ObjectKey, local: &LocalPod) {
        self.local.lock().insert(key.clone(), local.clone());
    }

    fn local_of(&self, key: &ObjectKey, pod: &Pod, runtime: &dyn Runtime) -> LocalPod {
        if let Some(local) = self.local.lock().get(key) {
            return local.clone();
        }
        let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
        let mut local = LocalPod::from_status(pod, &runtime.containers(&uid));
        local.sandbox |= runtime.sandboxes().contains(&uid);
        if runtime.assigns_addresses() {
            return local;
        }
        let mut addresses = self.addresses.lock();
        if let Some(address) = local.address {
            addresses.adopt(&uid, address);
        }
        local.address = addresses.of(&uid);
        local
    }

    /// The health of the pod's devices if it differs from the known one. Devices are released when their pod ends: their
    /// last health stays in its status.
    pub(crate) fn devices_of(&self, local: &LocalPod) -> Option<BTreeMap<String, Vec<ResourceStatus>>> {
        let devices = devices::statuses(&self.devices.as_ref()?.in_use(&local.uid));
        (!devices.is_empty() && devices != local.devices).then_some(devices)
    }

    async fn act(&self, step: Step, pod: &Pod, local: &mut LocalPod, runtime: &Arc<dyn Runtime>) {
        match step {
            Step::CreateSandbox => {
                let reserved = local.address.filter(|_| !runtime.assigns_addresses());
                let made = async {
                    if let Some(why) = admission::sandbox_refusal(pod, runtime.images().is_some()) {
                        return Err(RuntimeError::Invalid(why));
                    }
                    runtime.create_sandbox(container::sandbox(pod, reserved, self.cluster_dns.as_ref())).await
                };
                match self.unless_deleted(pod, made).await {
                    None => {}
                    Some(Ok(made)) => {
                        local.sandbox_made();
                        if let Some(spec) = &pod.spec {
                            local.initialise_again(spec);
                        }
                        local.address = made.addresses.first().copied();
                        local.more_addresses = made.addresses.into_iter().skip(1).collect();
                    }
                    Some(Err(error)) => {
                        let message = format!("Failed to create pod sandbox: {error}");
                        self.events.warning(pod, "FailedCreatePodSandBox", message.clone());
                        let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice());
                        local.sandbox_failed(containers.unwrap_or_default(), &message, Instant::now());
                    }
                }
            }
            Step::Start(container) => self.start(&container, pod, local, runtime).await,
            Step::Restart(name) => {
                let title = title(pod);
                let container = local.containers.entry(name.clone()).or_default();
                if container.restart_later(&format!("container={name} pod={title}"), Clocks::now()) {
                    let message = format!("Back-off restarting failed container {name} in pod {title}");
                    self.events.warning(pod, "BackOff", message);
                }
            }
            Step::End { reason, message } => {
                self.events.normal(pod, reason, message.clone());
                local.ended = Some((reason, message));
            }
            Step::Kill(failure) => self.kill(&failure, pod, local, runtime).await,
            Step::Finish { grace } => {
                self.probes.forget(&local.uid);
                // A deletion sets its own grace period.
                let stopped = self.unless_deleted(pod, self.stop_all(pod, local, runtime, grace)).await;
                if stopped.is_some() {
                    local.observe(&runtime.containers(&local.uid));
                    self.remove_sandbox(local, &**runtime).await;
                    if matches!(local.ended, Some((EVICTED, _))) {
                        // Frees disk space now. Volumes that cannot be removed yet are removed with the pod's object.
                        self.remove_volumes(&local.uid).await;
                    }
                }
            }
            Step::Collect | Step::Terminate { .. } | Step::Wait(_) => {}
        }
    }

    pub(super) async fn write_status(&self, pod: &Pod, local: &LocalPod, now: Timestamp) -> kube::Result<()> {
        let wanted = status::status(pod, local, self.host_address, now);
        if pod.status.as_ref() == Some(&wanted) {
            return Ok(());
        }
        let key = ObjectKey::of(pod);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        // The uid makes the API refuse the status of a pod that was replaced.
        let patch = json!({"metadata": {"uid": local.uid.0}, "status": status::patch(&wanted)});
        match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
            Err(error) if is_gone(&error) => Ok(()),
            result => result.map(|_| ()),
        }
    }
}

/// Whether the pod's phase is final, or it is being deleted.
fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether a failed write means that the pod was removed or replaced, which the informer reports too.
pub(super) fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found() || status.is_conflict())
}

/// A pod as upstream's kubelet names it in messages: `name_namespace(uid)`.
fn title(pod: &Pod) -> String {
    let key = ObjectKey::of(pod);
    format!("{}_{}({})", key.name, key.namespace, pod.metadata.uid.as_deref().unwrap_or_default())
}
