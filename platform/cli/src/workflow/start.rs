//! `mayfly workflow start`: starts an execution, and waits for the result of an express workflow.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use super::{
    client::Client,
    follow,
    reference::{Workflow, short},
    result,
};
use crate::{
    failure::{ErrorCode, Failure},
    invoke,
    output::{self, OutputFormat},
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow start order -d '{\"item\":\"pen\"}' --follow
  mayfly workflow start order -d @order.json --name order-17

The exit code is 1 when an execution that was waited for did not succeed.")]
pub(super) struct StartArgs {
    /// The workflow's name or ARN
    #[arg(value_name = "WORKFLOW", value_parser = Workflow::parse)]
    workflow: Workflow,
    /// The input, as JSON; @FILE reads a file, - reads stdin [default: {}]
    #[arg(short, long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    data: Option<String>,
    /// The execution's name [default: a new one]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Show the states as they are entered and left, until the execution's end
    #[arg(short, long)]
    follow: bool,
}

pub(super) async fn run(args: StartArgs, client: &Client, session: &Session) -> anyhow::Result<ExitCode> {
    let input = input(args.data.as_deref())?;
    let asked = args.workflow.clone().within(client.namespace());
    let arn = asked.arn();
    // A version or an alias has its own description.
    let workflow = client.workflow(&arn).await?.ok_or_else(|| asked.missing())?;
    let mut params = json!({"stateMachineArn": arn, "input": input});
    if let Some(name) = &args.name {
        params["name"] = name.as_str().into();
    }
    if workflow["type"] == "EXPRESS" {
        return express(&args, &params, client, session).await;
    }
    let started = client.call("StartExecution", &params).await?;
    let execution = started["executionArn"].as_str().unwrap_or("").to_owned();
    let format = session.format();
    if !args.follow {
        let line = format!("{execution}\n");
        result(format, &started, || line.clone(), || line.clone())?;
        return Ok(ExitCode::SUCCESS);
    }
    output::note(format_args!("following {} (Ctrl-C stops following, not the execution)", short(&execution)));
    // The followed events are the result, unless a data format is requested.
    let is_data = matches!(format, OutputFormat::Json | OutputFormat::Yaml);
    let show = |line: &str| {
        if is_data {
            output::note(line);
            return Ok(());
        }
        Ok(output::line(line)?)
    };
    let ended = follow::follow(client, &execution, show).await?;
    result(format, &ended, || format!("{execution}\n"), || follow::end(&ended))?;
    Ok(exit_code(&ended))
}

/// Runs an express workflow to its end; there is no history to follow.
async fn express(
    args: &StartArgs,
    params: &Value,
    client: &Client,
    session: &Session,
) -> anyhow::Result<ExitCode> {
    if args.follow {
        output::note("an express workflow has no history to follow; showing its result");
    }
    let ended = client.call("StartSyncExecution", params).await?;
    let arn = ended["executionArn"].as_str().unwrap_or("");
    result(session.format(), &ended, || format!("{arn}\n"), || format!("{arn}\n{}", follow::end(&ended)))?;
    Ok(exit_code(&ended))
}

fn exit_code(execution: &Value) -> ExitCode {
    match execution["status"] == "SUCCEEDED" {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// The input given by `-d`.
fn input(data: Option<&str>) -> anyhow::Result<String> {
    let Some(data) = data else { return Ok("{}".into()) };
    let bytes = invoke::data(data)?;
    let why = match serde_json::from_slice::<serde::de::IgnoredAny>(&bytes) {
        Ok(_) => match String::from_utf8(bytes.into()) {
            Ok(text) => return Ok(text),
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    };
    Err(Failure::error(
        ErrorCode::Usage,
        format!("the input is not JSON: {why}"),
        "quote it, as in -d '{\"name\":\"Ada\"}'",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_input_is_json_from_wherever() {
        assert_eq!(input(None).unwrap(), "{}");
        assert_eq!(input(Some("{ \"b\":1, \"a\":2 }")).unwrap(), "{ \"b\":1, \"a\":2 }");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("in.json");
        std::fs::write(&file, "[1]").unwrap();
        assert_eq!(input(Some(&format!("@{}", file.display()))).unwrap(), "[1]");
        let error = input(Some("name=Ada")).unwrap_err().to_string();
        assert!(error.contains("the input is not JSON"), "{error}");
    }
}
