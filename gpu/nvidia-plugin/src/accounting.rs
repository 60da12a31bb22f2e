//! The GPU time of processes that were too short to be seen: they began and ended between two readings. From the driver's
//! accounting mode, which keeps the figures of processes that ended, where an operator has turned it on.
//!
//! The driver names a process by its pid only, and nothing is known about it when it has ended. Its time counts for a
//! container if that is the only one with a share of the GPU.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nvml_wrapper::error::NvmlError;

use crate::{Gpu, GpuSource};

/// A process that the driver has accounted: its pid, and its start in µs since 1970.
type AccountedProcess = (u32, u64);

/// The ended processes that were counted, by the UUID of the GPU.
#[derive(Debug, Default)]
pub(crate) struct EndedProcesses(BTreeMap<String, GpuHistory>);

#[derive(Debug, Default)]
struct GpuHistory {
    counted: BTreeSet<AccountedProcess>,
    /// The processes that were seen on the GPU at the last two readings: the driver's samples cover them.
    seen: [BTreeSet<u32>; 2],
}

impl EndedProcesses {
    /// The GPU time of processes that began and ended since the previous call. `running`: the processes that are on the
    /// GPU now. The first call returns none.
    ///
    /// # Errors
    /// The driver does not answer, or accounting mode is off.
    pub(crate) fn read(
        &mut self,
        source: &GpuSource,
        gpu: &Gpu,
        running: impl IntoIterator<Item = u32>,
    ) -> Result<Duration, NvmlError> {
        let is_first = !self.0.contains_key(&gpu.uuid);
        let history = self.0.entry(gpu.uuid.clone()).or_default();
        history.seen.rotate_left(1);
        history.seen[1] = running.into_iter().collect();
        let nvml = source.nvml();
        let device = nvml.device_by_index(gpu.index)?;
        let (mut present, mut total) = (BTreeSet::new(), Duration::ZERO);
        for pid in device.accounting_pids()? {
            // It may have been overwritten meanwhile.
            let Ok(stats) = device.accounting_stats_for(pid) else { continue };
            if stats.is_running {
                continue;
            }
            let process = (pid, stats.start_time);
            present.insert(process);
            let is_known = is_first || history.counted.contains(&process);
            if !is_known && history.seen.iter().all(|seen| !seen.contains(&pid)) {
                let percent = u64::from(stats.gpu_utilization.unwrap_or(0).min(100));
                total += Duration::from_millis(stats.time.saturating_mul(percent) / 100);
            }
        }
        history.counted = present;
        Ok(total)
    }

    /// Forgets a GPU: its next reading counts nothing.
    pub(crate) fn forget(&mut self, uuid: &str) {
        self.0.remove(uuid);
    }

    /// Forgets GPUs that are not shared any more.
    pub(crate) fn retain(&mut self, shared: &BTreeSet<String>) {
        self.0.retain(|uuid, _| shared.contains(uuid));
    }
}
