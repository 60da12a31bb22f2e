//! `mayfly workflow stop` and `delete`.

use clap::Args;
use serde_json::json;

use super::{
    client::Client,
    reference::{Execution, Workflow, short},
};
use crate::{
    failure::{ErrorCode, Failure},
    output,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow stop order/order-17 --error Cancelled --cause 'the customer changed her mind'")]
pub(super) struct StopArgs {
    /// The execution: an ARN, WORKFLOW/EXECUTION, or WORKFLOW for its newest
    #[arg(value_name = "EXECUTION", value_parser = Execution::parse)]
    execution: Execution,
    /// The error it ends with
    #[arg(long, value_name = "NAME")]
    error: Option<String>,
    /// Why it was stopped
    #[arg(long, value_name = "TEXT")]
    cause: Option<String>,
}

pub(super) async fn stop(args: StopArgs, client: &Client) -> anyhow::Result<()> {
    let arn = args.execution.within(client.namespace()).arn(client).await?;
    let execution = client.call("DescribeExecution", &json!({"executionArn": arn})).await?;
    let status = execution["status"].as_str().unwrap_or("");
    if status != "RUNNING" && status != "PENDING_REDRIVE" {
        let what = format!("execution {} has ended: it is {status}", short(&arn));
        return Err(Failure::error(
            ErrorCode::Conflict,
            what,
            format!("see how: mayfly workflow describe {}", short(&arn)),
        ));
    }
    let mut params = json!({"executionArn": arn});
    for (field, text) in [("error", args.error), ("cause", args.cause)] {
        if let Some(text) = text {
            params[field] = text.into();
        }
    }
    client.call("StopExecution", &params).await?;
    output::line(format_args!("execution {} stopped", short(&arn)))?;
    Ok(())
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow delete order")]
pub(super) struct WorkflowDeleteArgs {
    /// The names or ARNs of workflows
    #[arg(value_name = "WORKFLOW", required = true, value_parser = Workflow::parse)]
    workflows: Vec<Workflow>,
}

pub(super) async fn delete(args: WorkflowDeleteArgs, client: &Client) -> anyhow::Result<()> {
    for workflow in args.workflows.into_iter().map(|workflow| workflow.within(client.namespace())) {
        // The API reports no error when a missing workflow is deleted.
        client.workflow(&workflow.arn()).await?.ok_or_else(|| workflow.missing())?;
        client.call("DeleteStateMachine", &json!({"stateMachineArn": workflow.arn()})).await?;
        output::line(format_args!("workflow {} deleted", workflow.name()))?;
    }
    Ok(())
}
