//! The controller service.

use mayfly_csi::proto::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerPublishVolumeRequest, ControllerPublishVolumeResponse,
    ControllerServiceCapability, ControllerUnpublishVolumeRequest, ControllerUnpublishVolumeResponse,
    CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest, DeleteVolumeResponse, Topology, Volume,
    controller_server::Controller,
    controller_service_capability::{self, Rpc, rpc},
};
use tonic::{Request, Response, Status};

use crate::{HostPathService, block::is_block, state::DriverVolume};

/// The size of a volume whose request has none.
const BYTES_DEFAULT: i64 = 1 << 20;
/// The maximum size of a volume.
const BYTES_MAX: i64 = 1 << 40;

#[tonic::async_trait]
impl Controller for HostPathService {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let topology = self.shared.config.topology.clone();
        let block_devices = self.shared.config.block_devices;
        self.run("CreateVolume", |volumes| {
            if request.name.is_empty() || request.volume_capabilities.is_empty() {
                return Err(Status::invalid_argument("a volume needs a name and capabilities"));
            }
            let wants_block = request.volume_capabilities.iter().any(|one| is_block(Some(one)));
            if let Some(reason) = block_devices.missing().filter(|_| wants_block) {
                return Err(Status::invalid_argument(format!("block volumes are not supported: {reason}")));
            }
            let range = request.capacity_range.unwrap_or_default();
            let bytes = if range.required_bytes == 0 { BYTES_DEFAULT } else { range.required_bytes };
            if bytes > BYTES_MAX {
                return Err(Status::out_of_range(format!("a volume has at most {BYTES_MAX} bytes")));
            }
            let required = request.accessibility_requirements.unwrap_or_default().requisite;
            let is_here = |wanted: &Topology| {
                wanted.segments.iter().all(|(key, value)| topology.get(key) == Some(value))
            };
            if !required.is_empty() && !required.iter().any(is_here) {
                return Err(Status::resource_exhausted("volumes are made on this node only"));
            }
            let id = format!("hostpath-{}", request.name);
            if volumes.volumes.get(&id).is_some_and(|known| known.bytes != bytes) {
                return Err(Status::already_exists("a volume of this name and another size exists"));
            }
            let volume = DriverVolume {
                name: request.name.clone(),
                bytes,
                node_bytes: bytes,
                ..DriverVolume::default()
            };
            volumes.create(&id, volume)?;
            let here =
                (!topology.is_empty()).then(|| Topology { segments: topology.clone().into_iter().collect() });
            let volume = Volume {
                capacity_bytes: bytes,
                volume_id: id,
                volume_context: request.parameters.clone(),
                accessible_topology: here.into_iter().collect(),
            };
            Ok(CreateVolumeResponse { volume: Some(volume) })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let id = request.into_inner().volume_id;
        self.run("DeleteVolume", |volumes| {
            if id.is_empty() {
                return Err(Status::invalid_argument("the volume id is missing"));
            }
            if volumes.volumes.get(&id).is_some_and(DriverVolume::is_in_use) {
                return Err(Status::failed_precondition("the volume is in use"));
            }
            volumes.remove(&id)?;
            Ok(DeleteVolumeResponse {})
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let own = self.shared.config.node_id.clone();
        self.run("ControllerPublishVolume", |volumes| {
            if request.node_id != own {
                return Err(Status::not_found(format!("there is no node {}", request.node_id)));
            }
            let volume = volumes.get(&request.volume_id)?;
            volume.attached = Some(request.node_id.clone());
            let publish_context = [("device".to_owned(), format!("/{}", request.volume_id))].into();
            Ok(ControllerPublishVolumeResponse { publish_context })
        })
        .await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.run("ControllerUnpublishVolume", |volumes| {
            let volume = volumes.get(&request.volume_id)?;
            if !volume.staged.is_empty() || !volume.published.is_empty() {
                return Err(Status::failed_precondition(
                    "the volume is still staged or published on the node",
                ));
            }
            volume.attached = None;
            Ok(ControllerUnpublishVolumeResponse {})
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _request: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let mut can = vec![rpc::Type::CreateDeleteVolume, rpc::Type::ExpandVolume];
        if self.shared.config.attach {
            can.push(rpc::Type::PublishUnpublishVolume);
        }
        let capability = |can: rpc::Type| ControllerServiceCapability {
            r#type: Some(controller_service_capability::Type::Rpc(Rpc { r#type: can.into() })),
        };
        let capabilities = can.into_iter().map(capability).collect();
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        self.run("ControllerExpandVolume", |volumes| {
            let wanted = request.capacity_range.unwrap_or_default().required_bytes;
            let volume = volumes.get(&request.volume_id)?;
            if wanted > BYTES_MAX {
                return Err(Status::out_of_range(format!("a volume has at most {BYTES_MAX} bytes")));
            }
            volume.bytes = volume.bytes.max(wanted);
            Ok(ControllerExpandVolumeResponse { capacity_bytes: volume.bytes, node_expansion_required: true })
        })
        .await
    }
}
