//! The plugin on a simulated host, whose NVML library is loaded like the driver's. Cargo builds it for these tests as
//! the dev-dependency `mayfly_gpu_fake_nvml`. Each test needs a separate process: the library has one global state.

mod eight_gpus;
mod mig;
mod node;

use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed, time::Duration};

use mayfly_api::gpu_placement::parse_matrix;
use mayfly_gpu_nvidia_plugin::{
    Gpu, GpuSource, MigStrategy, RESOURCE_CORE, RESOURCE_GPU, RESOURCE_MEMORY, SimulatedHost,
    violations::ViolationKind,
};
use mayfly_gpu_proto::{
    LimitsFile,
    process::{ProcessIdentity, monotonic_ns, namespace},
    sim::{SimFile, parse_gpus},
};
use mayfly_runtime::{DeviceError, NodeDevices as _, NodeGpus as _, PodUid};

use crate::node::{CONTEXT_BYTES, GpuNode, TestHost, host, pod, pod_with};

#[test]
fn the_driver_describes_its_gpus() {
    let TestHost { source, host, folder, sim } = host("3xH100");
    let gpus = parse_gpus("3xH100").unwrap();
    let gpus_seen = source.gpus();
    let seen: Vec<_> = gpus_seen
        .iter()
        .map(|gpu| (gpu.uuid.as_str(), gpu.memory_bytes, gpu.numa_node, gpu.minor, gpu.pci_address.as_str()))
        .collect();
    let expected = |at: usize, numa, address| {
        (gpus[at].uuid.as_str(), gpus[at].memory_bytes, Some(numa), u32::try_from(at).ok(), address)
    };
    assert_eq!(
        seen,
        [expected(0, 0, "0000:01:00.0"), expected(1, 0, "0000:02:00.0"), expected(2, 1, "0000:03:00.0")]
    );
    assert!(source.gpus().iter().all(|gpu| gpu.name == "NVIDIA H100 80GB HBM3" && gpu.fault.is_none()));
    assert_eq!(source.gpus()[2].compute_capability, (9, 0));
    assert_eq!(source.versions().unwrap(), ("570.86.15".into(), (12, 8)));
    assert_eq!(host.driver().sim, Some(folder.path().join("sim")));

    // A GPU in MIG mode without instances is omitted, and the others keep their indices.
    sim.device(0).mig_enabled.store(1, Relaxed);
    let others = host.source(MigStrategy::Mixed).unwrap();
    let mut rest = source.gpus()[1..].to_vec();
    rest.iter_mut().for_each(|gpu| _ = gpu.links.remove(&0));
    assert_eq!(*others.gpus(), rest);
    assert!(others.gpus()[0].is_mig_capable);
}

/// The links of each GPU to the others, in the driver's order.
fn links(source: &GpuSource) -> Vec<String> {
    let of = |gpu: &Gpu| gpu.links.values().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    source.gpus().iter().map(of).collect()
}

#[test]
fn pcie_links_are_the_drivers() {
    let TestHost { source, folder: _folder, .. } = host("4xL4");
    let pair = ["PIX SYS SYS", "PIX SYS SYS", "SYS SYS PIX", "SYS SYS PIX"];
    assert_eq!(links(&source), pair);
}

#[test]
fn nvlinks_are_the_drivers_and_a_matrix_replaces_them() {
    let TestHost { source, folder: _folder, .. } = host("3xH100");
    assert_eq!(links(&source), ["NV18 NV18"; 3]);
    let matrix = "GPU0 GPU1 GPU2\nGPU0 X SYS PHB\nGPU1 SYS X NV4\nGPU2 PHB NV4 X";
    let replaced = source.clone().with_links(&parse_matrix(matrix).unwrap()).unwrap();
    assert_eq!(links(&replaced), ["SYS PHB", "SYS NV4", "PHB NV4"]);
    let error = source.with_links(&parse_matrix("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X").unwrap()).unwrap_err();
    assert!(error.to_string().contains("GPU2"), "{error}");
}

#[test]
fn figures_are_the_drivers() {
    let TestHost { source, sim, .. } = host("2xL4");
    let uuid = source.gpus()[1].uuid.clone();
    assert_eq!(source.figures()[&uuid].busy_ns, 0, "the first reading is where counting starts");
    let own = mayfly_gpu_proto::process::ProcessIdentity::current();
    let slot = sim.claim(&own).unwrap();
    sim.ledger().charge(&own, slot, 1, 5 << 20).unwrap();
    let start = mayfly_gpu_proto::process::monotonic_ns();
    sim.submit(1, start, 1_000_000_000);
    let busy = |uuid: &String| source.figures()[uuid].busy_ns;
    while busy(&uuid) == 0 {
        assert!(mayfly_gpu_proto::process::monotonic_ns() < start + 10_000_000_000, "no busy time is seen");
    }
    let passed = mayfly_gpu_proto::process::monotonic_ns() - start;
    let figures = source.figures();
    assert!(figures[&uuid].busy_ns <= passed + 1_000_000, "{figures:?} in {passed} ns");
    assert_eq!(figures[&uuid].memory_bytes, 5 << 20);
    assert_eq!(figures[&source.gpus()[0].uuid].memory_bytes, 0);
    // A lost device has no figures, and the others keep theirs.
    sim.device(1).lost.store(999, Relaxed);
    assert_eq!(source.figures().keys().collect::<Vec<_>>(), [&source.gpus()[0].uuid]);
}

