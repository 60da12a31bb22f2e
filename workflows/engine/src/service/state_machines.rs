//! State machines: create, update, describe, delete, list.

use std::collections::BTreeMap;
use std::sync::Arc;

use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;

use super::names::{not_of_map, unqualified_only};
use super::resolve::compile;
use super::{CredentialScope, PageRequest, ResourceName, ServiceError, WorkflowService, page};
use crate::catalog::{
    EncryptionConfiguration, LoggingConfiguration, MachineRecord, MachineRevision, NewMachine, Publication,
    SeenRevision, TracingConfiguration, UpdateMachine, Version,
};
use crate::engine::{ExecutionOwner, ListQuery, Page, RunStatus};

/// A state machine to create.
#[derive(Debug, Clone)]
pub struct CreateStateMachine {
    /// The region and account it belongs to.
    pub scope: CredentialScope,
    /// Its name.
    pub name: ResourceName,
    /// STANDARD or EXPRESS.
    pub kind: StateMachineType,
    /// The definition as it is written.
    pub definition: String,
    /// The role that executions assume.
    pub role_arn: String,
    /// The logging of executions.
    pub logging: LoggingConfiguration,
    /// The tracing of executions.
    pub tracing: TracingConfiguration,
    /// The encryption of executions.
    pub encryption: EncryptionConfiguration,
    /// Publishes the first revision as version 1.
    pub publish: Option<Publication>,
    /// Tags by key.
    pub tags: BTreeMap<String, String>,
}

impl CreateStateMachine {
    /// A state machine with the default configuration.
    pub fn new(
        scope: CredentialScope,
        name: ResourceName,
        kind: StateMachineType,
        definition: String,
        role_arn: String,
    ) -> Self {
        Self {
            scope,
            name,
            kind,
            definition,
            role_arn,
            logging: LoggingConfiguration::default(),
            tracing: TracingConfiguration::default(),
            encryption: EncryptionConfiguration::default(),
            publish: None,
            tags: BTreeMap::new(),
        }
    }
}

/// A state machine that was created, now or by an equal request before.
#[derive(Debug, Clone)]
pub struct CreatedStateMachine {
    /// The state machine.
    pub machine: Arc<MachineRecord>,
    /// The version that was published with it.
    pub version: Option<Arc<Version>>,
}

/// The changes of a state machine; absent fields stay.
#[derive(Debug, Clone)]
pub struct UpdateStateMachine {
    /// The state machine, without qualifier.
    pub arn: StateMachineArn,
    /// The new definition.
    pub definition: Option<String>,
    /// The new role.
    pub role_arn: Option<String>,
    /// The new logging of executions.
    pub logging: Option<LoggingConfiguration>,
    /// The new tracing of executions.
    pub tracing: Option<TracingConfiguration>,
    /// The new encryption of executions.
    pub encryption: Option<EncryptionConfiguration>,
    /// Publishes the newest revision.
    pub publish: Option<Publication>,
    /// The revision on which the update depends: [`ServiceError::Conflict`] where the machine has another one by now.
    pub expects: Option<SeenRevision>,
}

impl UpdateStateMachine {
    /// A new definition for a state machine that was read before.
    pub fn definition(arn: StateMachineArn, definition: String, seen: SeenRevision) -> Self {
        Self {
            arn,
            definition: Some(definition),
            role_arn: None,
            logging: None,
            tracing: None,
            encryption: None,
            publish: None,
            expects: Some(seen),
        }
    }
}

/// An updated state machine.
#[derive(Debug, Clone)]
pub struct UpdatedStateMachine {
    /// The state machine with its newest revision.
    pub machine: Arc<MachineRecord>,
    /// The version that was published.
    pub version: Option<Arc<Version>>,
    /// The time of the update, in milliseconds since the epoch.
    pub updated_ms: i64,
}

/// A state machine or one of its versions.
#[derive(Debug, Clone)]
pub struct DescribedStateMachine {
    /// The state machine.
    pub machine: Arc<MachineRecord>,
    /// The version, if the ARN named one.
    pub version: Option<Arc<Version>>,
}

impl DescribedStateMachine {
    /// The described revision: the version's, else the newest.
    pub fn revision(&self) -> &MachineRevision {
        self.version.as_ref().map_or(&self.machine.revision, |version| &version.revision)
    }
}

impl WorkflowService {
    /// CreateStateMachine. An equal request returns the state machine that the first one created.
    ///
    /// # Errors
    /// The definition does not compile, the name is taken by another state machine, a tag is reserved, or the catalog
    /// cannot be written.
    pub async fn create_state_machine(
        &self,
        request: CreateStateMachine,
    ) -> Result<CreatedStateMachine, ServiceError> {
        let CreateStateMachine { scope, name, kind, definition, role_arn, .. } = request;
        let revision = MachineRevision::new(
            &definition,
            &role_arn,
            request.logging,
            request.tracing,
            request.encryption,
            self.now_ms(),
        );
        compile(&revision.definition, kind)?;
        let arn = scope.state_machine(&name);
        self.finish_deletion(&arn).await?;
        super::activities::check_tags(&request.tags)?;
        let new = NewMachine {
            arn,
            name: name.into_string(),
            kind,
            revision,
            publish: request.publish,
            tags: request.tags,
        };
        let (machine, version) = self.change(|book| book.plan_create(new)).await?;
        Ok(CreatedStateMachine { machine, version })
    }

