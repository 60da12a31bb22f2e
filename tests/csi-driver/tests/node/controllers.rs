//! A claim's whole life with the controllers, while one call of its driver refuses or hangs, or the controllers are
//! killed in it.

use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::api::{
    core::v1::{PersistentVolume, PersistentVolumeClaim},
    storage::v1::{StorageClass, VolumeAttachment},
};
use mayfly_csi_driver::{CallFault, DriverConfig, HostPathDriver, block::BlockDevices, state::DriverVolume};
use parking_lot::Mutex;
use serde_json::json;
use tonic::Code;

use crate::harness::{DriverNode, RunningControllers};

const DRIVER: &str = "hostpath.example.dev";
/// The size after the expansion.
const EXPANDED_BYTES: i64 = 2 << 20;

/// The end of a fault.
#[derive(Clone, Copy)]
enum Recovery {
    Heal,
    KillControllers,
    RestartDriver,
}

/// A node with one driver that attaches, and the controllers.
struct ControlledDriver {
    node: DriverNode,
    config: DriverConfig,
    driver: Mutex<Option<HostPathDriver>>,
    /// The calls of its earlier processes.
    earlier_calls: Mutex<Vec<String>>,
    controllers: Mutex<Option<RunningControllers>>,
}

impl ControlledDriver {
    async fn start(test: &str) -> Option<Self> {
        let node = DriverNode::start(test).await?;
        let config = node.config(DRIVER, true, BlockDevices::Unsupported);
        let driver = node.start_driver(config.clone()).await;
        let class = json!({"metadata": {"name": "csi"}, "provisioner": DRIVER, "reclaimPolicy": "Delete",
            "allowVolumeExpansion": true, "volumeBindingMode": "Immediate"});
        let class: StorageClass = serde_json::from_value(class).unwrap();
        Api::all(node.client.clone()).create(&PostParams::default(), &class).await.unwrap();
        let controllers = node.controllers();
        Some(Self {
            node,
            config,
            driver: Mutex::new(Some(driver)),
            earlier_calls: Mutex::default(),
            controllers: Mutex::new(Some(controllers)),
        })
    }

    fn with<T>(&self, look: impl FnOnce(&HostPathDriver) -> T) -> T {
        look(self.driver.lock().as_ref().unwrap())
    }

    fn count(&self, call: &str) -> usize {
        // One lock at a time: a restart takes them in the other order.
        let mut calls = self.earlier_calls.lock().clone();
        calls.extend(self.with(HostPathDriver::calls));
        calls.iter().filter(|known| *known == call).count()
    }

    fn volume(&self) -> Option<DriverVolume> {
        self.with(|driver| driver.volumes().volumes.into_values().next())
    }

    /// Ends the driver with the calls in progress, and starts it on the same volumes.
    fn restart_driver(&self) {
        let mut driver = self.driver.lock();
        let ended = driver.take().map(|driver| driver.calls());
        self.earlier_calls.lock().extend(ended.unwrap_or_default());
        *driver = Some(HostPathDriver::start(self.config.clone()).unwrap());
    }

    fn kill_controllers(&self) {
        let mut controllers = self.controllers.lock();
        *controllers = None;
        *controllers = Some(self.node.controllers());
    }

