//! The codes with which the driver answers steps out of order, repeated steps and unknown volumes: the cases of the
//! public `csi-sanity`, by the clients of the protocol. Without a kubelet.

use std::{collections::BTreeMap, os::unix::fs::MetadataExt as _};

use mayfly_csi::{
    capability, channel,
    proto::{
        CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
        ControllerUnpublishVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest, NodeExpandVolumeRequest,
        NodeGetVolumeStatsRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
        NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, Topology, TopologyRequirement,
        VolumeCapability, controller_client::ControllerClient, node_client::NodeClient,
    },
};
use mayfly_csi_driver::{DriverConfig, HostPathDriver, block::BlockDevices};
use tonic::{Code, Response, Status, transport::Channel};

const NAME: &str = "hostpath.example.com";
const MIB: i64 = 1 << 20;

struct ProtocolClient {
    folder: tempfile::TempDir,
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
    _driver: HostPathDriver,
}

fn code<R>(answer: Result<Response<R>, Status>) -> Code {
    answer.map_or_else(|status| status.code(), |_| Code::Ok)
}

fn filesystem() -> VolumeCapability {
    capability(false, "", Vec::new(), &[])
}

impl ProtocolClient {
    /// A driver whose volumes must be attached, on the node `here`.
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let driver = HostPathDriver::start(DriverConfig {
            name: NAME.into(),
            node_id: "here".into(),
            folder: folder.path().join("volumes"),
            kubelet: folder.path().join("kubelet"),
            attach: true,
            topology: BTreeMap::from([("zone".to_owned(), "a".to_owned())]),
            block_devices: BlockDevices::Unsupported,
        });
        let socket = folder.path().join("kubelet/plugins").join(NAME).join("csi.sock");
        let channel = channel(&socket);
        let (controller, node) = (ControllerClient::new(channel.clone()), NodeClient::new(channel));
        Self { folder, controller, node, _driver: driver.unwrap() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_string_lossy().into_owned()
    }

    async fn create(&mut self, request: CreateVolumeRequest) -> Code {
        code(self.controller.create_volume(request).await)
    }

    async fn attach(&mut self, volume: &str, node: &str) -> Code {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.into(),
            node_id: node.into(),
            volume_capability: Some(filesystem()),
            ..ControllerPublishVolumeRequest::default()
        };
        code(self.controller.controller_publish_volume(request).await)
    }

    async fn detach(&mut self, volume: &str) -> Code {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.into(),
            node_id: "here".into(),
            ..ControllerUnpublishVolumeRequest::default()
        };
        code(self.controller.controller_unpublish_volume(request).await)
    }

    async fn stage(&mut self, volume: &str, path: &str) -> Code {
        let request = NodeStageVolumeRequest {
            volume_id: volume.into(),
            staging_target_path: path.into(),
            volume_capability: Some(filesystem()),
            publish_context: [("device".to_owned(), "/x".to_owned())].into(),
            ..NodeStageVolumeRequest::default()
        };
        code(self.node.node_stage_volume(request).await)
    }

    async fn unstage(&mut self, volume: &str, path: &str) -> Code {
        let request = NodeUnstageVolumeRequest { volume_id: volume.into(), staging_target_path: path.into() };
        code(self.node.node_unstage_volume(request).await)
    }

    async fn publish(&mut self, volume: &str, path: &str) -> Code {
        let request = NodePublishVolumeRequest {
            volume_id: volume.into(),
            target_path: path.into(),
            volume_capability: Some(filesystem()),
            ..NodePublishVolumeRequest::default()
        };
        code(self.node.node_publish_volume(request).await)
    }

    async fn unpublish(&mut self, volume: &str, path: &str) -> Code {
        let request = NodeUnpublishVolumeRequest { volume_id: volume.into(), target_path: path.into() };
        code(self.node.node_unpublish_volume(request).await)
    }

    async fn delete(&mut self, volume: &str) -> Code {
        let request = DeleteVolumeRequest { volume_id: volume.into(), ..DeleteVolumeRequest::default() };
        code(self.controller.delete_volume(request).await)
    }
}

fn volume(name: &str, bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        volume_capabilities: vec![filesystem()],
        ..CreateVolumeRequest::default()
    }
}

