//! CreateStateMachine, UpdateStateMachine, DescribeStateMachine, DeleteStateMachine, ListStateMachines.

use std::sync::Arc;

use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::definition::{StateMachineType, variable_references};
use serde_json::{Value, json};

use super::params::{ResponseFields, date, flag, optional, text};
use super::{Answer, Api, StepFunctionsError, paging, tags};
use mayfly_workflows_engine::catalog::{
    EncryptionConfiguration, LogLevel, LoggingConfiguration, MachineRecord, MachineRevision, Publication,
    TracingConfiguration,
};
use mayfly_workflows_engine::service::{
    CreateStateMachine, CreatedStateMachine, CredentialScope, ResourceName, ServiceError, UpdateStateMachine,
    check_role, compiled,
};

impl Api {
    pub(super) async fn create_state_machine(&self, params: &Value, scope: &CredentialScope) -> Answer {
        let request = CreateStateMachine {
            scope: scope.clone(),
            name: ResourceName::parse(text(params, "name"))?,
            kind: optional(params, "type")
                .and_then(StateMachineType::from_word)
                .unwrap_or(StateMachineType::Standard),
            publish: publication(params)?,
            definition: text(params, "definition").to_owned(),
            role_arn: check_role(text(params, "roleArn"))?,
            logging: logging(params)?.unwrap_or_default(),
            tracing: tracing(params).unwrap_or_default(),
            encryption: encryption(params)?.unwrap_or_default(),
            tags: tags::of_creation(params),
        };
        let CreatedStateMachine { machine, version } = self.service.create_state_machine(request).await?;
        let fields = ResponseFields::default()
            .set("stateMachineArn", machine.arn.as_str())
            .set("creationDate", date(machine.created))
            .maybe("stateMachineVersionArn", version.as_ref().map(|version| version.arn.as_str()));
        Ok(fields.done())
    }

    pub(super) async fn update_state_machine(&self, params: &Value) -> Answer {
        let request = UpdateStateMachine {
            arn: StateMachineArn::parse(text(params, "stateMachineArn"))?,
            publish: publication(params)?,
            definition: optional(params, "definition").map(str::to_owned),
            role_arn: optional(params, "roleArn").map(check_role).transpose()?,
            logging: logging(params)?,
            tracing: tracing(params),
            encryption: encryption(params)?,
            expects: None,
        };
        let updated = self.service.update_state_machine(request).await?;
        let fields = ResponseFields::default()
            .set("updateDate", date(updated.updated_ms))
            .maybe("revisionId", updated.machine.revision.id.clone())
            .maybe("stateMachineVersionArn", updated.version.as_ref().map(|version| version.arn.as_str()));
        Ok(fields.done())
    }

    pub(super) async fn describe_state_machine(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        let described = self.service.describe_state_machine(&arn).await?;
        let machine = &described.machine;
        let whole = optional(params, "includedData") != Some("METADATA_ONLY");
        let fields = description_fields(machine, described.revision(), whole)
            .set("status", if machine.deleting { "DELETING" } else { "ACTIVE" });
        Ok(match &described.version {
            None => fields
                .set("stateMachineArn", machine.arn.as_str())
                .set("creationDate", date(machine.created))
                .done(),
            Some(version) => fields
                .set("stateMachineArn", version.arn.as_str())
                .set("creationDate", date(version.created))
                .maybe("description", version.description.clone())
                .done(),
        })
    }

    pub(super) async fn delete_state_machine(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        self.service.delete_state_machine(&arn).await?;
        Ok(json!({}))
    }

    pub(super) async fn list_state_machines(&self, params: &Value, scope: &CredentialScope) -> Answer {
        const LIST: &str = "ListStateMachines";
        let page = self.service.list_state_machines(scope, &paging::request(LIST, params)?).await?;
        let items = page.items.iter().map(|machine| {
            json!({
                "stateMachineArn": machine.arn.as_str(),
                "name": machine.name,
                "type": machine.kind.as_str(),
                "creationDate": date(machine.created),
            })
        });
        let next = page.next.map(|position| paging::token(LIST, &position));
        Ok(ResponseFields::default()
            .set("stateMachines", items.collect::<Vec<_>>())
            .maybe("nextToken", next)
            .done())
    }
}

