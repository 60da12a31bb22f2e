//! CreateStateMachine, UpdateStateMachine, DescribeStateMachine, DeleteStateMachine, ListStateMachines.

use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;
use std::sync::Arc;

use mayfly_workflows_language::definition::variable_references;
use serde_json::{Value, json};

use super::arn::{CredentialScope, check_name, not_of_map, unqualified_only};
use super::params::{ResponseFields, date, flag, optional, text};
use super::{Answer, Api, StepFunctionsError, paging, resolve, tags};
use mayfly_workflows_engine::catalog::{
    MachineRecord, MachineRevision, NewMachine, Publication, SeenRevision, UpdateMachine,
};
use mayfly_workflows_engine::engine::{ListQuery, Of, RunStatus};

impl Api {
    pub(super) async fn create_state_machine(&self, params: &Value, scope: &CredentialScope) -> Answer {
        let name = text(params, "name").to_owned();
        check_name(&name)?;
        let publish = publication(params)?;
        let kind = optional(params, "type")
            .and_then(StateMachineType::from_word)
            .unwrap_or(StateMachineType::Standard);
        let revision = MachineRevision::new(
            text(params, "definition"),
            &role(text(params, "roleArn"))?,
            logging(params)?.unwrap_or_else(default_logging),
            tracing_enabled(params).unwrap_or(false),
            encryption(params)?,
            self.now(),
        );
        resolve::compile(&revision.definition, kind)?;
        let arn = scope.state_machine(&name);
        self.finish_deletion(&arn).await?;
        let new = NewMachine { arn, name, kind, revision, publish, tags: tags::of_creation(params)? };
        let (machine, version) = self.change(|book| book.plan_create(new)).await?;
        let fields = ResponseFields::default()
            .set("stateMachineArn", machine.arn.as_str())
            .set("creationDate", date(machine.created))
            .maybe("stateMachineVersionArn", version.map(|version| version.arn.to_string()));
        Ok(fields.done())
    }

    /// UpdateStateMachine for a caller that looked at the machine before: refused with a conflict if the machine
    /// has another revision by now.
    pub async fn update_definition(
        &self,
        arn: &StateMachineArn,
        definition: &str,
        seen: SeenRevision,
    ) -> Answer {
        let params = json!({"stateMachineArn": arn.as_str(), "definition": definition});
        self.update(&params, Some(seen)).await
    }

    pub(super) async fn update_state_machine(&self, params: &Value) -> Answer {
        self.update(params, None).await
    }

