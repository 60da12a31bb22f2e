//! Starting, stopping and redriving executions, and everything that describes them.

use std::time::Duration;

use jiff::Timestamp;
use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use serde_json::{Value, json};

use super::params::{ResponseFields, date, flag, optional, text};
use super::{Answer, Api, StepFunctionsError, model, paging, state_machines};
use mayfly_workflows_engine::engine::{
    Description, ExecutionOwner, HistoryQuery, ListQuery, RedriveStatus, RunStatus, Started,
};
use mayfly_workflows_engine::service::{ExecutionDefinition, ResourceName, StartExecution};

/// Decodes a start.
pub(super) fn start_of(params: &Value) -> Result<StartExecution, StepFunctionsError> {
    Ok(StartExecution {
        state_machine: StateMachineArn::parse(text(params, "stateMachineArn"))?,
        name: optional(params, "name").map(ResourceName::parse).transpose()?,
        input: optional(params, "input").map(str::to_owned),
        trace_header: optional(params, "traceHeader").map(str::to_owned),
    })
}

/// The answer of StartExecution.
fn started_fields(started: &Started) -> Value {
    json!({"executionArn": started.execution_arn.as_str(), "startDate": date_of(started.start_date)})
}

/// Whether the answer has inputs and outputs, and not the metadata only.
fn whole(params: &Value) -> bool {
    optional(params, "includedData") != Some("METADATA_ONLY")
}

impl Api {
    pub(super) async fn start_execution(&self, params: &Value) -> Answer {
        let started = self.service.start_execution(start_of(params)?).await?;
        Ok(started_fields(&started))
    }

    /// StartExecution, answered like DescribeExecution when the execution has ended or `limit` is over. An EXPRESS
    /// execution cannot be described: its start is the whole answer. Not part of AWS's API, whose clients poll.
    pub(super) async fn start_and_wait(&self, params: &Value, limit: Duration) -> Answer {
        model::check("StartExecution", params)?;
        let started = self.service.start_execution(start_of(params)?).await?;
        let ended = match ExecutionArn::parse(started.execution_arn.as_str()) {
            Ok(arn) => self.service.describe_ended(&arn, limit).await.ok(),
            Err(_) => None,
        };
        Ok(ended.map_or_else(|| started_fields(&started), |found| describe_answer(&found, true)))
    }

    pub(super) async fn start_sync_execution(&self, params: &Value) -> Answer {
        let ended = self.service.start_sync_execution(start_of(params)?).await?;
        let lasted =
            ended.stop_date.unwrap_or(ended.start_date).as_millisecond() - ended.start_date.as_millisecond();
        Ok(description_fields(&ended, whole(params)).set("billingDetails", billing(lasted)).done())
    }

    pub(super) async fn stop_execution(&self, params: &Value) -> Answer {
        let (error, cause) = (optional(params, "error"), optional(params, "cause"));
        let arn = execution(params)?;
        let stopped = self.service.stop_execution(&arn, error.map(str::to_owned), cause.map(str::to_owned));
        Ok(json!({"stopDate": date_of(stopped.await?)}))
    }

    pub(super) async fn redrive_execution(&self, params: &Value) -> Answer {
        let redriven =
            self.service.redrive_execution(&execution(params)?, optional(params, "clientToken")).await?;
        Ok(json!({"redriveDate": date_of(redriven)}))
    }

    pub(super) async fn describe_execution(&self, params: &Value) -> Answer {
        let found = self.service.describe_execution(&execution(params)?).await?;
        Ok(describe_answer(&found, whole(params)))
    }

    /// DescribeExecution, answered when the execution has ended or `limit` is over. Not part of AWS's API, whose
    /// clients poll.
    pub(super) async fn describe_ended(&self, params: &Value, limit: Duration) -> Answer {
        model::check("DescribeExecution", params)?;
        let found = self.service.describe_ended(&execution(params)?, limit).await?;
        Ok(describe_answer(&found, whole(params)))
    }

    pub(super) async fn describe_for_execution(&self, params: &Value) -> Answer {
        let found = self.service.describe_state_machine_for_execution(&execution(params)?).await?;
        let ExecutionDefinition { machine, execution } = found;
        let whole = whole(params);
        let details = machine.details.as_ref();
        let references = if whole { state_machines::references_of(&machine.definition) } else { None };
        // A map run's child runs the processor of the Map state alone.
        let text = match machine.flow {
            Some(flow) => &machine.definition.flow(flow).definition,
            None => &machine.definition_text,
        };
        let fields = ResponseFields::default()
            .set("stateMachineArn", execution.state_machine_arn.as_str())
            .set("name", execution.state_machine_arn.name())
            .set("definition", if whole { &**text } else { state_machines::NO_DEFINITION })
            .set("roleArn", machine.role_arn.as_str())
            .maybe("updateDate", details.map(|details| date(details.update_date)))
            .maybe("loggingConfiguration", details.map(|details| json!(details.logging_configuration)))
            .maybe("tracingConfiguration", details.map(|details| json!(details.tracing_configuration)))
            .maybe("encryptionConfiguration", details.map(|details| json!(details.encryption_configuration)))
            .maybe("revisionId", details.and_then(|details| details.revision_id.clone()))
            .maybe("mapRunArn", execution.map_run_arn.as_ref().map(MapRunArn::as_str))
            .maybe("label", execution.map_run_arn.as_ref().and_then(MapRunArn::label))
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
        let page = self.service.execution_history(&arn, query).await?;
        let next = page.next.map(|position| paging::token(&list, &position));
        Ok(ResponseFields::default().set("events", page.items).maybe("nextToken", next).done())
    }

    pub(super) async fn list_executions(&self, params: &Value) -> Answer {
        let of = match (optional(params, "stateMachineArn"), optional(params, "mapRunArn")) {
            (Some(text), None) => self.service.executions_of(StateMachineArn::parse(text)?)?,
            (None, Some(text)) => self.service.children_of(MapRunArn::parse(text)?).await?,
            _ => {
                return Err(StepFunctionsError::validation("Must provide a StateMachine ARN or MapRun ARN")
                    .with("reason", "MISSING_REQUIRED_PARAMETER"));
            }
        };
        let list = format!("ListExecutions {of:?}");
        let by_version = matches!(of, ExecutionOwner::Version(_));
        let query = ListQuery {
            owner: of,
            status: optional(params, "statusFilter").and_then(RunStatus::parse),
            redriven: optional(params, "redriveFilter").map(|filter| filter == "REDRIVEN"),
            limit: paging::page_size(params),
            from: paging::position(&list, params)?,
        };
        let page = self.service.list_executions(query).await?;
        let items: Vec<Value> = page.items.iter().map(|found| list_item(found, by_version)).collect();
        let next = page.next.map(|position| paging::token(&list, &position));
        Ok(ResponseFields::default().set("executions", items).maybe("nextToken", next).done())
    }
}

/// The answer of DescribeExecution.
fn describe_answer(found: &Description, whole: bool) -> Value {
    let (status, reason) = match &found.redrive_status {
        RedriveStatus::Redrivable => ("REDRIVABLE", None),
        RedriveStatus::NotRedrivable(reason) => ("NOT_REDRIVABLE", Some(reason.as_str())),
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
    fields.done()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn billing_rounds_up_to_the_next_step() {
        for (lasted, billed) in [(0, 100), (1, 100), (100, 100), (101, 200), (250, 300)] {
            assert_eq!(billing(lasted)["billedDurationInMilliseconds"], json!(billed), "{lasted}");
        }
    }
}
