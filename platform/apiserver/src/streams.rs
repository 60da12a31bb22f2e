//! `pods/x/exec`, `pods/x/attach`, `pods/x/portforward`, `pods/x/log` over WebSocket, and `nodes/x/proxy`: passed on to
//! the node.
//!
//! The request goes to the node's HTTP API together with its connection's upgrade, so the node speaks the protocol
//! (WebSocket, SPDY) with the client, and nothing is translated here.

use std::sync::Arc;

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderName, Request, StatusCode, header, request::Parts};
use http_body_util::{BodyExt as _, Limited};
use mayfly_accept::ClientConnection;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    admission::{AdmissionAttributes, AdmissionOperation},
    call::ResourceRequest,
    logs,
    object::Object,
    request::boolean,
    server::ServerState,
    status::ApiError,
    verbs::{key, load},
};

/// Headers of a handshake that the node needs.
const HANDSHAKE: [HeaderName; 8] = [
    header::CONNECTION,
    header::UPGRADE,
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_VERSION,
    header::SEC_WEBSOCKET_PROTOCOL,
    header::SEC_WEBSOCKET_EXTENSIONS,
    HeaderName::from_static("x-stream-protocol-version"),
    header::CONTENT_TYPE,
];
/// The maximum number of bytes of a node's error that are shown.
const ERROR_BYTES_MAX: usize = 4 << 10;

/// A stream into a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodStream {
    Exec,
    Attach,
    PortForward,
}

impl PodStream {
    /// The stream that a subresource of pods names.
    pub(crate) fn of(resource: &str, subresource: Option<&str>) -> Option<Self> {
        match (resource, subresource?) {
            ("pods", "exec") => Some(Self::Exec),
            ("pods", "attach") => Some(Self::Attach),
            ("pods", "portforward") => Some(Self::PortForward),
            _ => None,
        }
    }

    fn subresource(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Attach => "attach",
            Self::PortForward => "portforward",
        }
    }

    /// The options in a query as the object that admission decides about.
    fn options(self, query: &str) -> Value {
        let kind = match self {
            Self::Exec => "PodExecOptions",
            Self::Attach => "PodAttachOptions",
            Self::PortForward => "PodPortForwardOptions",
        };
        let mut options = json!({"kind": kind, "apiVersion": "v1"});
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            let is_flag = matches!(&*name, "stdin" | "stdout" | "stderr" | "tty");
            match &*name {
                "container" => options["container"] = value.into(),
                "command" => match options["command"].as_array_mut() {
                    Some(words) => words.push(value.into()),
                    None => options["command"] = json!([value]),
                },
                "ports" => {
                    let ports: Vec<u16> = value.split(',').filter_map(|port| port.parse().ok()).collect();
                    options["ports"] = ports.into();
                }
                name if is_flag => options[name] = boolean(&value).into(),
                _ => {}
            }
        }
        options
    }
}

/// The node and the path on it that `/api/v1/nodes/NAME/proxy/…` names.
pub(crate) fn node_path(segments: &[String]) -> Option<(&str, String)> {
    match segments {
        [api, version, nodes, name, proxy, rest @ ..]
            if (api.as_str(), version.as_str(), nodes.as_str(), proxy.as_str())
                == ("api", "v1", "nodes", "proxy") =>
        {
            Some((name, format!("/{}", rest.join("/"))))
        }
        _ => None,
    }
}

impl ResourceRequest {
    /// Connects the client to the pod's node.
    pub(crate) async fn stream(self, stream: PodStream) -> Result<Response, ApiError> {
        let permit = self.long_lived()?;
        let (kind, namespace) = (self.target.kind, &self.target.namespace);
        let name = self.target.name.as_deref().unwrap_or_default();
        let entry = load(&self.server.store, kind, &key(kind, namespace, name))?;
        let pod = Object::from_entry(&entry).map_err(ApiError::internal)?;
        let node = pod.str_at(&["spec", "nodeName"]).to_owned();
        if node.is_empty() {
            return Err(ApiError::bad_request(format!("pod {name} does not have a host assigned")));
        }
        let phase = pod.str_at(&["status", "phase"]);
        if matches!(phase, "Succeeded" | "Failed") {
            let message =
                format!("cannot exec into a container in a completed pod; current phase is {phase}");
            return Err(ApiError::bad_request(message));
        }
        let query = self.parts.uri.query().unwrap_or("");
        let request = self.write_request();
        let attributes = AdmissionAttributes {
            request: &request,
            operation: AdmissionOperation::Connect,
            subresource: stream.subresource(),
        };
        self.server.review_posted(&attributes, name, &mut stream.options(query)).await?;
        let path = match stream {
            PodStream::PortForward => format!("/portForward/{namespace}/{name}?{query}"),
            PodStream::Exec | PodStream::Attach => {
                let asked = logs::parameter(query, "container");
                let container = logs::container(&pod, name, asked.as_deref())?;
                let verb = stream.subresource();
                format!("/{verb}/{namespace}/{name}/{container}?{query}")
            }
        };
        let connection = self.parts.extensions.get::<ClientConnection>().cloned();
        let response = pass_on(&self.server, &node, &path, self.parts, Body::empty()).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            hold_until_closed(connection.as_ref(), permit);
        }
        Ok(response)
    }
}