    async fn update(&self, params: &Value, expects: Option<SeenRevision>) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        not_of_map(&arn)?;
        unqualified_only(&arn, "only the state machine itself can be updated")?;
        let publish = publication(params)?;
        let (definition, role_arn) = (optional(params, "definition"), optional(params, "roleArn"));
        let (logging, tracing) = (logging(params)?, tracing_enabled(params));
        let encrypted = params.get("encryptionConfiguration").is_some_and(|value| !value.is_null());
        if definition.is_none() && role_arn.is_none() && logging.is_none() && tracing.is_none() && !encrypted
        {
            return Err(StepFunctionsError::new(
                "MissingRequiredParameter",
                "Either the definition, the role ARN, the LoggingConfiguration, or the TracingConfiguration \
                 must be specified",
            ));
        }
        self.finish_deletion(&arn).await?;
        let kind = self.catalog.read().live(&arn)?.kind;
        if let Some(definition) = definition {
            resolve::compile(definition, kind)?;
        }
        let update = UpdateMachine {
            arn,
            definition: definition.map(Into::into),
            role_arn: role_arn.map(role).transpose()?,
            logging,
            tracing,
            encryption: if encrypted { Some(encryption(params)?) } else { None },
            revision_id: self.uuid(),
            publish,
            expects,
            now: self.now(),
        };
        let updated = update.now;
        let (machine, version) = self.change(|book| book.plan_update(update)).await?;
        let fields = ResponseFields::default()
            .set("updateDate", date(updated))
            .maybe("revisionId", machine.revision.id.clone())
            .maybe("stateMachineVersionArn", version.map(|version| version.arn.to_string()));
        Ok(fields.done())
    }

    pub(super) async fn describe_state_machine(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        not_of_map(&arn)?;
        self.finish_deletion(&arn.unqualified()).await?;
        let missing = || StepFunctionsError::machine_missing(&arn);
        let book = self.catalog.read();
        let machine = book.machine(&arn.unqualified()).ok_or_else(missing)?;
        let whole = optional(params, "includedData") != Some("METADATA_ONLY");
        match arn.qualifier() {
            None => Ok(description_fields(machine, &machine.revision, whole)
                .set("stateMachineArn", machine.arn.as_str())
                .set("status", if machine.deleting { "DELETING" } else { "ACTIVE" })
                .set("creationDate", date(machine.created))
                .done()),
            Some(ArnQualifier::Version(number)) => {
                let version = book.version(&machine.arn, number).ok_or_else(missing)?;
                Ok(description_fields(machine, &version.revision, whole)
                    .set("stateMachineArn", version.arn.as_str())
                    .set("status", if machine.deleting { "DELETING" } else { "ACTIVE" })
                    .set("creationDate", date(version.created))
                    .maybe("description", version.description.clone())
                    .done())
            }
            Some(ArnQualifier::Alias(_)) => Err(missing()),
        }
    }

    pub(super) async fn delete_state_machine(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        not_of_map(&arn)?;
        unqualified_only(&arn, "use DeleteStateMachineVersion or DeleteStateMachineAlias")?;
        loop {
            let seen = self.catalog.read().machine(&arn).cloned();
            let Some(seen) = seen else { return Ok(json!({})) };
            let running = self.has_running(&arn).await?;
            if self.change(move |book| book.plan_delete(&seen, running)).await? {
                return Ok(json!({}));
            }
        }
    }

    pub(super) async fn list_state_machines(&self, params: &Value, scope: &CredentialScope) -> Answer {
        const LIST: &str = "ListStateMachines";
        let after = paging::position(LIST, params)?;
        let prefix = scope.arn(format_args!("stateMachine:"));
        let leaving: Vec<StateMachineArn> = {
            let book = self.catalog.read();
            book.machines(&prefix).filter(|machine| machine.deleting).map(|m| m.arn.clone()).collect()
        };
        for arn in leaving {
            self.finish_deletion(&arn).await?;
        }
        let book = self.catalog.read();
        let size = paging::page_size(params);
        let all = book.machines(&prefix);
        let (page, next) = paging::page(all, size, after.as_deref(), |machine| machine.name.clone());
        let items = page.into_iter().map(|machine| {
            json!({
                "stateMachineArn": machine.arn.as_str(),
                "name": machine.name,
                "type": machine.kind.as_str(),
                "creationDate": date(machine.created),
            })
        });
        let next = next.map(|position| paging::token(LIST, &position));
        Ok(ResponseFields::default()
            .set("stateMachines", items.collect::<Vec<_>>())
            .maybe("nextToken", next)
            .done())
    }

    /// A machine that is being deleted goes when its last execution has ended; this looks whether it has.
    pub(super) async fn finish_deletion(&self, arn: &StateMachineArn) -> Result<(), StepFunctionsError> {
        let deleting = self.catalog.read().machine(arn).filter(|machine| machine.deleting).cloned();
        let Some(deleting) = deleting else { return Ok(()) };
        if !self.has_running(arn).await? {
            // Another request may have finished it, and the name may be another machine's by now.
            self.change(move |book| book.plan_delete(&deleting, false)).await?;
        }
        Ok(())
    }

    async fn has_running(&self, arn: &StateMachineArn) -> Result<bool, StepFunctionsError> {
        let query = ListQuery {
            of: Of::StateMachine(arn.clone()),
            status: Some(RunStatus::Running),
            redriven: None,
            limit: 1,
            from: None,
        };
        let page = self.engine.list(query).await.map_err(|error| StepFunctionsError::internal(&error))?;
        Ok(!page.items.is_empty())
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
    let compiled = resolve::runnable(machine, revision).ok()?;
    references_of(&compiled.definition)
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

/// A role is taken over as it is named; it only has to be an ARN.
pub(super) fn role(arn: &str) -> Result<String, StepFunctionsError> {
    if arn.starts_with("arn:") && arn.split(':').count() >= 6 {
        Ok(arn.to_owned())
    } else {
        Err(StepFunctionsError::new("InvalidArn", format!("Invalid Role Arn: '{arn}'")))
    }
}

fn default_logging() -> Value {
    json!({"level": "OFF", "includeExecutionData": false})
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

/// The encryption configuration with AWS's defaults: keys are AWS's, or the caller's with 300 s of reuse.
pub(super) fn encryption(params: &Value) -> Result<Value, StepFunctionsError> {
    let Some(given) = params.get("encryptionConfiguration").filter(|value| !value.is_null()) else {
        return Ok(json!({"type": "AWS_OWNED_KEY"}));
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
        ("CUSTOMER_MANAGED_KMS_KEY", Some(key)) => Ok(json!({
            "type": "CUSTOMER_MANAGED_KMS_KEY",
            "kmsKeyId": key,
            "kmsDataKeyReusePeriodSeconds": period.unwrap_or(300),
        })),
        (_, Some(_)) => refused("kmsKeyId must not be set when type is AWS_OWNED_KEY"),
        (_, None) => Ok(json!({"type": "AWS_OWNED_KEY"})),
    }
}
