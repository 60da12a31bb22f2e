//! The pod that an allocation is for, as metadata of the calls to a plugin. Other plugins ignore it.

use std::collections::BTreeMap;

use mayfly_api::ObjectKey;
use mayfly_runtime::PodUid;
use tonic::metadata::{MetadataMap, MetadataValue};

const POD_UID: &str = "mayfly-pod-uid";
const POD_NAMESPACE: &str = "mayfly-pod-namespace";
const POD_NAME: &str = "mayfly-pod-name";
const CONTAINER: &str = "mayfly-container-name";
/// Resource names with counts, as JSON.
const RESOURCES: &str = "mayfly-container-resources";
/// The pod's annotations with the prefix `mayfly.dev/` or `tencent.com/`, as JSON; in a binary header, as values may be
/// any text.
const ANNOTATIONS: &str = "mayfly-pod-annotations-bin";

/// The container for which devices are allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOwner {
    pub uid: PodUid,
    pub pod: ObjectKey,
    pub container: String,
    /// All device resources of the container, since those that share a device are placed together.
    pub resources: BTreeMap<String, u32>,
    pub annotations: BTreeMap<String, String>,
}

impl DeviceOwner {
    /// Adds the owner to the metadata of a call.
    pub fn write(&self, metadata: &mut MetadataMap) {
        let resources = serde_json::to_string(&self.resources).unwrap_or_default();
        for (key, value) in [
            (POD_UID, &self.uid.0),
            (POD_NAMESPACE, &self.pod.namespace),
            (POD_NAME, &self.pod.name),
            (CONTAINER, &self.container),
            (RESOURCES, &resources),
        ] {
            // Names of objects and resources are ASCII; other values are omitted.
            if let Ok(value) = value.parse() {
                metadata.insert(key, value);
            }
        }
        let ours = |name: &str| name.starts_with("mayfly.dev/") || name.starts_with("tencent.com/");
        let annotations: BTreeMap<_, _> = self.annotations.iter().filter(|(name, _)| ours(name)).collect();
        let annotations = serde_json::to_vec(&annotations).unwrap_or_default();
        metadata.insert_bin(ANNOTATIONS, MetadataValue::from_bytes(&annotations));
    }

    /// Reads the owner from a call's metadata; `None` if the caller is another kubelet.
    pub fn read(metadata: &MetadataMap) -> Option<Self> {
        let text = |key: &str| metadata.get(key)?.to_str().ok().map(str::to_owned);
        let annotations = metadata.get_bin(ANNOTATIONS).and_then(|value| value.to_bytes().ok());
        Some(Self {
            uid: PodUid(text(POD_UID)?),
            pod: ObjectKey { namespace: text(POD_NAMESPACE)?, name: text(POD_NAME)? },
            container: text(CONTAINER)?,
            resources: serde_json::from_str(&text(RESOURCES)?).ok()?,
            annotations: annotations
                .and_then(|value| serde_json::from_slice(&value).ok())
                .unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_survives_the_wire() {
        let owner = DeviceOwner {
            uid: PodUid("u-1".into()),
            pod: ObjectKey { namespace: "team".into(), name: "train-0".into() },
            container: "main".into(),
            resources: [("mayfly.dev/vcuda-core".into(), 50)].into(),
            annotations: [("mayfly.dev/note".into(), "grün".into())].into(),
        };
        let mut metadata = MetadataMap::new();
        owner.write(&mut metadata);
        assert_eq!(DeviceOwner::read(&metadata), Some(owner));
        assert_eq!(DeviceOwner::read(&MetadataMap::new()), None);
    }
}
