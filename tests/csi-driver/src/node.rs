//! The node service: a volume is published as a bind mount of its folder, or of its device.

use std::{fs, path::Path};

use mayfly_csi::proto::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability,
    NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse,
    NodeUnstageVolumeRequest, NodeUnstageVolumeResponse, Topology, VolumeCondition, VolumeUsage,
    node_server::Node,
    node_service_capability::{self, Rpc, rpc},
    volume_usage::Unit,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tonic::{Request, Response, Status};

use crate::{
    HostPathService,
    block::is_block,
    state::{DriverVolume, VolumeStates},
};

/// The key with which the kubelet marks an inline volume.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

/// The number of files that a volume may have.
const INODES: i64 = 1000;

fn refused(error: impl ToString) -> Status {
    Status::internal(error.to_string())
}

fn is_mounted(path: &str) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().any(|line| line.split(' ').nth(4) == Some(path))
}

/// The bytes and the number of the files in the folder of a volume.
fn contents(folder: &Path) -> (i64, i64) {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|file| file.metadata().ok());
    let lengths = files.map(|file| i64::try_from(file.len()).unwrap_or(i64::MAX));
    lengths.fold((0, 0), |(bytes, files), length| (bytes + length, files + 1))
}

fn publish(volumes: &mut VolumeStates, request: &NodePublishVolumeRequest) -> Result<(), Status> {
    if request.target_path.is_empty() || request.volume_capability.is_none() {
        return Err(Status::invalid_argument("the target path or the capability is missing"));
    }
    let data = volumes.data(&request.volume_id);
    let is_ephemeral = request.volume_context.get(EPHEMERAL).is_some_and(|text| text == "true");
    if is_ephemeral {
        let volume =
            DriverVolume { name: request.volume_id.clone(), ephemeral: true, ..DriverVolume::default() };
        volumes.create(&request.volume_id, volume)?;
    }
    let volume = volumes.get(&request.volume_id)?;
    if !is_ephemeral && volume.staged.is_empty() {
        return Err(Status::failed_precondition("the volume must be staged before publishing"));
    }
    if !is_mounted(&request.target_path) {
        let (none, target) = (None::<&str>, Path::new(&request.target_path));
        let source = match is_block(request.volume_capability.as_ref()) {
            true => {
                let device = volume.device.clone();
                let device = device.ok_or_else(|| {
                    Status::failed_precondition("the volume is not staged as a block device")
                })?;
                fs::File::options().create(true).append(true).open(target).map_err(refused)?;
                device
            }
            false => {
                fs::create_dir_all(target).map_err(refused)?;
                data
            }
        };
        mount(Some(&source), target, none, MsFlags::MS_BIND, none).map_err(refused)?;
        if request.readonly {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            mount(none, target, none, flags, none).map_err(refused)?;
        }
    }
    volume.published.insert(request.target_path.clone());
    Ok(())
}

fn unpublish(volumes: &mut VolumeStates, request: &NodeUnpublishVolumeRequest) -> Result<(), Status> {
    if request.target_path.is_empty() {
        return Err(Status::invalid_argument("the target path is missing"));
    }
    while is_mounted(&request.target_path) {
        umount2(Path::new(&request.target_path), MntFlags::empty()).map_err(refused)?;
    }
    let _ = fs::remove_dir(&request.target_path).or_else(|_| fs::remove_file(&request.target_path));
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
        let (attach, block_devices) = (self.shared.config.attach, self.shared.config.block_devices);
        self.run("NodeStageVolume", |volumes| {
            let data = volumes.data(&request.volume_id);
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
            if is_block(request.volume_capability.as_ref()) {
                volume.device = Some(block_devices.set_up(&data, volume.bytes)?);
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
        let block_devices = self.shared.config.block_devices;
        self.run("NodeUnstageVolume", |volumes| {
            let data = volumes.data(&request.volume_id);
            let volume = volumes.get(&request.volume_id)?;
            if request.staging_target_path.is_empty() {
                return Err(Status::invalid_argument("the staging path is missing"));
            }
            if !volume.published.is_empty() {
                return Err(Status::failed_precondition("the volume is still published"));
            }
            volume.staged.remove(&request.staging_target_path);
            if volume.staged.is_empty() && volume.device.is_some() {
                block_devices.release(&data)?;
                volume.device = None;
            }
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
        let problem = self.shared.problem.lock().clone();
        self.run("NodeGetVolumeStats", |volumes| {
            let data = volumes.data(&request.volume_id);
            let volume = volumes.get(&request.volume_id)?;
            if !volume.published.contains(&request.volume_path) {
                return Err(Status::not_found("the volume is not published there"));
            }
            let total = volume.bytes;
            let (used, files) = if volume.device.is_some() { (total, 0) } else { contents(&data) };
            let bytes = VolumeUsage { available: total - used, total, used, unit: Unit::Bytes.into() };
            let inodes = VolumeUsage {
                available: INODES - files,
                total: INODES,
                used: files,
                unit: Unit::Inodes.into(),
            };
            let condition =
                VolumeCondition { abnormal: problem.is_some(), message: problem.unwrap_or_default() };
            Ok(NodeGetVolumeStatsResponse { usage: vec![bytes, inodes], volume_condition: Some(condition) })
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
        let can = [
            rpc::Type::StageUnstageVolume,
            rpc::Type::GetVolumeStats,
            rpc::Type::ExpandVolume,
            rpc::Type::VolumeCondition,
        ];
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
