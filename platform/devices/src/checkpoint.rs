//! The file `kubelet_internal_checkpoint` in the kubelet's format, which other programs read, too.
//!
//! Upstream's checksum is that of a Go dump of the structure and cannot be computed from the JSON; this one is FNV-1a
//! of the data's JSON. A file with an unknown checksum is still read: a wrong entry is released when its pod is not
//! found.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use mayfly_runtime::PodUid;
use serde::{Deserialize, Serialize};

use crate::state::{AllocationEntry, DeviceLedger, EntryKey};

pub const FILE_NAME: &str = "kubelet_internal_checkpoint";

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: CheckpointBody,
    #[serde(default)]
    checksum: u64,
    #[serde(rename = "BootID", default, skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct CheckpointBody {
    pod_device_entries: Option<Vec<PodDeviceEntry>>,
    registered_devices: Option<BTreeMap<String, Vec<String>>>,
}

#[derive(Serialize, Deserialize)]
struct PodDeviceEntry {
    #[serde(rename = "PodUID")]
    pod: String,
    #[serde(rename = "ContainerName")]
    container: String,
    #[serde(rename = "ResourceName")]
    resource: String,
    #[serde(rename = "DeviceIDs")]
    devices: BTreeMap<i64, BTreeSet<String>>,
    #[serde(rename = "AllocResp")]
    response: String,
}

/// The content of a checkpoint: the allocations, and the registered resources.
pub type Restored = (BTreeMap<EntryKey, AllocationEntry>, Vec<String>);

/// Encodes the file.
pub fn encode(book: &DeviceLedger) -> String {
    let (entries, resources) = book.snapshot();
    let entry = |((pod, container, resource), entry): (&EntryKey, &AllocationEntry)| PodDeviceEntry {
        pod: pod.0.clone(),
        container: container.clone(),
        resource: resource.clone(),
        devices: entry.devices.clone(),
        response: STANDARD.encode(&entry.response),
    };
    let data = CheckpointBody {
        pod_device_entries: Some(entries.into_iter().map(entry).collect()),
        registered_devices: Some(resources),
    };
    let checksum = fnv1a(&serde_json::to_vec(&data).unwrap_or_default());
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let boot_id = boot_id.map(|text| text.trim().to_owned());
    serde_json::to_string(&Checkpoint { data, checksum: checksum.into(), boot_id }).unwrap_or_default()
}

/// Decodes the file.
///
/// # Errors
/// The text is not in the kubelet's format.
pub fn decode(text: &str) -> Result<Restored, String> {
    let checkpoint: Checkpoint = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut entries = BTreeMap::new();
    for entry in checkpoint.data.pod_device_entries.unwrap_or_default() {
        let response = STANDARD.decode(&entry.response).map_err(|error| error.to_string())?;
        let key = (PodUid(entry.pod), entry.container, entry.resource);
        entries.insert(key, AllocationEntry { devices: entry.devices, response });
    }
    Ok((entries, checkpoint.data.registered_devices.unwrap_or_default().into_keys().collect()))
}

/// Writes the file atomically.
///
/// # Errors
/// The folder cannot be written.
pub fn write(folder: &Path, text: &str) -> io::Result<()> {
    let beside = folder.join(format!(".{FILE_NAME}.new"));
    let file = fs::File::create(&beside)?;
    io::Write::write_all(&mut &file, text.as_bytes())?;
    file.sync_all()?;
    fs::rename(beside, folder.join(FILE_NAME))
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::state::{DeviceState, EndpointOptions};

    fn book() -> DeviceLedger {
        let mut book = DeviceLedger::default();
        let generation = book.begin_connection();
        assert!(book.connect(generation, "nvidia.com/gpu", "gpu.sock", EndpointOptions::default()));
        let device = DeviceState { healthy: true, numa: [1].into() };
        book.update("nvidia.com/gpu", generation, [("GPU-0".into(), device)].into());
        let key = (PodUid("uid-1".into()), "main".into(), "nvidia.com/gpu".into());
        book.reserve(key.clone(), &["GPU-0".to_owned()].into());
        book.complete(&key, vec![10, 0]);
        book
    }

    #[test]
    fn the_file_has_the_kubelets_form() {
        let value: serde_json::Value = serde_json::from_str(&encode(&book())).unwrap();
        let expected = serde_json::json!({
            "PodDeviceEntries": [{"PodUID": "uid-1", "ContainerName": "main", "ResourceName": "nvidia.com/gpu",
                "DeviceIDs": {"1": ["GPU-0"]}, "AllocResp": "CgA="}],
            "RegisteredDevices": {"nvidia.com/gpu": ["GPU-0"]}});
        assert_eq!(value["Data"], expected);
        assert_ne!(value["Checksum"], 0);
    }

    /// Upstream: `TestUpdateCapacityAllocatable`, its last part.
    #[test]
    fn after_a_restart_allocations_are_known_and_resources_wait_for_their_plugin() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &encode(&book())).unwrap();
        let text = fs::read_to_string(folder.path().join(FILE_NAME)).unwrap();
        let (entries, resources) = decode(&text).unwrap();
        let restored = DeviceLedger::restore(entries, &resources, Duration::ZERO);
        assert_eq!(restored.allocations(), book().allocations());
        assert_eq!(restored.counts().capacity, [("nvidia.com/gpu".to_owned(), 0)].into());
        assert_eq!(restored.endpoint("nvidia.com/gpu"), None);
    }

    #[test]
    fn upstreams_empty_file_and_unknown_checksums_are_read() {
        let text = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1}"#;
        assert_eq!(decode(text), Ok((BTreeMap::new(), vec![])));
        assert!(decode("{").is_err());
    }
}