    /// UpdateStateMachine.
    ///
    /// # Errors
    /// Nothing is to be changed, the definition does not compile, the state machine does not exist or has another
    /// revision than the caller expects, or the catalog cannot be written.
    pub async fn update_state_machine(
        &self,
        request: UpdateStateMachine,
    ) -> Result<UpdatedStateMachine, ServiceError> {
        let UpdateStateMachine { arn, definition, role_arn, logging, tracing, encryption, publish, expects } =
            request;
        not_of_map(&arn)?;
        unqualified_only(&arn, "only the state machine itself can be updated")?;
        let is_empty = definition.is_none()
            && role_arn.is_none()
            && logging.is_none()
            && tracing.is_none()
            && encryption.is_none();
        if is_empty {
            return Err(ServiceError::MissingRequiredParameter);
        }
        self.finish_deletion(&arn).await?;
        let kind = self.catalog().read().live(&arn)?.kind;
        if let Some(definition) = &definition {
            compile(definition, kind)?;
        }
        let update = UpdateMachine {
            arn,
            definition: definition.map(Into::into),
            role_arn,
            logging,
            tracing,
            encryption,
            revision_id: self.random_uuid(),
            publish,
            expects,
            now: self.now_ms(),
        };
        let updated_ms = update.now;
        let (machine, version) = self.change(|book| book.plan_update(update)).await?;
        Ok(UpdatedStateMachine { machine, version, updated_ms })
    }

    /// DescribeStateMachine, for a state machine or a version.
    ///
    /// # Errors
    /// There is none with this ARN.
    pub async fn describe_state_machine(
        &self,
        arn: &StateMachineArn,
    ) -> Result<DescribedStateMachine, ServiceError> {
        not_of_map(arn)?;
        let machine_arn = arn.unqualified();
        self.finish_deletion(&machine_arn).await?;
        let missing = || ServiceError::StateMachineDoesNotExist(arn.clone());
        let book = self.catalog().read();
        let machine = Arc::clone(book.machine(&machine_arn).ok_or_else(missing)?);
        let version = match arn.qualifier() {
            None => None,
            Some(ArnQualifier::Version(number)) => {
                Some(Arc::clone(book.version(&machine_arn, number).ok_or_else(missing)?))
            }
            Some(ArnQualifier::Alias(_)) => return Err(missing()),
        };
        Ok(DescribedStateMachine { machine, version })
    }

    /// DeleteStateMachine: at once, or after its last execution. A state machine that does not exist is deleted.
    ///
    /// # Errors
    /// The ARN names a version or an alias, or a store fails.
    pub async fn delete_state_machine(&self, arn: &StateMachineArn) -> Result<(), ServiceError> {
        not_of_map(arn)?;
        unqualified_only(arn, "use DeleteStateMachineVersion or DeleteStateMachineAlias")?;
        loop {
            let seen = self.catalog().read().machine(arn).cloned();
            let Some(seen) = seen else { return Ok(()) };
            let running = self.has_running(arn).await?;
            if self.change(move |book| book.plan_delete(&seen, running)).await? {
                return Ok(());
            }
        }
    }

    /// ListStateMachines of one region and account, by name.
    ///
    /// # Errors
    /// A store fails.
    pub async fn list_state_machines(
        &self,
        scope: &CredentialScope,
        request: &PageRequest,
    ) -> Result<Page<Arc<MachineRecord>>, ServiceError> {
        let prefix = scope.arn(format_args!("stateMachine:"));
        let leaving: Vec<StateMachineArn> = {
            let book = self.catalog().read();
            book.machines(&prefix).filter(|machine| machine.deleting).map(|m| m.arn.clone()).collect()
        };
        for arn in leaving {
            self.finish_deletion(&arn).await?;
        }
        let book = self.catalog().read();
        let page = page(book.machines(&prefix), request, |machine| machine.name.clone());
        Ok(Page { items: page.items.into_iter().cloned().collect(), next: page.next })
    }

    /// Deletes a state machine that waits for the end of its last execution, if that has ended.
    pub(super) async fn finish_deletion(&self, arn: &StateMachineArn) -> Result<(), ServiceError> {
        let deleting = self.catalog().read().machine(arn).filter(|machine| machine.deleting).cloned();
        let Some(deleting) = deleting else { return Ok(()) };
        if !self.has_running(arn).await? {
            // Another request may have finished it, and the name may be another machine's by now.
            self.change(move |book| book.plan_delete(&deleting, false)).await?;
        }
        Ok(())
    }

    async fn has_running(&self, arn: &StateMachineArn) -> Result<bool, ServiceError> {
        let query = ListQuery {
            owner: ExecutionOwner::StateMachine(arn.clone()),
            status: Some(RunStatus::Running),
            redriven: None,
            limit: 1,
            from: None,
        };
        let page =
            self.engine.list(query).await.map_err(|error| ServiceError::Internal(error.to_string()))?;
        Ok(!page.items.is_empty())
    }
}