/// An Xid is a fault only if no program caused it; the fault also affects the GPU's shares, and ends when the GPU
/// passes its self-test: with memory errors, after a reset.
#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_with_a_fault_is_offered_again_when_it_is_well() {
    let TestHost { source, sim, host, .. } = host("2xL4");
    let node = GpuNode::start(source, &host, Duration::from_millis(1));
    node.offers(RESOURCE_GPU, 2, 2).await;
    node.offers(RESOURCE_CORE, 200, 200).await;
    // The driver's events count from the watcher's start, which cannot be observed: errors are repeated until one is
    // seen.
    sim.device(1).uncorrected_errors.store(3, Relaxed);
    let mut repeat = tokio::time::interval(Duration::from_millis(200));
    tokio::select! {
        () = node.offers(RESOURCE_GPU, 2, 1) => {}
        () = async { loop { repeat.tick().await; sim.inject_xid(0, 31); sim.inject_xid(1, 48); } } => {}
    }
    node.offers(RESOURCE_CORE, 200, 100).await;
    let health = node.health();
    assert_eq!(health[0], (true, 0), "Xid 31 is the program's");
    assert!(!health[1].0 && health[1].1 > 0, "{health:?}");
    sim.device(1).uncorrected_errors.store(0, Relaxed);
    node.offers(RESOURCE_GPU, 2, 2).await;

    sim.device(0).lost.store(999, Relaxed);
    node.offers(RESOURCE_GPU, 2, 1).await;
    node.offers(RESOURCE_CORE, 200, 100).await;
    assert_eq!(node.health()[0], (false, 1), "a loss counts once");
    sim.device(0).lost.store(0, Relaxed);
    node.offers(RESOURCE_GPU, 2, 2).await;
    assert_eq!(node.health()[0], (true, 1));
}

/// Two GPUs have 80 hundredths free together, and none has 60: a pod for 60 waits; one that asks for the impossible
/// fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_share_that_no_single_gpu_has_free_is_waited_for() {
    let TestHost { source, host, folder: _folder, .. } = host("2xL4");
    let node = GpuNode::start(source, &host, Duration::from_secs(30));
    node.offers(RESOURCE_CORE, 200, 200).await;
    node.offers(RESOURCE_MEMORY, 178, 178).await;
    for uid in ["a", "b"] {
        node.manager.prepare(&pod(uid, 60), "c").await.unwrap();
    }
    let error = node.manager.prepare(&pod("d", 60), "c").await.unwrap_err();
    let waits = matches!(&error, DeviceError::NotReady(why) if why.contains("no GPU has 60 cores"));
    assert!(waits, "{error:?}");
    let error = node.manager.prepare(&pod("e", 150), "c").await.unwrap_err();
    assert!(matches!(error, DeviceError::Refused(_)), "{error}");
    node.manager.release(&PodUid("a".into()));
    node.manager.prepare(&pod("d", 60), "c").await.unwrap();
}

/// After a restart of a container its old processes are gone, with a pid namespace that the new ones cannot see.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_container_has_all_of_its_memory() {
    let TestHost { source, host, folder: _folder, .. } = host("L4");
    let node = GpuNode::start(source, &host, Duration::from_secs(30));
    node.offers(RESOURCE_CORE, 100, 100).await;
    node.offers(RESOURCE_MEMORY, 89, 89).await;
    let pod = pod("uid", 50);
    node.manager.prepare(&pod, "c").await.unwrap();
    let limits = LimitsFile::open(&node.folder.path().join("limits/uid/c/limits")).unwrap();
    let charge = |identity: &ProcessIdentity, bytes| {
        let slot = limits.region().claim(identity).unwrap();
        limits.region().charge(identity, slot, 0, bytes).unwrap();
    };
    charge(&ProcessIdentity { pid: 7, start: 7, namespace: 1 }, 1 << 20);
    charge(&ProcessIdentity::current(), 2 << 20);
    node.manager.prepare(&pod, "c").await.unwrap();
    assert_eq!(limits.usage()[0].memory_bytes, 2 << 20, "only the processes that run have memory");
}

