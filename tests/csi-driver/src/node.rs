//! The node service: a volume is published as a bind mount of its folder.

use std::{fs, path::Path};

use mayfly_csi::proto::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability,
    NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse,
    NodeUnstageVolumeRequest, NodeUnstageVolumeResponse, Topology, VolumeUsage,
    node_server::Node,
    node_service_capability::{self, Rpc, rpc},
    volume_usage::Unit,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tonic::{Request, Response, Status};

use crate::{
    HostPathService,
    state::{VolumeState, VolumeStates},
};

/// The key with which the kubelet marks an inline volume.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

fn refused(error: impl ToString) -> Status {
    Status::internal(error.to_string())
}

fn is_mounted(path: &str) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().any(|line| line.split(' ').nth(4) == Some(path))
}

fn publish(volumes: &mut VolumeStates, request: &NodePublishVolumeRequest) -> Result<(), Status> {
    let data = volumes.data(&request.volume_id);
    let is_ephemeral = request.volume_context.get(EPHEMERAL).is_some_and(|text| text == "true");
    if is_ephemeral {
        let volume =
            VolumeState { name: request.volume_id.clone(), ephemeral: true, ..VolumeState::default() };
        volumes.create(&request.volume_id, volume)?;
    }
    let volume = volumes.get(&request.volume_id)?;
    if !is_ephemeral && volume.staged.is_empty() {
        return Err(Status::failed_precondition("the volume must be staged before publishing"));
    }
    if !is_mounted(&request.target_path) {
        fs::create_dir_all(&request.target_path).map_err(refused)?;
        let (none, target) = (None::<&str>, Path::new(&request.target_path));
        mount(Some(&data), target, none, MsFlags::MS_BIND, none).map_err(refused)?;
        if request.readonly {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            mount(none, target, none, flags, none).map_err(refused)?;
        }
    }
    volume.published.insert(request.target_path.clone());
    Ok(())
}

fn unpublish(volumes: &mut VolumeStates, request: &NodeUnpublishVolumeRequest) -> Result<(), Status> {
    while is_mounted(&request.target_path) {
        umount2(Path::new(&request.target_path), MntFlags::empty()).map_err(refused)?;
    }
    let _ = fs::remove_dir(&request.target_path);
    let volume = volumes.get(&request.volume_id)?;
    volume.published.remove(&request.target_path);
    if volume.ephemeral && volume.published.is_empty() {
        volumes.remove(&request.volume_id)?;
    }
    Ok(())
}

#[tonic::async_trait]
impl Node for HostPathService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let attach = self.shared.config.attach;
        self.run("NodeStageVolume", |volumes| {
            let volume = volumes.get(&request.volume_id)?;
            if request.staging_target_path.is_empty() || request.volume_capability.is_none() {
                return Err(Status::invalid_argument("the staging path or the capability is missing"));
            }
            if attach && (volume.attached.is_none() || !request.publish_context.contains_key("device")) {
                return Err(Status::failed_precondition("the volume must be attached before staging"));
            }
            if !volume.staged.is_empty() && !volume.staged.contains(&request.staging_target_path) {
                return Err(Status::failed_precondition("the volume is staged at another path"));
            }
            volume.staged.insert(request.staging_target_path.clone());
            Ok(NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        self.run("NodeUnstageVolume", |volumes| {
            let volume = volumes.get(&request.volume_id)?;
            if !volume.published.is_empty() {
                return Err(Status::failed_precondition("the volume is still published"));
            }
            volume.staged.remove(&request.staging_target_path);
            Ok(NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.run("NodePublishVolume", |volumes| {
            publish(volumes, &request).map(|()| NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.run("NodeUnpublishVolume", |volumes| {
            unpublish(volumes, &request).map(|()| NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        self.run("NodeGetVolumeStats", |volumes| {
            let total = volumes.get(&request.volume_id)?.bytes;
            let usage = VolumeUsage { available: total, total, used: 0, unit: Unit::Bytes.into() };
            Ok(NodeGetVolumeStatsResponse { usage: vec![usage], volume_condition: None })
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        self.run("NodeExpandVolume", |volumes| {
            let volume = volumes.get(&request.volume_id)?;
            if !volume.published.contains(&request.volume_path) {
                return Err(Status::not_found("the volume is not published there"));
            }
            volume.node_bytes =
                request.capacity_range.unwrap_or_default().required_bytes.max(volume.node_bytes);
            Ok(NodeExpandVolumeResponse { capacity_bytes: volume.node_bytes })
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let can = [rpc::Type::StageUnstageVolume, rpc::Type::GetVolumeStats, rpc::Type::ExpandVolume];
        let capability = |can: rpc::Type| NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(Rpc { r#type: can.into() })),
        };
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: can.map(capability).to_vec() }))
    }

    async fn node_get_info(
        &self,
        _request: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let config = &self.shared.config;
        let segments = config.topology.clone().into_iter().collect();
        let accessible_topology = (!config.topology.is_empty()).then_some(Topology { segments });
        Ok(Response::new(NodeGetInfoResponse {
            node_id: config.node_id.clone(),
            max_volumes_per_node: 0,
            accessible_topology,
        }))
    }
}
