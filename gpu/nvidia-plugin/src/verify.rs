//! Decides which containers use more memory of a shared GPU than they may. Pure; [`crate::inspector`] reads the driver's
//! figures.
//!
//! The limiting library books the memory of the programs that load it, and a program may run without it. So the memory
//! that the driver reports for a container's processes is compared with the container's limit and with its books. The
//! driver's figures include the memory of contexts and of loaded kernels, which is not booked: each process may use
//! [`MemoryTolerance::context_bytes`] for it. A container must exceed its limit in several readings one after another,
//! since a reading of many processes is not taken at one moment.

use std::collections::{BTreeMap, BTreeSet};

use mayfly_runtime::PodUid;

/// The deviations that are tolerated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryTolerance {
    /// The memory of one process on one GPU that is not booked, in bytes.
    pub context_bytes: u64,
    /// The number of consecutive readings after which a deviation counts.
    pub readings: u32,
}

impl MemoryTolerance {
    /// More than the context and the kernels of a program with the common libraries need on recent GPUs.
    pub const CONTEXT_BYTES_DEFAULT: u64 = 1 << 30;
    pub const READINGS_DEFAULT: u32 = 3;
}

impl Default for MemoryTolerance {
    fn default() -> Self {
        Self { context_bytes: Self::CONTEXT_BYTES_DEFAULT, readings: Self::READINGS_DEFAULT }
    }
}

/// The memory of a container on one shared GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerMemory {
    pub pod: PodUid,
    pub container: String,
    /// The UUID of the GPU.
    pub gpu: String,
    /// The memory that is allocated to the container; 0: no limit.
    pub limit_bytes: u64,
    /// The memory in the books of the container's limits file.
    pub booked_bytes: u64,
    /// The number of its processes on the GPU.
    pub processes: u32,
    /// The memory of its processes, as the driver reports it.
    pub used_bytes: u64,
}

impl ContainerMemory {
    fn key(&self) -> ContainerOnGpu {
        (self.gpu.clone(), self.pod.clone(), self.container.clone())
    }

    /// Whether it uses more than this number of bytes and its processes' contexts.
    fn exceeds(&self, bytes: u64, tolerance: &MemoryTolerance) -> bool {
        let contexts = tolerance.context_bytes.saturating_mul(self.processes.into());
        self.used_bytes > bytes.saturating_add(contexts)
    }
}

/// A process on a shared GPU that belongs to no container with a share of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrangeProcess {
    /// The UUID of the GPU.
    pub gpu: String,
    pub pid: u32,
    pub used_bytes: u64,
}

/// One reading of the GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// The UUIDs of the shared GPUs whose processes the driver reported. Nothing is concluded about others.
    pub gpus: BTreeSet<String>,
    pub containers: Vec<ContainerMemory>,
    pub strangers: Vec<StrangeProcess>,
}

/// What follows from a reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryFindings {
    /// The pods to evict, with the messages, until they are gone.
    pub violations: BTreeMap<PodUid, String>,
    /// The containers within their limits whose programs use memory that is not booked. Each is reported once.
    pub unbooked: Vec<ContainerMemory>,
    /// Each is reported once.
    pub strangers: Vec<StrangeProcess>,
}

/// GPU, pod, container.
type ContainerOnGpu = (String, PodUid, String);

/// Counts the readings in which containers deviate.
#[derive(Debug)]
pub struct MemoryVerifier {
    tolerance: MemoryTolerance,
    over: BTreeMap<ContainerOnGpu, u32>,
    unbooked: BTreeMap<ContainerOnGpu, u32>,
    strangers: BTreeMap<(String, u32), u32>,
}

impl MemoryVerifier {
    pub fn new(tolerance: MemoryTolerance) -> Self {
        Self { tolerance, over: BTreeMap::new(), unbooked: BTreeMap::new(), strangers: BTreeMap::new() }
    }

