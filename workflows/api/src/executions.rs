//! Starting, stopping and redriving executions, and everything that describes them.

use mayfly_workflows_language::arn::{ArnQualifier, ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;
use std::time::Duration;

use jiff::Timestamp;
use mayfly_workflows_language::value;
use serde_json::{Value, json};

use super::arn::{check_name, not_of_map};
use super::params::{ResponseFields, date, flag, optional, text};
use super::{Answer, Api, StepFunctionsError, model, paging, state_machines};
use mayfly_workflows_engine::engine::{
    Description, ExecutionError, HistoryQuery, ListQuery, Of, RedriveError, RedriveStatus, RunStatus,
    StartError, StartRequest,
};
use mayfly_workflows_journal::{JournalError, WaitedBy};

/// The reason for which an execution is not redriven while its machine is being deleted (the model's words).
const LEFT_BEHIND: &str = "State machine is in DELETING status";

fn left_behind() -> RedriveStatus {
    RedriveStatus::NotRedrivable(LEFT_BEHIND.to_owned())
}

/// AWS's limit of an input or an output, in bytes.
pub(super) const PAYLOAD_BYTES_MAX: usize = 262_144;

impl Api {
    pub(super) async fn start_execution(&self, params: &Value) -> Answer {
        self.start(params, None).await
    }

    /// StartExecution for a task that waits for the execution's end.
    pub(super) async fn start_for(&self, params: &Value, waited_by: WaitedBy) -> Answer {
        model::check("StartExecution", params)?;
        self.start(params, Some(waited_by)).await
    }

    async fn start(&self, params: &Value, waited_by: Option<WaitedBy>) -> Answer {
        // A caller that waits needs an execution that can be described at its end, which an EXPRESS one cannot.
        let wanted = waited_by.map(|_| StateMachineType::Standard);
        let request = self.start_request(params, wanted).await?;
        let started = self.engine.start_for(request, waited_by).await.map_err(start_refused)?;
        Ok(json!({"executionArn": started.execution_arn.as_str(), "startDate": date_of(started.start_date)}))
    }

    pub(super) async fn start_sync_execution(&self, params: &Value) -> Answer {
        let request = self.start_request(params, Some(StateMachineType::Express)).await?;
        let ended = self.engine.start_sync(request).await.map_err(start_refused)?;
        let whole = optional(params, "includedData") != Some("METADATA_ONLY");
        let lasted =
            ended.stop_date.unwrap_or(ended.start_date).as_millisecond() - ended.start_date.as_millisecond();
        Ok(description_fields(&ended, whole).set("billingDetails", billing(lasted)).done())
    }

    /// The checked parameters of a start, with the current machine.
    async fn start_request(
        &self,
        params: &Value,
        wanted: Option<StateMachineType>,
    ) -> Result<StartRequest, StepFunctionsError> {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        not_of_map(&arn)?;
        let name = optional(params, "name").map(str::to_owned);
        if let Some(name) = &name {
            check_name(name)?;
        }
        self.finish_deletion(&arn.unqualified()).await?;
        let target = self.target(&arn)?;
        if wanted.is_some_and(|wanted| wanted != target.machine.kind) {
            return Err(StepFunctionsError::type_not_supported());
        }
        let input = optional(params, "input").unwrap_or("{}").to_owned();
        check_input(&input)?;
        Ok(StartRequest {
            state_machine: target.machine,
            name,
            input,
            trace_header: optional(params, "traceHeader").map(str::to_owned),
            version_arn: target.version_arn,
            alias_arn: target.alias_arn,
        })
    }

    pub(super) async fn stop_execution(&self, params: &Value) -> Answer {
        let arn = execution(params)?;
        let (error, cause) = (optional(params, "error"), optional(params, "cause"));
        let stopped = self.engine.stop(&arn, error.map(str::to_owned), cause.map(str::to_owned)).await;
        Ok(json!({"stopDate": date_of(stopped.map_err(refused)?)}))
    }

    pub(super) async fn redrive_execution(&self, params: &Value) -> Answer {
        let (arn, token) = (execution(params)?, optional(params, "clientToken"));
        let found = self.engine.describe(&arn).await.map_err(refused)?;
        if found.is_some_and(|found| self.redrivable(&found) == left_behind()) {
            return Err(StepFunctionsError::new("ExecutionNotRedrivable", LEFT_BEHIND));
        }
        match self.engine.redrive(&arn, token).await {
            Ok(redriven) => Ok(json!({"redriveDate": date_of(redriven)})),
            Err(refused @ (RedriveError::NotRedrivable(_) | RedriveError::AlreadyRunning)) => {
                Err(StepFunctionsError::new("ExecutionNotRedrivable", refused.to_string()))
            }
            Err(RedriveError::Execution(error)) => Err(refused(error)),
        }
    }

    pub(super) async fn describe_execution(&self, params: &Value) -> Answer {
        let arn = execution(params)?;
        let found = self.engine.describe(&arn).await.map_err(refused)?;
        self.describe_answer(params, &found.ok_or_else(|| StepFunctionsError::execution_missing(&arn))?)
    }

    /// DescribeExecution, answered when the execution has ended or `limit` is over. Not part of AWS's API, whose
    /// clients poll.
    pub(super) async fn describe_ended(&self, params: &Value, limit: Duration) -> Answer {
        model::check("DescribeExecution", params)?;
        let arn = execution(params)?;
        let ended = tokio::time::timeout(limit, self.engine.wait(&arn)).await;
        match ended {
            Ok(Ok(Some(found))) => self.describe_answer(params, &found),
            Ok(Err(error)) => Err(refused(error)),
            Ok(Ok(None)) | Err(_) => self.describe_execution(params).await,
        }
    }

    /// The answer of DescribeExecution.
    fn describe_answer(&self, params: &Value, found: &Description) -> Answer {
        let whole = optional(params, "includedData") != Some("METADATA_ONLY");
        let (status, reason) = match self.redrivable(found) {
            RedriveStatus::Redrivable => ("REDRIVABLE", None),
            RedriveStatus::NotRedrivable(reason) => ("NOT_REDRIVABLE", Some(reason)),
            RedriveStatus::RedrivableByMapRun => ("REDRIVABLE_BY_MAP_RUN", None),
        };
        let fields = description_fields(found, whole)
            .maybe("mapRunArn", found.map_run_arn.as_ref().map(MapRunArn::as_str))
            .maybe("stateMachineVersionArn", found.version_arn.as_ref().map(StateMachineArn::as_str))
            .maybe("stateMachineAliasArn", found.alias_arn.as_ref().map(StateMachineArn::as_str))
            .set("redriveCount", found.redrive_count)
            .maybe("redriveDate", found.redrive_date.map(date_of))
            .set("redriveStatus", status)
            .maybe("redriveStatusReason", reason);
        Ok(fields.done())
    }

    /// Whether an execution can be redriven: what its own end says, as long as its machine stays. (The model lists the
    /// reason for a machine that is on its way out; that it holds for one that is gone is our reading.)
    fn redrivable(&self, found: &Description) -> RedriveStatus {
        let stays = self
            .catalog
            .read()
            .machine(&found.state_machine_arn.without_label())
            .is_some_and(|machine| !machine.deleting);
        match &found.redrive_status {
            RedriveStatus::Redrivable if !stays => left_behind(),
            status => status.clone(),
        }
    }

    pub(super) async fn describe_for_execution(&self, params: &Value) -> Answer {
        let arn = execution(params)?;
        let missing = || StepFunctionsError::execution_missing(&arn);
        let machine = self.engine.snapshot(&arn).await.map_err(refused)?.ok_or_else(missing)?;
        let found = self.engine.describe(&arn).await.map_err(refused)?.ok_or_else(missing)?;
        let whole = optional(params, "includedData") != Some("METADATA_ONLY");
        let detail = |name: &str| machine.details.get(name).filter(|value| !value.is_null()).cloned();
        let references = if whole { state_machines::references_of(&machine.definition) } else { None };
        let label = found.map_run_arn.as_ref().and_then(MapRunArn::label);
        // A map run's child runs the processor of the Map state alone.
        let text = match machine.flow {
            Some(flow) => &machine.definition.flow(flow).definition,
            None => &machine.definition_text,
        };
        let name = found.state_machine_arn.name();
        let fields = ResponseFields::default()
            .set("stateMachineArn", found.state_machine_arn.as_str())
            .set("name", name)
            .set("definition", if whole { &**text } else { state_machines::NO_DEFINITION })
            .set("roleArn", machine.role_arn.as_str())
            .maybe("updateDate", machine.details.get("updateDate").and_then(Value::as_i64).map(date))
            .maybe("loggingConfiguration", detail("loggingConfiguration"))
            .maybe("tracingConfiguration", detail("tracingConfiguration"))
            .maybe("encryptionConfiguration", detail("encryptionConfiguration"))
            .maybe("revisionId", detail("revisionId"))
            .maybe("mapRunArn", found.map_run_arn.as_ref().map(MapRunArn::as_str))
            .maybe("label", label)
            .maybe("variableReferences", references);
        Ok(fields.done())
    }

    pub(super) async fn get_execution_history(&self, params: &Value) -> Answer {
        let arn = execution(params)?;
        let list = format!("GetExecutionHistory {arn}");
        let query = HistoryQuery {
            reverse: flag(params, "reverseOrder").unwrap_or(false),
            include_data: flag(params, "includeExecutionData").unwrap_or(true),
            limit: paging::page_size(params),
            from: paging::position(&list, params)?,
        };
        let page = self.engine.history(&arn, query).await.map_err(refused)?;
        let page = page.ok_or_else(|| StepFunctionsError::execution_missing(&arn))?;
        let next = page.next.map(|position| paging::token(&list, &position));
        Ok(ResponseFields::default().set("events", page.items).maybe("nextToken", next).done())
    }

    pub(super) async fn list_executions(&self, params: &Value) -> Answer {
        let of = self.list_of(params)?;
        if let Of::MapRun(arn) = &of
            && !self.engine.has_map_run(arn).await.map_err(refused)?
        {
            return Err(StepFunctionsError::resource_missing());
        }
        let list = format!("ListExecutions {of:?}");
        let by_version = matches!(of, Of::Version(_));
        let query = ListQuery {
            of,
            status: optional(params, "statusFilter").and_then(RunStatus::parse),
            redriven: optional(params, "redriveFilter").map(|filter| filter == "REDRIVEN"),
            limit: paging::page_size(params),
            from: paging::position(&list, params)?,
        };
        let page = self.engine.list(query).await.map_err(refused)?;
        let items: Vec<Value> = page.items.iter().map(|found| list_item(found, by_version)).collect();
        let next = page.next.map(|position| paging::token(&list, &position));
        Ok(ResponseFields::default().set("executions", items).maybe("nextToken", next).done())
    }

    fn list_of(&self, params: &Value) -> Result<Of, StepFunctionsError> {
        match (optional(params, "stateMachineArn"), optional(params, "mapRunArn")) {
            (Some(text), None) => {
                let arn = StateMachineArn::parse(text)?;
                let missing = || StepFunctionsError::machine_missing(&arn);
                let book = self.catalog.read();
                let machine = book.machine(&arn.unqualified()).ok_or_else(missing)?;
                if machine.kind == StateMachineType::Express {
                    return Err(StepFunctionsError::type_not_supported());
                }
                Ok(match arn.qualifier() {
                    None => Of::StateMachine(arn),
                    Some(ArnQualifier::Version(number)) => {
                        book.version(&machine.arn, number).ok_or_else(missing)?;
                        Of::Version(arn)
                    }
                    Some(ArnQualifier::Alias(name)) => {
                        book.alias(&machine.arn, name).ok_or_else(StepFunctionsError::resource_missing)?;
                        Of::Alias(arn)
                    }
                })
            }
            (None, Some(text)) => Ok(Of::MapRun(MapRunArn::parse(text)?)),
            _ => Err(StepFunctionsError::validation("Must provide a StateMachine ARN or MapRun ARN")
                .with("reason", "MISSING_REQUIRED_PARAMETER")),
        }
    }
}

/// Whether a text may be an execution's input: JSON, and not larger than AWS allows.
pub(super) fn check_input(input: &str) -> Result<(), StepFunctionsError> {
    if input.len() > PAYLOAD_BYTES_MAX {
        return Err(StepFunctionsError::constraints(&[format!(
            "Value at 'input' failed to satisfy constraint: Member must have length less than or equal to \
             {PAYLOAD_BYTES_MAX}"
        )]));
    }
    match value::Value::parse(input) {
        Ok(_) => Ok(()),
        Err(error) => Err(StepFunctionsError::new(
            "InvalidExecutionInput",
            format!("Invalid State Machine Execution Input: '{}'", error.describe(input)),
        )),
    }
}

/// The ARN of a STANDARD execution; an express execution is nowhere to be described.
pub(super) fn execution(params: &Value) -> Result<ExecutionArn, StepFunctionsError> {
    Ok(ExecutionArn::parse(text(params, "executionArn"))?)
}

/// The fields that all operations about one execution share.
fn description_fields(found: &Description, whole: bool) -> ResponseFields {
    let fields = outline_fields(found)
        .maybe("error", found.error.clone())
        .maybe("cause", found.cause.clone())
        .maybe("traceHeader", found.trace_header.clone());
    with_data(fields, found, whole)
}

/// Which execution, and where it stands.
fn outline_fields(found: &Description) -> ResponseFields {
    ResponseFields::default()
        .set("executionArn", found.execution_arn.as_str())
        .set("stateMachineArn", found.state_machine_arn.as_str())
        .set("name", found.name.as_str())
        .set("status", found.status.as_str())
        .set("startDate", date_of(found.start_date))
        .maybe("stopDate", found.stop_date.map(date_of))
}

/// Input and output with the note whether they are included.
fn with_data(fields: ResponseFields, found: &Description, whole: bool) -> ResponseFields {
    let data = |text: &std::sync::Arc<str>| Value::from(&**text);
    let included = json!({"included": whole});
    let mut fields = fields.set("inputDetails", included.clone());
    if whole {
        fields = fields.set("input", data(&found.input));
    }
    match &found.output {
        Some(output) if whole => fields.set("output", data(output)).set("outputDetails", included),
        Some(_) => fields.set("outputDetails", included),
        None => fields,
    }
}

/// Express executions are billed in steps of 100 ms and 64 MB.
fn billing(lasted_ms: i64) -> Value {
    let steps = lasted_ms.max(1).div_euclid(100) + i64::from(lasted_ms.max(1).rem_euclid(100) > 0);
    json!({"billedMemoryUsedInMB": 64, "billedDurationInMilliseconds": steps * 100})
}

/// An entry of ListExecutions. AWS leaves `redriveCount` out of the list of a version's executions.
fn list_item(found: &Description, by_version: bool) -> Value {
    outline_fields(found)
        .maybe("mapRunArn", found.map_run_arn.as_ref().map(MapRunArn::as_str))
        .maybe("itemCount", found.item_count)
        .maybe("stateMachineVersionArn", found.version_arn.as_ref().map(StateMachineArn::as_str))
        .maybe("stateMachineAliasArn", found.alias_arn.as_ref().map(StateMachineArn::as_str))
        .maybe("redriveCount", (!by_version).then_some(found.redrive_count))
        .maybe("redriveDate", found.redrive_date.map(date_of))
        .done()
}

pub(super) fn date_of(timestamp: Timestamp) -> Value {
    date(timestamp.as_millisecond())
}

pub(super) fn refused(error: ExecutionError) -> StepFunctionsError {
    match error {
        ExecutionError::NotFound(arn) => StepFunctionsError::execution_missing(&arn),
        ExecutionError::InvalidPage => StepFunctionsError::invalid_token(),
        error @ (ExecutionError::Closed
        | ExecutionError::Journal(JournalError::Database(_) | JournalError::Closed)) => {
            StepFunctionsError::unavailable(&error)
        }
        error => StepFunctionsError::internal(&error),
    }
}

fn start_refused(error: StartError) -> StepFunctionsError {
    match error {
        StartError::AlreadyExists { arn } => {
            StepFunctionsError::new("ExecutionAlreadyExists", format!("Execution Already Exists: '{arn}'"))
        }
        StartError::TooMany { limit } => StepFunctionsError::new(
            "ExecutionLimitExceeded",
            format!("The maximum number of running executions has been reached: {limit}"),
        ),
        error @ (StartError::Closed
        | StartError::Journal(JournalError::Database(_) | JournalError::Closed)) => {
            StepFunctionsError::unavailable(&error)
        }
        error => StepFunctionsError::internal(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn billing_rounds_up_to_the_next_step() {
        for (lasted, billed) in [(0, 100), (1, 100), (100, 100), (101, 200), (250, 300)] {
            assert_eq!(billing(lasted)["billedDurationInMilliseconds"], json!(billed), "{lasted}");
        }
    }

    #[test]
    fn a_journal_that_cannot_be_written_is_told_with_its_reason() {
        let full = || JournalError::Database("database or disk is full".to_owned());
        for refused in [start_refused(StartError::Journal(full())), refused(ExecutionError::Journal(full()))]
        {
            assert_eq!((refused.code, refused.status), ("ServiceUnavailable", 503));
            let message = refused.message.unwrap_or_default();
            assert!(
                message.contains("database or disk is full") && message.contains("try again"),
                "{message}"
            );
        }
    }

    #[test]
    fn an_input_is_json_of_at_most_256_kib() {
        assert!(check_input("{}").is_ok());
        assert_eq!(check_input("{").expect_err("broken").code, "InvalidExecutionInput");
        let large = format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX));
        assert_eq!(check_input(&large).expect_err("large").code, "ValidationException");
    }
}
