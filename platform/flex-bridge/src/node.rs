//! The node service: its calls as calls of the driver.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use mayfly_csi::{
    capability,
    proto::{
        NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
        NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest,
        NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodePublishVolumeResponse,
        NodeServiceCapability, NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnpublishVolumeRequest,
        NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest, NodeUnstageVolumeResponse, VolumeCapability,
        node_server::Node,
        node_service_capability::{self, Rpc, rpc},
        volume_capability::{AccessType, access_mode::Mode},
    },
};
use mayfly_flexvolume::{CallOptions, FlexError, mounts::is_mount_point};
use tonic::{Request, Response, Status};

use crate::{Bridge, statistics::FileSystemUse};

/// The prefix of the keys that the kubelet adds to a volume's context, and those that drivers get.
const KUBELET_PREFIX: &str = "csi.storage.k8s.io/";
const POD_KEYS: [&str; 4] = ["pod.name", "pod.namespace", "pod.uid", "serviceAccount.name"];

pub(crate) struct NodeService {
    pub(crate) bridge: Arc<Bridge>,
}

/// The mark of a mount point that is being worked on.
struct BusyPath {
    bridge: Arc<Bridge>,
    path: PathBuf,
}

impl Drop for BusyPath {
    fn drop(&mut self) {
        self.bridge.busy.lock().remove(&self.path);
    }
}

impl NodeService {
    /// Works on a staging or target path, unless another call does. The work goes on when the caller gives up: the
    /// driver is not killed in the middle of a mount, and the repeated call finds the result.
    async fn run<R: Send + 'static, W: Future<Output = Result<R, Status>> + Send + 'static>(
        &self,
        volume: &str,
        path: &str,
        work: impl FnOnce(Arc<Bridge>, PathBuf) -> W,
    ) -> Result<Response<R>, Status> {
        if volume.is_empty() {
            return Err(Status::invalid_argument("the volume's id is missing"));
        }
        let path = absolute(path)?;
        if !self.bridge.busy.lock().insert(path.clone()) {
            return Err(Status::aborted(format!("another call works on {}", path.display())));
        }
        let busy = BusyPath { bridge: self.bridge.clone(), path: path.clone() };
        let work = work(self.bridge.clone(), path);
        let work = tokio::spawn(async move {
            let _busy = busy;
            work.await
        });
        work.await.map_err(|error| Status::internal(error.to_string()))?.map(Response::new)
    }
}

/// How a volume is mounted, from its capability and context.
struct MountRequest {
    options: CallOptions,
    read_only: bool,
}

impl MountRequest {
    /// # Errors
    /// The capability is of a kind that FlexVolume does not have, or the context contains a reserved key.
    fn new(
        volume: &str,
        capability: Option<VolumeCapability>,
        read_only: bool,
        context: &HashMap<String, String>,
    ) -> Result<Self, Status> {
        let capability = capability.unwrap_or_default();
        let mount = match capability.access_type {
            Some(AccessType::Mount(mount)) if mount.mount_flags.is_empty() => mount,
            Some(AccessType::Mount(_)) => {
                return Err(Status::invalid_argument("FlexVolume drivers take no mount options"));
            }
            Some(AccessType::Block(_)) => {
                return Err(Status::invalid_argument("FlexVolume drivers have no block volumes"));
            }
            None => return Err(Status::invalid_argument("the volume's capability is missing")),
        };
        let mode = capability.access_mode.unwrap_or_default().mode();
        let read_only = read_only || matches!(mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly);
        if let Some(key) = context.keys().find(|key| CallOptions::is_reserved(key)) {
            return Err(Status::invalid_argument(format!("the volume's attribute {key} is reserved")));
        }
        let mut options = CallOptions::new(&mount.fs_type, read_only, volume);
        let users = context.iter().filter(|(key, _)| !key.starts_with(KUBELET_PREFIX));
        options.extend(users.map(|(key, value)| (key.clone(), value.clone())));
        Ok(Self { options, read_only })
    }
}

fn status(error: FlexError) -> Status {
    let message = error.to_string();
    match error {
        FlexError::NotSupported { .. } => Status::unimplemented(message),
        FlexError::TimedOut { .. } => Status::deadline_exceeded(message),
        FlexError::NoDriver { .. } => Status::unavailable(message),
        FlexError::Failed { .. } | FlexError::Node(_) => Status::internal(message),
    }
}

/// A path from a request.
fn absolute(text: &str) -> Result<PathBuf, Status> {
    let path = Path::new(text);
    match path.is_absolute() {
        true => Ok(path.to_owned()),
        false => Err(Status::invalid_argument(format!("the path {text:?} is not absolute"))),
    }
}

impl Bridge {
    async fn attaches(&self) -> Result<bool, Status> {
        self.driver.capabilities().await.map(|found| found.attach).map_err(status)
    }

    async fn stage(
        &self,
        staging: &Path,
        request: NodeStageVolumeRequest,
    ) -> Result<NodeStageVolumeResponse, Status> {
        let volume = &request.volume_id;
        let wanted = MountRequest::new(volume, request.volume_capability, false, &request.volume_context)?;
        if self.attaches().await? {
            let staged = self.driver.mount_device(staging, &self.config.node, &wanted.options).await;
            staged.map_err(status)?;
        }
        Ok(NodeStageVolumeResponse {})
    }

