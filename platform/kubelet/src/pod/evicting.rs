//! Evictions: pods that exceed their own limits of local storage or of GPU memory, and pods chosen when the node is short of memory or
//! disk.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};
use mayfly_informer::reconcile::WorkQueue;
use mayfly_runtime::PodUid;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;

use super::worker::Worker;
use crate::{
    local_storage::{self, ContainerStorage, EPHEMERAL_STORAGE, PodStorage},
    pressure::{self, ContainerConsumption, EvictionCandidate, PressureSignal, Shortage},
    volumes::disk_usage::disk_usage,
};

/// The status reason of an evicted pod.
pub(crate) const EVICTED: &str = "Evicted";
/// The reason of the event of a pod that uses more GPU time than its share.
const GPU_TIME_EXCEEDED: &str = "GpuTimeExceeded";

/// Measures the pods' local storage, and evicts pods that exceed their limits.
pub(crate) async fn watch_storage(worker: &Worker, queue: &WorkQueue<ObjectKey>, stop: &CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(pressure::MEASURE_EVERY) => {}
        }
        worker.measure_storage().await;
        worker.evict_over_limits(queue);
    }
}

/// Evicts pods that use more GPU memory than they may, and reports those that use more GPU time.
pub(crate) async fn watch_gpus(worker: &Worker, queue: &WorkQueue<ObjectKey>, stop: &CancellationToken) {
    let Some(gpus) = &worker.gpus else { return };
    let (mut violations, mut warnings) = (gpus.violations(), gpus.warnings());
    let mut warned = BTreeMap::new();
    loop {
        let current = violations.borrow_and_update().clone();
        for (uid, message) in current {
            worker.evict(queue, &uid, message);
        }
        let known = std::mem::replace(&mut warned, warnings.borrow_and_update().clone());
        for (uid, message) in warned.iter().filter(|(uid, message)| known.get(*uid) != Some(*message)) {
            worker.warn_of_gpu_time(uid, message);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            changed = violations.changed() => if changed.is_err() { return },
            changed = warnings.changed() => if changed.is_err() { return },
        }
    }
}

/// Measures the node, reports shortages, and evicts one pod at a time while memory or disk is short.
pub(crate) async fn watch_pressure(
    worker: &Worker,
    queue: &WorkQueue<ObjectKey>,
    shortages: &watch::Sender<[bool; 3]>,
    stop: &CancellationToken,
) {
    let folder = worker.logs.root().to_owned();
    let mut states = [pressure::SignalState::default(); 3];
    let mut disk_was_short = false;
    loop {
        let folder = folder.clone();
        let measured = spawn_blocking(move || pressure::measure(&folder)).await;
        // Fails only when the Tokio runtime shuts down.
        let Ok(headroom) = measured else { return };
        let now = tokio::time::Instant::now();
        let mut short = [false; 3];
        for ((short, state), signal) in short.iter_mut().zip(&mut states).zip(PressureSignal::ALL) {
            *short = state.update(headroom.is_short(signal), now);
        }
        shortages.send_if_modified(|known| std::mem::replace(known, short) != short);
        if let Some(shortage) = headroom.memory_shortage() {
            worker.evict_for_memory(queue, &shortage);
        }
        // Unused images are removed before pods are evicted.
        let disk = headroom.disk_shortage();
        if let Some(shortage) = disk.as_ref().filter(|_| disk_was_short) {
            worker.evict_for_disk(queue, shortage);
        }
        disk_was_short = disk.is_some();
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(pressure::MEASURE_EVERY) => {}
        }
    }
}

impl Worker {
    /// Measures the local storage of the pods that run here.
    pub(crate) async fn measure_storage(&self) {
        let mut layers: HashMap<PodUid, Vec<_>> = HashMap::new();
        for runtime in self.runtimes.all() {
            for (id, usage) in runtime.layer_usage().await {
                layers.entry(id.pod).or_default().push((id.name, usage));
            }
        }
        let running: Vec<(PodUid, Arc<Pod>)> = {
            let local = self.local.lock();
            let running = local.iter().filter(|(_, known)| known.sandbox && known.ended.is_none());
            running.filter_map(|(key, known)| Some((known.uid.clone(), self.pods.get(key)?))).collect()
        };
        let (logs, volumes) = (self.logs.clone(), self.volumes.clone());
        let measure = move || -> HashMap<PodUid, PodStorage> {
            let of_pod = |(uid, pod): (PodUid, Arc<Pod>)| {
                let mut storage = PodStorage::default();
                for name in local_storage::containers(&pod) {
                    let logs = disk_usage(&logs.attempts(&uid, name));
                    let own = ContainerStorage { logs, ..ContainerStorage::default() };
                    storage.containers.insert(name.to_owned(), own);
                }
                for (name, usage) in layers.remove(&uid).unwrap_or_default() {
                    storage.containers.entry(name).or_default().layer = usage;
                }
                if let Some(volumes) = &volumes {
                    storage.volumes = volumes.disk_usage(&pod, &uid);
                }
                (uid, storage)
            };
            running.into_iter().map(of_pod).collect()
        };
        // Fails only when the Tokio runtime shuts down.
        if let Ok(measured) = spawn_blocking(measure).await {
            *self.storage.lock() = measured;
        }
    }

