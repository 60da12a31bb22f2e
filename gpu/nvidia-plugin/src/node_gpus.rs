//! The usage of GPUs on which the kubelet acts: the pods that exceed their limits.

use std::collections::BTreeMap;

use mayfly_runtime::{NodeGpus, PodUid};
use tokio::sync::watch;

use crate::GpuMeter;

impl NodeGpus for GpuMeter {
    fn violations(&self) -> watch::Receiver<BTreeMap<PodUid, String>> {
        self.violations.clone()
    }
}
