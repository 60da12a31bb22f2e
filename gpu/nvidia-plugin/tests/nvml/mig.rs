//! GPUs in MIG mode.

use std::{fs, os::unix::fs::symlink, sync::atomic::Ordering::Relaxed, time::Duration};

use mayfly_gpu_nvidia_plugin::{Gpu, MigStrategy, RESOURCE_CORE, RESOURCE_GPU, labels};
use mayfly_runtime::NodeDevices as _;

use crate::node::{GpuNode, TestHost, host, host_with, pod_with};

const SMALL: &str = "nvidia.com/mig-1g.10gb";
const LARGE: &str = "nvidia.com/mig-3g.40gb";
const GPUS: &str = "1xL4,1xH100:mig=3g.40gb+1g.10gb*3";

#[test]
fn the_driver_describes_its_instances() {
    let TestHost { source, folder: _folder, .. } = host(GPUS);
    let seen = |gpu: &Gpu| {
        let mig = gpu.mig.as_ref();
        let ids = mig.map(|mig| (mig.gpu_instance, mig.compute_instance, mig.capabilities.clone()));
        (gpu.position(), gpu.resource.clone(), gpu.minor, ids)
    };
    let seen: Vec<_> = source.gpus().iter().map(seen).collect();
    let instance = |at: u32, resource: &str| {
        let ids = (at + 1, 0, vec![3 + 2 * at, 4 + 2 * at]);
        (format!("1:{at}"), resource.to_owned(), Some(1), Some(ids))
    };
    let gpu = ("0".to_owned(), RESOURCE_GPU.to_owned(), Some(0), None);
    assert_eq!(seen, [gpu, instance(0, LARGE), instance(1, SMALL), instance(2, SMALL), instance(3, SMALL)]);
    let large = &source.gpus()[1];
    assert_eq!(large.name, "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
    assert!(large.uuid.starts_with("MIG-") && large.links.is_empty());
    assert_eq!((large.memory_bytes, large.numa_node), ((81_559 << 20) / 8 * 4, Some(1)));
    let labels = labels::of_node(Some(&source));
    let of = |name: &str| labels.get(&format!("nvidia.com/{name}")).cloned().flatten().unwrap_or_default();
    assert_eq!((of("gpu.count").as_str(), of("mig.strategy").as_str()), ("2", "mixed"));
    assert_eq!((of("mig-1g.10gb.count").as_str(), of("mig-3g.40gb.slices.gi").as_str()), ("3", "3"));
}

/// Instances are resources of their own; the divided GPU is neither a whole GPU nor shared.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_gets_an_instance_and_its_capabilities() {
    let TestHost { source, host, folder, sim } = host(GPUS);
    for name in ["nvidia1", "nvidia-caps/nvidia-cap3", "nvidia-caps/nvidia-cap4", "nvidia-caps/nvidia-cap5"] {
        let path = folder.path().join("dev").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink("/dev/null", path).unwrap();
    }
    let large = source.gpus()[1].uuid.clone();
    let node = GpuNode::start(source, &host, Duration::from_millis(1));
    node.offers(SMALL, 3, 3).await;
    node.offers(LARGE, 1, 1).await;
    node.offers(RESOURCE_GPU, 1, 1).await;
    node.offers(RESOURCE_CORE, 100, 100).await;
    let given = node.manager.prepare(&pod_with("a", &[(LARGE, 1)]), "c").await.unwrap();
    let env = |name: &str| {
        given.env.iter().find(|(known, _)| known.as_str() == name).map(|(_, value)| value.clone())
    };
    assert_eq!(env("CUDA_VISIBLE_DEVICES"), Some(large.clone()));
    assert_eq!(env("NVIDIA_VISIBLE_DEVICES"), Some(large.clone()));
    let nodes: Vec<_> = given.nodes.iter().map(|device| format!("{device:?}")).collect();
    let has = |name: &str| nodes.iter().any(|node| node.contains(&format!("\"/dev/{name}\"")));
    let has =
        ["nvidia1", "nvidia-caps/nvidia-cap3", "nvidia-caps/nvidia-cap4", "nvidia-caps/nvidia-cap5"].map(has);
    assert_eq!(has, [true, true, true, false], "{nodes:?}");

    let usage = node.meter.read();
    assert_eq!(usage.len(), 5);
    let (user, memory) = (&usage[1].containers[0], usage[1].figures.unwrap().memory_bytes);
    assert_eq!((user.pod.0.as_str(), user.memory_limit_bytes, memory), ("a", usage[1].gpu.memory_bytes, 0));
    assert!(usage[1].load.whole && usage[2].containers.is_empty());
    // The memory of an instance is its own.
    let own = mayfly_gpu_proto::process::ProcessIdentity::current();
    let slot = sim.claim(&own).unwrap();
    sim.ledger().charge(&own, slot, 2, 5 << 20).unwrap();
    let used: Vec<_> = node.meter.read().iter().map(|one| one.figures.unwrap().memory_bytes).collect();
    assert_eq!(used, [0, 5 << 20, 0, 0, 0]);
}

