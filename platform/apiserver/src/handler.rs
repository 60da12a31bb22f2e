//! The handling of a request: authentication, authorization, the target, and the response.

use std::sync::Arc;

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Method, Request, StatusCode, header, request::Parts};
use http_body::Body as _;

use crate::{
    access::{self, User},
    artifacts::{DISCARD_TIME_MAX, discard},
    audit::AuditRecord,
    call::{ResourceRequest, with_warnings},
    compression,
    custom::ServedKinds,
    discovery, etag, health, issuer, negotiate, openapi,
    rbac::Attributes,
    render::json_value,
    request::{Query, RequestTarget, UnknownResource, segments, selected_name, verb},
    server::ServerState,
    status::ApiError,
    streams, yaml,
};

/// Longest URI, in bytes.
const URI_BYTES_MAX: usize = 16 << 10;
/// The most bytes of a body that are read after an error: more than the largest body that is accepted, so that a client
/// with a somewhat larger one reads why it is refused.
const DISCARDED_BYTES_MAX: u64 = 16 << 20;

pub(crate) async fn handle(server: Arc<ServerState>, request: Request<Body>) -> Response {
    let path = segments(request.uri().path());
    let served = server.custom.served();
    let target = path
        .as_deref()
        .map_or_else(|| Err(ApiError::no_resource()), |path| RequestTarget::parse(path, &served));
    let measure =
        server.metrics.start(request.method(), request.uri(), request.headers(), target.as_ref().ok());
    let encoding = negotiate::encoding(request.headers(), request.uri().query().unwrap_or(""));
    let is_head = request.method() == Method::HEAD;
    // Answers of pods and other servers are passed on as they are.
    let is_own = path.as_deref().and_then(|path| path.first()).is_some_and(|first| first.starts_with("api"))
        && !target.as_ref().is_ok_and(RequestTarget::is_proxied);
    let compresses = is_own && !is_head && compression::accepts_gzip(request.headers());
    let mut record = None;
    let response = match Box::pin(route(server, request, path, target, &mut record)).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    };
    let response = match record {
        Some(record) => Box::pin(record.responded(response)).await,
        None => response,
    };
    let mut response = yaml::rewritten(response, encoding).await;
    if compresses {
        response = compression::compressed(response).await;
    }
    // As upstream: responses depend on the user and on the moment.
    let caching = response.headers_mut().entry(header::CACHE_CONTROL);
    caching.or_insert(HeaderValue::from_static("no-cache, private"));
    measure.end(response.status());
    if is_head { without_body(response) } else { response }
}

/// The response to HEAD: for an HTTP/2 client, a body would be a protocol error. (In HTTP/1.1 hyper leaves it out.)
fn without_body(response: Response) -> Response {
    let (mut parts, body) = response.into_parts();
    if let Some(bytes) = body.size_hint().exact() {
        parts.headers.entry(header::CONTENT_LENGTH).or_insert(bytes.into());
    }
    Response::from_parts(parts, Body::empty())
}

async fn route(
    server: Arc<ServerState>,
    request: Request<Body>,
    path: Option<Vec<String>>,
    target: Result<RequestTarget, ApiError>,
    record: &mut Option<AuditRecord>,
) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    let allowed = allow(&server, &parts, path, &target, record);
    access::remove_bearer(&mut parts.headers);
    if let Some(record) = record {
        record.received().await;
    }
    let allowed = match allowed {
        Ok(allowed) => allowed,
        Err(error) => return Err(after_body(body, error).await),
    };
    let (path, user) = match allowed {
        Allowed::Open(response) => return Ok(response),
        Allowed::User { path, user } => (path, user),
    };
    let is_get = parts.method == Method::GET;
    match path.first().map(String::as_str) {
        None if is_get => return Ok(paths(&server.custom.served())),
        Some("metrics") if is_get && path.len() == 1 => return metrics(&server),
        Some(".well-known" | "openid") if is_get => {
            return issuer::answer(&server, &path).ok_or_else(ApiError::no_path);
        }
        Some("openapi") if is_get => {
            let query = parts.uri.query().unwrap_or("");
            let hash = url::form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == "hash");
            let hash = hash.as_ref().map(|(_, value)| &**value);
            let answer = openapi::answer(&server.custom.served(), &path, hash, &parts.headers)?;
            return Ok(etag::tagged(&parts.headers, answer).await);
        }
        Some("artifacts") if path.len() <= 2 => {
            // Uploads have permits of their own: they take long, and wait for each other.
            let _permit = match parts.method {
                Method::PUT => None,
                _ => server.acquire_permit(&user).await?,
            };
            let digest = path.get(1).map(String::as_str);
            return server.artifact_request(&parts.method, digest, &parts.headers, body).await;
        }
        Some("api" | "apis") if is_get => {
            if let Some(answer) = discovery::answer(&server.custom.served(), &path, &parts.headers) {
                let answer = answer?;
                return Ok(match negotiate::aggregated_discovery(&parts.headers) {
                    Some(_) => etag::tagged(&parts.headers, answer).await,
                    None => answer,
                });
            }
        }
        _ => {}
    }
    if let Some((node, rest)) = streams::node_path(&path) {
        return streams::proxy(&server, node, &rest, parts, body).await;
    }
    let target = match target {
        Ok(target) => target,
        Err(error) => return Err(after_body(body, error).await),
    };
    if target.is_proxied() {
        // The query belongs to the pod's request and is not parsed.
        return ResourceRequest { server, user, target, query: Query::default(), parts }.proxied(body).await;
    }
    let mut body = match record {
        Some(record) => record.request_body(&parts, body, server.config.body_bytes_max).await,
        None => body,
    };
    let warning = target.kind.definition.and_then(|version| version.deprecation.clone());
    let answer = match Query::parse(&parts.method, parts.uri.query().unwrap_or("")) {
        Ok(query) => ResourceRequest { server, user, target, query, parts }.answer(&mut body).await,
        Err(error) => Err(error),
    };
    let answer = match answer {
        Ok(response) => Ok(response),
        Err(error) => Err(after_body(body, error).await),
    };
    match warning {
        Some(warning) => Ok(with_warnings(answer.unwrap_or_else(IntoResponse::into_response), vec![warning])),
        None => answer,
    }
}

