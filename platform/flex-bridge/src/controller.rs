//! The controller service: expansion only, which it leaves to the node. A FlexVolume driver runs there.

use std::sync::Arc;

use mayfly_csi::proto::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerPublishVolumeRequest, ControllerPublishVolumeResponse,
    ControllerServiceCapability, ControllerUnpublishVolumeRequest, ControllerUnpublishVolumeResponse,
    CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest, DeleteVolumeResponse,
    controller_server::Controller,
    controller_service_capability::{self, Rpc, rpc},
};
use tonic::{Request, Response, Status};

use crate::Bridge;

pub(crate) struct ControllerService {
    pub(crate) bridge: Arc<Bridge>,
}

impl ControllerService {
    fn unimplemented(&self, call: &str) -> Status {
        Status::unimplemented(format!(
            "{} has no {call}: the node calls a FlexVolume driver",
            self.bridge.config.name
        ))
    }
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        _request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        Err(self.unimplemented("CreateVolume"))
    }

    async fn delete_volume(
        &self,
        _request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        Err(self.unimplemented("DeleteVolume"))
    }

    async fn controller_publish_volume(
        &self,
        _request: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        Err(self.unimplemented("ControllerPublishVolume"))
    }

    async fn controller_unpublish_volume(
        &self,
        _request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        Err(self.unimplemented("ControllerUnpublishVolume"))
    }

    async fn controller_get_capabilities(
        &self,
        _request: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let expand = ControllerServiceCapability {
            r#type: Some(controller_service_capability::Type::Rpc(Rpc {
                r#type: rpc::Type::ExpandVolume.into(),
            })),
        };
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: vec![expand] }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let capacity_bytes = request.into_inner().capacity_range.unwrap_or_default().required_bytes;
        if capacity_bytes <= 0 {
            return Err(Status::invalid_argument("the volume's new size is missing"));
        }
        Ok(Response::new(ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: true }))
    }
}
