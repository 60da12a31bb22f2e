//! CreateStateMachine, UpdateStateMachine, DescribeStateMachine, DeleteStateMachine, ListStateMachines.

use std::sync::Arc;

use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::definition::{StateMachineType, variable_references};
use serde_json::{Value, json};

use super::params::{ResponseFields, date, flag, optional, text};
use super::{Answer, Api, StepFunctionsError, paging, tags};
use mayfly_workflows_engine::catalog::{MachineRecord, MachineRevision, Publication};
use mayfly_workflows_engine::service::{
    CreateStateMachine, CreatedStateMachine, CredentialScope, ResourceName, UpdateStateMachine, check_role,
    compiled,
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
            logging: logging(params)?,
            tracing: tracing_enabled(params).unwrap_or(false),
            encryption: encryption(params)?,
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
            tracing: tracing_enabled(params),
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
        .set("loggingConfiguration", revision.logging.clone())
        .set("tracingConfiguration", json!({"enabled": revision.tracing}))
        .set("encryptionConfiguration", revision.encryption.clone())
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

/// The logging configuration with AWS's defaults; a level other than OFF needs a destination.
fn logging(params: &Value) -> Result<Option<Value>, StepFunctionsError> {
    let Some(given) = params.get("loggingConfiguration").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let level = optional(given, "level").unwrap_or("OFF");
    let destinations = given.get("destinations").and_then(Value::as_array).filter(|all| !all.is_empty());
    if level != "OFF" && destinations.is_none() {
        return Err(StepFunctionsError::new(
            "InvalidLoggingConfiguration",
            "Invalid Logging Configuration: Must specify exactly one Log Destination.",
        ));
    }
    let names_group =
        |one: &Value| one.pointer("/cloudWatchLogsLogGroup/logGroupArn").is_some_and(Value::is_string);
    if destinations.is_some_and(|all| all.len() > 1 || !all.iter().all(names_group)) {
        return Err(StepFunctionsError::new(
            "InvalidLoggingConfiguration",
            "Invalid Logging Configuration: Must specify exactly one Log Destination.",
        ));
    }
    let fields = ResponseFields::default()
        .set("level", level)
        .set("includeExecutionData", flag(given, "includeExecutionData").unwrap_or(false))
        .maybe("destinations", destinations.cloned());
    Ok(Some(fields.done()))
}

fn tracing_enabled(params: &Value) -> Option<bool> {
    let given = params.get("tracingConfiguration").filter(|value| !value.is_null())?;
    Some(flag(given, "enabled").unwrap_or(false))
}

/// The encryption configuration with AWS's defaults, if the request has one: keys are AWS's, or the caller's with 300 s
/// of reuse.
pub(super) fn encryption(params: &Value) -> Result<Option<Value>, StepFunctionsError> {
    let Some(given) = params.get("encryptionConfiguration").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let refused = |message: &str| {
        Err(StepFunctionsError::new(
            "InvalidEncryptionConfiguration",
            format!("Invalid Encryption Configuration: {message}"),
        ))
    };
    let period = given.get("kmsDataKeyReusePeriodSeconds").and_then(Value::as_u64);
    match (text(given, "type"), optional(given, "kmsKeyId")) {
        ("CUSTOMER_MANAGED_KMS_KEY", None) => {
            refused("kmsKeyId is required when type is CUSTOMER_MANAGED_KMS_KEY")
        }
        ("CUSTOMER_MANAGED_KMS_KEY", Some(key)) => Ok(Some(json!({
            "type": "CUSTOMER_MANAGED_KMS_KEY",
            "kmsKeyId": key,
            "kmsDataKeyReusePeriodSeconds": period.unwrap_or(300),
        }))),
        (_, Some(_)) => refused("kmsKeyId must not be set when type is AWS_OWNED_KEY"),
        (_, None) => Ok(Some(json!({"type": "AWS_OWNED_KEY"}))),
    }
}
