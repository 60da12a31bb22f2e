//! DescribeMapRun, ListMapRuns, UpdateMapRun.

use mayfly_workflows_language::arn::MapRunArn;
use serde_json::{Value, json};

use super::executions::{date_of, execution};
use super::params::{ResponseFields, text};
use super::{Answer, Api, paging};
use mayfly_workflows_engine::engine::{MapRunCounts, MapRunDescription, MapRunUpdate};

impl Api {
    pub(super) async fn describe_map_run(&self, params: &Value) -> Answer {
        let arn = MapRunArn::parse(text(params, "mapRunArn"))?;
        let found = self.service.describe_map_run(&arn).await?;
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
        let page = self.service.list_map_runs(&arn, &paging::request(&list, params)?).await?;
        let items: Vec<Value> = page.items.iter().map(list_item).collect();
        let next = page.next.map(|position| paging::token(&list, &position));
        Ok(ResponseFields::default().set("mapRuns", items).maybe("nextToken", next).done())
    }

    pub(super) async fn update_map_run(&self, params: &Value) -> Answer {
        let arn = MapRunArn::parse(text(params, "mapRunArn"))?;
        let update = MapRunUpdate {
            max_concurrency: params.get("maxConcurrency").and_then(Value::as_u64),
            tolerated_failure_count: params.get("toleratedFailureCount").and_then(Value::as_u64),
            tolerated_failure_percentage: params.get("toleratedFailurePercentage").and_then(Value::as_f64),
        };
        self.service.update_map_run(&arn, update).await?;
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
