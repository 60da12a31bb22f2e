//! `mayfly invoke`: calls a function with an event, like a workflow.

use std::{path::Path, process::ExitCode, str::FromStr};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::time::Instant;
use tower::ServiceExt as _;

use super::{
    bounded_read::{self, CONTENT_BYTES_MAX},
    failure::{ErrorCode, Failure},
    gateway::{HttpClient, function_url, is_private, proxy_path},
    output::{self, OutputFormat},
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly invoke greet -d '{\"name\":\"Ada\"}'
  mayfly invoke hello --method GET --path /status -v
  mayfly invoke charge --async -d '{\"order\":7}'

The exit code is 1 when the function answers with an error.")]
pub(crate) struct InvokeArgs {
    /// The function's name
    name: String,
    /// The event, as JSON; @FILE reads a file, - reads stdin [default: {}]
    #[arg(short, long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    data: Option<String>,
    /// The path relative to the function
    #[arg(long, default_value = "/", value_name = "PATH")]
    path: String,
    /// The HTTP method
    #[arg(short = 'X', long, default_value = "POST", value_name = "METHOD")]
    method: Method,
    /// A header, as 'Name: value'; may be given several times
    #[arg(short = 'H', long, value_name = "HEADER")]
    header: Vec<Header>,
    /// Queue the event and print the invocation's id: the function is called later, and again if it fails
    #[arg(long = "async")]
    asynchronous: bool,
}

/// A header as given on the command line.
#[derive(Clone, Debug)]
struct Header(HeaderName, HeaderValue);

impl FromStr for Header {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once(':').ok_or("write 'Name: value'")?;
        let name = name.trim().parse().map_err(|_| format!("{name:?} is not a header's name"))?;
        let value = value.trim().parse().map_err(|_| format!("{value:?} cannot be a header's value"))?;
        Ok(Self(name, value))
    }
}

/// The header that selects an asynchronous invocation.
const HEADER_INVOCATION: &str = "mayfly-invocation";
/// The response header with the invocation's id.
const HEADER_INVOCATION_ID: &str = "mayfly-invocation-id";

/// The forms of `-d`, here and for starting a workflow.
const DATA_FORMS: &str = "-d @FILE reads a file, -d '{}' is the JSON itself";

/// The number of bytes of an error's body that are read. Other response bodies are streamed.
const ERROR_BYTES_MAX: usize = 1 << 20;

pub(crate) async fn run(args: InvokeArgs, session: &Session) -> anyhow::Result<ExitCode> {
    let namespace = session.namespace().await?;
    let started = Instant::now();
    let response = send(&args, session, &namespace).await?;
    let status = response.status();
    if session.globals().verbose {
        let text =
            |name: &str| response.headers().get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
        output::note(format_args!("{status} in {}", super::format::seconds(started.elapsed().as_secs_f64())));
        for name in ["server-timing", "x-request-id", "mayfly-revision", "content-type"] {
            if let Some(value) = text(name) {
                output::note(format_args!("{name}: {value}"));
            }
        }
    }
    if args.asynchronous && status == StatusCode::ACCEPTED {
        return queued(response, session).map(|()| ExitCode::SUCCESS);
    }
    if status.is_success() {
        return stream(&args.name, response.into_body()).await.map(|()| ExitCode::SUCCESS);
    }
    let body = http_body_util::Limited::new(response.into_body(), ERROR_BYTES_MAX).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let text = error_text(&args.name, status, &body);
    if session.format() == OutputFormat::Json || text.is_none() {
        output::out(with_line_end(&body))?;
    }
    let text = text.unwrap_or_else(|| format!("function {} answered {status}", args.name));
    output::note(format_args!("error: {text}"));
    Ok(ExitCode::FAILURE)
}

