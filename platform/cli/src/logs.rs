//! `mayfly logs`: the output of a function (or a pod) on stdout and stderr.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use futures::AsyncReadExt as _;
use mayfly_api::duration::Span;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::{
    failure::{ErrorCode, Failure},
    output,
    server::{is_not_found, segment, with_query},
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly logs hello --follow
  mayfly logs hello --since 10m --timestamps
  mayfly logs pod/hello-00001-x7k2p")]
pub(crate) struct LogsArgs {
    /// The function's name, or pod/NAME
    name: String,
    /// Keep running, and show new lines as they arrive
    #[arg(short, long)]
    follow: bool,
    /// Only the last lines
    #[arg(long, value_name = "LINES")]
    tail: Option<u32>,
    /// Only lines not older than this, such as 10m
    #[arg(long, value_name = "DURATION")]
    since: Option<Span>,
    /// Begin each line with its time
    #[arg(long)]
    timestamps: bool,
    /// Only this revision's lines
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
}

/// The longest delay between the end of a pod's log and the change of its phase, which is polled meanwhile.
const PHASE_PATIENCE: Duration = Duration::from_secs(5);
const PHASE_PAUSE: Duration = Duration::from_millis(200);

pub(crate) async fn run(args: LogsArgs, session: &Session) -> anyhow::Result<()> {
    let namespace = session.namespace().await?;
    let path = path(&args, &namespace)?;
    copy(session, &path).await?;
    if args.follow && !is_over(&args, &path, &namespace, session).await {
        let todo = "follow it again with the same command; --since 1m shows what came meanwhile";
        return Err(Failure::error(
            ErrorCode::ServerError,
            format!("the server closed the log of {}", args.name),
            todo,
        ));
    }
    Ok(())
}

/// Whether a followed log is complete: its pod has ended, or the writer is gone.
async fn is_over(args: &LogsArgs, path: &str, namespace: &str, session: &Session) -> bool {
    let Ok(server) = session.server().await else { return false };
    let mut objects =
        vec![path.split('?').next().and_then(|path| path.strip_suffix("/log")).unwrap_or(path).to_owned()];
    if let Some(revision) = &args.revision {
        let revisions = format!("/apis/mayfly.dev/v1/namespaces/{}/revisions", segment(namespace));
        objects.push(format!("{revisions}/{}", segment(revision)));
    }
    // A pod's log ends shortly before its phase changes.
    let latest = Instant::now() + PHASE_PATIENCE;
    loop {
        let mut is_pod = false;
        for object in &objects {
            match server.get(object).await {
                Err(error) => return is_not_found(&error),
                Ok(found) if has_ended(&found) => return true,
                Ok(found) => is_pod = found["kind"] == "Pod",
            }
        }
        if !is_pod || Instant::now() > latest {
            return false;
        }
        sleep(PHASE_PAUSE).await;
    }
}

fn has_ended(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
        || object["kind"] == "Pod"
            && matches!(object["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
}

/// The path of a function's log, followed from now on.
pub(crate) fn follow_path(namespace: &str, name: &str) -> String {
    let path = function_path(namespace, name);
    with_query(&path, &[("follow", Some("true")), ("tailLines", Some("0"))])
}

/// Copies a log to stdout until it ends.
pub(crate) async fn copy(session: &Session, path: &str) -> anyhow::Result<()> {
    let mut stream = session.server().await?.stream(path, "*/*").await?;
    let mut buffer = vec![0; 64 << 10];
    loop {
        match stream.read(&mut buffer).await.context("the log ended early")? {
            0 => return Ok(()),
            length => output::out(&buffer[..length])?,
        }
    }
}

fn function_path(namespace: &str, name: &str) -> String {
    format!("/apis/mayfly.dev/v1/namespaces/{}/functions/{}/log", segment(namespace), segment(name))
}

fn path(args: &LogsArgs, namespace: &str) -> anyhow::Result<String> {
    let (kind, name) = args.name.split_once('/').unwrap_or(("function", &args.name));
    let path = match kind {
        "function" | "functions" | "fn" => function_path(namespace, name),
        "pod" | "pods" | "po" if args.revision.is_none() => {
            format!("/api/v1/namespaces/{}/pods/{}/log", segment(namespace), segment(name))
        }
        "pod" | "pods" | "po" => {
            return Err(Failure::error(
                ErrorCode::Usage,
                "a pod belongs to one revision",
                "leave --revision out",
            ));
        }
        other => {
            return Err(Failure::error(
                ErrorCode::Usage,
                format!("{other:?} has no log"),
                "name a function, or pod/NAME",
            ));
        }
    };
    let tail = args.tail.map(|lines| lines.to_string());
    // The API uses whole seconds, at least one.
    let since = args.since.map(|Span(since)| since.as_millis().div_ceil(1000).max(1).to_string());
    Ok(with_query(
        &path,
        &[
            ("follow", args.follow.then_some("true")),
            ("tailLines", tail.as_deref()),
            ("sinceSeconds", since.as_deref()),
            ("timestamps", args.timestamps.then_some("true")),
            ("revision", args.revision.as_deref()),
        ],
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        let args = LogsArgs {
            name: "hello".into(),
            follow: true,
            tail: Some(5),
            since: Some("1m30s".parse().unwrap()),
            timestamps: true,
            revision: Some("hello-00002".into()),
        };
        assert_eq!(
            path(&args, "default").unwrap(),
            "/apis/mayfly.dev/v1/namespaces/default/functions/hello/log\
             ?follow=true&tailLines=5&sinceSeconds=90&timestamps=true&revision=hello-00002"
        );
        let pod = |revision| LogsArgs {
            name: "pod/p".into(),
            follow: false,
            tail: None,
            since: Some("10ms".parse().unwrap()),
            timestamps: false,
            revision,
        };
        assert_eq!(path(&pod(None), "ns").unwrap(), "/api/v1/namespaces/ns/pods/p/log?sinceSeconds=1");
        assert!(path(&pod(Some("r".into())), "ns").is_err());
        assert!(path(&LogsArgs { name: "node/n".into(), ..pod(None) }, "ns").is_err());
    }
}
