//! Reads an object and its state machine, computes the next step with [`plan`](super::plan), carries it out, and
//! repeats.

use mayfly_workflows_language::arn::StateMachineArn;
use std::{collections::HashMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::{
    Client,
    api::{Api as Kinds, DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use mayfly_api::{
    ObjectKey, Workflow, WorkflowSpec,
    k8s::apimachinery::pkg::apis::meta::v1::{Condition, Time},
    wellknown,
    workflow::{definition, names},
};
use mayfly_informer::{
    Change,
    reconcile::{self, Outcome, WorkQueue},
};
use mayfly_workflows_engine::catalog::{Catalog, CatalogError, MachineRecord, SeenRevision};
use mayfly_workflows_engine::service::{
    CreateStateMachine, CredentialScope, ResourceName, ServiceError, UpdateStateMachine, WorkflowService,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    AGREED, Directory, FINALIZER,
    changes::DefinitionChanges,
    definitions::{definition_of_machine, definition_of_object},
    plan::{self, Agreement, MachineFacts, ObjectFacts, Step, plan},
    state_machine_arn,
};

/// Workflows looked at at the same time.
const PARALLEL: usize = 4;
/// The pause before a request that the Step Functions API refused is repeated.
const RETRY_REFUSED: Duration = Duration::from_secs(5);
const READY: &str = "Ready";

/// Keeps Workflow objects and state machines alike.
pub struct WorkflowObjects {
    reconciler: Arc<Reconciler>,
    /// ARNs of state machines.
    queue: WorkQueue<StateMachineArn>,
}

impl std::fmt::Debug for WorkflowObjects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkflowObjects").finish_non_exhaustive()
    }
}

struct Reconciler {
    service: WorkflowService,
    client: Client,
    directory: Directory,
    written: Arc<DefinitionChanges>,
    made: Mutex<HashMap<StateMachineArn, Made>>,
}

/// A revision that the reconciler made from an object: it is as old as the object's change, and an object that was
/// changed since is newer.
struct Made {
    revision: SeenRevision,
    changed_ms: i64,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Kinds(#[from] kube::Error),
    #[error(transparent)]
    Service(ServiceError),
}

/// A state machine as it was looked at.
struct Seen {
    machine: Arc<MachineRecord>,
    facts: MachineFacts,
}

impl WorkflowObjects {
    pub fn new(service: WorkflowService, client: Client, directory: Directory) -> Self {
        let queue = WorkQueue::default();
        let changed = queue.clone();
        let written = Arc::new(DefinitionChanges::default());
        let times = written.clone();
        directory.workflows().handle(move |change| {
            match change {
                Change::Deleted(object) => times.forget(object),
                _ => times.see(change.latest()),
            }
            change.states().for_each(|object| changed.add(state_machine_arn(object)));
        });
        Self {
            reconciler: Arc::new(Reconciler { service, client, directory, written, made: Mutex::default() }),
            queue,
        }
    }

    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let follow = follow(self.reconciler.service.catalog().clone(), self.queue.clone(), stop.clone());
        tokio::select! {
            () = self.reconciler.directory.synced() => {}
            () = stop.cancelled() => return,
        }
        let reconciler = self.reconciler;
        let work = reconcile::run("workflows", self.queue, PARALLEL, stop, move |arn| {
            let reconciler = reconciler.clone();
            async move { Box::pin(reconciler.look(&arn)).await }
        });
        tokio::join!(follow, work);
    }
}

/// Queues the state machines that the catalog changed.
async fn follow(catalog: Arc<Catalog>, queue: WorkQueue<StateMachineArn>, stop: CancellationToken) {
    let mut changes = catalog.changes();
    let mut known: HashMap<StateMachineArn, Arc<MachineRecord>> = HashMap::new();
    loop {
        let now: HashMap<StateMachineArn, Arc<MachineRecord>> =
            catalog.read().machines("").map(|machine| (machine.arn.clone(), machine.clone())).collect();
        for (arn, machine) in &now {
            if known.get(arn).is_none_or(|before| !Arc::ptr_eq(before, machine)) {
                queue.add(arn.clone());
            }
        }
        // Deleted machines are kept until their object is deleted: these are few.
        catalog.read().deleted().for_each(|arn| queue.add(arn.clone()));
        known = now;
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

impl Reconciler {
    async fn look(&self, arn: &StateMachineArn) -> Result<Outcome, Error> {
        let mut objects = self.directory.objects(arn).into_iter();
        let object = objects.next();
        for other in objects {
            self.report(&other, None, Err(("NameTaken", name_taken(object.as_deref())))).await?;
        }
        let (machine, deleted) = {
            let book = self.service.catalog().read();
            (book.machine(arn).cloned(), book.is_deleted(arn))
        };
        let mut machine = machine.map(with_facts);
        self.date(arn, machine.as_mut());
        let facts = object.as_deref().map(|object| facts(object, self.written.of(object)));
        let side = match &machine {
            Some(seen) => plan::CatalogMachine::There(&seen.facts),
            None if deleted => plan::CatalogMachine::Deleted,
            None => plan::CatalogMachine::Absent,
        };
        match (plan(facts.as_ref(), side), object, machine) {
            (Step::Forget, ..) => self.forget(arn).await,
            (Step::Nothing, ..) | (_, None, None) => Ok(Outcome::Done),
            (Step::CreateObject, _, Some(seen)) => self.create_object(arn, &seen.machine).await,
            (step, Some(object), machine) => self.act(step, &object, machine.as_ref(), arn).await,
            (_, None, Some(_)) => Ok(Outcome::Done),
        }
    }

    async fn act(
        &self,
        step: Step,
        object: &Workflow,
        machine: Option<&Seen>,
        arn: &StateMachineArn,
    ) -> Result<Outcome, Error> {
        let kinds = self.kinds(&ObjectKey::of(object));
        let name = object.metadata.name.as_deref().unwrap_or_default();
        match step {
            Step::Nothing | Step::CreateObject | Step::Forget => {}
            Step::Hold => self.finalizers(object, true).await?,
            Step::Release => self.finalizers(object, false).await?,
            Step::CreateMachine => return self.create_machine(object, arn).await,
            Step::UpdateMachine => {
                let Some(seen) = machine else { return Ok(Outcome::Done) };
                let definition = definition::text(&definition_of_object(&object.spec));
                let seen = SeenRevision::of(&seen.machine);
                let (created, (_, changed_ms)) = (seen.created, self.written.of(object));
                let request = UpdateStateMachine::definition(arn.clone(), definition, seen);
                let updated = Box::pin(self.service.update_state_machine(request)).await;
                let machine = updated.as_ref().ok().map(|updated| &updated.machine);
                if let Some(revision) = machine.and_then(|machine| machine.revision.id.clone()) {
                    self.made(arn, SeenRevision { created, revision }, changed_ms);
                }
                return self.answered(updated.map(drop), object).await;
            }
            Step::DeleteMachine => {
                let created = machine.map(|seen| seen.machine.created);
                if self.service.catalog().read().machine(arn).map(|now| now.created) != created {
                    return Ok(Outcome::RequeueAfter(Duration::ZERO));
                }
                self.service.delete_state_machine(arn).await.map_err(Error::Service)?;
                self.finalizers(object, false).await?;
            }
            Step::UpdateObject => {
                if let Some(seen) = machine {
                    self.update_object(object, &seen.machine).await?;
                }
            }
            Step::DeleteObject => {
                // Only as it was read: a later write of the object must not go with the machine.
                let preconditions = Preconditions {
                    uid: object.metadata.uid.clone(),
                    resource_version: object.metadata.resource_version.clone(),
                };
                let params =
                    DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
                unless_gone(kinds.delete(name, &params).await.map(drop))?;
            }
            Step::Agree => {
                if let Some(seen) = machine {
                    self.note_agreement(object, &seen.facts).await?;
                    self.report(object, Some(seen), Ok(())).await?;
                }
            }
            Step::Differ => {
                let is = machine.map_or("", |seen| seen.facts.kind.as_str());
                let message = format!("the state machine {arn} is {is}, and a state machine's type stays");
                self.report(object, None, Err(("TypeDiffers", message))).await?;
            }
            Step::Wait => {
                let message =
                    "the state machine of this name was deleted, and its executions are still running";
                self.report(object, None, Err(("StateMachineDeleting", message.into()))).await?;
                // A description deletes the state machine if its last execution has ended.
                let _ = self.service.describe_state_machine(arn).await;
                return Ok(Outcome::RequeueAfter(RETRY_REFUSED));
            }
        }
        Ok(Outcome::Done)
    }

    /// The catalog need not remember any more that this machine was deleted.
    async fn forget(&self, arn: &StateMachineArn) -> Result<Outcome, Error> {
        // Not from the informer: an object that was created a moment ago is on its way to it. Without the note of the
        // deletion that object would make the machine again. Its arrival brings the key back; the pause is for an
        // object of this name that stands for another machine.
        let (key, _) = self.directory.place(arn);
        if self.kinds(&key).get_opt(&key.name).await?.is_some() {
            return Ok(Outcome::RequeueAfter(RETRY_REFUSED));
        }
        let (catalog, arn) = (self.service.catalog().clone(), arn.clone());
        let forgotten = tokio::task::spawn_blocking(move || {
            catalog.change(|book| book.plan_forget_deleted(&arn).map_err(|_| CatalogError::Interrupted))
        });
        // Errors of the catalog are reported by its health.
        Ok(match forgotten.await {
            Ok(Ok(())) => Outcome::Done,
            Ok(Err(_)) | Err(_) => Outcome::RequeueAfter(RETRY_REFUSED),
        })
    }

    async fn create_machine(&self, object: &Workflow, arn: &StateMachineArn) -> Result<Outcome, Error> {
        let (_, changed_ms) = self.written.of(object);
        let created = Box::pin(self.create(object, arn)).await;
        let outcome = self.answered(created, object).await?;
        let first = self.service.catalog().read().machine(arn).map(|machine| SeenRevision::of(machine));
        if let Some(first) = first.filter(|first| first.revision == "INITIAL") {
            self.made(arn, first, changed_ms);
        }
        Ok(outcome)
    }

    async fn create(&self, object: &Workflow, arn: &StateMachineArn) -> Result<(), ServiceError> {
        let request = CreateStateMachine::new(
            CredentialScope::of(arn),
            ResourceName::parse(arn.last_field())?,
            object.spec.kind,
            definition::text(&definition_of_object(&object.spec)),
            names::ROLE.to_owned(),
        );
        self.service.create_state_machine(request).await.map(drop)
    }

    /// The outcome of a change of the state machine; a refusal is reported in the object's status.
    async fn answered(&self, answer: Result<(), ServiceError>, object: &Workflow) -> Result<Outcome, Error> {
        match answer {
            Ok(()) => Ok(Outcome::Done),
            // The machine was changed after it was looked at: look again.
            Err(ServiceError::Conflict(_)) => Ok(Outcome::RequeueAfter(Duration::ZERO)),
            Err(error) if error.is_refusal() => {
                let message = format!("{}: {error}", error.code());
                self.report(object, None, Err(("Refused", message))).await?;
                Ok(Outcome::RequeueAfter(RETRY_REFUSED))
            }
            Err(error) => Err(Error::Service(error)),
        }
    }

    /// Gives a revision that was made here the time of the change it was made from.
    fn date(&self, arn: &StateMachineArn, machine: Option<&mut Seen>) {
        let mut made = self.made.lock();
        let Some(seen) = machine else {
            made.remove(arn);
            return;
        };
        if let Some(known) = made.get(arn).filter(|known| known.revision == SeenRevision::of(&seen.machine)) {
            seen.facts.changed_ms = known.changed_ms;
        }
    }

    fn made(&self, arn: &StateMachineArn, revision: SeenRevision, changed_ms: i64) {
        let mut made = self.made.lock();
        made.insert(arn.clone(), Made { revision, changed_ms });
    }

    /// Writes the agreement to the object, where it is not there already.
    async fn note_agreement(&self, object: &Workflow, machine: &MachineFacts) -> Result<(), Error> {
        let text = machine.agreement(object.metadata.generation.unwrap_or_default()).text();
        let known = object.metadata.annotations.as_ref().and_then(|all| all.get(AGREED));
        if known == Some(&text) {
            return Ok(());
        }
        let patch = json!({"metadata": {
            "annotations": {AGREED: text},
            "resourceVersion": object.metadata.resource_version,
        }});
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let kinds = self.kinds(&ObjectKey::of(object));
        unless_gone(kinds.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop))
    }

    async fn create_object(&self, arn: &StateMachineArn, machine: &MachineRecord) -> Result<Outcome, Error> {
        let (key, state_machine) = self.directory.place(arn);
        let spec = WorkflowSpec {
            kind: machine.kind,
            definition: definition_of_machine(machine),
            tasks: Value::Null,
            state_machine,
            triggers: Vec::new(),
        };
        let mut object = Workflow::new(&key.name, spec);
        object.metadata.finalizers = Some(vec![FINALIZER.into()]);
        // A new object has this generation.
        let agreement = facts_of(machine).agreement(1).text();
        object.metadata.annotations = Some([(AGREED.to_owned(), agreement)].into());
        self.kinds(&key).create(&from_the_api(), &object).await?;
        Ok(Outcome::Done)
    }

    async fn update_object(&self, object: &Workflow, machine: &MachineRecord) -> Result<(), Error> {
        let mut new = object.clone();
        new.spec.definition = match object.spec.definition {
            Value::String(_) => Value::String(machine.revision.definition.to_string()),
            _ => definition_of_machine(machine),
        };
        // The state machine is no longer what they are compiled to.
        new.spec.tasks = Value::Null;
        let annotations = new.metadata.annotations.get_or_insert_default();
        // A definition that came from elsewhere is not what was applied.
        annotations.remove(wellknown::ANNOTATION_LAST_APPLIED);
        // This write changes the definition, and is refused if another one came before.
        let generation = object.metadata.generation.unwrap_or_default() + 1;
        annotations.insert(AGREED.to_owned(), facts_of(machine).agreement(generation).text());
        let name = object.metadata.name.as_deref().unwrap_or_default();
        self.kinds(&ObjectKey::of(object)).replace(name, &from_the_api(), &new).await?;
        Ok(())
    }

    async fn finalizers(&self, object: &Workflow, held: bool) -> Result<(), Error> {
        let old = object.metadata.finalizers.iter().flatten().filter(|finalizer| *finalizer != FINALIZER);
        let own = held.then(|| FINALIZER.to_owned());
        let finalizers: Vec<String> = old.cloned().chain(own).collect();
        let patch = json!({"metadata": {
            "finalizers": finalizers,
            "resourceVersion": object.metadata.resource_version,
        }});
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let kinds = self.kinds(&ObjectKey::of(object));
        unless_gone(kinds.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop))
    }

    /// Says in the status how it stands, where that is not what it says already.
    async fn report(
        &self,
        object: &Workflow,
        seen: Option<&Seen>,
        ready: Result<(), (&str, String)>,
    ) -> Result<(), Error> {
        let old = object.status.clone().unwrap_or_default();
        let mut new = old.clone();
        new.observed_generation = object.metadata.generation;
        if let Some(Seen { machine, facts }) = seen {
            new.state_machine_arn = Some(machine.arn.to_string());
            new.revision_id = Some(machine.revision.id.clone().unwrap_or_else(|| "INITIAL".into()));
            new.definition_digest = Some(facts.digest.clone());
        }
        let (status, reason, message) = match ready {
            Ok(()) => ("True", "Ready", String::new()),
            Err((reason, message)) => ("False", reason, message),
        };
        let same = old.conditions.iter().find(|known| known.type_ == READY && known.status == status);
        new.conditions = vec![Condition {
            type_: READY.into(),
            status: status.into(),
            reason: reason.into(),
            message,
            observed_generation: object.metadata.generation,
            last_transition_time: same
                .map_or(Time(Timestamp::now()), |known| known.last_transition_time.clone()),
        }];
        if new == old {
            return Ok(());
        }
        let mut status = serde_json::to_value(&new).unwrap_or_default();
        // The triggers' part is not ours.
        if let Some(status) = status.as_object_mut() {
            status.remove("triggers");
        }
        let patch = json!({ "status": status });
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let kinds = self.kinds(&ObjectKey::of(object));
        unless_gone(kinds.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop))
    }

    fn kinds(&self, key: &ObjectKey) -> Kinds<Workflow> {
        Kinds::namespaced(self.client.clone(), &key.namespace)
    }
}

