//! Uploads a component, or the input of a job, once per digest.

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use indicatif::{ProgressBar, ProgressStyle};
use mayfly_api::Digest;
use tower::ServiceExt as _;

use super::server::{Server, api_error};

/// One step of the progress bar, in bytes.
const CHUNK_BYTES: usize = 64 << 10;
/// The size limit of the response to an upload, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The result of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upload {
    Sent,
    AlreadyThere,
}

/// The type of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// The server checks the component, and refuses one that cannot run.
    Component,
    /// Any other content.
    File,
}

impl Content {
    /// Detects the type by the first bytes.
    pub(crate) fn of(content: &[u8]) -> Self {
        if content.starts_with(b"\0asm") { Self::Component } else { Self::File }
    }

    fn media_type(self) -> &'static str {
        match self {
            Self::Component => "application/wasm",
            Self::File => "application/octet-stream",
        }
    }
}

/// The path of an artifact.
pub(crate) fn path(digest: &Digest) -> String {
    format!("/artifacts/{digest}")
}

/// Uploads content unless the server already has it. Shows a progress bar on a terminal.
pub(crate) async fn upload(server: &Server, digest: &Digest, component: Bytes) -> anyhow::Result<Upload> {
    let path = path(digest);
    // POST also renews the artifact's age, so that it is not collected before it is referenced.
    let answer = call(server, Method::POST, &path, None).await?;
    match answer.status() {
        status if status.is_success() => return Ok(Upload::AlreadyThere),
        StatusCode::NOT_FOUND => {}
        status => return Err(api_error(status, &content(answer).await).into()),
    }
    let answer = call(server, Method::PUT, &path, Some(component)).await?;
    match answer.status() {
        status if status.is_success() => Ok(Upload::Sent),
        status => Err(api_error(status, &content(answer).await).into()),
    }
}

/// Writes content as it arrives.
pub(crate) async fn download(
    server: &Server,
    digest: &Digest,
    into: &mut (dyn std::io::Write + Send),
) -> anyhow::Result<()> {
    let answer = call(server, Method::GET, &path(digest), None).await?;
    let status = answer.status();
    if !status.is_success() {
        return Err(api_error(status, &content(answer).await).into());
    }
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        if let Ok(chunk) = frame?.into_data() {
            into.write_all(&chunk)?;
        }
    }
    Ok(into.flush()?)
}

async fn content(answer: Response<Incoming>) -> Bytes {
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    body.map(|body| body.to_bytes()).unwrap_or_default()
}

async fn call(
    server: &Server,
    method: Method,
    path: &str,
    sent: Option<Bytes>,
) -> anyhow::Result<Response<Incoming>> {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(content) = &sent {
        // Also set for an empty file: without the type, the server expects a component.
        request = request
            .header(header::CONTENT_TYPE, Content::of(content).media_type())
            .header(header::CONTENT_LENGTH, content.len());
    }
    let body = sent.unwrap_or_default();
    let bar = progress(body.len());
    let counted = bar.clone();
    let chunks = (0..body.len()).step_by(CHUNK_BYTES).map(move |at| {
        let chunk = body.slice(at..body.len().min(at + CHUNK_BYTES));
        counted.inc(chunk.len() as u64);
        Ok::<_, std::io::Error>(Frame::data(chunk))
    });
    let request = request.body(StreamBody::new(stream::iter(chunks).boxed()))?;
    let answer = server.streaming()?.oneshot(request).await;
    bar.finish_and_clear();
    // Converted to an error of the API's client, so that a connection failure lists the addresses that were tried.
    Ok(answer.map_err(kube::Error::Service)?)
}

fn progress(bytes: usize) -> ProgressBar {
    if bytes < CHUNK_BYTES {
        return ProgressBar::hidden();
    }
    let template = "uploading {bar:30} {bytes}/{total_bytes} {bytes_per_sec}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(bytes as u64).with_style(style)
}
