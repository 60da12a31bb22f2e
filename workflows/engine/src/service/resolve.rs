//! The resolution of a revision or an ARN to the state machine that the engine runs.

use std::sync::Arc;

use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};
use mayfly_workflows_language::definition::{StateMachine, StateMachineType};
use mayfly_workflows_language::parse;

use super::{ServiceError, WorkflowService};
use crate::catalog::{MachineRecord, MachineRevision};
use crate::engine::{RevisionDetails, StartedMachine};

/// The longest definition, in UTF-16 code units (service model).
const DEFINITION_LENGTH_MAX: usize = 1 << 20;

/// Compiles a definition, or refuses it as CreateStateMachine does.
pub(super) fn compile(text: &str, kind: StateMachineType) -> Result<StateMachine, ServiceError> {
    let length = text.encode_utf16().count();
    ServiceError::check_length("definition", None, length, 1..=DEFINITION_LENGTH_MAX)?;
    parse::compile(text, kind).map_err(rejected)
}

fn rejected(rejection: parse::Rejection) -> ServiceError {
    ServiceError::InvalidDefinition(rejection.message())
}

/// The compiled form of a revision; compiled once.
pub fn compiled(
    machine: &MachineRecord,
    revision: &MachineRevision,
) -> Result<Arc<StartedMachine>, ServiceError> {
    if let Some(compiled) = revision.compiled.get() {
        return Ok(Arc::clone(compiled));
    }
    let compiled = StartedMachine {
        arn: machine.arn.clone(),
        name: machine.name.clone(),
        role_arn: revision.role_arn.clone(),
        kind: machine.kind,
        definition_text: Arc::clone(&revision.definition),
        definition: Arc::new(parse::compile_accepted(&revision.definition, machine.kind).map_err(rejected)?),
        details: Some(RevisionDetails {
            encryption_configuration: revision.encryption.clone(),
            logging_configuration: revision.logging.clone(),
            revision_id: revision.id.clone(),
            tracing_configuration: revision.tracing,
            update_date: revision.updated,
        }),
        flow: None,
    };
    Ok(Arc::clone(revision.compiled.get_or_init(|| Arc::new(compiled))))
}

/// The target of a start: the machine, and the version and alias by which it was named.
pub(super) struct ResolvedStart {
    pub(super) machine: Arc<StartedMachine>,
    pub(super) version_arn: Option<StateMachineArn>,
    pub(super) alias_arn: Option<StateMachineArn>,
}

impl WorkflowService {
    /// Finds what a state machine's, a version's or an alias's ARN runs now. An alias with two routes
    /// draws one by weight.
    pub(super) fn target(&self, arn: &StateMachineArn) -> Result<ResolvedStart, ServiceError> {
        let missing = || ServiceError::StateMachineDoesNotExist(arn.clone());
        let book = self.catalog().read();
        let machine_arn = arn.unqualified();
        let machine = book.machine(&machine_arn).ok_or_else(missing)?;
        if machine.deleting {
            return Err(ServiceError::StateMachineDeleting(arn.clone()));
        }
        let (number, alias_arn) = match arn.qualifier() {
            None => {
                let machine = compiled(machine, &machine.revision)?;
                return Ok(ResolvedStart { machine, version_arn: None, alias_arn: None });
            }
            Some(ArnQualifier::Version(number)) => (Some(number), None),
            Some(ArnQualifier::Alias(name)) => {
                let alias = book.alias(&machine_arn, name).ok_or_else(missing)?;
                let [draw, ..] = self.random_bytes();
                // 256 is no multiple of 100; the error of a weight stays below half a percent.
                let mut left = u64::from(draw) * 100 / 256;
                let drawn = alias.routes.iter().find(|route| {
                    let hit = left < route.weight;
                    left = left.saturating_sub(route.weight);
                    hit
                });
                let route = drawn.or(alias.routes.last()).ok_or_else(missing)?;
                let number = match route.version_arn.qualifier() {
                    Some(ArnQualifier::Version(number)) => Some(number),
                    Some(ArnQualifier::Alias(_)) | None => None,
                };
                (number, Some(alias.arn.clone()))
            }
        };
        let version = number.and_then(|number| book.version(&machine_arn, number)).ok_or_else(missing)?;
        let machine = compiled(machine, &version.revision)?;
        Ok(ResolvedStart { machine, version_arn: Some(version.arn.clone()), alias_arn })
    }
}