/// An error of one instance, and one of its GPU.
#[tokio::test(flavor = "multi_thread")]
async fn an_instance_with_a_fault_is_not_offered() {
    let TestHost { source, host, folder: _folder, sim } = host(GPUS);
    let node = GpuNode::start(source, &host, Duration::from_millis(1));
    node.offers(SMALL, 3, 3).await;
    // The self-test fails until the errors are reset.
    sim.device(1).uncorrected_errors.store(1, Relaxed);
    let mut repeat = tokio::time::interval(Duration::from_millis(200));
    tokio::select! {
        () = node.offers(SMALL, 3, 2) => {}
        () = async { loop { repeat.tick().await; sim.inject_xid(3, 48); } } => {}
    }
    node.offers(LARGE, 1, 1).await;
    let healthy: Vec<bool> = node.health().iter().map(|(is_healthy, _)| *is_healthy).collect();
    assert_eq!(healthy, [true, true, false, true, true]);
    sim.inject_xid(1, 79);
    node.offers(SMALL, 3, 0).await;
    node.offers(LARGE, 1, 0).await;
    node.offers(RESOURCE_GPU, 1, 1).await;
    sim.device(1).uncorrected_errors.store(0, Relaxed);
    node.offers(SMALL, 3, 3).await;
    node.offers(LARGE, 1, 1).await;
    // A lost instance.
    sim.device(4).lost.store(999, Relaxed);
    node.offers(SMALL, 3, 2).await;
    sim.device(4).lost.store(0, Relaxed);
    node.offers(SMALL, 3, 3).await;
}

/// With the strategy `single` instances are GPUs, if the whole node has one profile.
#[tokio::test(flavor = "multi_thread")]
async fn instances_of_one_profile_may_be_offered_as_gpus() {
    let TestHost { source, host, folder: _folder, .. } =
        host_with("2xH100:mig=2g.20gb*3", MigStrategy::Single);
    let node = GpuNode::start(source, &host, Duration::from_millis(1));
    node.offers(RESOURCE_GPU, 6, 6).await;
    let given = node.manager.prepare(&pod_with("a", &[(RESOURCE_GPU, 1)]), "c").await.unwrap();
    let visible =
        given.env.iter().find(|(name, _)| name.as_str() == "CUDA_VISIBLE_DEVICES").unwrap().1.clone();
    assert!(visible.starts_with("MIG-"), "{visible}");
    assert!(!node.manager.counts().capacity.contains_key(RESOURCE_CORE), "instances have no shares");
}

#[test]
fn instances_are_not_offered_with_the_strategy_none() {
    let TestHost { source, folder: _folder, .. } = host_with(GPUS, MigStrategy::None);
    assert_eq!(source.gpus().iter().map(Gpu::position).collect::<Vec<_>>(), ["0"]);
}

/// Instances that are removed and made while the plugin runs, and a GPU that leaves MIG mode and comes back.
#[tokio::test(flavor = "multi_thread")]
async fn changes_of_instances_are_followed() {
    let TestHost { host, folder: _folder, sim, .. } = host(GPUS);
    let removed = |index: usize, is_removed: u32| sim.device(index).removed.store(is_removed, Relaxed);
    // The plugin starts without the large instance, whose resource it registers when it appears.
    removed(2, 1);
    let source = host.source(MigStrategy::Mixed).unwrap();
    let node = GpuNode::start(source.clone(), &host, Duration::from_millis(1));
    node.offers(SMALL, 3, 3).await;
    assert!(!node.manager.counts().capacity.contains_key(LARGE));
    removed(2, 0);
    node.offers(LARGE, 1, 1).await;
    let small = source.gpus()[4].uuid.clone();
    removed(4, 1);
    node.offers(SMALL, 2, 2).await;
    // The others keep their identity, although the numbers have a gap.
    assert_eq!(source.gpus().iter().map(Gpu::position).collect::<Vec<_>>(), ["0", "1:0", "1:1", "1:3"]);
    let given = node.manager.prepare(&pod_with("a", &[(SMALL, 2)]), "c").await.unwrap();
    let visible =
        given.env.iter().find(|(name, _)| name.as_str() == "NVIDIA_VISIBLE_DEVICES").unwrap().1.clone();
    assert!(visible.contains(&small), "{visible}");
    // The loss of a GPU is no change of its instances.
    sim.device(1).lost.store(15, Relaxed);
    node.offers(SMALL, 2, 0).await;
    node.offers(LARGE, 1, 0).await;
    sim.device(1).lost.store(0, Relaxed);
    node.offers(SMALL, 2, 2).await;
    // The GPU leaves MIG mode: it is offered as a whole, and in shares.
    sim.device(1).mig_enabled.store(0, Relaxed);
    node.offers(SMALL, 0, 0).await;
    node.offers(LARGE, 0, 0).await;
    node.offers(RESOURCE_GPU, 2, 2).await;
    node.offers(RESOURCE_CORE, 200, 200).await;
}