/// Reads the rest of a request's body before an error is sent: HTTP/2 resets a stream with an unread body, and
/// clients that are still sending then lose the response.
async fn after_body(body: Body, error: ApiError) -> ApiError {
    if !body.is_end_stream() {
        let mut content = body.into_data_stream();
        let _ = tokio::time::timeout(DISCARD_TIME_MAX, discard(&mut content, DISCARDED_BYTES_MAX)).await;
    }
    error
}

/// An authenticated and admitted request: its user, or the response that ends it.
enum Allowed {
    /// A path that needs no authentication, and its response.
    Open(Response),
    User {
        path: Vec<String>,
        user: User,
    },
}

fn allow(
    server: &ServerState,
    parts: &Parts,
    path: Option<Vec<String>>,
    target: &Result<RequestTarget, ApiError>,
    record: &mut Option<AuditRecord>,
) -> Result<Allowed, ApiError> {
    let uri_bytes = parts.uri.path().len() + parts.uri.query().map_or(0, str::len);
    if uri_bytes > URI_BYTES_MAX {
        return Err(ApiError::bad_request("the request's URI is too long"));
    }
    let path = path.ok_or_else(ApiError::no_resource)?;
    if let Some(response) = open_to_all(server, parts, &path) {
        return Ok(Allowed::Open(response));
    }
    let verb = verb(&parts.method, &parts.uri, target.as_ref().ok());
    let method = parts.method.as_str().to_ascii_lowercase();
    let selected = match target {
        Ok(RequestTarget { name: None, .. }) => selected_name(&parts.method, &parts.uri),
        _ => None,
    };
    let asked = match target {
        Ok(target) => Attributes {
            verb,
            path: None,
            group: target.kind.group,
            resource: target.kind.plural,
            subresource: target.subresource.as_deref().unwrap_or(""),
            // A Namespace object counts as within its own namespace, so that roles of the namespace apply to it.
            namespace: match (target.kind.group, target.kind.plural, &target.name) {
                ("", "namespaces", Some(name)) => name,
                _ => &target.namespace,
            },
            name: target.name.as_deref().or(selected.as_deref()).unwrap_or(""),
        },
        Err(_) => match UnknownResource::parse(&path) {
            Some(unknown) => Attributes {
                verb: unknown.verb(&parts.method, &parts.uri),
                path: None,
                group: unknown.group,
                resource: unknown.resource,
                subresource: unknown.subresource,
                namespace: unknown.namespace,
                name: unknown.name,
            },
            None => Attributes { verb: &method, path: Some(parts.uri.path()), ..Attributes::default() },
        },
    };
    let user = match parts.extensions.get::<User>() {
        Some(user) => Ok(user.clone()),
        None => server.authenticate(&parts.headers, parts.extensions.get()),
    };
    if let Some(audit) = &server.config.audit {
        *record = audit.record(user.as_ref().ok(), &asked, parts, target.as_ref().ok(), &server.clock);
    }
    let user = user?;
    let authenticated = user.name.clone();
    let user = server.impersonated(user, &parts.headers, parts.uri.path())?;
    if let Some(record) = record.as_mut().filter(|_| user.name != authenticated) {
        record.impersonates(&user);
    }
    let decision = server.authorize(&user, &asked);
    if let Some(record) = record {
        record.decided(&decision);
    }
    if !decision.is_allowed() {
        return Err(access::refused(&user, &asked, &decision));
    }
    Ok(Allowed::User { path, user })
}

/// Health, version and the certificate of the server's authority, which need no token.
fn open_to_all(server: &ServerState, parts: &Parts, path: &[String]) -> Option<Response> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    if parts.method != Method::GET && parts.method != Method::HEAD {
        return None;
    }
    match path.as_slice() {
        ["version"] => Some(json_value(StatusCode::OK, &discovery::version())),
        // A machine that joins compares it with the hash that it was given, before it sends its token.
        ["cacerts"] => server.config.serving_authority_pem.clone().map(|pem| {
            let plain = HeaderValue::from_static("text/plain; charset=utf-8");
            ([(header::CONTENT_TYPE, plain)], pem).into_response()
        }),
        path => health::answer(server, path, parts.uri.query().unwrap_or("")),
    }
}

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

fn metrics(server: &ServerState) -> Result<Response, ApiError> {
    let registry = server.exposition.get().ok_or_else(ApiError::no_resource)?;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).map_err(ApiError::internal)?;
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(OPENMETRICS));
    Ok(response)
}

/// `/`: the list of served paths.
fn paths(served: &ServedKinds) -> Response {
    let mut paths = vec!["/api".to_owned(), "/api/v1".into(), "/apis".into(), "/artifacts".into()];
    for (group, versions) in served.groups().into_iter().filter(|(group, _)| !group.is_empty()) {
        paths.push(format!("/apis/{group}"));
        paths.extend(versions.iter().map(|version| format!("/apis/{group}/{version}")));
    }
    paths.extend(
        ["/healthz", "/livez", "/metrics", "/openapi/v2", "/openapi/v3", "/readyz", "/version"]
            .map(String::from),
    );
    json_value(StatusCode::OK, &serde_json::json!({"paths": paths}))
}
