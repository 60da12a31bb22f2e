//! DescribeMapRun, ListMapRuns, UpdateMapRun.

use mayfly_workflows_language::arn::MapRunArn;
use serde_json::{Value, json};

use super::executions::{date_of, execution, refused};
use super::params::{ResponseFields, text};
use super::{Answer, Api, StepFunctionsError, paging};
use mayfly_workflows_engine::engine::{MapRunCounts, MapRunDescription, MapRunUpdate};

impl Api {
    pub(super) async fn describe_map_run(&self, params: &Value) -> Answer {
        let arn = MapRunArn::parse(text(params, "mapRunArn"))?;
        let found = self.engine.describe_map_run(&arn).await.map_err(refused)?;
        let found = found.ok_or_else(StepFunctionsError::resource_missing)?;
        let fields = ResponseFields::default()
            .set("mapRunArn", found.map_run_arn.as_str())
            .set("executionArn", found.execution_arn.as_str())
            .set("status", found.status.as_str())
            .set("startDate", date_of(found.start_date))
            .maybe("stopDate", found.stop_date.map(date_of))
            .set("maxConcurrency", found.max_concurrency)
            .set("toleratedFailurePercentage", found.tolerated_failure_percentage)
            .set("toleratedFailureCount", found.tolerated_failure_count)
            .set("itemCounts", counts(&found.item_counts))
            .set("executionCounts", counts(&found.execution_counts))
            .set("redriveCount", found.redrive_count)
            .maybe("redriveDate", found.redrive_date.map(date_of));
        Ok(fields.done())
    }

    pub(super) async fn list_map_runs(&self, params: &Value) -> Answer {
        let arn = execution(params)?;
        let list = format!("ListMapRuns {arn}");
        let after = paging::position(&list, params)?;
        let found = self.engine.list_map_runs(&arn).await.map_err(refused)?;
        let found = found.ok_or_else(|| StepFunctionsError::execution_missing(&arn))?;
        let size = paging::page_size(params);
        let (page, next) = paging::page(found, size, after.as_deref(), |run| run.map_run_arn.to_string());
        let items: Vec<Value> = page.iter().map(list_item).collect();
        let next = next.map(|position| paging::token(&list, &position));
        Ok(ResponseFields::default().set("mapRuns", items).maybe("nextToken", next).done())
    }

    pub(super) async fn update_map_run(&self, params: &Value) -> Answer {
        let arn = MapRunArn::parse(text(params, "mapRunArn"))?;
        let update = MapRunUpdate {
            max_concurrency: params.get("maxConcurrency").and_then(Value::as_u64),
            tolerated_failure_count: params.get("toleratedFailureCount").and_then(Value::as_u64),
            tolerated_failure_percentage: params.get("toleratedFailurePercentage").and_then(Value::as_f64),
        };
        let found = self.engine.describe_map_run(&arn).await.map_err(refused)?;
        if found.ok_or_else(StepFunctionsError::resource_missing)?.stop_date.is_some() {
            return Err(StepFunctionsError::validation(format!(
                "Cannot update a completed Map Run: '{arn}'"
            ))
            .with("reason", "CANNOT_UPDATE_COMPLETED_MAP_RUN"));
        }
        let missing = |error| match error {
            mayfly_workflows_engine::engine::ExecutionError::NotFound(_) => {
                StepFunctionsError::resource_missing()
            }
            error => refused(error),
        };
        self.engine.update_map_run(&arn, update).await.map_err(missing)?;
        Ok(json!({}))
    }
}

fn counts(counts: &MapRunCounts) -> Value {
    json!({
        "pending": counts.pending,
        "running": counts.running,
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "timedOut": counts.timed_out,
        "aborted": counts.aborted,
        "total": counts.total,
        "resultsWritten": counts.results_written,
        "failuresNotRedrivable": counts.failures_not_redrivable,
        "pendingRedrive": counts.pending_redrive,
    })
}

fn list_item(run: &MapRunDescription) -> Value {
    ResponseFields::default()
        .set("executionArn", run.execution_arn.as_str())
        .set("mapRunArn", run.map_run_arn.as_str())
        .set("stateMachineArn", run.state_machine_arn.as_str())
        .set("startDate", date_of(run.start_date))
        .maybe("stopDate", run.stop_date.map(date_of))
        .done()
}