/// Keeps the permit of an upgraded request until its client's connection is closed: the node owns the stream, whose end
/// is not visible here. A request without a connection (of a component of this process) cannot be upgraded.
pub(crate) fn hold_until_closed(connection: Option<&ClientConnection>, permit: Option<OwnedSemaphorePermit>) {
    if let (Some(connection), Some(permit)) = (connection, permit) {
        connection.hold(permit);
    }
}

/// `nodes/x/proxy`: any request to the node's HTTP API, for administrators.
pub(crate) async fn proxy(
    server: &Arc<ServerState>,
    node: &str,
    path: &str,
    parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let query = parts.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    pass_on(server, node, &format!("{path}{query}"), parts, body).await
}

/// Whether a request asks for a WebSocket (upstream's `IsWebSocketRequest`).
pub(crate) fn is_websocket(headers: &HeaderMap) -> bool {
    let has = |name: HeaderName, token: &str| {
        let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
        let mut tokens = values.flat_map(|value| value.split(','));
        tokens.any(|known| known.trim().eq_ignore_ascii_case(token))
    };
    has(header::UPGRADE, "websocket") && has(header::CONNECTION, "upgrade")
}

/// Forwards a request to a node, with the headers of an upgrade, and returns the response.
pub(crate) async fn pass_on(
    server: &ServerState,
    node: &str,
    path: &str,
    mut parts: Parts,
    body: Body,
) -> Result<Response, ApiError> {
    let mut request = Request::new(body);
    *request.method_mut() = parts.method.clone();
    *request.uri_mut() = path.parse().map_err(|_| ApiError::bad_request("the path cannot be passed on"))?;
    for name in HANDSHAKE {
        for value in parts.headers.get_all(&name) {
            request.headers_mut().append(name.clone(), value.clone());
        }
    }
    if let Some(upgrade) = parts.extensions.remove::<hyper::upgrade::OnUpgrade>() {
        request.extensions_mut().insert(upgrade);
    }
    let answer = (server.nodes)(node.to_owned(), request)
        .await
        .map_err(|error| ApiError::unavailable(format!("node {node:?} cannot be reached: {error}")))?;
    let code = answer.status();
    // The response to an unsupported protocol has headers with the supported ones.
    let is_refused_protocol = code == StatusCode::FORBIDDEN;
    if code.is_success() || code == StatusCode::SWITCHING_PROTOCOLS || is_refused_protocol {
        return Ok(answer.into_response());
    }
    let text = match Limited::new(answer.into_body(), ERROR_BYTES_MAX).collect().await {
        Ok(collected) => String::from_utf8_lossy(&collected.to_bytes()).trim().to_owned(),
        Err(_) => String::new(),
    };
    let message = if text.is_empty() { format!("node {node:?} answered {code}") } else { text };
    Err(match code {
        StatusCode::NOT_FOUND => ApiError::new(code, "NotFound", message),
        StatusCode::BAD_REQUEST => ApiError::bad_request(message),
        StatusCode::TOO_MANY_REQUESTS => ApiError::too_many_requests(message),
        _ => ApiError::new(code, "InternalError", message),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_and_node_paths_are_recognised() {
        assert_eq!(PodStream::of("pods", Some("exec")), Some(PodStream::Exec));
        assert_eq!(PodStream::of("pods", Some("log")), None);
        assert_eq!(PodStream::of("nodes", Some("exec")), None);
        let options = PodStream::Exec.options("command=ls&command=-l&container=c&stdin=true&x=y");
        let expected = json!({"kind": "PodExecOptions", "apiVersion": "v1", "command": ["ls", "-l"],
            "container": "c", "stdin": true});
        assert_eq!(options, expected);
        let path = |text: &str| crate::request::segments(text).unwrap();
        let segments = path("/api/v1/nodes/n/proxy/images/import");
        assert_eq!(node_path(&segments), Some(("n", "/images/import".into())));
        assert_eq!(node_path(&path("/api/v1/nodes/n/proxy")), Some(("n", "/".into())));
        assert_eq!(node_path(&path("/api/v1/nodes/n/status")), None);
    }
}
