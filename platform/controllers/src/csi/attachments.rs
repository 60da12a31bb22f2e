//! Carries out attachments through the drivers.

use std::collections::{BTreeMap, HashMap};

use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{core::v1::Node, storage::v1::VolumeAttachment},
        jiff::Timestamp,
    },
};
use mayfly_csi::{
    ControllerAbilities, CsiDriver,
    proto::{ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest},
};
use serde_json::json;

use super::{
    act::{CsiActError, CsiController, WITH_CLAIMS, capability_of},
    attach::{self, AttachState, AttachStep, MANAGED},
};
use crate::metadata::{is_gone, status_patch};

impl CsiController {
    pub(super) async fn plan_attachments(&self) -> Result<(), CsiActError> {
        let state = AttachState {
            pods: self.pods_with_claims.get(WITH_CLAIMS),
            claims: self.claims.list().into_iter().map(|claim| (ObjectKey::of(&*claim), claim)).collect(),
            volumes: self.volumes.list().into_iter().map(|volume| (volume.name_any(), volume)).collect(),
            drivers: self.drivers.list().into_iter().map(|driver| (driver.name_any(), driver)).collect(),
            attachments: self.attachments.list(),
            nodes: self.nodes.list(),
        };
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        for step in attach::plan(&state) {
            match step {
                AttachStep::Create { name, driver, node, volume } => {
                    let attachment = serde_json::from_value(json!({
                        "metadata": {"name": name, "annotations": {MANAGED: "mayfly"}, "finalizers": [finalizer(&driver)]},
                        "spec": {"attacher": driver, "nodeName": node, "source": {"persistentVolumeName": volume}}}))
                    .map_err(kube::Error::SerdeError)?;
                    match api.create(&PostParams::default(), &attachment).await {
                        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                        created => _ = created?,
                    }
                }
                AttachStep::Delete { name } => {
                    if self.is_in_use(&name).await? {
                        continue;
                    }
                    let deleted = api.delete(&name, &Default::default()).await;
                    if !is_gone(&deleted) {
                        deleted?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the attachment's node uses the volume, read from the API because the informer may be behind.
    async fn is_in_use(&self, attachment: &str) -> Result<bool, CsiActError> {
        let Some(known) = self.attachments.get(&ObjectKey::cluster(attachment)) else { return Ok(false) };
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = nodes.get_opt(&known.spec.node_name).await?;
        Ok(node.is_some_and(|node| attach::in_use(&node).iter().any(|name| name == attachment)))
    }

    /// Attaches or detaches the volume of an attachment.
    pub(super) async fn attach(&self, attachment: &VolumeAttachment) -> Result<(), CsiActError> {
        let is_managed = attachment.annotations().contains_key(MANAGED);
        let status = attachment.status.clone().unwrap_or_default();
        let is_going = attachment.metadata.deletion_timestamp.is_some();
        if !is_managed || (status.attached && !is_going) {
            return Ok(());
        }
        let Some((driver, abilities)) = self.driver(&attachment.spec.attacher) else { return Ok(()) };
        let done = match is_going {
            true => self.detach(attachment, &driver, abilities).await,
            false => self.attach_now(attachment, &driver, abilities).await,
        };
        if let Err(error) = &done {
            let field = if is_going { "detachError" } else { "attachError" };
            let told = json!({field: {"time": Timestamp::now().to_string(), "message": error.to_string()}});
            let told = status_patch(attachment, told);
            let api: Api<VolumeAttachment> = Api::all(self.client.clone());
            let known = match is_going {
                true => status.detach_error.and_then(|error| error.message),
                false => status.attach_error.and_then(|error| error.message),
            };
            if known != Some(error.to_string()) {
                // A failed write of the status is ignored: the original error is returned.
                let _ = api
                    .patch_status(&attachment.name_any(), &PatchParams::default(), &Patch::Merge(told))
                    .await;
            }
        }
        done
    }

    async fn attach_now(
        &self,
        attachment: &VolumeAttachment,
        driver: &CsiDriver,
        abilities: ControllerAbilities,
    ) -> Result<(), CsiActError> {
        let mut publish_context = HashMap::new();
        if abilities.publish {
            let name = attachment.spec.source.persistent_volume_name.clone().unwrap_or_default();
            let volume = self.volumes.get(&ObjectKey::cluster(&name));
            let volume =
                volume.ok_or_else(|| CsiActError::Other(format!("persistentvolume {name:?} not found")))?;
            let source = volume.spec.as_ref().and_then(|spec| spec.csi.clone()).unwrap_or_default();
            let request = ControllerPublishVolumeRequest {
                volume_id: source.volume_handle.clone(),
                node_id: self.node_id(&attachment.spec.node_name, &driver.name)?,
                volume_capability: Some(capability_of(&volume)),
                readonly: source.read_only.unwrap_or(false),
                secrets: self.secret_of(source.controller_publish_secret_ref.as_ref()).await?,
                volume_context: source.volume_attributes.unwrap_or_default().into_iter().collect(),
            };
            publish_context = driver.controller_publish_volume(request).await?.publish_context;
        }
        let metadata: BTreeMap<_, _> = publish_context.into_iter().collect();
        let patch = json!({"metadata": {"resourceVersion": attachment.metadata.resource_version},
            "status": {"attached": true, "attachmentMetadata": metadata, "attachError": null}});
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        api.patch_status(&attachment.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn detach(
        &self,
        attachment: &VolumeAttachment,
        driver: &CsiDriver,
        abilities: ControllerAbilities,
    ) -> Result<(), CsiActError> {
        let name = attachment.spec.source.persistent_volume_name.clone().unwrap_or_default();
        let volume = self.volumes.get(&ObjectKey::cluster(&name));
        let source = volume.and_then(|volume| volume.spec.as_ref()?.csi.clone());
        if let Some(source) = source.filter(|_| abilities.publish) {
            let request = ControllerUnpublishVolumeRequest {
                volume_id: source.volume_handle.clone(),
                node_id: self.node_id(&attachment.spec.node_name, &driver.name)?,
                secrets: self.secret_of(source.controller_publish_secret_ref.as_ref()).await?,
            };
            driver.controller_unpublish_volume(request).await?;
        }
        let own = finalizer(&driver.name);
        let left: Vec<_> = attachment.finalizers().iter().filter(|name| **name != own).collect();
        let metadata = json!({"resourceVersion": attachment.metadata.resource_version, "finalizers": left});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        let released = api.patch(&attachment.name_any(), &PatchParams::default(), &patch).await;
        if !is_gone(&released) {
            released?;
        }
        Ok(())
    }

    /// The driver's id of a node.
    fn node_id(&self, node: &str, driver: &str) -> Result<String, CsiActError> {
        let csi_node = self.csi_nodes.get(&ObjectKey::cluster(node));
        let id = csi_node.and_then(|csi_node| {
            csi_node.spec.drivers.iter().find(|one| one.name == driver).map(|one| one.node_id.clone())
        });
        id.ok_or_else(|| CsiActError::Other(format!("CSI driver {driver} is not registered on node {node}")))
    }
}

/// The finalizer that keeps an attachment until its volume is detached.
fn finalizer(driver: &str) -> String {
    format!("external-attacher/{}", driver.replace('.', "-"))
}