/// A program without the limiting library that uses memory of the first GPU.
struct Program {
    sim: SimFile,
    slot: usize,
    bytes: u64,
}

impl Program {
    /// `pid`: a living process, which is in a container of the pod according to the node's `/proc`.
    fn start(node: &GpuNode, host: &SimulatedHost, pid: u32, pod: &str, bytes: u64) -> Self {
        let process = node.folder.path().join("proc").join(pid.to_string());
        std::fs::create_dir_all(&process).unwrap();
        std::fs::write(process.join("cgroup"), format!("0::/mayfly/burstable/{pod}/0a1b\n")).unwrap();
        let sim = SimFile::open(&host.state()).unwrap();
        let identity = ProcessIdentity { pid, start: 0, namespace: namespace() };
        let slot = sim.claim(&identity).unwrap();
        sim.ledger().charge(&identity, slot, 0, bytes).unwrap();
        Self { sim, slot, bytes }
    }

    fn end(self) {
        self.sim.ledger().release(self.slot, 0, self.bytes);
    }
}

/// The driver reports more memory for a container than it has: its pod is in violation. One that uses its memory, and
/// as much as a context needs, is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_bypasses_the_library_is_in_violation() {
    let TestHost { source, host, sim, folder: _folder, .. } = host("2xL4");
    let node = GpuNode::start(source, &host, Duration::from_secs(30));
    node.offers(RESOURCE_CORE, 200, 200).await;
    node.offers(RESOURCE_MEMORY, 178, 178).await;
    for uid in ["honest", "cheat"] {
        node.manager.prepare(&pod(uid, 50), "c").await.unwrap();
    }
    let mut violations = node.meter.violations();
    let patience = Duration::from_secs(20);
    let limit = 1 << 30;
    let _honest = Program::start(&node, &host, std::process::id(), "honest", limit + CONTEXT_BYTES);
    let cheat = Program::start(&node, &host, 1, "cheat", limit + CONTEXT_BYTES + 1);
    let found = tokio::time::timeout(patience, violations.wait_for(|found| !found.is_empty()));
    let found = found.await.unwrap().unwrap().clone();
    let message = &found[&PodUid("cheat".into())];
    assert!(found.len() == 1 && message.contains("memory limit \"1024Mi\": 1 process of it"), "{found:?}");
    assert_eq!(node.meter.violation_counts().get(ViolationKind::Memory), 1);
    // Its process ends.
    cheat.end();
    tokio::time::timeout(patience, violations.wait_for(BTreeMap::is_empty)).await.unwrap().unwrap();

    // Nothing is concluded while the driver does not answer.
    sim.device(0).lost.store(999, Relaxed);
    node.offers(RESOURCE_CORE, 200, 100).await;
    let _cheat = Program::start(&node, &host, 1, "cheat", 2 * limit);
    sim.device(1).lost.store(999, Relaxed);
    node.offers(RESOURCE_CORE, 200, 0).await;
    assert!(violations.borrow().is_empty(), "{violations:?}");
    sim.device(0).lost.store(0, Relaxed);
    tokio::time::timeout(patience, violations.wait_for(|found| !found.is_empty())).await.unwrap().unwrap();
}

/// The programs measure the time of shares; the device's busy time counts for a whole GPU.
#[tokio::test(flavor = "multi_thread")]
async fn gpu_time_is_that_of_shares_and_of_whole_gpus() {
    let TestHost { source, host, sim, folder: _folder, .. } = host("2xL4");
    let node = GpuNode::start(source, &host, Duration::from_secs(30));
    node.offers(RESOURCE_CORE, 200, 200).await;
    node.offers(RESOURCE_MEMORY, 178, 178).await;
    let time = |uid: &str| node.meter.time_used(&PodUid(uid.into()));
    assert_eq!(time("share"), None, "it has no GPU");
    node.manager.prepare(&pod("share", 50), "c").await.unwrap();
    assert_eq!(time("share"), Some(Duration::ZERO));
    let limits = LimitsFile::open(&node.folder.path().join("limits/share/c/limits")).unwrap();
    limits.region().devices()[0].gpu_ns.store(7_000_000_000, Relaxed);
    assert_eq!(time("share"), Some(Duration::from_secs(7)));

    node.offers(RESOURCE_GPU, 2, 1).await;
    // An earlier user's time does not count.
    let (_, earlier_end) = sim.submit(1, monotonic_ns(), 50_000_000);
    let busy = || node.meter.read()[1].figures.unwrap().busy_ns;
    let _ = busy();
    while monotonic_ns() < earlier_end {
        std::thread::yield_now();
    }
    let _ = busy();
    node.manager.prepare(&pod_with("whole", &[(RESOURCE_GPU, 1)]), "c").await.unwrap();
    assert_eq!(time("whole"), Some(Duration::ZERO));
    let begin = monotonic_ns();
    let (_, end) = sim.submit(1, begin, 50_000_000);
    while time("whole") == Some(Duration::ZERO) {
        assert!(monotonic_ns() < end + 20_000_000_000, "no busy time is seen");
    }
    let used = time("whole").unwrap();
    assert!(used <= Duration::from_nanos(monotonic_ns() - begin), "{used:?}");
}