/// Sends the request to the gateway; for a private function, which has no address there, through the API server.
async fn send(args: &InvokeArgs, session: &Session, namespace: &str) -> anyhow::Result<Response<Incoming>> {
    let server = session.server().await?;
    // A local gateway gets the request first, so that calls work while the control plane is down.
    let is_local = server.endpoints().is_some();
    if is_local || !is_private(server, namespace, &args.name).await? {
        let url = function_url(session, namespace, &args.name).await?;
        let response = HttpClient::new().send(request(args, &url)?).await?;
        // With this status the gateway refuses a private function, which it has not called then.
        let refused = is_local && response.status() == StatusCode::NOT_FOUND;
        if !refused || !is_private(server, namespace, &args.name).await.unwrap_or(false) {
            return Ok(response);
        }
    }
    let answer = server.streaming()?.oneshot(request(args, &proxy_path(namespace, &args.name))?).await;
    Ok(answer.map_err(kube::Error::Service)?)
}

fn request(args: &InvokeArgs, url: &str) -> anyhow::Result<Request<Full<Bytes>>> {
    let has_body = args.data.is_some() || !matches!(args.method, Method::GET | Method::HEAD | Method::DELETE);
    let body = match args.data.as_deref() {
        None if has_body => Bytes::from_static(b"{}"),
        None => Bytes::new(),
        Some(text) => data(text)?,
    };
    let says_type = args.header.iter().any(|header| header.0 == header::CONTENT_TYPE);
    if has_body
        && !says_type
        && let Err(error) = serde_json::from_slice::<serde::de::IgnoredAny>(&body)
    {
        return Err(Failure::error(
            ErrorCode::Usage,
            format!("the event is not JSON: {error}"),
            "quote it, as in -d '{\"name\":\"Ada\"}', or name its type: -H 'content-type: text/plain'",
        ));
    }
    let path = args.path.trim_start_matches('/');
    let mut request = Request::builder().method(args.method.clone()).uri(format!("{url}{path}"));
    if has_body && !says_type {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    for Header(name, value) in &args.header {
        request = request.header(name, value);
    }
    if args.asynchronous {
        request = request.header(HEADER_INVOCATION, "async");
    }
    request.body(Full::new(body)).map_err(|error| {
        Failure::error(
            ErrorCode::Usage,
            format!("--path {:?} is not valid in a URL: {error}", args.path),
            "escape it as in a URL",
        )
    })
}

/// The data of `-d`: `@FILE` is the content of a file, `-` is stdin, other text is used as it is.
pub(super) fn data(text: &str) -> anyhow::Result<Bytes> {
    if text == "-" {
        let content =
            bounded_read::stream(std::io::stdin(), CONTENT_BYTES_MAX).context("cannot read stdin")?;
        return Ok(content.into());
    }
    match text.strip_prefix('@') {
        Some("") => Err(Failure::error(ErrorCode::Usage, "-d @ names no file", DATA_FORMS)),
        Some(path) => read(Path::new(path)),
        None => Ok(Bytes::copy_from_slice(text.as_bytes())),
    }
}

fn read(path: &Path) -> anyhow::Result<Bytes> {
    let content = bounded_read::file(path, CONTENT_BYTES_MAX).map_err(|error| {
        Failure::error(ErrorCode::FileError, format!("cannot read {}: {error}", path.display()), DATA_FORMS)
    })?;
    Ok(content.into())
}

/// Prints the id of an asynchronous invocation.
fn queued(response: Response<Incoming>, session: &Session) -> anyhow::Result<()> {
    let id = response.headers().get(HEADER_INVOCATION_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
    output::result(session.format(), &json!({"invocation": id}), || format!("{id}\n"))
}

/// Writes the body as it arrives.
async fn stream(name: &str, mut body: Incoming) -> anyhow::Result<()> {
    let mut last = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            Failure::error(
                ErrorCode::RunFailed,
                format!("the response ended early: {error}"),
                format!("see the function's log: mayfly logs {name}"),
            )
        })?;
        if let Some(data) = frame.data_ref() {
            last = data.last().copied().or(last);
            output::out(data)?;
        }
    }
    // A terminal gets a final newline before its prompt; a pipe gets the exact bytes.
    if last.is_some_and(|last| last != b'\n') && std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        output::out("\n")?;
    }
    Ok(())
}

