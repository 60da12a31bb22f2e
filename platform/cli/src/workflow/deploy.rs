//! `mayfly workflow deploy`: creates or updates a workflow from a definition.

use std::path::PathBuf;

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use mayfly_api::{names::dns_label, wellknown::NAMESPACE_DEFAULT, workflow::names::ROLE};
use mayfly_workflows_language::{definition::StateMachineType, validate};
use serde::Serialize;
use serde_json::{Value, json};

use super::{client::Client, components, definition, reference::Workflow, result};
use crate::{
    failure::{ErrorCode, Failure},
    output,
    server::{is_not_found, segment},
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow deploy order.yaml
  mayfly workflow deploy order.asl.json --name order-2 --type express
  mayfly workflow deploy order.yaml -n shop     # the state machine shop.order

Where a job:run task names a .wasm file as its Component, the file is uploaded.")]
pub(super) struct WorkflowDeployArgs {
    /// A state machine in the Amazon States Language, or tasks with dependencies, as JSON or YAML; - reads stdin
    #[arg(value_name = "FILE|-")]
    file: PathBuf,
    /// The workflow's name [default: the file's]
    #[arg(long, value_name = "NAME", value_parser = Workflow::parse)]
    name: Option<Workflow>,
    /// Standard workflows survive everything; express ones answer at once and keep nothing [default: standard, or the
    /// workflow's current type]
    #[arg(long = "type", value_name = "TYPE", value_parser = types(), ignore_case = true)]
    kind: Option<StateMachineType>,
}

/// The values of `--type`.
fn types() -> impl TypedValueParser<Value = StateMachineType> {
    PossibleValuesParser::new(["standard", "express"])
        .try_map(|word| StateMachineType::from_word(&word).ok_or("not a type of state machines"))
}

/// The result of a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Change {
    Created,
    Updated,
    Unchanged,
}

pub(super) async fn run(args: WorkflowDeployArgs, client: &Client, session: &Session) -> anyhow::Result<()> {
    definition::refuse_folder(&args.file)?;
    let workflow = named(&args, client.namespace())?;
    let definition = definition::read(&args.file)?;
    if workflow.object_within(client.namespace()).is_some() {
        namespace_is_there(client.namespace(), session).await?;
    }
    let definition = components::upload(definition, &args.file, session).await?;
    let there = client.workflow(&workflow.arn()).await?;
    let type_there = there.as_ref().and_then(|there| there["type"].as_str());
    let kind = match (args.kind.map(StateMachineType::as_str), type_there) {
        (Some(asked), Some(is)) if asked != is => {
            let name = workflow.name();
            return Err(Failure::error(
                ErrorCode::Conflict,
                format!("workflow {name} is {is}, and a workflow's type cannot change"),
                format!("delete it first (mayfly workflow delete {name}), or give another --name"),
            ));
        }
        (asked, is) => asked.or(is).unwrap_or(StateMachineType::Standard.as_str()).to_owned(),
    };
    let source = definition::source(&args.file);
    check(client, &definition, &kind, &source).await?;
    let change = match there {
        None => {
            let name = workflow.name();
            let params = json!({"name": name, "definition": definition, "roleArn": ROLE, "type": kind});
            client.call("CreateStateMachine", &params).await?;
            Change::Created
        }
        Some(there) if there["definition"] == definition.as_str() => Change::Unchanged,
        Some(_) => {
            let params = json!({"stateMachineArn": workflow.arn(), "definition": definition});
            client.call("UpdateStateMachine", &params).await?;
            Change::Updated
        }
    };
    let (name, arn) = (workflow.name(), workflow.arn());
    let deployed = json!({"name": name, "stateMachineArn": arn, "type": kind, "change": change});
    let human = || {
        let change = format!("{change:?}").to_lowercase();
        format!(
            "workflow {name} {change} ({})\n  {arn}\nstart it: mayfly workflow start {name} -d JSON --follow\n",
            kind.to_lowercase()
        )
    };
    result(session.format(), &deployed, || format!("workflow/{name}\n"), human)
}

