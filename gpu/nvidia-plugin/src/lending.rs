//! Lends idle GPU time to containers with an elastic limit, and tells those that share a GPU whether others use it (the
//! plan is [`mayfly_gpu_proto::elastic`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use mayfly_gpu_proto::{ElasticBalancer, LimitsFile, elastic::UsageSample, process::monotonic_ns};
use mayfly_runtime::DeviceAllocation;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{Gpu, RESOURCE_CORE, grant};

/// The period of balancing: long enough to measure usage, short enough not to be noticed by users.
const PERIOD: Duration = Duration::from_millis(100);

/// The mapped limits file of a container, with its last measurement on each GPU.
struct Borrower {
    file: LimitsFile,
    samples: BTreeMap<String, UsageSample>,
}

/// Balances until `stop`. Sleeps while no container has a GPU.
pub(crate) async fn run(
    gpus: &watch::Receiver<Arc<Vec<Gpu>>>,
    limits: &Path,
    mut allocations: watch::Receiver<Arc<Vec<DeviceAllocation>>>,
    stop: &CancellationToken,
) {
    let mut borrowers: BTreeMap<PathBuf, Borrower> = BTreeMap::new();
    loop {
        let current = allocations.borrow_and_update().clone();
        follow(limits, &current, &mut borrowers);
        let gpus_now = gpus.borrow().clone();
        balance(&gpus_now, &mut borrowers);
        tokio::select! {
            () = stop.cancelled() => return,
            // A container's file is written after its allocation is known, so missing files are looked for again.
            () = tokio::time::sleep(PERIOD), if !current.is_empty() => {}
            changed = allocations.changed() => if changed.is_err() { return },
        }
    }
}

/// Maps the files of containers with shares, and unmaps those of other containers.
fn follow(limits: &Path, allocations: &[DeviceAllocation], borrowers: &mut BTreeMap<PathBuf, Borrower>) {
    let shares = allocations.iter().filter(|one| one.resource == RESOURCE_CORE);
    let paths: BTreeSet<PathBuf> =
        shares.map(|one| limits.join(&one.pod.0).join(&one.container).join(grant::LIMITS_FILE)).collect();
    borrowers.retain(|path, _| paths.contains(path));
    for path in paths {
        if !borrowers.contains_key(&path)
            && let Ok(file) = LimitsFile::open(&path)
        {
            borrowers.insert(path, Borrower { file, samples: BTreeMap::new() });
        }
    }
}

fn balance(gpus: &[Gpu], borrowers: &mut BTreeMap<PathBuf, Borrower>) {
    for gpu in gpus {
        let mut on_gpu: Vec<_> = borrowers
            .values_mut()
            .filter(|borrower| borrower.file.region().find(&gpu.uuid).is_some())
            .map(|Borrower { file, samples }| (&*file, samples.entry(gpu.uuid.clone()).or_default()))
            .collect();
        ElasticBalancer::new(&gpu.uuid).step(&mut on_gpu, monotonic_ns());
    }
}

#[cfg(test)]
mod tests {
    use mayfly_gpu_proto::DeviceLimit;
    use mayfly_runtime::PodUid;

    use super::*;

    #[test]
    fn idle_time_is_lent_to_the_container_that_waits() {
        let folder = tempfile::tempdir().unwrap();
        let gpus = [Gpu::of_test("GPU-0")];
        let allocation = |pod: &str| DeviceAllocation {
            pod: PodUid(pod.into()),
            container: "c".into(),
            resource: RESOURCE_CORE.into(),
            devices: vec!["GPU-0::c00".into()],
        };
        let limit = |core_percent, elastic_percent| DeviceLimit {
            uuid: "GPU-0".into(),
            memory_bytes: 0,
            core_percent,
            elastic_percent,
        };
        let write =
            |pod: &str, limit| grant::write_limits(&folder.path().join(pod).join("c"), &[limit]).unwrap();
        let (waiting, idle) = (write("a", limit(30, 90)), write("b", limit(70, 0)));
        let mut borrowers = BTreeMap::new();
        follow(folder.path(), &[allocation("a"), allocation("b")], &mut borrowers);
        balance(&gpus, &mut borrowers);
        let shim = LimitsFile::open(&waiting).unwrap();
        let device = &shim.region().devices()[0];
        assert_eq!(device.share(), Some(30), "it did not wait");
        device.throttled.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        balance(&gpus, &mut borrowers);
        assert_eq!(device.share(), Some(90));
        assert_eq!(LimitsFile::open(&idle).unwrap().region().devices()[0].share(), Some(70));
        balance(&gpus, &mut borrowers);
        assert_eq!(device.share(), Some(30), "it waits no more");
        let contended = || device.contended.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(contended(), 0, "the other one is idle");
        LimitsFile::open(&idle).unwrap().region().devices()[0].spend(1);
        balance(&gpus, &mut borrowers);
        assert_eq!(contended(), 1);
        balance(&gpus, &mut borrowers);
        assert_eq!(contended(), 0);
        follow(folder.path(), &[allocation("a")], &mut borrowers);
        assert_eq!(borrowers.len(), 1);
    }
}