/// Two programs without the limiting library: one uses more time than its container's share, the other one as much as an
/// elastic limit allows.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_uses_more_time_than_its_share_is_reported() {
    let TestHost { source, host, folder: _folder, .. } = host("2xL4");
    let node = GpuNode::start(source, &host, Duration::from_secs(30));
    node.offers(RESOURCE_CORE, 200, 200).await;
    node.offers(RESOURCE_MEMORY, 178, 178).await;
    let mut elastic = pod("elastic", 30);
    elastic.annotations.insert("mayfly.dev/vcuda-core-limit".into(), "90".into());
    for pod in [pod("cheat", 30), elastic] {
        node.manager.prepare(&pod, "c").await.unwrap();
    }
    let programs = [
        Program::start(&node, &host, 1, "cheat", 1),
        Program::start(&node, &host, std::process::id(), "elastic", 1),
    ];
    // Each uses about four fifths of the GPU, until it is reported.
    let working = async {
        let mut before = monotonic_ns();
        let mut pause = tokio::time::interval(Duration::from_millis(5));
        loop {
            pause.tick().await;
            let now = monotonic_ns();
            for program in &programs {
                program.sim.submit_of(program.slot, 0, now, (now - before) * 4 / 5);
            }
            before = now;
        }
    };
    let mut warnings = node.meter.warnings();
    let warned = async { warnings.wait_for(|found| !found.is_empty()).await.unwrap().clone() };
    let found = tokio::select! {
        found = tokio::time::timeout(Duration::from_secs(30), warned) => found.unwrap(),
        () = working => unreachable!(),
    };
    let message = &found[&PodUid("cheat".into())];
    assert!(found.len() == 1 && message.contains("share of GPU time of 30 %"), "{found:?}");
    assert!(message.contains("the limiting library measured 0 %"), "{message}");
    assert!(node.meter.violation_counts().get(ViolationKind::Time) >= 1);
    assert!(node.meter.violations().borrow().is_empty(), "it is not evicted");
}

/// Programs that end before they are looked at, one after the other: the driver's accounting shows what they used.
#[tokio::test(flavor = "multi_thread")]
async fn short_programs_that_use_more_time_than_the_share_are_reported() {
    let TestHost { source, host, folder: _folder, sim } = host("2xL4");
    let node = GpuNode::start(source, &host, Duration::from_secs(30));
    node.offers(RESOURCE_CORE, 200, 200).await;
    node.offers(RESOURCE_MEMORY, 178, 178).await;
    node.manager.prepare(&pod("cheat", 30), "c").await.unwrap();
    sim.device(0).accounting.store(1, Relaxed);
    // Each is a process that has ended when the driver looks at it, after it has used four fifths of the time since the
    // one before it.
    let working = async {
        let mut before = monotonic_ns();
        let mut pause = tokio::time::interval(Duration::from_millis(20));
        loop {
            pause.tick().await;
            let ended = std::process::Command::new("true").spawn().unwrap();
            let pid = ended.id();
            assert!(ended.wait_with_output().unwrap().status.success());
            let program = SimFile::open(&host.state()).unwrap();
            let slot = program.claim(&ProcessIdentity { pid, start: 1, namespace: namespace() }).unwrap();
            let now = monotonic_ns();
            program.submit_of(slot, 0, now, (now - before) * 4 / 5);
            before = now;
        }
    };
    let mut warnings = node.meter.warnings();
    let warned = async { warnings.wait_for(|found| !found.is_empty()).await.unwrap().clone() };
    let found = tokio::select! {
        found = tokio::time::timeout(Duration::from_secs(30), warned) => found.unwrap(),
        () = working => unreachable!(),
    };
    let message = &found[&PodUid("cheat".into())];
    assert!(message.contains("share of GPU time of 30 %"), "{message}");
}

/// The limits of a pod that is admitted again, while those of its first admission are removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_admitted_again_has_its_limits() {
    let TestHost { source, host, folder: _folder, .. } = host("L4");
    let node = GpuNode::start(source, &host, Duration::from_secs(30));
    node.offers(RESOURCE_CORE, 100, 100).await;
    node.offers(RESOURCE_MEMORY, 89, 89).await;
    let pod = pod("uid", 50);
    let limits = node.folder.path().join("limits/uid/c/limits");
    for round in 0..200 {
        node.manager.prepare(&pod, "c").await.unwrap();
        assert!(limits.exists(), "round {round}");
        node.manager.release(&pod.uid);
    }
}
