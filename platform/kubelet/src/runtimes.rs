//! The node's runtimes, and the choice of one for a pod.

use std::{collections::BTreeMap, sync::Arc};

use mayfly_api::{
    ObjectKey,
    k8s::api::{core::v1::Pod, node::v1::RuntimeClass},
};
use mayfly_informer::Informer;
use mayfly_runtime::{PodUid, Runtime};

/// The handler of RuntimeClasses whose pods are ordinary containers: the name of containerd's default runtime.
const OCI_HANDLER: &str = "runc";
/// The class of the runtime of ordinary containers.
const OCI_CLASS: &str = "";

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct NodeRuntimes {
    by_class: Arc<BTreeMap<String, Arc<dyn Runtime>>>,
    classes: Informer<RuntimeClass>,
}

/// The pod's runtime class; empty for pods without one.
pub(crate) fn class_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref()).unwrap_or_default()
}

impl NodeRuntimes {
    pub(crate) fn new(runtimes: Vec<Arc<dyn Runtime>>, classes: Informer<RuntimeClass>) -> Self {
        let by_class = runtimes.into_iter().map(|runtime| (runtime.class().to_owned(), runtime)).collect();
        Self { by_class: Arc::new(by_class), classes }
    }

    /// Returns when the RuntimeClasses are known.
    pub(crate) async fn synced(&self) {
        self.classes.synced().await;
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<dyn Runtime>> {
        self.by_class.values()
    }

    /// The classes with a runtime on this node.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_class.keys().map(String::as_str)
    }

    /// The runtime of the pod's class: the runtime of this name, otherwise the one of the RuntimeClass's handler. A pod
    /// whose RuntimeClass was deleted stays with the runtime that has its sandbox.
    pub(crate) fn of_pod(&self, pod: &Pod) -> Option<&Arc<dyn Runtime>> {
        let class = class_of(pod);
        if let Some(runtime) = self.by_class.get(class) {
            return Some(runtime);
        }
        match self.classes.get(&ObjectKey::cluster(class)) {
            Some(found) if found.handler == OCI_HANDLER => self.by_class.get(OCI_CLASS),
            Some(found) => self.by_class.get(&found.handler),
            None => {
                let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
                self.all().find(|runtime| runtime.sandboxes().contains(&uid))
            }
        }
    }

    /// The reason why no runtime can run a pod, in upstream's words where there are any.
    pub(crate) fn refusal(&self, pod: &Pod) -> String {
        let class = class_of(pod);
        let handler = self.classes.get(&ObjectKey::cluster(class)).map(|found| found.handler.clone());
        let missing = handler.as_deref().unwrap_or(class);
        let have: Vec<_> =
            self.names().map(|name| if name.is_empty() { OCI_HANDLER } else { name }).collect();
        let have = have.join(", ");
        match missing {
            OCI_CLASS | OCI_HANDLER => format!(
                "this node runs no OCI containers (its runtime classes: {have}): mayfly up --containers on says what \
                 they need; spec.runtimeClassName: wasm is for a wasm component"
            ),
            missing => format!("no runtime for {missing:?} is configured (there are: {have})"),
        }
    }
}