fn with_line_end(body: &[u8]) -> Vec<u8> {
    let mut body = body.to_vec();
    if body.last().is_some_and(|last| *last != b'\n') {
        body.push(b'\n');
    }
    body
}

/// The message in an error's body, if it has the format of functions, of the gateway or of the API server.
fn error_text(name: &str, status: StatusCode, body: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(body).ok()?;
    if let Some(kind) = value["errorType"].as_str() {
        let message = value["errorMessage"].as_str().unwrap_or("");
        return Some(format!("{kind}: {message}\n  function {name} answered {status}"));
    }
    if value["kind"] == "Status"
        && let Some(message) = value["message"].as_str()
    {
        return Some(format!("{message} ({status})"));
    }
    let message = value["error"]["message"].as_str()?;
    // The gateway's code, which docs/errors.md explains.
    let code = value["error"]["code"].as_str().map(|code| format!(", {code}")).unwrap_or_default();
    let hint = value["error"]["hint"].as_str().map(|hint| format!("\n  {hint}")).unwrap_or_default();
    Some(format!("{message} ({status}{code}){hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(data: Option<&str>, method: Method, headers: &[&str]) -> InvokeArgs {
        InvokeArgs {
            name: "f".into(),
            data: data.map(str::to_owned),
            path: "/x?y=1".into(),
            method,
            header: headers.iter().map(|header| header.parse().unwrap()).collect(),
            asynchronous: false,
        }
    }

    #[test]
    fn an_event_is_a_post_of_json() {
        let sent = request(&args(Some("{\"a\":1}"), Method::POST, &[]), "http://g/fn/d/f/").unwrap();
        assert_eq!(sent.uri(), "http://g/fn/d/f/x?y=1");
        assert_eq!(sent.headers()["content-type"], "application/json");
        let error = request(&args(Some("name=Ada"), Method::POST, &[]), "http://g/").unwrap_err().to_string();
        assert!(error.contains("not JSON"), "{error}");
        let text = args(Some("name=Ada"), Method::POST, &["Content-Type: text/plain"]);
        assert_eq!(request(&text, "http://g/").unwrap().headers()["content-type"], "text/plain");
        let get = request(&args(None, Method::GET, &["x-a: b"]), "http://g/").unwrap();
        assert!(!get.headers().contains_key("content-type") && get.headers()["x-a"] == "b");
        assert!("no colon".parse::<Header>().is_err());
        assert!("bad name: x".parse::<Header>().is_err());
    }

    #[test]
    fn errors_of_functions_are_told() {
        let body = br#"{"errorType": "NameMissing", "errorMessage": "say who you are"}"#;
        let text = error_text("greet", StatusCode::BAD_REQUEST, body).unwrap();
        assert_eq!(text, "NameMissing: say who you are\n  function greet answered 400 Bad Request");
        let body =
            br#"{"error": {"code": "timed_out", "message": "too slow", "hint": "raise limits.timeout"}}"#;
        let text = error_text("greet", StatusCode::GATEWAY_TIMEOUT, body).unwrap();
        assert_eq!(text, "too slow (504 Gateway Timeout, timed_out)\n  raise limits.timeout");
        assert_eq!(error_text("greet", StatusCode::BAD_REQUEST, b"<html>"), None);
        let body = br#"{"kind": "Status", "message": "functions.mayfly.dev \"greet\" is forbidden"}"#;
        let text = error_text("greet", StatusCode::FORBIDDEN, body).unwrap();
        assert_eq!(text, "functions.mayfly.dev \"greet\" is forbidden (403 Forbidden)");
    }
}