    async fn publish(
        &self,
        target: &Path,
        request: NodePublishVolumeRequest,
    ) -> Result<NodePublishVolumeResponse, Status> {
        let (volume, context) = (&request.volume_id, &request.volume_context);
        let mut wanted = MountRequest::new(volume, request.volume_capability, request.readonly, context)?;
        let attaches = self.attaches().await?;
        if attaches && request.staging_target_path.is_empty() {
            let why = "the driver attaches, so the volume must be staged: it cannot be an inline volume";
            return Err(Status::failed_precondition(why));
        }
        if is_mount_point(target) {
            return Ok(NodePublishVolumeResponse {});
        }
        for key in POD_KEYS {
            let value = context.get(&format!("{KUBELET_PREFIX}{key}")).cloned();
            wanted.options.set(key, value.unwrap_or_default());
        }
        for (key, value) in &request.secrets {
            wanted.options.set_secret(key, value.as_bytes());
        }
        let staging = attaches.then(|| absolute(&request.staging_target_path)).transpose()?;
        let mounted = self.driver.mount(target, staging.as_deref(), wanted.read_only, &wanted.options).await;
        mounted.map_err(status)?;
        Ok(NodePublishVolumeResponse {})
    }

    async fn unpublish(&self, target: &Path) -> Result<NodeUnpublishVolumeResponse, Status> {
        self.driver.unmount(target).await.map_err(status)?;
        match fs::remove_dir(target) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Status::internal(format!("cannot remove {}: {error}", target.display())))
            }
            _ => Ok(NodeUnpublishVolumeResponse {}),
        }
    }

    async fn expand(
        &self,
        path: &Path,
        request: NodeExpandVolumeRequest,
    ) -> Result<NodeExpandVolumeResponse, Status> {
        let wanted = request.capacity_range.map_or(0, |range| range.required_bytes);
        let new_bytes = u64::try_from(wanted).ok().filter(|bytes| *bytes > 0);
        let Some(new_bytes) = new_bytes else {
            return Err(Status::invalid_argument("the volume's new size is missing"));
        };
        // The call has no attributes of the volume; older callers omit its capability, too.
        let capability = request.volume_capability.or_else(|| Some(capability(false, "", Vec::new(), &[])));
        let options = MountRequest::new(&request.volume_id, capability, false, &HashMap::new())?.options;
        let measured = path.to_owned();
        let used = tokio::task::spawn_blocking(move || FileSystemUse::of(&measured));
        let old_bytes = used.await.map_err(|error| Status::internal(error.to_string()))??.bytes.total;
        self.driver.expand(path, new_bytes, old_bytes, &options).await.map_err(status)?;
        Ok(NodeExpandVolumeResponse { capacity_bytes: wanted })
    }

    async fn unstage(&self, staging: &Path, volume: &str) -> Result<NodeUnstageVolumeResponse, Status> {
        let attaches = match self.driver.capabilities().await {
            Ok(found) => found.attach,
            // A driver that was removed from the node: its mounts are undone without it.
            Err(FlexError::NoDriver { .. }) => true,
            Err(error) => return Err(status(error)),
        };
        if attaches {
            let done = self.driver.unmount_device(staging, &self.config.node, volume).await;
            done.map_err(status)?;
        }
        Ok(NodeUnstageVolumeResponse {})
    }
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let (volume, path) = (request.volume_id.clone(), request.staging_target_path.clone());
        self.run(&volume, &path, |bridge, path| async move { bridge.stage(&path, request).await }).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let (volume, path) = (request.volume_id.clone(), request.staging_target_path.clone());
        self.run(
            &volume,
            &path,
            |bridge, path| async move { bridge.unstage(&path, &request.volume_id).await },
        )
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let (volume, path) = (request.volume_id.clone(), request.target_path.clone());
        self.run(&volume, &path, |bridge, path| async move { bridge.publish(&path, request).await }).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let (volume, path) = (request.volume_id.clone(), request.target_path.clone());
        self.run(&volume, &path, |bridge, path| async move { bridge.unpublish(&path).await }).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        if request.volume_id.is_empty() {
            return Err(Status::invalid_argument("the volume's id is missing"));
        }
        let path = absolute(&request.volume_path)?;
        // A file system whose server is away blocks.
        let used = tokio::task::spawn_blocking(move || FileSystemUse::of(&path));
        let used = used.await.map_err(|error| Status::internal(error.to_string()))??;
        let usage = used.usage();
        Ok(Response::new(NodeGetVolumeStatsResponse { usage, volume_condition: None }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let (volume, path) = (request.volume_id.clone(), request.volume_path.clone());
        self.run(&volume, &path, |bridge, path| async move { bridge.expand(&path, request).await }).await
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        // Only a call shows whether a driver can expand volumes.
        let mut rpcs = vec![rpc::Type::GetVolumeStats, rpc::Type::ExpandVolume];
        if self.bridge.attaches().await? {
            rpcs.push(rpc::Type::StageUnstageVolume);
        }
        let capability = |one: rpc::Type| NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(Rpc { r#type: one.into() })),
        };
        Ok(Response::new(NodeGetCapabilitiesResponse {
            capabilities: rpcs.into_iter().map(capability).collect(),
        }))
    }

    async fn node_get_info(
        &self,
        _request: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let node_id = self.bridge.config.node.clone();
        Ok(Response::new(NodeGetInfoResponse { node_id, max_volumes_per_node: 0, accessible_topology: None }))
    }
}
