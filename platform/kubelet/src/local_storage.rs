//! The disk usage of pods, and the pods' own limits (upstream's `kubelet/eviction`, `localStorageEviction`). Pure;
//! [`crate::pod::evicting`] measures.

use std::collections::{BTreeMap, HashMap};

use mayfly_api::{
    k8s::{
        api::core::v1::{Container, Pod, PodSpec},
        apimachinery::pkg::api::resource::Quantity,
    },
    quantity::{self, Bytes},
    resources::Amounts,
};
use mayfly_runtime::{DiskUsage, PodUid};
use parking_lot::Mutex;

use crate::volumes::disk_usage::VolumeUsage;

/// The name of the resource.
pub(crate) const EPHEMERAL_STORAGE: &str = "ephemeral-storage";

/// The last measurement of the node's pods.
pub(crate) type MeasuredStorage = Mutex<HashMap<PodUid, PodStorage>>;

/// The disk usage of a container without its volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContainerStorage {
    pub(crate) layer: DiskUsage,
    pub(crate) logs: DiskUsage,
}

impl ContainerStorage {
    pub(crate) fn total(&self) -> DiskUsage {
        self.layer + self.logs
    }
}

/// The disk usage of a pod: of its containers and its local volumes, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodStorage {
    pub(crate) containers: BTreeMap<String, ContainerStorage>,
    pub(crate) volumes: BTreeMap<String, VolumeUsage>,
}

impl PodStorage {
    /// The usage that counts against the pod's limit, and takes space of the disk.
    pub(crate) fn total(&self) -> DiskUsage {
        let volumes = self.volumes.values().filter(|volume| !volume.in_memory).map(|volume| volume.usage);
        self.containers.values().map(ContainerStorage::total).chain(volumes).sum()
    }

    /// The limit that the pod exceeds, as upstream's eviction message.
    pub(crate) fn exceeded(&self, spec: &PodSpec) -> Option<String> {
        self.volume_exceeded(spec)
            .or_else(|| self.pod_exceeded(spec))
            .or_else(|| self.container_exceeded(spec))
    }

    fn volume_exceeded(&self, spec: &PodSpec) -> Option<String> {
        spec.volumes.iter().flatten().find_map(|volume| {
            let limit = volume.empty_dir.as_ref()?.size_limit.as_ref()?;
            let bytes = quantity::whole(limit).ok().filter(|bytes| *bytes > 0)?;
            let used = self.volumes.get(&volume.name)?.usage.bytes;
            let (name, limit) = (&volume.name, &limit.0);
            (used > bytes).then(|| format!("Usage of EmptyDir volume {name:?} exceeds the limit {limit:?}. "))
        })
    }

    fn pod_exceeded(&self, spec: &PodSpec) -> Option<String> {
        let limit = Amounts::limits_of_pod(spec).get(EPHEMERAL_STORAGE);
        if limit == 0 || self.total().bytes <= limit {
            return None;
        }
        let limits: Vec<&Quantity> = spec.containers.iter().filter_map(limit_of).collect();
        let limit = match limits[..] {
            [one] if quantity::whole(one) == Ok(limit) => one.0.clone(),
            _ => Bytes(limit).to_string().replace(" bytes", ""),
        };
        Some(format!("Pod ephemeral local storage usage exceeds the total limit of containers {limit}. "))
    }

    fn container_exceeded(&self, spec: &PodSpec) -> Option<String> {
        spec.containers.iter().find_map(|container| {
            let limit = limit_of(container)?;
            let used = self.containers.get(&container.name)?.total().bytes;
            let (name, bytes) = (&container.name, quantity::whole(limit).ok()?);
            let message =
                || format!("Container {name} exceeded its local ephemeral storage limit {:?}. ", limit.0);
            (used > bytes).then(message)
        })
    }
}

fn limit_of(container: &Container) -> Option<&Quantity> {
    container.resources.as_ref()?.limits.as_ref()?.get(EPHEMERAL_STORAGE)
}

/// The containers of a pod that may have written something.
pub(crate) fn containers(pod: &Pod) -> impl Iterator<Item = &str> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str());
        let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        all.map(|container| container.name.as_str()).chain(ephemeral)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn usage(mib: u64) -> DiskUsage {
        DiskUsage { bytes: mib * MIB, inodes: 1 }
    }

    fn exceeded(spec: Value, containers: &[(&str, u64)], volumes: &[(&str, u64, bool)]) -> Option<String> {
        let storage = PodStorage {
            containers: containers
                .iter()
                .map(|(name, mib)| {
                    ((*name).into(), ContainerStorage { layer: usage(mib - 1), logs: usage(1) })
                })
                .collect(),
            volumes: volumes
                .iter()
                .map(|(name, mib, in_memory)| {
                    ((*name).into(), VolumeUsage { usage: usage(*mib), in_memory: *in_memory })
                })
                .collect(),
        };
        storage.exceeded(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_pod_is_told_which_limit_it_exceeds() {
        let container = |name: &str, limit: &str| json!({"name": name, "resources": {"limits": {"ephemeral-storage": limit}}});
        let one = json!({"containers": [container("a", "10Mi")]});
        let two = json!({"containers": [container("a", "10Mi"), container("b", "20Mi")]});
        let dirs = json!({"containers": [{"name": "a"}], "volumes": [
            {"name": "small", "emptyDir": {"sizeLimit": "5Mi"}}, {"name": "free", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "5Mi"}}]});
        for (spec, used, volumes, expected) in [
            (&one, vec![("a", 10)], vec![], None),
            (
                &one,
                vec![("a", 11)],
                vec![],
                Some("Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. "),
            ),
            (
                &two,
                vec![("a", 11), ("b", 1)],
                vec![],
                Some("Container a exceeded its local ephemeral storage limit \"10Mi\". "),
            ),
            (
                &two,
                vec![("a", 1), ("b", 1)],
                vec![("v", 29, false)],
                Some("Pod ephemeral local storage usage exceeds the total limit of containers 30Mi. "),
            ),
            (&two, vec![("a", 1), ("b", 1)], vec![("v", 29, true)], None),
            (&dirs, vec![("a", 100)], vec![("small", 5, false), ("free", 100, false)], None),
            (
                &dirs,
                vec![],
                vec![("small", 6, false)],
                Some("Usage of EmptyDir volume \"small\" exceeds the limit \"5Mi\". "),
            ),
            (
                &dirs,
                vec![],
                vec![("memory", 6, true)],
                Some("Usage of EmptyDir volume \"memory\" exceeds the limit \"5Mi\". "),
            ),
        ] {
            assert_eq!(exceeded(spec.clone(), &used, &volumes).as_deref(), expected, "{used:?} {volumes:?}");
        }
    }
}