/// The workflow to deploy. `--name` is resolved as in other commands; a name taken from the file belongs to the
/// namespace.
fn named(args: &WorkflowDeployArgs, namespace: &str) -> anyhow::Result<Workflow> {
    let (workflow, is_given) = match &args.name {
        Some(name) => (name.clone(), true),
        None => {
            let name = definition::name_of_file(&args.file).ok_or_else(|| {
                Failure::new(ErrorCode::Usage, "stdin has no name", "give the workflow one with --name")
            })?;
            let parsed = Workflow::parse(&name);
            (parsed.map_err(|why| Failure::new(ErrorCode::Usage, why, "give it a name with --name"))?, false)
        }
    };
    let workflow = workflow.within(namespace);
    let object = workflow.object_within(namespace);
    let is_elsewhere = object.is_none() && !is_given && namespace != NAMESPACE_DEFAULT;
    match object.map(dns_label) {
        // With this name its object would be in `default`.
        Some(Err(why)) => Err(Failure::error(
            ErrorCode::Usage,
            format!(
                "workflow {} cannot be an object in namespace {namespace}: its name {why}",
                workflow.name()
            ),
            "give it another --name",
        )),
        None if is_elsewhere => Err(Failure::error(
            ErrorCode::Usage,
            format!("{} is not a name in namespace {namespace}: it has a dot", workflow.name()),
            "give it another --name; a name with a dot contains its namespace",
        )),
        _ => Ok(workflow),
    }
}

/// Checks that the namespace exists: otherwise the workflow's object would be created in `default`. A server without a
/// Kubernetes API has no objects.
async fn namespace_is_there(namespace: &str, session: &Session) -> anyhow::Result<()> {
    let Ok(server) = session.server().await else { return Ok(()) };
    match server.get(&format!("/api/v1/namespaces/{}", segment(namespace))).await {
        Err(error) if is_not_found(&error) => Err(Failure::error(
            ErrorCode::NotFound,
            format!("there is no namespace {namespace}"),
            format!("make it: kubectl create namespace {namespace}"),
        )),
        _ => Ok(()),
    }
}

/// Validates a definition by the API. All findings go to stderr; any error among them makes this fail.
async fn check(client: &Client, definition: &str, kind: &str, source: &str) -> anyhow::Result<()> {
    let params = json!({"definition": definition, "type": kind, "severity": "WARNING"});
    let answer = client.call("ValidateStateMachineDefinition", &params).await?;
    let mut diagnostics = answer["diagnostics"].as_array().cloned().unwrap_or_default();
    if answer["result"] != "OK" {
        // As on AWS, the API checks transitions only when all fields are valid.
        for missing in missing_targets(definition, kind)? {
            if !diagnostics.contains(&missing) {
                diagnostics.push(missing);
            }
        }
    }
    for diagnostic in &diagnostics {
        output::note(problem(diagnostic));
    }
    if answer["truncated"] == true {
        output::note("and more, which the server does not list");
    }
    if answer["result"] == "OK" {
        return Ok(());
    }
    let errors = diagnostics.iter().filter(|diagnostic| diagnostic["severity"] != "WARNING").count();
    let problems = if errors == 1 { "an error".to_owned() } else { format!("{errors} errors") };
    Err(Failure::error(ErrorCode::InvalidFile, format!("{source} has {problems}"), "nothing was deployed"))
}

/// The transitions to missing states, in the API's form.
fn missing_targets(definition: &str, kind: &str) -> serde_json::Result<Vec<Value>> {
    let machine_type = StateMachineType::from_word(kind).unwrap_or(StateMachineType::Standard);
    validate::missing_targets(definition, machine_type).iter().map(serde_json::to_value).collect()
}

/// Formats a diagnostic as `location: message (CODE)`.
fn problem(diagnostic: &Value) -> String {
    let text = |field: &str| diagnostic[field].as_str().unwrap_or("");
    let (location, message, code) = (text("location"), text("message"), text("code"));
    let place = if location.is_empty() { String::new() } else { format!("{location}: ") };
    let warning = if text("severity") == "WARNING" { "warning: " } else { "" };
    format!("{place}{warning}{message} ({code})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_has_its_missing_targets_in_the_form_of_the_api() {
        let text = r#"{"StartAt": "A", "States": {"A": {"Type": "Pass", "Next": "B", "Bogus": 1}}}"#;
        let missing = json!({"severity": "ERROR", "code": "MISSING_TRANSITION_TARGET",
            "message": "Missing 'Next' target: B", "location": "/States/A/Next"});
        assert_eq!(missing_targets(text, "STANDARD").unwrap(), [missing]);
        assert_eq!(missing_targets("{", "STANDARD").unwrap(), [Value::Null; 0]);
    }

    #[test]
    fn problems_begin_with_their_place() {
        let mut diagnostic = json!({"severity": "ERROR", "code": "C", "message": "no such state", "location": "/States/A/Next"});
        assert_eq!(problem(&diagnostic), "/States/A/Next: no such state (C)");
        diagnostic["severity"] = "WARNING".into();
        assert_eq!(problem(&diagnostic), "/States/A/Next: warning: no such state (C)");
        diagnostic["location"] = Value::Null;
        assert_eq!(problem(&diagnostic), "warning: no such state (C)");
    }
}
