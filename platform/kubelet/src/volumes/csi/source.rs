//! A volume of a CSI driver, as a pod or a PersistentVolume specifies it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use mayfly_api::{
    env::EnvSources,
    k8s::api::{
        core::v1::{Pod, Secret, SecretReference, Volume},
        storage::v1::CSIDriver,
    },
    volume_claims::{capacity_bytes, node_expansion},
};
use mayfly_csi::{
    capability, names,
    proto::{VolumeCapability, volume_capability::access_mode::Mode},
};

use crate::volumes::VolumeSources;

/// The keys of the volume context through which a driver learns about the pod (upstream's).
const CONTEXT: &str = "csi.storage.k8s.io";

/// A volume as specified by a pod or a PersistentVolume.
#[derive(Clone, Debug)]
pub(in crate::volumes) struct CsiSource {
    pub(super) driver: String,
    pub(super) handle: String,
    /// The PersistentVolume's name, otherwise that of the pod's volume: the folder in the pod.
    pub(super) name: String,
    pub(super) ephemeral: bool,
    pub(super) read_only: bool,
    pub(super) block: bool,
    pub(super) capability: VolumeCapability,
    pub(super) has_fs_type: bool,
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) stage_secret: Option<Arc<Secret>>,
    pub(super) publish_secret: Option<Arc<Secret>>,
    /// The size to expand the volume to on the node, in bytes; 0: none.
    pub(super) expand_to: u64,
    pub(super) capacity: u64,
}

impl CsiSource {
    /// The source of a pod's volume, or of the volume that its claim is bound to; `None` if it is of another type.
    ///
    /// # Errors
    /// A message: a Secret does not exist.
    pub(in crate::volumes) fn of(
        pod: &Pod,
        volume: &Volume,
        sources: &VolumeSources<'_, impl EnvSources>,
    ) -> Result<Option<Self>, String> {
        let secret = |namespace: &str, name: &str| sources.secret(&volume.name, namespace, name);
        if let Some(inline) = &volume.csi {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let reference = inline.node_publish_secret_ref.as_ref();
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let fs_type = inline.fs_type.clone().unwrap_or_default();
            return Ok(Some(Self {
                driver: inline.driver.clone(),
                handle: names::ephemeral_handle(uid, &volume.name),
                name: volume.name.clone(),
                ephemeral: true,
                read_only: inline.read_only.unwrap_or(false),
                block: false,
                has_fs_type: !fs_type.is_empty(),
                capability: capability(false, &fs_type, Vec::new(), &[]),
                attributes: inline.volume_attributes.clone().unwrap_or_default(),
                stage_secret: None,
                publish_secret: reference.map(|reference| secret(namespace, &reference.name)).transpose()?,
                expand_to: 0,
                capacity: 0,
            }));
        }
        let Some(claimed) = sources.claimed.get(&volume.name) else { return Ok(None) };
        let Some(spec) = claimed.volume.spec.as_ref() else { return Ok(None) };
        let Some(source) = &spec.csi else { return Ok(None) };
        let find = |reference: &Option<SecretReference>| {
            let text = |value: &Option<String>| value.clone().unwrap_or_default();
            reference.as_ref().map(|one| secret(&text(&one.namespace), &text(&one.name))).transpose()
        };
        let block = spec.volume_mode.as_deref() == Some("Block");
        let fs_type = source.fs_type.clone().unwrap_or_default();
        let modes = spec.access_modes.clone().unwrap_or_default();
        let options = spec.mount_options.clone().unwrap_or_default();
        Ok(Some(Self {
            driver: source.driver.clone(),
            handle: source.volume_handle.clone(),
            name: claimed.volume.metadata.name.clone().unwrap_or_default(),
            ephemeral: false,
            read_only: claimed.read_only || source.read_only.unwrap_or(false),
            block,
            has_fs_type: !fs_type.is_empty(),
            capability: capability(block, &fs_type, options, &modes),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            stage_secret: find(&source.node_stage_secret_ref)?,
            publish_secret: find(&source.node_publish_secret_ref)?,
            expand_to: node_expansion(&claimed.volume).unwrap_or(0),
            capacity: capacity_bytes(&claimed.volume),
        }))
    }

    /// Whether the volume must be attached to the node before it is mounted.
    pub(super) fn needs_attachment(&self, settings: &CSIDriver) -> bool {
        !self.ephemeral && settings.spec.attach_required != Some(false)
    }

    /// The volume context of `NodePublishVolume`: the volume's own, and the pod's if the driver requests it.
    pub(super) fn context(&self, pod: &Pod, settings: &CSIDriver) -> HashMap<String, String> {
        let mut context: HashMap<String, String> = self.attributes.clone().into_iter().collect();
        if settings.spec.pod_info_on_mount == Some(true) {
            let text = |value: &Option<String>| value.clone().unwrap_or_default();
            let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
            for (key, value) in [
                ("pod.name", text(&pod.metadata.name)),
                ("pod.namespace", text(&pod.metadata.namespace)),
                ("pod.uid", text(&pod.metadata.uid)),
                ("serviceAccount.name", account.unwrap_or_default()),
                ("ephemeral", self.ephemeral.to_string()),
            ] {
                context.insert(format!("{CONTEXT}/{key}"), value);
            }
        }
        context
    }

    /// Whether the node applies `fsGroup`.
    pub(super) fn gives_to_group(&self, settings: &CSIDriver) -> bool {
        let once = self.capability.access_mode.is_some_and(|mode| mode.mode() == Mode::SingleNodeWriter);
        let applies = match settings.spec.fs_group_policy.as_deref() {
            Some("None") => false,
            Some("File") => true,
            _ => self.has_fs_type && once,
        };
        applies && !self.read_only && !self.block
    }
}

/// The content of a Secret as drivers receive it; empty without one.
pub(super) fn content(secret: Option<&Arc<Secret>>) -> HashMap<String, String> {
    let data = secret.and_then(|secret| secret.data.clone()).unwrap_or_default();
    data.into_iter().map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned())).collect()
}
