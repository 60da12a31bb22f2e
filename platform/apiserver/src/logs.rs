//! `pods/x/log` and `functions/x/log`: streamed from the nodes to the client.
//!
//! When the client disconnects, the response is dropped, and with it the requests to the nodes. A request for the log of
//! a pod over WebSocket is passed on with its connection, as those of exec are.

use axum::{body::Body, response::Response};
use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, future::join_all, stream};
use http::{HeaderValue, Request, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Limited};
use mayfly_api::validation::FieldError;
use mayfly_store::{ListOptions, Range};
use serde_json::Value;

use crate::{
    object::Object,
    registry::{Kind, registry},
    request::boolean,
    server::ServerState,
    status::ApiError,
    streams,
    verbs::{key, load},
};

/// The annotation with the default container for logs.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";
/// Parameters of a log that are passed on to the node.
const PARAMETERS: [&str; 9] = [
    "follow",
    "tailLines",
    "sinceSeconds",
    "sinceTime",
    "timestamps",
    "previous",
    "limitBytes",
    "stream",
    "revision",
];
/// The maximum number of bytes of a node's error that are shown.
const ERROR_BYTES_MAX: usize = 4 << 10;
/// Maximum length of a line that is kept together when the logs of several nodes are interleaved, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;

impl ServerState {
    /// The log of one container of a pod. `parts`: those of the request.
    pub(crate) async fn pod_log(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        parts: &Parts,
    ) -> Result<Response, ApiError> {
        let query = parts.uri.query().unwrap_or("");
        let entry = load(&self.store, kind, &key(kind, namespace, name))?;
        let pod = Object::from_entry(&entry).map_err(ApiError::internal)?;
        let asked = parameter(query, "container");
        let container = container(&pod, name, asked.as_deref())?;
        let node = pod.str_at(&["spec", "nodeName"]);
        check_options(name, query)?;
        if node.is_empty() {
            // There is no log, and no error, as upstream.
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NO_CONTENT;
            return Ok(response);
        }
        let path = format!("/containerLogs/{namespace}/{name}/{container}{}", passed_on(query)?);
        if streams::is_websocket(&parts.headers) {
            return streams::pass_on(self, node, &path, parts.clone(), Body::empty()).await;
        }
        let body = self.fetch(node, &path).await?;
        Ok(text_response(body))
    }

