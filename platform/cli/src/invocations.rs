//! `mayfly invocations`: the asynchronous invocations of functions.

use clap::{Args, Subcommand, ValueEnum};
use http::Method;
use jiff::Timestamp;
use kube::api::ListParams;
use mayfly_api::Function;
use serde_json::{Value, json};

use super::{
    format,
    output::{self, OutputFormat},
    server::{segment, with_query},
    session::Session,
    table,
    workflow::client::Client,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly invoke charge --async -d '{\"order\":7}'
  mayfly invocations list charge --status failed
  mayfly invocations describe charge 019ab3f0-6f0e-7a31-9c55-0d6f6d1d2a10
  mayfly invocations retry charge 019ab3f0-6f0e-7a31-9c55-0d6f6d1d2a10")]
pub(crate) struct InvocationsArgs {
    /// Where the workflows port answers [default: MAYFLY_WORKFLOWS_URL, else as in the data directory]
    #[arg(long, global = true, value_name = "URL")]
    workflows_url: Option<String>,
    #[command(subcommand)]
    command: InvocationsCommand,
}

#[derive(Subcommand, Debug)]
enum InvocationsCommand {
    /// List the invocations of a function, or of all functions, the newest first
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show an invocation with its request and its history
    #[command(after_help = "Example:
  mayfly invocations describe charge 019ab3f0-6f0e-7a31-9c55-0d6f6d1d2a10")]
    Describe(IdArgs),
    /// Queue the request of an invocation again, as a new invocation
    #[command(after_help = "Example:
  mayfly invocations retry charge 019ab3f0-6f0e-7a31-9c55-0d6f6d1d2a10")]
    Retry(IdArgs),
    /// Remove invocations; those that have not ended are ended
    Purge(PurgeArgs),
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly invocations list
  mayfly invocations list charge --status failed")]
struct ListArgs {
    /// The function's name [default: all functions of the namespace]
    function: Option<String>,
    /// Only invocations with this status
    #[arg(long, value_enum, ignore_case = true)]
    status: Option<InvocationStatus>,
    /// At most this many of each function
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
}

#[derive(Args, Debug)]
struct IdArgs {
    /// The function's name
    function: String,
    /// The invocation's id
    id: String,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly invocations purge charge
  mayfly invocations purge charge --status running")]
struct PurgeArgs {
    /// The function's name
    function: String,
    /// Only invocations with this status
    #[arg(long, value_enum, ignore_case = true)]
    status: Option<InvocationStatus>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum InvocationStatus {
    /// Queued, running, or waiting for the next attempt
    Running,
    Succeeded,
    Failed,
    /// Removed by `purge` before its end
    Aborted,
}

impl InvocationStatus {
    /// The status's name on the wire.
    fn name(self) -> &'static str {
        match self {
            Self::Running => "RUNNING",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::Aborted => "ABORTED",
        }
    }
}

pub(crate) async fn run(args: InvocationsArgs, session: &Session) -> anyhow::Result<()> {
    let namespace = session.namespace().await?;
    let client = Client::find(args.workflows_url, namespace, session.globals())?;
    match args.command {
        InvocationsCommand::List(args) => list(args, &client, session).await,
        InvocationsCommand::Describe(args) => {
            let found = client.rest(Method::GET, &path_of(&client, &args.function, Some(&args.id))).await?;
            output::result(session.format(), &found, || described(&found))
        }
        InvocationsCommand::Retry(args) => {
            let path = path_of(&client, &args.function, Some(&args.id)) + "/retry";
            let answer = client.rest(Method::POST, &path).await?;
            let text = || format!("{}\n", answer["invocation"].as_str().unwrap_or_default());
            output::result(session.format(), &answer, text)
        }
        InvocationsCommand::Purge(args) => {
            let path = path_of(&client, &args.function, None);
            let path = with_query(&path, &[("status", args.status.map(InvocationStatus::name))]);
            let answer = client.rest(Method::DELETE, &path).await?;
            output::result(session.format(), &answer, || {
                let plural = if answer["purged"] == 1 { "" } else { "s" };
                format!("{} invocation{plural} removed\n", answer["purged"])
            })
        }
    }
}

async fn list(args: ListArgs, client: &Client, session: &Session) -> anyhow::Result<()> {
    let functions = match args.function {
        Some(function) => vec![function],
        None => {
            let client = session.server().await?.client().clone();
            let functions: kube::Api<Function> = kube::Api::namespaced(client, &session.namespace().await?);
            let found = functions.list_metadata(&ListParams::default()).await?;
            found.items.into_iter().filter_map(|function| function.metadata.name).collect()
        }
    };
    let limit = args.limit.to_string();
    let status = args.status.map(InvocationStatus::name);
    let mut items = Vec::new();
    let mut is_more = false;
    for function in functions {
        let path =
            with_query(&path_of(client, &function, None), &[("status", status), ("limit", Some(&limit))]);
        let mut page = client.rest(Method::GET, &path).await?;
        is_more |= page["next"].is_string();
        if let Value::Array(found) = page["items"].take() {
            items.extend(found);
        }
    }
    let text = |item: &Value, field: &str| item[field].as_str().unwrap_or_default().to_owned();
    items.sort_by_key(|item| std::cmp::Reverse(text(item, "queuedTime")));
    let human = || {
        if items.is_empty() {
            return "No invocations found.\n".to_owned();
        }
        let now = Timestamp::now();
        let row = |item: &Value| {
            let age = format::age(item["queuedTime"].as_str(), now);
            vec![text(item, "function"), text(item, "id"), text(item, "status"), text(item, "error"), age]
        };
        let rows: Vec<Vec<String>> = items.iter().map(row).collect();
        table::render(&["FUNCTION", "ID", "STATUS", "ERROR", "AGE"], &rows)
    };
    output::result(session.format(), &json!({"items": items}), || match session.format() {
        OutputFormat::Name => items.iter().map(|item| format!("{}\n", text(item, "id"))).collect(),
        _ => human(),
    })?;
    if is_more {
        output::note(format_args!("there are older ones: raise --limit ({limit})"));
    }
    Ok(())
}

fn path_of(client: &Client, function: &str, id: Option<&str>) -> String {
    let path = format!("/invocations/{}/{}", segment(client.namespace()), segment(function));
    id.map_or(path.clone(), |id| format!("{path}/{}", segment(id)))
}

/// A readable description of an invocation.
fn described(found: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let mut lines = Vec::new();
    for (title, value) in [
        ("Id", &found["id"]),
        ("Function", &found["function"]),
        ("Namespace", &found["namespace"]),
        ("Status", &found["status"]),
        ("Attempts", &found["attempts"]),
        ("Queued", &found["queuedTime"]),
        ("Ended", &found["endTime"]),
        ("Deadline", &found["deadline"]),
        ("Error", &found["error"]),
        ("Cause", &found["cause"]),
    ] {
        if !value.is_null() {
            lines.push(format!("{:<11}{}", format!("{title}:"), text(value)));
        }
    }
    let request = &found["request"];
    lines.push(format!("Request:   {} {}", text(&request["method"]), text(&request["path"])));
    lines.push(format!("  {}", text(&request["body"])));
    lines.push("History:".to_owned());
    for line in found["history"].as_array().into_iter().flatten() {
        lines.push(format!("  {}", text(line)));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invocation_is_described_by_its_fields() {
        let found = json!({
            "id": "i", "function": "charge", "namespace": "shop", "status": "FAILED", "attempts": 3,
            "queuedTime": "2026-11-23T10:00:00.000Z", "error": "Boom",
            "request": {"method": "POST", "path": "/", "body": "{}"},
            "history": ["1 10:00:00.000 ExecutionStarted"],
        });
        let text = described(&found);
        assert!(text.contains("Attempts:  3\n") && text.contains("Error:     Boom\n"), "{text}");
        assert!(text.contains("Request:   POST /\n  {}\n"), "{text}");
        assert!(!text.contains("Ended"), "{text}");
    }
}