    /// Evicts the pods that exceed their limits of local storage.
    pub(crate) fn evict_over_limits(&self, queue: &WorkQueue<ObjectKey>) {
        let over: Vec<(PodUid, String)> = {
            let (local, storage) = (self.local.lock(), self.storage.lock());
            let over = local.iter().filter_map(|(key, known)| {
                let pod = self.pods.get(key).filter(|pod| !pressure::is_critical(pod))?;
                Some((known.uid.clone(), storage.get(&known.uid)?.exceeded(pod.spec.as_ref()?)?))
            });
            over.collect()
        };
        for (uid, message) in over {
            self.evict(queue, &uid, message);
        }
    }

    /// Evicts one pod because the node is short of memory.
    pub(crate) fn evict_for_memory(&self, queue: &WorkQueue<ObjectKey>, shortage: &Shortage) {
        let mut used: HashMap<PodUid, Vec<(String, u64)>> = HashMap::new();
        for (id, usage) in self.runtimes.all().flat_map(|runtime| runtime.usage()) {
            used.entry(id.pod).or_default().push((id.name, usage.memory_bytes));
        }
        let used = |uid: &PodUid| {
            let containers = used.get(uid)?.clone();
            Some((containers.iter().map(|(_, bytes)| bytes).sum(), containers))
        };
        self.evict_for(queue, "memory", shortage, used);
    }

    /// Evicts one pod because the node is short of disk space or inodes.
    pub(crate) fn evict_for_disk(&self, queue: &WorkQueue<ObjectKey>, shortage: &Shortage) {
        let is_inodes = shortage.resource == pressure::INODES;
        let storage = self.storage.lock().clone();
        let used = |uid: &PodUid| {
            let storage = storage.get(uid)?;
            let amount =
                |usage: mayfly_runtime::DiskUsage| if is_inodes { usage.inodes } else { usage.bytes };
            let containers = storage.containers.iter();
            let containers = containers.map(|(name, own)| (name.clone(), amount(own.total()))).collect();
            Some((amount(storage.total()), containers))
        };
        let requested = if is_inodes { pressure::INODES } else { EPHEMERAL_STORAGE };
        self.evict_for(queue, requested, shortage, used);
    }

    /// Evicts the first pod in upstream's order. `used` returns the usage of a pod, and of its containers by name.
    fn evict_for(
        &self,
        queue: &WorkQueue<ObjectKey>,
        requested: &'static str,
        shortage: &Shortage,
        used: impl Fn(&PodUid) -> Option<(u64, Vec<(String, u64)>)>,
    ) {
        let chosen = {
            let local = self.local.lock();
            let running = local.iter().filter(|(_, known)| known.sandbox && known.ended.is_none());
            let candidates: Vec<EvictionCandidate> = running
                .filter_map(|(key, known)| {
                    EvictionCandidate::of(&*self.pods.get(key)?, requested, used(&known.uid)?.0)
                })
                .collect();
            let Some(victim) = pressure::victim(&candidates) else { return };
            let pod = local.iter().find(|(_, known)| known.uid == victim.uid);
            let pod = pod.and_then(|(key, _)| self.pods.get(key));
            pod.map(|pod| (victim.uid.clone(), pod))
        };
        let Some((uid, pod)) = chosen else { return };
        let containers = used(&uid).map(|(_, containers)| containers).unwrap_or_default();
        let containers: Vec<_> = containers
            .into_iter()
            .filter_map(|(name, used)| ContainerConsumption::of(&pod, &name, requested, used))
            .collect();
        self.evict(queue, &uid, shortage.message(&containers));
    }

    fn warn_of_gpu_time(&self, uid: &PodUid, message: &str) {
        let key = self.local.lock().iter().find(|(_, known)| known.uid == *uid).map(|(key, _)| key.clone());
        if let Some(pod) = key.and_then(|key| self.pods.get(&key)) {
            self.events.warning(&*pod, GPU_TIME_EXCEEDED, message.to_owned());
        }
    }

    fn evict(&self, queue: &WorkQueue<ObjectKey>, uid: &PodUid, message: String) {
        let mut local = self.local.lock();
        let Some((key, known)) = local.iter_mut().find(|(_, known)| known.uid == *uid) else { return };
        if !known.sandbox || known.ended.is_some() {
            return;
        }
        if let Some(pod) = self.pods.get(key) {
            self.events.warning(&*pod, EVICTED, message.clone());
        }
        known.ended = Some((EVICTED, message));
        queue.add(key.clone());
    }
}
