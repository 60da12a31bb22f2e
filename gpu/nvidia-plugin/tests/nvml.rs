//! The plugin on a simulated host, whose NVML is a library that is loaded as the driver's is. Cargo builds it for these
//! tests as the dev-dependency `mayfly_gpu_fake_nvml`. A test must have its own process: the library has one state.

use std::{path::PathBuf, sync::atomic::Ordering::Relaxed};

use mayfly_gpu_nvidia_plugin::{GpuSource, SimulatedHost};
use mayfly_gpu_proto::{
    FAKE_NVML_FILE,
    sim::{SimFile, parse_gpus},
};

/// The folder of a library that cargo built: beside the test's executable, or one folder up.
fn libraries() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let mut folders = executable.ancestors().skip(1).take(2);
    let found = folders.find(|folder| folder.join(FAKE_NVML_FILE).exists());
    found.unwrap_or_else(|| panic!("cargo did not build {FAKE_NVML_FILE}")).to_owned()
}

struct TestHost {
    folder: tempfile::TempDir,
    host: SimulatedHost,
    source: GpuSource,
    sim: SimFile,
}

fn host(gpus: &str) -> TestHost {
    let folder = tempfile::tempdir().unwrap();
    let host = SimulatedHost::create(folder.path(), &libraries(), &parse_gpus(gpus).unwrap()).unwrap();
    let source = host.source().unwrap();
    let sim = SimFile::open(&host.state()).unwrap();
    TestHost { folder, host, source, sim }
}

#[test]
fn the_driver_describes_its_gpus() {
    let TestHost { source, host, folder, .. } = host("3xH100");
    let gpus = parse_gpus("3xH100").unwrap();
    let seen: Vec<_> = source
        .gpus()
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
    assert!(source.gpus().iter().all(|gpu| gpu.name == "NVIDIA H100 80GB HBM3" && gpu.healthy));
    assert_eq!(source.gpus()[2].compute_capability, (9, 0));
    assert_eq!(source.versions().unwrap(), ("570.86.15".into(), (12, 8)));
    assert_eq!(host.driver().sim, Some(folder.path().join("sim")));
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