/// The field manager of definitions that were changed through the Step Functions API.
fn from_the_api() -> PostParams {
    PostParams { field_manager: Some("step-functions-api".into()), ..PostParams::default() }
}

fn unless_gone(result: kube::Result<()>) -> Result<(), Error> {
    match result {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        other => Ok(other?),
    }
}

fn name_taken(object: Option<&Workflow>) -> String {
    let key = object.map(ObjectKey::of).map(|key| key.to_string()).unwrap_or_default();
    format!("workflow {key} has this state machine; name another in spec.stateMachine")
}

fn facts(object: &Workflow, (generation, changed_ms): (i64, i64)) -> ObjectFacts {
    let finalizers = object.metadata.finalizers.iter().flatten();
    ObjectFacts {
        leaving: object.metadata.deletion_timestamp.is_some(),
        held: finalizers.into_iter().any(|finalizer| finalizer == FINALIZER),
        kind: object.spec.kind,
        digest: definition::digest(&definition_of_object(&object.spec)).to_string(),
        agreed: agreement(object),
        generation,
        changed_ms,
    }
}

/// The annotation's; for objects without one, that of the status.
fn agreement(object: &Workflow) -> Option<Agreement> {
    let noted = object.metadata.annotations.as_ref().and_then(|all| all.get(AGREED));
    noted.and_then(|text| Agreement::parse(text)).or_else(|| {
        let status = object.status.as_ref()?;
        let (digest, revision) = (status.definition_digest.clone()?, status.revision_id.clone()?);
        Some(Agreement { digest, revision, created_ms: None, generation: i64::MAX })
    })
}

fn with_facts(machine: Arc<MachineRecord>) -> Seen {
    let facts = facts_of(&machine);
    Seen { machine, facts }
}

fn facts_of(machine: &MachineRecord) -> MachineFacts {
    let SeenRevision { created, revision } = SeenRevision::of(machine);
    MachineFacts {
        leaving: machine.deleting,
        kind: machine.kind,
        digest: definition::digest(&Value::String(machine.revision.definition.to_string())).to_string(),
        revision,
        created_ms: created,
        changed_ms: machine.revision.updated,
    }
}