    /// The log of a function from all nodes that may run it. Lines of several nodes are interleaved as they arrive.
    pub(crate) async fn function_log(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
        query: &str,
    ) -> Result<Response, ApiError> {
        load(&self.store, kind, &key(kind, namespace, name))?;
        if let Some(revision) = parameter(query, "revision") {
            let revisions = registry().find("mayfly.dev", "v1", "revisions").expect("the row is there");
            load(&self.store, revisions, &key(revisions, namespace, &revision))?;
        }
        let path = format!("/functionLogs/{namespace}/{name}{}", passed_on(query)?);
        let nodes = self
            .store
            .list(&Range::resource("nodes"), &ListOptions::default())
            .map_err(ApiError::internal)?;
        let names: Vec<_> = nodes.entries.iter().map(|entry| entry.key.name.to_string()).collect();
        if names.is_empty() {
            return Err(ApiError::unavailable("there is no node, so there is no log"));
        }
        let answers = join_all(names.iter().map(|node| self.fetch(node, &path))).await;
        let (mut bodies, mut first_error) = (Vec::new(), None);
        for answer in answers {
            match answer {
                Ok(body) => bodies.push(body),
                // A node that never ran the function has no log of it.
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        match (bodies.len(), first_error) {
            (0, Some(error)) => Err(error),
            (1, _) => Ok(text_response(bodies.remove(0))),
            _ => {
                let lines = bodies.into_iter().map(|body| lines(body).boxed());
                Ok(text_response(Body::from_stream(stream::select_all(lines))))
            }
        }
    }

    async fn fetch(&self, node: &str, path: &str) -> Result<Body, ApiError> {
        let request = Request::get(path).body(Body::empty()).map_err(ApiError::internal)?;
        let limit = self.config.request_timeout;
        let answer = match tokio::time::timeout(limit, (self.nodes)(node.to_owned(), request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                return Err(ApiError::unavailable(format!(
                    "node {node:?} cannot be reached for its logs: {error}"
                )));
            }
            Err(_) => {
                return Err(ApiError::timeout(format!(
                    "node {node:?} did not answer within {} s",
                    limit.as_secs()
                )));
            }
        };
        if answer.status().is_success() {
            return Ok(answer.into_body());
        }
        let code = answer.status();
        let text = match Limited::new(answer.into_body(), ERROR_BYTES_MAX).collect().await {
            Ok(collected) => String::from_utf8_lossy(&collected.to_bytes()).trim().to_owned(),
            Err(_) => String::new(),
        };
        let message = if text.is_empty() { format!("node {node:?} answered {code}") } else { text };
        Err(match code {
            StatusCode::NOT_FOUND => ApiError::new(code, "NotFound", message),
            StatusCode::BAD_REQUEST => ApiError::bad_request(message),
            _ => ApiError::internal(message),
        })
    }
}

/// Checks the options of a pod's log (upstream's `ValidatePodLogOptions`).
fn check_options(pod: &str, query: &str) -> Result<(), ApiError> {
    let mut errors = Vec::new();
    let number = |field: &str| parameter(query, field).and_then(|text| text.parse::<i64>().ok());
    for (field, least, detail) in [
        ("tailLines", 0, "must be greater than or equal to 0"),
        ("limitBytes", 1, "must be greater than 0"),
        ("sinceSeconds", 1, "must be greater than 0"),
    ] {
        if let Some(value) = number(field).filter(|value| *value < least) {
            errors.push(FieldError::invalid(field, value, detail));
        }
    }
    if parameter(query, "sinceSeconds").is_some() && parameter(query, "sinceTime").is_some() {
        let detail = "at most one of `sinceTime` or `sinceSeconds` may be specified";
        errors.push(FieldError::forbidden("sinceSeconds", detail));
    }
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid_named("", "PodLogOptions", pod, &errors)) }
}

/// The requested container if the pod has it; else the annotated one; else the only one.
pub(crate) fn container(pod: &Object, name: &str, asked: Option<&str>) -> Result<String, ApiError> {
    let lists = ["containers", "initContainers", "ephemeralContainers"];
    let of = |list: &str| {
        let items = pod.at(&["spec", list]).and_then(Value::as_array).into_iter().flatten();
        items.filter_map(|container| container["name"].as_str()).collect::<Vec<_>>()
    };
    let all: Vec<&str> = lists.iter().flat_map(|list| of(list)).collect();
    let annotated = pod.str_at(&["metadata", "annotations", DEFAULT_CONTAINER]);
    let chosen = asked.filter(|text| !text.is_empty()).or(Some(annotated).filter(|text| all.contains(text)));
    match (chosen, of("containers").as_slice()) {
        (Some(chosen), _) if all.contains(&chosen) => Ok(chosen.to_owned()),
        (Some(chosen), _) => {
            Err(ApiError::bad_request(format!("container {chosen} is not valid for pod {name}")))
        }
        (None, [one]) => Ok((*one).to_owned()),
        (None, several) => {
            let list = several.join(" ");
            let message =
                format!("a container name must be specified for pod {name}, choose one of: [{list}]");
            Err(ApiError::bad_request(message))
        }
    }
}

