//! `mayfly workflow describe`, `history` and `list`.

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use mayfly_api::wellknown::NAMESPACE_DEFAULT;
use serde_json::{Value, json};

use super::{
    client::Client,
    follow,
    history::{self, EventRow, Trace},
    ordered::Ordered,
    reference::{Execution, Workflow, short},
    result,
};
use crate::{
    format,
    output::{self, OutputFormat},
    session::Session,
    table,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow describe order
  mayfly workflow describe order/order-17")]
pub(super) struct WorkflowDescribeArgs {
    /// A workflow's name or ARN, or an execution: its ARN or WORKFLOW/EXECUTION
    #[arg(value_name = "WORKFLOW|EXECUTION", value_parser = Execution::parse)]
    what: Execution,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow history order/order-17
  mayfly workflow history order -o json")]
pub(super) struct HistoryArgs {
    /// The execution: an ARN, WORKFLOW/EXECUTION, or WORKFLOW for its newest
    #[arg(value_name = "EXECUTION", value_parser = Execution::parse)]
    execution: Execution,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow list
  mayfly workflow list -n shop
  mayfly workflow list order --status failed

In the namespace default all workflows are listed, in another its own.")]
pub(super) struct ListArgs {
    /// List the executions of this workflow, the newest first
    #[arg(value_name = "WORKFLOW", value_parser = Workflow::parse)]
    workflow: Option<Workflow>,
    /// Only executions with this status
    #[arg(long, value_name = "STATUS", value_enum, ignore_case = true, requires = "workflow")]
    status: Option<Status>,
    /// The largest number of items
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Status {
    Running,
    Succeeded,
    Failed,
    TimedOut,
    Aborted,
    PendingRedrive,
}

impl Status {
    /// The status's name in the API.
    fn name(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::TimedOut => "TIMED_OUT",
            Self::Aborted => "ABORTED",
            Self::PendingRedrive => "PENDING_REDRIVE",
        }
    }
}

/// The number of executions in the description of a workflow.
const EXECUTIONS_SHOWN: usize = 5;
/// The length limit of details in a table that is not wide, in characters.
const DETAILS_LETTERS_MAX: usize = 80;
/// The largest number of events of an execution.
const EVENTS_MAX: usize = 25_000;

pub(super) async fn describe(
    args: WorkflowDescribeArgs,
    client: &Client,
    session: &Session,
) -> anyhow::Result<()> {
    let workflow = match args.what.within(client.namespace()) {
        Execution::Newest(workflow) => workflow,
        execution => {
            let arn = execution.arn(client).await?;
            return describe_execution(&arn, client, session).await;
        }
    };
    let arn = workflow.arn();
    let Some(described) = client.workflow(&arn).await? else {
        let arn = workflow.as_execution(client).await?.ok_or_else(|| workflow.missing())?;
        return describe_execution(&arn, client, session).await;
    };
    let is_standard = described["type"] == "STANDARD";
    let executions = if is_standard && !is_data(session) {
        let params = json!({"stateMachineArn": arn});
        client.list("ListExecutions", &params, "executions", EXECUTIONS_SHOWN).await?.0
    } else {
        Vec::new()
    };
    let name = || format!("workflow/{}\n", workflow.name());
    result(session.format(), &described, name, || workflow_text(&described, &executions, Timestamp::now()))
}

async fn describe_execution(arn: &str, client: &Client, session: &Session) -> anyhow::Result<()> {
    let execution = client.call("DescribeExecution", &json!({"executionArn": arn})).await?;
    let human = || execution_text(&execution, Timestamp::now());
    result(session.format(), &execution, || format!("execution/{}\n", short(arn)), human)
}

pub(super) async fn history(args: HistoryArgs, client: &Client, session: &Session) -> anyhow::Result<()> {
    let arn = args.execution.within(client.namespace()).arn(client).await?;
    let params = json!({"executionArn": arn});
    let (events, _) = client.list("GetExecutionHistory", &params, "events", EVENTS_MAX).await?;
    let is_wide = session.format() == OutputFormat::Wide;
    let names =
        || events.iter().map(|event| event["type"].as_str().unwrap_or("").to_owned() + "\n").collect();
    result(session.format(), &events, names, || history_table(&events, is_wide))
}

pub(super) async fn list(args: ListArgs, client: &Client, session: &Session) -> anyhow::Result<()> {
    let limit = usize::try_from(args.limit)?;
    let (now, nobody_parses) = (Timestamp::now(), session.globals().output.is_none());
    let is_more = match args.workflow.map(|workflow| workflow.within(client.namespace())) {
        None => {
            let (workflows, is_more) = workflows(client, limit).await?;
            if workflows.is_empty() && nobody_parses {
                let place = match client.namespace() {
                    NAMESPACE_DEFAULT => String::new(),
                    namespace => format!(" in namespace {namespace}"),
                };
                output::note(format_args!("no workflows{place}; mayfly workflow deploy makes one"));
                return Ok(());
            }
            let names = || names("workflow", &workflows, |item| item["name"].as_str().unwrap_or("").into());
            result(session.format(), &workflows, names, || workflow_table(&workflows, now))?;
            is_more
        }
        Some(workflow) => {
            let mut params = json!({"stateMachineArn": workflow.arn()});
            if let Some(status) = args.status {
                params["statusFilter"] = status.name().into();
            }
            let (executions, is_more) = client.list("ListExecutions", &params, "executions", limit).await?;
            if executions.is_empty() && nobody_parses {
                output::note(format_args!(
                    "no executions; mayfly workflow start {} makes one",
                    workflow.name()
                ));
                return Ok(());
            }
            let names = || names("execution", &executions, execution_name);
            result(session.format(), &executions, names, || execution_table(&executions, now))?;
            is_more
        }
    };
    if is_more {
        output::note(format_args!("and more; --limit shows more than {limit}"));
    }
    Ok(())
}

/// The workflows of the namespace. In `default` all are listed: most state machines of AWS's tools are in it, whatever
/// their names.
async fn workflows(client: &Client, limit: usize) -> anyhow::Result<(Vec<Value>, bool)> {
    let prefix = match client.namespace() {
        NAMESPACE_DEFAULT => String::new(),
        namespace => format!("{namespace}."),
    };
    let is_here = |item: &Value| item["name"].as_str().is_some_and(|name| name.starts_with(&prefix));
    client.list_where("ListStateMachines", &json!({}), "stateMachines", limit, is_here).await
}

fn is_data(session: &Session) -> bool {
    matches!(session.format(), OutputFormat::Json | OutputFormat::Yaml)
}

fn names(kind: &str, items: &[Value], name: impl Fn(&Value) -> String) -> String {
    items.iter().map(|item| format!("{kind}/{}\n", name(item))).collect()
}

fn execution_name(execution: &Value) -> String {
    short(execution["executionArn"].as_str().unwrap_or(""))
}

/// `TIMED_OUT` → `Timed out`.
fn status_text(status: &Value) -> String {
    let status = status.as_str().unwrap_or("").replace('_', " ");
    let (first, rest) = status.split_at_checked(1).unwrap_or(("", &status));
    first.to_owned() + &rest.to_lowercase()
}

/// A time of the API, in seconds since 1970.
fn timestamp(seconds: &Value) -> Option<Timestamp> {
    #[expect(clippy::cast_possible_truncation, reason = "milliseconds of a date")]
    let millis = (seconds.as_f64()? * 1000.0).round() as i64;
    Timestamp::from_millisecond(millis).ok()
}

fn age(seconds: &Value, now: Timestamp) -> String {
    let time = timestamp(seconds);
    time.map_or("<unknown>".into(), |time| format::age_of_seconds(now.as_second() - time.as_second()))
}

/// The duration of an execution; until now if it is running.
fn took(execution: &Value, now: Timestamp) -> String {
    let start = execution["startDate"].as_f64();
    #[expect(clippy::cast_precision_loss, reason = "milliseconds are shown")]
    let stop = execution["stopDate"].as_f64().unwrap_or(now.as_millisecond() as f64 / 1000.0);
    start.map_or("-".into(), |start| follow::duration(stop - start))
}

fn workflow_table(workflows: &[Value], now: Timestamp) -> String {
    let row = |workflow: &Value| {
        let name = workflow["name"].as_str().unwrap_or("").to_owned();
        vec![name, status_text(&workflow["type"]), age(&workflow["creationDate"], now)]
    };
    table::render(&["NAME", "TYPE", "AGE"], &workflows.iter().map(row).collect::<Vec<_>>())
}

fn execution_table(executions: &[Value], now: Timestamp) -> String {
    let row = |execution: &Value| {
        let status = status_text(&execution["status"]);
        vec![execution_name(execution), status, age(&execution["startDate"], now), took(execution, now)]
    };
    table::render(&["NAME", "STATUS", "AGE", "DURATION"], &executions.iter().map(row).collect::<Vec<_>>())
}

fn history_table(events: &[Value], is_wide: bool) -> String {
    let mut trace = Trace::default();
    let row = |event: &Value| {
        let event = EventRow::parse(event);
        let state = trace.take(&event).map_or("-".to_owned(), |scope| scope.label.clone());
        let details = event.summary();
        let details = match is_wide {
            true => details.replace('\n', " "),
            false => history::cut(&details, DETAILS_LETTERS_MAX),
        };
        vec![event.id.to_string(), format!("{:.3}s", trace.since_start(&event)), event.kind, state, details]
    };
    table::render(&["ID", "TIME", "EVENT", "STATE", "DETAILS"], &events.iter().map(row).collect::<Vec<_>>())
}

/// Fields one below the other; those without a value are omitted.
fn fields(fields: &[(&str, String)]) -> String {
    let there = fields.iter().filter(|(_, value)| !value.is_empty());
    there.map(|(name, value)| format!("{:<11}{value}\n", format!("{name}:"))).collect()
}

fn workflow_text(workflow: &Value, executions: &[Value], now: Timestamp) -> String {
    let text = |field: &str| workflow[field].as_str().unwrap_or("").to_owned();
    let created = timestamp(&workflow["creationDate"]).map_or(String::new(), |time| time.to_string());
    let mut shown = fields(&[
        ("Name", text("name")),
        ("ARN", text("stateMachineArn")),
        ("Type", status_text(&workflow["type"])),
        ("Status", status_text(&workflow["status"])),
        ("Created", created),
        ("Revision", text("revisionId")),
    ]);
    if let Ok(definition) = serde_json::from_str::<Ordered>(&text("definition")) {
        let comment = definition.get("Comment").and_then(Ordered::as_str).unwrap_or("").to_owned();
        shown += &fields(&[("Comment", comment)]);
        let states = state_rows(&definition);
        if !states.is_empty() {
            shown += &format!("\n{}", table::render(&["STATE", "TYPE", "NEXT"], &states));
        }
    }
    if !executions.is_empty() {
        shown += &format!("\n{}", execution_table(executions, now));
    }
    shown
}

/// The outermost states in the order of the definition, with their transitions.
fn state_rows(definition: &Ordered) -> Vec<Vec<String>> {
    let text = |value: Option<&Ordered>| value.and_then(Ordered::as_str).map(str::to_owned);
    let start = text(definition.get("StartAt"));
    let states = definition.get("States").map_or(&[][..], Ordered::members);
    let row = |(name, state): &(String, Ordered)| {
        let mut next: Vec<String> = Vec::new();
        let choices = match state.get("Choices") {
            Some(Ordered::Array(rules)) => rules.as_slice(),
            _ => &[],
        };
        let targets = choices.iter().map(|rule| text(rule.get("Next")));
        for target in targets.chain([text(state.get("Default")), text(state.get("Next"))]).flatten() {
            if !next.contains(&target) {
                next.push(target);
            }
        }
        let name = if start.as_ref() == Some(name) { format!("{name} (start)") } else { name.clone() };
        vec![name, text(state.get("Type")).unwrap_or_default(), next.join(", ")]
    };
    states.iter().map(row).collect()
}

fn execution_text(execution: &Value, now: Timestamp) -> String {
    let text = |field: &str| execution[field].as_str().unwrap_or("").to_owned();
    let time = |field: &str| timestamp(&execution[field]).map_or(String::new(), |time| time.to_string());
    let workflow = text("stateMachineArn");
    let name = workflow.split_once(":stateMachine:").map_or(workflow.as_str(), |(_, name)| name);
    let redrives = execution["redriveCount"].as_u64().filter(|count| *count > 0);
    let mut shown = fields(&[
        ("Name", text("name")),
        ("ARN", text("executionArn")),
        ("Workflow", name.to_owned()),
        ("Status", status_text(&execution["status"])),
        ("Started", time("startDate")),
        ("Ended", time("stopDate")),
        ("Duration", took(execution, now)),
        ("Redrives", redrives.map_or(String::new(), |count| count.to_string())),
        ("Error", text("error")),
        ("Cause", text("cause")),
    ]);
    for (title, field) in [("Input", "input"), ("Output", "output")] {
        if let Some(payload) = execution[field].as_str() {
            shown += &format!("{title}:\n{}", history::payload(payload, "  "));
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        "2026-01-02T00:00:10Z".parse().unwrap()
    }

    #[test]
    fn executions_in_a_table() {
        let start = 1_767_312_000.0; // 2026-01-02T00:00:00Z
        let execution = |name: &str, status: &str, stop: Option<f64>| {
            json!({"executionArn": format!("arn:aws:states:r:a:execution:m:{name}"), "status": status,
                   "startDate": start, "stopDate": stop})
        };
        let rows = [execution("a", "RUNNING", None), execution("b", "TIMED_OUT", Some(start + 2.5))];
        assert_eq!(
            execution_table(&rows, now()),
            "NAME   STATUS      AGE   DURATION\n\
             m/a    Running     10s   10.0s\n\
             m/b    Timed out   10s   2.5s\n"
        );
        assert_eq!(names("execution", &rows, execution_name), "execution/m/a\nexecution/m/b\n");
    }

    #[test]
    fn a_workflow_with_its_states_as_they_are_written() {
        let definition = json!({"Comment": "an order", "StartAt": "Z", "States": {"Z": {"Type": "Choice",
            "Choices": [{"Next": "A"}, {"Next": "A"}], "Default": "B"}}});
        let workflow = json!({"name": "m", "stateMachineArn": "arn", "type": "STANDARD", "status": "ACTIVE",
            "creationDate": 1_767_312_000.0, "definition": definition.to_string()});
        assert_eq!(
            workflow_text(&workflow, &[], now()),
            "Name:      m\nARN:       arn\nType:      Standard\nStatus:    Active\n\
             Created:   2026-01-02T00:00:00Z\nComment:   an order\n\n\
             STATE       TYPE     NEXT\nZ (start)   Choice   A, B\n"
        );
    }

    #[test]
    fn an_execution_in_full() {
        let execution = json!({"name": "e", "executionArn": "arn", "stateMachineArn": "x:stateMachine:m",
            "status": "FAILED", "startDate": 1_767_312_000.0, "stopDate": 1_767_312_001.5, "error": "E", "cause": "c",
            "input": "{\"b\":1}", "redriveCount": 0});
        assert_eq!(
            execution_text(&execution, now()),
            "Name:      e\nARN:       arn\nWorkflow:  m\nStatus:    Failed\n\
             Started:   2026-01-02T00:00:00Z\nEnded:     2026-01-02T00:00:01.5Z\nDuration:  1.5s\n\
             Error:     E\nCause:     c\nInput:\n  {\n    \"b\": 1\n  }\n"
        );
    }

    #[test]
    fn events_with_their_states() {
        let events = [
            json!({"id": 1, "previousEventId": 0, "timestamp": 10.0, "type": "ExecutionStarted",
                   "executionStartedEventDetails": {"input": "{}"}}),
            json!({"id": 2, "previousEventId": 0, "timestamp": 10.25, "type": "PassStateEntered",
                   "stateEnteredEventDetails": {"name": "A", "input": "{\n}"}}),
        ];
        assert_eq!(
            history_table(&events, false),
            "ID   TIME     EVENT              STATE   DETAILS\n\
             1    0.000s   ExecutionStarted   -       input {}\n\
             2    0.250s   PassStateEntered   A       input { }\n"
        );
    }
}