    /// Concludes from a reading. `shared`: the UUIDs of all shared GPUs; what is known of others is forgotten.
    pub fn judge(&mut self, shared: &BTreeSet<String>, reading: &MemoryReading) -> MemoryFindings {
        let tolerance = self.tolerance;
        let containers = || reading.containers.iter();
        let over = containers().filter(|one| one.limit_bytes > 0 && one.exceeds(one.limit_bytes, &tolerance));
        let over: BTreeMap<_, _> = over.map(|one| (one.key(), one)).collect();
        let unbooked = containers().filter(|one| one.exceeds(one.booked_bytes, &tolerance));
        let unbooked: BTreeMap<_, _> = unbooked.map(|one| (one.key(), one)).collect();
        let strangers: BTreeMap<_, _> =
            reading.strangers.iter().map(|one| ((one.gpu.clone(), one.pid), one)).collect();

        let is_known = |gpu: &String| shared.contains(gpu) && !reading.gpus.contains(gpu);
        count(&mut self.over, over.keys(), |key| is_known(&key.0));
        count(&mut self.unbooked, unbooked.keys(), |key| is_known(&key.0));
        count(&mut self.strangers, strangers.keys(), |key| is_known(&key.0));

        let mut findings = MemoryFindings::default();
        for (key, one) in over {
            if self.over.get(&key).is_some_and(|readings| *readings >= tolerance.readings) {
                findings.violations.entry(one.pod.clone()).or_insert_with(|| message(one));
            }
        }
        let is_due = |readings: Option<&u32>| readings == Some(&tolerance.readings);
        let unbooked = unbooked.into_iter().filter(|(key, _)| is_due(self.unbooked.get(key)));
        let unbooked = unbooked.filter(|(key, _)| !self.over.contains_key(key));
        findings.unbooked = unbooked.map(|(_, one)| one.clone()).collect();
        let strangers = strangers.into_iter().filter(|(key, _)| is_due(self.strangers.get(key)));
        findings.strangers = strangers.map(|(_, one)| one.clone()).collect();
        findings
    }
}

/// Counts a reading of `present`, and forgets the others unless nothing was read about them.
fn count<'a, K: Ord + Clone + 'a>(
    counts: &mut BTreeMap<K, u32>,
    present: impl Iterator<Item = &'a K>,
    is_unread: impl Fn(&K) -> bool,
) {
    let before = std::mem::take(counts);
    for key in present {
        counts.insert(key.clone(), before.get(key).copied().unwrap_or(0).saturating_add(1));
    }
    for (key, readings) in before {
        if is_unread(&key) {
            counts.insert(key, readings);
        }
    }
}