pub(crate) fn parameter(query: &str, name: &str) -> Option<String> {
    url::form_urlencoded::parse(query.as_bytes())
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

/// The parameters that a node supports, validated, as a query string that begins with `?`.
fn passed_on(query: &str) -> Result<String, ApiError> {
    let mut out = url::form_urlencoded::Serializer::new(String::new());
    let mut any = false;
    for (key, value) in url::form_urlencoded::parse(query.as_bytes()) {
        let numeric = matches!(&*key, "tailLines" | "sinceSeconds" | "limitBytes");
        if numeric && value.parse::<u64>().is_err() {
            return Err(ApiError::unprocessable(format!(
                "{key}: Invalid value: {value:?}: must be a number, 0 or greater"
            )));
        }
        let value = match &*key {
            // Clients spell booleans in several ways.
            "follow" | "timestamps" | "previous" => boolean(&value).to_string().into(),
            _ => value,
        };
        if PARAMETERS.contains(&&*key) {
            out.append_pair(&key, &value);
            any = true;
        }
    }
    Ok(if any { format!("?{}", out.finish()) } else { String::new() })
}

fn text_response(body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}

/// Cuts a body into whole lines, so that those of several nodes do not mix.
fn lines(body: Body) -> impl Stream<Item = Result<Bytes, axum::Error>> + Send {
    let state = (body.into_data_stream(), BytesMut::new(), false);
    stream::unfold(state, |(mut body, mut buffer, mut ended)| async move {
        loop {
            let whole = buffer.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
            let ready = match whole {
                Some(end) => end,
                None if ended || buffer.len() > LINE_BYTES_MAX => buffer.len(),
                None => 0,
            };
            if ready > 0 {
                let lines = buffer.split_to(ready).freeze();
                return Some((Ok(lines), (body, buffer, ended)));
            }
            if ended {
                return None;
            }
            match body.next().await {
                Some(Ok(bytes)) => buffer.extend_from_slice(&bytes),
                Some(Err(error)) => return Some((Err(error), (body, buffer, true))),
                None => ended = true,
            }
        }
    })
}

/// Whether a kind is `Function`, the kind of [`ServerState::function_log`].
pub(crate) fn is_function(kind: &Kind) -> bool {
    registry().find("mayfly.dev", "v1", "functions").is_some_and(|row| std::ptr::eq(row, kind))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_are_chosen_as_upstream_does() {
        let pod = |annotated: &str| {
            let value = json!({
                "metadata": {"annotations": {DEFAULT_CONTAINER: annotated}},
                "spec": {"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]}
            });
            Object(value.as_object().unwrap().clone())
        };
        assert_eq!(container(&pod(""), "p", Some("i")).unwrap(), "i");
        assert_eq!(container(&pod("b"), "p", None).unwrap(), "b");
        let message = container(&pod(""), "p", None).unwrap_err().message;
        assert_eq!(message, "a container name must be specified for pod p, choose one of: [a b]");
        let message = container(&pod(""), "p", Some("x")).unwrap_err().message;
        assert_eq!(message, "container x is not valid for pod p");
    }

    #[test]
    fn only_known_parameters_are_passed_on() {
        assert_eq!(
            passed_on("follow=true&container=x&tailLines=5&evil=1").unwrap(),
            "?follow=true&tailLines=5"
        );
        assert_eq!(passed_on("").unwrap(), "");
        // The spelling of the Python client.
        assert_eq!(
            passed_on("follow=True&timestamps=1&previous=False").unwrap(),
            "?follow=true&timestamps=true&previous=false"
        );
        assert!(passed_on("tailLines=-1").is_err());
    }

    #[tokio::test]
    async fn lines_of_several_bodies_stay_whole() {
        let parts = ["a1\na", "2\nrest"].map(|part| Ok::<_, axum::Error>(Bytes::from(part)));
        let body = Body::from_stream(stream::iter(parts));
        let chunks: Vec<_> =
            lines(body).map(|chunk| String::from_utf8(chunk.unwrap().to_vec()).unwrap()).collect().await;
        assert_eq!(chunks, ["a1\n", "a2\n", "rest"]);
    }
}
