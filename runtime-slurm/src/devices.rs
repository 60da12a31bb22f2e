//! The GPUs of the cluster, as offered by the virtual node that represents it: Slurm allocates them when it starts a
//! job.

use std::{collections::HashSet, path::Path};

use async_trait::async_trait;
use mayfly_runtime::{
    ContainerDevices, DeviceCounts, DeviceError, DeviceInUse, NodeDevices, PodDeviceClaims, PodUid,
};
use tokio::sync::watch;

use crate::script::RESOURCE_GPU;

/// More GPUs than any cluster has, so that jobs queue in Slurm instead of the scheduler.
const GPUS: u64 = 1_000_000;

/// The devices of the virtual node that represents the cluster.
#[derive(Debug)]
pub struct SlurmDevices {
    changes: watch::Sender<u64>,
}

impl Default for SlurmDevices {
    fn default() -> Self {
        Self { changes: watch::Sender::new(0) }
    }
}

#[async_trait]
impl NodeDevices for SlurmDevices {
    fn counts(&self) -> DeviceCounts {
        let counts = || [(RESOURCE_GPU.to_owned(), GPUS)].into();
        DeviceCounts { capacity: counts(), allocatable: counts() }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    async fn prepare(&self, pod: &PodDeviceClaims, _: &str) -> Result<ContainerDevices, DeviceError> {
        let names = pod.claims.iter().flat_map(|claim| claim.resources.keys());
        match names.into_iter().find(|name| *name != RESOURCE_GPU) {
            Some(name) => {
                Err(DeviceError::Refused(format!("{name} is not offered through Slurm, only {RESOURCE_GPU}")))
            }
            None => Ok(ContainerDevices::default()),
        }
    }

    /// Slurm does not tell which GPUs a job has.
    fn in_use(&self, _: &PodUid) -> Vec<DeviceInUse> {
        Vec::new()
    }

    async fn add_plugin(&self, _: &str, _: &Path, _: &[String]) -> Result<(), String> {
        Err("a node that represents a Slurm cluster has no device plugins".into())
    }

    fn remove_plugin(&self, _: &str, _: &Path) {}

    fn release(&self, _: &PodUid) {}

    fn retain(&self, _: &HashSet<String>) {}
}