#[tokio::test]
async fn a_volume_is_created_once_and_deleted_when_nothing_uses_it() {
    let mut peer = ProtocolClient::start();
    let elsewhere = Topology { segments: [("zone".to_owned(), "b".to_owned())].into() };
    let elsewhere = TopologyRequirement { requisite: vec![elsewhere], preferred: Vec::new() };
    for (request, expected) in [
        (volume("", MIB), Code::InvalidArgument),
        (CreateVolumeRequest { volume_capabilities: Vec::new(), ..volume("v", MIB) }, Code::InvalidArgument),
        (volume("v", 1 << 50), Code::OutOfRange),
        (
            CreateVolumeRequest { accessibility_requirements: Some(elsewhere), ..volume("v", MIB) },
            Code::ResourceExhausted,
        ),
        (volume("v", MIB), Code::Ok),
        (volume("v", MIB), Code::Ok),
        (volume("v", 2 * MIB), Code::AlreadyExists),
    ] {
        let shown = format!("{request:?}");
        assert_eq!(peer.create(request).await, expected, "{shown}");
    }
    let created = peer.controller.create_volume(volume("v", MIB)).await.unwrap().into_inner().volume.unwrap();
    assert_eq!((created.volume_id.as_str(), created.capacity_bytes), ("hostpath-v", MIB));
    for (volume_id, bytes, expected) in [
        ("hostpath-v", 2 * MIB, Code::Ok),
        ("hostpath-v", 1 << 50, Code::OutOfRange),
        ("x", MIB, Code::NotFound),
    ] {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume_id.into(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            ..ControllerExpandVolumeRequest::default()
        };
        assert_eq!(code(peer.controller.controller_expand_volume(request).await), expected, "{volume_id}");
    }
    assert_eq!(peer.attach("hostpath-v", "here").await, Code::Ok);
    assert_eq!(peer.delete("hostpath-v").await, Code::FailedPrecondition);
    assert_eq!(peer.detach("hostpath-v").await, Code::Ok);
    for (id, expected) in [("", Code::InvalidArgument), ("hostpath-v", Code::Ok), ("hostpath-v", Code::Ok)] {
        assert_eq!(peer.delete(id).await, expected, "{id:?}");
    }
}

#[tokio::test]
async fn steps_out_of_order_are_refused_and_repeated_ones_succeed() {
    let mut peer = ProtocolClient::start();
    peer.create(volume("v", MIB)).await;
    let (id, staging, target) = ("hostpath-v", peer.path("staging"), peer.path("target"));
    assert_eq!(peer.attach("x", "here").await, Code::NotFound);
    assert_eq!(peer.attach(id, "elsewhere").await, Code::NotFound);
    assert_eq!(peer.stage(id, &staging).await, Code::FailedPrecondition, "not attached");
    for _ in 0..2 {
        assert_eq!(peer.attach(id, "here").await, Code::Ok);
    }
    assert_eq!(peer.publish(id, &target).await, Code::FailedPrecondition, "not staged");
    for (volume, path, expected) in [
        ("", staging.as_str(), Code::InvalidArgument),
        (id, "", Code::InvalidArgument),
        ("x", &staging, Code::NotFound),
        (id, &staging, Code::Ok),
        (id, &staging, Code::Ok),
        (id, "/elsewhere", Code::FailedPrecondition),
    ] {
        assert_eq!(peer.stage(volume, path).await, expected, "{volume} {path}");
    }
    assert_eq!(peer.detach(id).await, Code::FailedPrecondition, "staged");
    assert_eq!(peer.publish(id, "").await, Code::InvalidArgument);
    assert_eq!(peer.publish("x", &target).await, Code::NotFound);
    let (volume_id, volume_path) = (id.to_owned(), target.clone());
    let measured =
        NodeGetVolumeStatsRequest { volume_id, volume_path, ..NodeGetVolumeStatsRequest::default() };
    assert_eq!(code(peer.node.node_get_volume_stats(measured).await), Code::NotFound, "not published");
    let (volume_id, volume_path) = (id.to_owned(), target.clone());
    let expanded = NodeExpandVolumeRequest { volume_id, volume_path, ..NodeExpandVolumeRequest::default() };
    assert_eq!(code(peer.node.node_expand_volume(expanded).await), Code::NotFound, "not published");
    if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
        for _ in 0..2 {
            assert_eq!(peer.publish(id, &target).await, Code::Ok);
        }
        assert_eq!(peer.unstage(id, &staging).await, Code::FailedPrecondition, "published");
    }
    assert_eq!(peer.unpublish(id, "").await, Code::InvalidArgument);
    for _ in 0..2 {
        assert_eq!(peer.unpublish(id, &target).await, Code::Ok);
    }
    assert_eq!(peer.unstage(id, "").await, Code::InvalidArgument);
    for _ in 0..2 {
        assert_eq!(peer.unstage(id, &staging).await, Code::Ok);
        assert_eq!(peer.detach(id).await, Code::Ok);
    }
    assert_eq!(peer.delete(id).await, Code::Ok);
}
