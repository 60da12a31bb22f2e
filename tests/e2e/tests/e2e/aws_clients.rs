//! AWS's own clients against the running binary: boto3 and the `aws` command.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{CliOutput, Up, guest_or_skip, skipped, test_name, wait::until};
use serde_json::{Value, json};
use tokio::process::Command;

/// The timeout of a client: Python starts slowly next to a compiler.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A program of AWS's, with dummy credentials and without the user's own settings.
fn client(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"AWS_")) {
        command.env_remove(name);
    }
    let nowhere = "/nonexistent";
    command.env("AWS_CONFIG_FILE", nowhere).env("AWS_SHARED_CREDENTIALS_FILE", nowhere);
    command.env("AWS_ACCESS_KEY_ID", "any").env("AWS_SECRET_ACCESS_KEY", "any");
    command.env("AWS_DEFAULT_REGION", "us-east-1").env("AWS_PAGER", "").env("AWS_MAX_ATTEMPTS", "1");
    // `sync-127.0.0.1` does not resolve.
    command.env("AWS_DISABLE_HOST_PREFIX_INJECTION", "true").env("AWS_EC2_METADATA_DISABLED", "true");
    command.kill_on_drop(true);
    command
}

async fn finished(mut command: Command) -> Result<CliOutput> {
    let output = tokio::time::timeout(TIMEOUT, command.output()).await.context("it did not end")??;
    Ok(CliOutput {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// A Python with this package; `None`, after a line that reports the test as skipped, if there is none.
pub(crate) async fn python_or_skip(test: &str, package: &str) -> Option<String> {
    let python = std::env::var("MAYFLY_PYTHON").unwrap_or_else(|_| "python3".into());
    let mut command = client(&python);
    command.args(["-c", &format!("import {package}")]);
    match finished(command).await {
        Ok(CliOutput { code: Some(0), .. }) => Some(python),
        _ => {
            skipped(test, &format!("{python} has no {package} (set MAYFLY_PYTHON to one that has)"));
            None
        }
    }
}

/// The address of the Step Functions API.
fn workflows(up: &Up) -> String {
    format!("http://{}", up.address("workflows"))
}

/// Runs a script of this package with an argument; its temporary files are in the server's folder. Returns its output.
pub(crate) async fn script(python: &str, file: &str, argument: &str, up: &Up) -> Result<String> {
    let mut command = client(python);
    command.arg(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).arg(argument);
    command.env("TMPDIR", up.data()).env("PYTHONDONTWRITEBYTECODE", "1");
    let told = finished(command).await?;
    ensure!(told.code == Some(0), "{}{}", told.stdout, told.stderr);
    Ok(told.stdout)
}

#[tokio::test(flavor = "multi_thread")]
async fn boto3_calls_every_operation_of_the_binary() -> Result<()> {
    let Some(python) = python_or_skip(test_name!(), "boto3").await else { return Ok(()) };
    let up = Up::start().await?;
    let told = script(&python, "../../workflows/api/tests/boto3/calls.py", &workflows(&up), &up).await?;
    ensure!(told.trim() == "37 operations called", "{told}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn boto3_sees_every_kind_of_state_event_by_event() -> Result<()> {
    let Some(python) = python_or_skip(test_name!(), "boto3").await else { return Ok(()) };
    guest_or_skip!("greet");
    let up = Up::start().await?;
    up.deploy("greet", "greet", &[]).await?;
    let told = script(&python, "tests/e2e/aws_clients/states.py", &workflows(&up), &up).await?;
    ensure!(told.trim() == "every state, event by event", "{told}");
    Ok(())
}

/// The `aws` command for one server.
struct Aws {
    program: String,
    up: Up,
}

impl Aws {
    async fn start(test: &str) -> Result<Option<Self>> {
        let program = std::env::var("MAYFLY_AWS").unwrap_or_else(|_| "aws".into());
        let mut version = client(&program);
        version.arg("--version");
        if !finished(version).await.is_ok_and(|told| told.code == Some(0)) {
            skipped(test, "no aws command (pip install awscli, and MAYFLY_AWS if it is not on the PATH)");
            return Ok(None);
        }
        Ok(Some(Self { program, up: Up::start().await? }))
    }

    async fn run(&self, arguments: &[&str]) -> Result<CliOutput> {
        let mut command = client(&self.program);
        let url = workflows(&self.up);
        command.args(["stepfunctions", "--endpoint-url", &url, "--output", "json"]).args(arguments);
        finished(command).await
    }

    async fn ok(&self, arguments: &[&str]) -> Result<Value> {
        let told = self.run(arguments).await?;
        ensure!(told.code == Some(0), "aws {arguments:?}: {told:?}");
        if told.stdout.trim().is_empty() {
            return Ok(Value::Null);
        }
        Ok(serde_json::from_str(&told.stdout)?)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_aws_command_leads_a_workflows_life() -> Result<()> {
    guest_or_skip!("greet");
    let Some(aws) = Aws::start(test_name!()).await? else { return Ok(()) };
    aws.up.deploy("greet", "greet", &[]).await?;
    let role = "arn:aws:iam::000000000000:role/any";
    let definition = json!({"StartAt": "Greet", "States": {"Greet": {"Type": "Task",
        "Resource": "arn:aws:states:::lambda:invoke", "OutputPath": "$.Payload.message",
        "Parameters": {"FunctionName": "greet", "Payload.$": "$"}, "End": true}}})
    .to_string();
    let create = ["create-state-machine", "--name", "cli", "--role-arn", role, "--definition", &definition];
    let machine = aws.ok(&create).await?["stateMachineArn"].as_str().context("no ARN")?.to_owned();
    let start =
        ["start-execution", "--state-machine-arn", &machine, "--name", "one", "--input", r#"{"name":"Ada"}"#];
    let execution = aws.ok(&start).await?["executionArn"].as_str().context("no ARN")?.to_owned();
    let told = until("the execution ends", async || {
        let told = aws.ok(&["describe-execution", "--execution-arn", &execution]).await?;
        Ok((told["status"] != "RUNNING").then_some(told))
    })
    .await?;
    ensure!(told["status"] == "SUCCEEDED" && told["output"] == r#""Hello, Ada!""#, "{told}");
    // The command prints times as received.
    ensure!(told["startDate"].as_f64().is_some_and(|at| at > 1e9), "{told}");
    let ask = ["get-execution-history", "--execution-arn", &execution, "--no-include-execution-data"];
    let history = aws.ok(&ask).await?;
    let kinds: Vec<_> =
        history["events"].as_array().context("none")?.iter().map(|event| &event["type"]).collect();
    ensure!(kinds.len() == 7 && kinds[4] == "TaskSucceeded", "{kinds:?}");
    let listed = aws.ok(&["list-executions", "--state-machine-arn", &machine, "--max-items", "1"]).await?;
    ensure!(listed["executions"][0]["name"] == "one", "{listed}");

    let express = [
        "create-state-machine",
        "--name",
        "fast",
        "--type",
        "EXPRESS",
        "--role-arn",
        role,
        "--definition",
        &definition,
    ];
    let express = aws.ok(&express).await?["stateMachineArn"].as_str().context("no ARN")?.to_owned();
    let sync = ["start-sync-execution", "--state-machine-arn", &express, "--input", r#"{"name":"Grace"}"#];
    let told = aws.ok(&sync).await?;
    ensure!(told["output"] == r#""Hello, Grace!""#, "{told}");
    let state = json!({"Type": "Pass", "Result": 1, "End": true}).to_string();
    let told = aws.ok(&["test-state", "--definition", &state, "--role-arn", role]).await?;
    ensure!(told["status"] == "SUCCEEDED" && told["output"] == "1", "{told}");

    let refused = aws.run(&["describe-execution", "--execution-arn", &format!("{execution}x")]).await?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("(ExecutionDoesNotExist)"), "{refused:?}");
    let wrong = ["create-state-machine", "--name", "wrong", "--role-arn", role, "--definition", "{}"];
    let refused = aws.run(&wrong).await?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("(InvalidDefinition)"), "{refused:?}");
    aws.ok(&["delete-state-machine", "--state-machine-arn", &machine]).await?;
    Ok(())
}
