//! The synchronisation of Workflow objects and state machines, which are two views of one thing.
//!
//! Neither side is the master. An annotation of the object has the state in which both last agreed: the definition's
//! digest, the machine's revision and its creation date. The side that differs from it was changed, and the other
//! follows; if both differ, the later write wins. The annotation is written together with a definition that comes from
//! the machine, and machines are updated only while they have the revision that was read, so the reconciler neither
//! takes its own write for a user's nor overwrites a newer one.
//!
//! ```text
//!  object   machine    agreed on   action
//!  new      –          nothing     create the machine
//!  –        new        –           create the object
//!  changed  unchanged  unchanged   update the machine
//!  unchanged changed   unchanged   update the object
//!  exists   deleted    something   delete the object: DeleteStateMachine was called
//!  exists   unknown    something   create the machine again: the catalog was lost
//!  deleting exists                 delete the machine (a finalizer holds the object until then)
//! ```
//! [`plan`] decides, [`act`] carries out. As on AWS, the executions of a deleted state machine run to their end; the
//! object does not wait for them.

mod act;
mod changes;
mod definitions;
mod plan;

pub use act::WorkflowObjects;

use mayfly_api::{ObjectKey, k8s::api::core::v1::Namespace};
use mayfly_api::{Workflow, workflow::names};
use mayfly_informer::{Index, Informer};
use mayfly_workflows_language::arn::StateMachineArn;

/// The state in which object and state machine last agreed.
pub const AGREED: &str = "mayfly.dev/agreed-state-machine";

/// Holds a Workflow until its state machine is gone.
pub const FINALIZER: &str = "mayfly.dev/state-machine";

/// An index by the ARN of the state machine.
const BY_STATE_MACHINE: &str = "state-machine";

/// The ARN of a workflow's state machine.
pub fn state_machine_arn(workflow: &Workflow) -> StateMachineArn {
    StateMachineArn::from_trusted(names::state_machine_arn(workflow))
}

/// Which object stands for a state machine.
#[derive(Clone)]
pub struct Directory {
    workflows: Informer<Workflow>,
    by_state_machine: Index<Workflow>,
    namespaces: Informer<Namespace>,
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Directory").finish_non_exhaustive()
    }
}

impl Directory {
    pub fn new(workflows: Informer<Workflow>, namespaces: Informer<Namespace>) -> Self {
        let by_state_machine =
            workflows.index(BY_STATE_MACHINE, |object| vec![names::state_machine_arn(object)]);
        Self { workflows, by_state_machine, namespaces }
    }

    /// The objects that claim a state machine, the rightful one first: the oldest.
    pub fn objects(&self, arn: &StateMachineArn) -> Vec<std::sync::Arc<Workflow>> {
        let mut objects = self.by_state_machine.get(arn.as_str());
        objects.sort_by_key(|object| object.metadata.creation_timestamp.as_ref().map(|time| time.0));
        objects
    }

    /// The key of a state machine's object, and the name that it has to contain.
    pub fn place(&self, arn: &StateMachineArn) -> (ObjectKey, Option<String>) {
        if let Some(object) = self.objects(arn).first() {
            return (ObjectKey::of(&**object), object.spec.state_machine.clone());
        }
        let is_namespace = |name: &str| self.namespaces.get(&ObjectKey::cluster(name)).is_some();
        let (key, named) = names::workflow_of(arn.as_str(), is_namespace);
        match self.workflows.get(&key) {
            // Its name is taken by an object that stands for another state machine.
            Some(_) => names::workflow_of_digest(arn.as_str()),
            None => (key, named),
        }
    }

    /// The state machine's ARN of a workflow, whether it has an object or had one.
    pub fn arn(&self, key: &ObjectKey) -> StateMachineArn {
        match self.workflows.get(key) {
            Some(object) => state_machine_arn(&object),
            None => {
                let name = names::state_machine_name(key);
                StateMachineArn::from_trusted(format!("{}{name}", names::STATE_MACHINE_PREFIX))
            }
        }
    }

    pub async fn synced(&self) {
        self.workflows.synced().await;
        self.namespaces.synced().await;
    }

    pub fn workflows(&self) -> &Informer<Workflow> {
        &self.workflows
    }
}