/// In the form of the kubelet's messages about limits of local storage.
fn message(one: &ContainerMemory) -> String {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    format!(
        "Container {} exceeded its GPU memory limit \"{}Mi\": {} process{} of it use{} {}Mi of {}. ",
        one.container,
        mib(one.limit_bytes),
        one.processes,
        if one.processes == 1 { "" } else { "es" },
        if one.processes == 1 { "s" } else { "" },
        mib(one.used_bytes),
        one.gpu,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn container(pod: &str, limit: u64, booked: u64, used: u64) -> ContainerMemory {
        ContainerMemory {
            pod: PodUid(pod.into()),
            container: "c".into(),
            gpu: "GPU-0".into(),
            limit_bytes: limit,
            booked_bytes: booked,
            processes: 1,
            used_bytes: used,
        }
    }

    fn reading(containers: &[ContainerMemory]) -> MemoryReading {
        let gpus = ["GPU-0".to_owned()].into();
        MemoryReading { gpus, containers: containers.to_vec(), strangers: Vec::new() }
    }

    fn shared() -> BTreeSet<String> {
        ["GPU-0".to_owned()].into()
    }

    fn verifier() -> MemoryVerifier {
        MemoryVerifier::new(MemoryTolerance { context_bytes: GIB, readings: 3 })
    }

    /// The pods in violation after each of these readings.
    fn violations(verifier: &mut MemoryVerifier, readings: &[MemoryReading]) -> Vec<String> {
        let judged = readings.iter().map(|reading| verifier.judge(&shared(), reading).violations);
        judged.map(|found| found.keys().map(|pod| pod.0.as_str()).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn an_honest_container_may_use_its_limit_and_its_contexts() {
        let honest = container("honest", 8 * GIB, 8 * GIB, 9 * GIB);
        let mut several = container("several", 8 * GIB, 8 * GIB, 11 * GIB);
        several.processes = 3;
        let unlimited = container("unlimited", 0, 50 * GIB, 51 * GIB);
        let all = reading(&[honest, several, unlimited]);
        let mut verifier = verifier();
        for _ in 0..10 {
            assert_eq!(verifier.judge(&shared(), &all), MemoryFindings::default());
        }
    }

    #[test]
    fn a_container_above_its_limit_is_in_violation_after_several_readings() {
        let over = reading(&[container("cheat", 8 * GIB, 0, 9 * GIB + 1), container("good", GIB, GIB, GIB)]);
        let within = reading(&[container("cheat", 8 * GIB, 8 * GIB, 9 * GIB)]);
        let mut verifier = verifier();
        let readings = [&over, &over, &within, &over, &over, &over, &over, &within, &over].map(Clone::clone);
        let expected = ["", "", "", "", "", "cheat", "cheat", "", ""];
        assert_eq!(violations(&mut verifier, &readings), expected, "only consecutive readings count");
        let message = |one: ContainerMemory| message(&one);
        assert_eq!(
            message(container("cheat", 8 * GIB, 0, 9 * GIB + 1)),
            "Container c exceeded its GPU memory limit \"8192Mi\": 1 process of it uses 9217Mi of GPU-0. "
        );
        assert!(
            message(ContainerMemory { processes: 2, ..container("x", GIB, 0, 9 * GIB) })
                .contains("2 processes of it use 9216Mi")
        );
    }

    #[test]
    fn a_gpu_that_was_not_read_changes_nothing() {
        let over = reading(&[container("cheat", 8 * GIB, 0, 10 * GIB)]);
        let mut verifier = verifier();
        let nothing = MemoryReading::default();
        let readings = [&over, &over, &nothing, &nothing, &over, &nothing].map(Clone::clone);
        assert_eq!(violations(&mut verifier, &readings), ["", "", "", "", "cheat", ""]);
        // The GPU is not shared any more.
        assert_eq!(verifier.judge(&BTreeSet::new(), &nothing), MemoryFindings::default());
        assert_eq!(violations(&mut verifier, &[over.clone(), over.clone(), over]), ["", "", "cheat"]);
    }

    #[test]
    fn memory_that_is_not_booked_is_reported_once() {
        let bypass = reading(&[container("bypass", 8 * GIB, GIB, 5 * GIB)]);
        let mut verifier = verifier();
        let reported: Vec<usize> =
            (0..6).map(|_| verifier.judge(&shared(), &bypass).unbooked.len()).collect();
        assert_eq!(reported, [0, 0, 1, 0, 0, 0]);
        assert_eq!(verifier.judge(&shared(), &bypass).violations, BTreeMap::new());
    }

    #[test]
    fn a_process_of_no_container_is_reported_once_and_again_as_another_process() {
        let with = |pid| MemoryReading {
            strangers: vec![StrangeProcess { gpu: "GPU-0".into(), pid, used_bytes: GIB }],
            ..reading(&[])
        };
        let mut verifier = verifier();
        let mut pids = Vec::new();
        for pid in [7, 7, 7, 7, 8, 8, 8, 7, 7, 7] {
            pids.extend(verifier.judge(&shared(), &with(pid)).strangers.iter().map(|one| one.pid));
        }
        assert_eq!(pids, [7, 8, 7], "a process that ends within fewer readings is not reported");
    }
}