    /// Creates a claim and its pod, expands the volume, and deletes both; waits for the effect of each step.
    /// `expansions`: the calls of `NodeExpandVolume` after which the pod is deleted.
    async fn life(&self, name: &str, expansions: usize) {
        let node = &self.node;
        let claim = json!({"metadata": {"name": name}, "spec": {"storageClassName": "csi",
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
        node.create::<PersistentVolumeClaim>(claim).await;
        let mounts = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
        let pod = node.pod(name, name, mounts).await;
        node.started(&pod).await;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(node.client.clone(), "default");
        let patch = json!({"spec": {"resources": {"requests": {"storage": EXPANDED_BYTES.to_string()}}}});
        claims.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        let is_expanded = |volume: DriverVolume| volume.node_bytes == EXPANDED_BYTES;
        let is_called = || self.count("NodeExpandVolume") >= expansions;
        let expanded = async || (self.volume().is_some_and(is_expanded) && is_called()).then_some(());
        node.find("the volume is expanded on the node", expanded).await;
        node.delete(name).await;
        let attachments: Api<VolumeAttachment> = Api::all(node.client.clone());
        let detached = async || {
            let left = attachments.list(&ListParams::default()).await.unwrap().items;
            (left.is_empty() && self.volume().is_some_and(|volume| volume.attached.is_none())).then_some(())
        };
        node.find("the volume is detached", detached).await;
        claims.delete(name, &DeleteParams::default()).await.unwrap();
        let volumes: Api<PersistentVolume> = Api::all(node.client.clone());
        let deleted = async || {
            let left = volumes.list(&ListParams::default()).await.unwrap().items;
            (left.is_empty() && self.volume().is_none()).then_some(())
        };
        node.find("the volume is deleted", deleted).await;
    }

    /// [`Self::life`] with a fault of one call, until it was called `times` times.
    async fn life_with(&self, name: &str, call: &str, fault: CallFault, times: usize, recovery: Recovery) {
        let before = self.count(call);
        let is_expansion = call == "NodeExpandVolume";
        let expansions = self.count("NodeExpandVolume") + if is_expansion { times + 1 } else { 1 };
        self.with(|driver| driver.set_fault(call, Some(fault)));
        let recovered = async {
            let called = async || (self.count(call) >= before + times).then_some(());
            self.node.find(&format!("{call} was called {times} times"), called).await;
            let seen = self.count(call);
            self.with(|driver| driver.set_fault(call, None));
            match recovery {
                Recovery::Heal => {}
                Recovery::KillControllers => self.kill_controllers(),
                Recovery::RestartDriver => self.restart_driver(),
            }
            seen
        };
        let ((), seen) = tokio::join!(self.life(name, expansions), recovered);
        assert!(self.count(call) > seen, "{call} is not repeated");
    }

    async fn leaves_nothing(self) {
        self.node.leaves_nothing().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_of_the_controllers_that_is_refused_is_repeated() {
    let Some(driver) = ControlledDriver::start("a_call_of_the_controllers_that_is_refused_is_repeated").await
    else {
        return;
    };
    for (name, call, code) in [
        ("create", "CreateVolume", Code::Internal),
        ("attach", "ControllerPublishVolume", Code::ResourceExhausted),
        ("expand", "ControllerExpandVolume", Code::Internal),
        ("expand-node", "NodeExpandVolume", Code::Aborted),
        ("detach", "ControllerUnpublishVolume", Code::Internal),
        ("delete", "DeleteVolume", Code::FailedPrecondition),
    ] {
        driver.life_with(name, call, CallFault::Refuse(code), 2, Recovery::Heal).await;
    }
    driver.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn controllers_that_are_killed_in_a_call_repeat_it() {
    let Some(driver) = ControlledDriver::start("controllers_that_are_killed_in_a_call_repeat_it").await
    else {
        return;
    };
    // The driver has done its work when the controllers are killed.
    for (name, call) in [
        ("create", "CreateVolume"),
        ("attach", "ControllerPublishVolume"),
        ("expand", "ControllerExpandVolume"),
        ("detach", "ControllerUnpublishVolume"),
        ("delete", "DeleteVolume"),
    ] {
        driver.life_with(name, call, CallFault::Hang, 1, Recovery::KillControllers).await;
    }
    driver.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_restarted_in_a_call_is_called_again() {
    let Some(driver) = ControlledDriver::start("a_driver_that_is_restarted_in_a_call_is_called_again").await
    else {
        return;
    };
    for (name, call) in [
        ("create", "CreateVolume"),
        ("attach", "ControllerPublishVolume"),
        ("expand", "ControllerExpandVolume"),
        ("expand-node", "NodeExpandVolume"),
        ("detach", "ControllerUnpublishVolume"),
        ("delete", "DeleteVolume"),
    ] {
        driver.life_with(name, call, CallFault::Hang, 1, Recovery::RestartDriver).await;
    }
    driver.leaves_nothing().await;
}