/// Replaces the definition when only metadata were requested (API reference, DescribeStateMachine).
pub(super) const NO_DEFINITION: &str = "{}";

/// The fields that the descriptions of a machine, a version and an execution's machine share.
fn description_fields(machine: &MachineRecord, revision: &MachineRevision, whole: bool) -> ResponseFields {
    let references = if whole { references(machine, revision) } else { None };
    ResponseFields::default()
        .set("name", machine.name.as_str())
        .set("type", machine.kind.as_str())
        .set("definition", if whole { &*revision.definition } else { NO_DEFINITION })
        .set("roleArn", revision.role_arn.as_str())
        .set("loggingConfiguration", json!(revision.logging))
        .set("tracingConfiguration", json!(revision.tracing))
        .set("encryptionConfiguration", json!(revision.encryption))
        .maybe("revisionId", revision.id.clone())
        .maybe("variableReferences", references)
}

fn references(machine: &MachineRecord, revision: &MachineRevision) -> Option<Value> {
    references_of(&compiled(machine, revision).ok()?.definition)
}

/// Which states read which variables; absent where none does.
pub(super) fn references_of(
    definition: &mayfly_workflows_language::definition::StateMachine,
) -> Option<Value> {
    let references = variable_references(definition);
    let state = |(state, variables): (Arc<str>, Vec<Arc<str>>)| {
        let variables: Vec<Value> = variables.iter().map(|name| Value::from(&**name)).collect();
        (state.to_string(), Value::Array(variables))
    };
    if references.is_empty() {
        return None;
    }
    Some(Value::Object(references.into_iter().map(state).collect()))
}

/// The version that is wanted, if one is.
fn publication(params: &Value) -> Result<Option<Publication>, StepFunctionsError> {
    let description = optional(params, "versionDescription").map(str::to_owned);
    match (flag(params, "publish").unwrap_or(false), description) {
        (true, description) => Ok(Some(Publication { description })),
        (false, None) => Ok(None),
        (false, Some(_)) => {
            Err(StepFunctionsError::validation("Version description can only be set when publish is true"))
        }
    }
}

/// The logging configuration of a request, if it has one.
fn logging(params: &Value) -> Result<Option<LoggingConfiguration>, StepFunctionsError> {
    let Some(given) = params.get("loggingConfiguration").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let level = optional(given, "level").and_then(LogLevel::parse).unwrap_or_default();
    let destinations = given.get("destinations").and_then(Value::as_array).map(Vec::as_slice);
    let log_group = |destination: &Value| {
        let arn = destination.pointer("/cloudWatchLogsLogGroup/logGroupArn");
        arn.and_then(Value::as_str).map(str::to_owned)
    };
    let log_groups = destinations.unwrap_or_default().iter().map(log_group).collect();
    let includes_data = flag(given, "includeExecutionData").unwrap_or(false);
    Ok(Some(LoggingConfiguration::new(level, includes_data, log_groups).map_err(ServiceError::from)?))
}

/// The tracing configuration of a request, if it has one.
fn tracing(params: &Value) -> Option<TracingConfiguration> {
    let given = params.get("tracingConfiguration").filter(|value| !value.is_null())?;
    Some(TracingConfiguration { enabled: flag(given, "enabled").unwrap_or(false) })
}

/// The encryption configuration of a request, if it has one.
pub(super) fn encryption(params: &Value) -> Result<Option<EncryptionConfiguration>, StepFunctionsError> {
    let Some(given) = params.get("encryptionConfiguration").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let key_id = optional(given, "kmsKeyId");
    let reuse_seconds = given.get("kmsDataKeyReusePeriodSeconds").and_then(Value::as_u64);
    let made = match text(given, "type") {
        "CUSTOMER_MANAGED_KMS_KEY" => {
            EncryptionConfiguration::customer_managed(key_id.map(str::to_owned), reuse_seconds)
        }
        _ => EncryptionConfiguration::aws_owned(key_id),
    };
    Ok(Some(made.map_err(ServiceError::from)?))
}
