//! Plain HTTP to servers other than the API: the gateway, the admin port.

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use mayfly_api::{Function, wellknown};

use super::{
    failure::{ErrorCode, Failure},
    server::{Server, segment},
    session::Session,
};
use crate::http_client::{self, HttpsClient};

/// The size limit of responses of the admin port, in bytes.
const TEXT_BYTES_MAX: usize = 256 << 20;

pub(crate) struct HttpClient(HttpsClient);

impl HttpClient {
    pub(crate) fn new() -> Self {
        Self(http_client::new())
    }

    /// Sends a request. If the server is unreachable, the error contains the innermost cause.
    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Response<Incoming>> {
        let uri = request.uri().clone();
        self.0.request(request).await.map_err(|error| {
            let last = http_client::innermost(&error);
            let what = match error.is_connect() {
                true => format!("no server answers at {} ({last})", origin(&uri)),
                false => format!("the connection to {} broke ({last})", origin(&uri)),
            };
            Failure::new(ErrorCode::NoServer, what, "is the server running? start one with: mayfly up").into()
        })
    }

    /// GETs a text.
    pub(crate) async fn text(&self, url: &str) -> anyhow::Result<String> {
        let request = Request::get(url).body(Full::default())?;
        let response = self.send(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), TEXT_BYTES_MAX).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!("reading {url}: {error}"))?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if !status.is_success() {
            anyhow::bail!("{url} answered {status}: {}", text.trim());
        }
        Ok(text)
    }
}

fn origin(uri: &Uri) -> String {
    format!("{}://{}", uri.scheme_str().unwrap_or("http"), uri.authority().map_or("", |a| a.as_str()))
}

/// The URL of a function, with a trailing slash. The gateway of the local server is used without a request to the API,
/// so that calls work while the control plane is down; otherwise the URL comes from the function's status.
pub(crate) async fn function_url(session: &Session, namespace: &str, name: &str) -> anyhow::Result<String> {
    let server = session.server().await?;
    if let Some(endpoints) = server.endpoints() {
        let gateway = endpoints.http.trim_end_matches('/');
        let prefix = wellknown::FUNCTION_PATH_PREFIX;
        return Ok(format!("{gateway}{prefix}{}/{}/", segment(namespace), segment(name)));
    }
    let functions: kube::Api<Function> = kube::Api::namespaced(server.client().clone(), namespace);
    let function = functions.get(name).await?;
    match function.status.and_then(|status| status.url) {
        Some(url) => Ok(if url.ends_with('/') { url } else { url + "/" }),
        None => Err(Failure::error(
            ErrorCode::NotReady,
            format!("function {name} has no address yet"),
            format!("see why: mayfly describe function {name} -n {namespace}"),
        )),
    }
}

/// Whether a function has no public address.
pub(crate) async fn is_private(server: &Server, namespace: &str, name: &str) -> Result<bool, kube::Error> {
    let functions: kube::Api<Function> = kube::Api::namespaced(server.client().clone(), namespace);
    Ok(!functions.get(name).await?.spec.visibility.is_public())
}

/// The path by which the API server passes requests on to a function, with a trailing slash.
pub(crate) fn proxy_path(namespace: &str, name: &str) -> String {
    format!("/apis/mayfly.dev/v1/namespaces/{}/functions/{}/proxy/", segment(namespace), segment(name))
}
