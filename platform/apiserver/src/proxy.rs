//! `pods/x/proxy`, `services/x/proxy` and `functions/x/proxy`: HTTP requests to a port of a pod, passed on through the
//! pod's node, and to a function, called through the gateway.
//!
//! ```text
//! /api/v1/namespaces/NS/pods/[SCHEME:]NAME[:PORT]/proxy/PATH      the port's number; else the first one that a container names
//! /api/v1/namespaces/NS/services/[SCHEME:]NAME[:PORT]/proxy/PATH  the service port's name or number; a ready endpoint at random
//! /apis/mayfly.dev/v1/namespaces/NS/functions/NAME/proxy/PATH     the function, also one without a public address
//! ```
//! The node connects to the pod, so that pods are reached on any network; for the scheme `https` with TLS, without a
//! verification of the pod's certificate. The pod gets the path as it was sent, with its escapes.
//! (Behaviour: upstream `pkg/registry/core/{pod,service}/storage` and `apimachinery/pkg/util/proxy`.)

mod function;

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header};
use rand::seq::IteratorRandom as _;
use serde_json::{Value, json};

use crate::{
    admission::{AdmissionAttributes, AdmissionOperation},
    call::ResourceRequest,
    registry::Kind,
    request::{Query, RequestTarget},
    status::ApiError,
    verbs::{key, load},
};

/// Headers of the connection to the API server, or for it alone.
const DROPPED: [HeaderName; 8] = [
    header::AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("impersonate-user"),
];
/// The number of path segments before the proxied path: `/api/v1/namespaces/NS/pods/NAME/proxy`.
const SEGMENTS: usize = 7;

/// Whether a path is that of a proxied request. `rest`: its segments after the resource.
pub(crate) fn is_proxy(group: &str, plural: &str, rest: &[&str]) -> bool {
    matches!((group, plural), ("", "pods" | "services") | (function::GROUP, function::PLURAL))
        && matches!(rest, [_, "proxy", ..])
}

/// Whether further segments of a path after these belong to the proxied path.
pub(crate) fn is_below(segments: &[String]) -> bool {
    let (group, rest) = match segments {
        [api, version, rest @ ..] if api == "api" && version == "v1" => ("", rest),
        [apis, group, _, rest @ ..] if apis == "apis" => (group.as_str(), rest),
        _ => return false,
    };
    let [namespaces, _, plural, _, subresource, ..] = rest else { return false };
    namespaces == "namespaces" && is_proxy(group, plural, &["", subresource])
}

impl RequestTarget {
    /// Whether a request is passed on to a pod or a function.
    pub(crate) fn is_proxied(&self) -> bool {
        let subresource = self.subresource.as_deref().unwrap_or_default();
        is_proxy(self.kind.group, self.kind.plural, &["", subresource])
    }
}

/// `[SCHEME:]NAME[:PORT]` (upstream's `SplitSchemeNamePort`).
#[derive(Debug, PartialEq, Eq)]
struct ProxyName<'n> {
    scheme: &'n str,
    name: &'n str,
    port: &'n str,
}

impl<'n> ProxyName<'n> {
    fn parse(text: &'n str) -> Option<Self> {
        let parts: Vec<&str> = text.split(':').collect();
        let parsed = match parts.as_slice() {
            [name] => Self { scheme: "", name, port: "" },
            [name, port] => Self { scheme: "", name, port },
            [scheme @ ("" | "http" | "https"), name, port] => Self { scheme, name, port },
            _ => return None,
        };
        (!parsed.name.is_empty()).then_some(parsed)
    }

    fn uses_tls(&self) -> bool {
        self.scheme == "https"
    }
}

/// The part of a request's path after `segments` segments, unchanged; `None` if the path ends without a slash after
/// `proxy`.
fn proxied_path(path: &str, segments: usize) -> Option<&str> {
    let (at, _) = path.match_indices('/').nth(segments)?;
    Some(&path[at..])
}

/// A port of a pod.
struct PodPort {
    pod: String,
    port: u16,
}

impl ResourceRequest {
    /// Passes a request on to a pod or a function, and its response back.
    pub(crate) async fn proxied(self, body: Body) -> Result<Response, ApiError> {
        let is_function = self.target.kind.group == function::GROUP;
        let segments = if is_function { function::SEGMENTS } else { SEGMENTS };
        let path = match (proxied_path(self.parts.uri.path(), segments), &self.parts.method) {
            (Some(path), _) => path,
            // Redirects to a path with a slash, so that relative links of the response are below the proxy.
            (None, &Method::GET | &Method::HEAD) => return moved(&self.parts.uri),
            (None, _) => "/",
        };
        // The node limits the number of proxied requests, so a pod that never answers holds no permit of a watch.
        // A function's own limits apply to its calls.
        let passed = async {
            match is_function {
                true => self.pass_to_function(path, body).await,
                false => self.pass_to_pod(path, body).await,
            }
        };
        let passed = self.server.shutdown.run_until_cancelled(passed).await;
        let response = passed.ok_or_else(|| ApiError::unavailable("the server is shutting down"))??;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(response);
        }
        Ok(self.ends_with_server(response, ()))
    }

    async fn pass_to_pod(&self, path: &str, body: Body) -> Result<Response, ApiError> {
        let (kind, namespace) = (self.target.kind, &*self.target.namespace);
        let text = self.target.name.as_deref().unwrap_or_default();
        let resource = kind.plural.trim_end_matches('s');
        let invalid = || ApiError::bad_request(format!("invalid {resource} request {text:?}"));
        let name = ProxyName::parse(text).ok_or_else(invalid)?;
        let is_pod = kind.plural == "pods";
        let to = match is_pod {
            true => self.port_of_pod(&name)?,
            false => self.port_of_service(&name)?,
        };
        let options = if is_pod { "PodProxyOptions" } else { "ServiceProxyOptions" };
        self.review_connection(json!({"kind": options, "apiVersion": "v1", "path": path})).await?;
        let pods = self.server.custom.served().find("", "v1", "pods").ok_or_else(ApiError::no_resource)?;
        let pod = self.stored(pods, &to.pod)?;
        let node = pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned();
        if node.is_empty() {
            return Err(ApiError::bad_request(format!("pod {} does not have a host assigned", to.pod)));
        }
        let query = self.parts.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        let scheme = if name.uses_tls() { "https:" } else { "" };
        let on_node = format!("/proxy/{namespace}/{}/{scheme}{}{path}{query}", to.pod, to.port);
        let mut request = self.passed_on(on_node.parse().map_err(|_| invalid())?, body);
        if let Some(upgrade) = self.parts.extensions.get::<hyper::upgrade::OnUpgrade>() {
            request.extensions_mut().insert(upgrade.clone());
        }
        let answered = (self.server.nodes)(node.clone(), request).await;
        let mut response = answered
            .map_err(|error| ApiError::unavailable(format!("node {node:?} cannot be reached: {error}")))?
            .into_response();
        prefix_location(response.headers_mut(), self.parts.uri.path(), path);
        Ok(response)
    }

    /// Admits a request to connect with the object. `options`: the object that admission plugins see.
    async fn review_connection(&self, mut options: Value) -> Result<(), ApiError> {
        let request = self.write_request();
        let attributes = AdmissionAttributes {
            request: &request,
            operation: AdmissionOperation::Connect,
            subresource: "proxy",
        };
        let name = self.target.name.as_deref().unwrap_or_default();
        self.server.review_posted(&attributes, name, &mut options).await?;
        Ok(())
    }

    /// The request as it is passed on.
    fn passed_on(&self, uri: Uri, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = self.parts.method.clone();
        *request.uri_mut() = uri;
        *request.headers_mut() = headers(&self.parts.headers, &self.parts.uri);
        request
    }

    /// Reads an object in the request's namespace.
    fn stored(&self, kind: &'static Kind, name: &str) -> Result<Value, ApiError> {
        let entry = load(&self.server.store, kind, &key(kind, &self.target.namespace, name))?;
        serde_json::from_slice(&entry.value).map_err(ApiError::internal)
    }

    fn port_of_pod(&self, name: &ProxyName<'_>) -> Result<PodPort, ApiError> {
        let pod = self.stored(self.target.kind, name.name)?;
        let port = match name.port {
            "" => first_port(&pod).unwrap_or(if name.uses_tls() { 443 } else { 80 }),
            port => port.parse().map_err(|_| {
                ApiError::bad_request(format!("the port of a pod is a number, which {port:?} is not"))
            })?,
        };
        Ok(PodPort { pod: name.name.to_owned(), port })
    }

    fn port_of_service(&self, name: &ProxyName<'_>) -> Result<PodPort, ApiError> {
        let service = self.stored(self.target.kind, name.name)?;
        let port = port_name(&service, name.port).ok_or_else(|| {
            ApiError::unavailable(format!(
                "no service port {:?} found for service {:?}",
                name.port, name.name
            ))
        })?;
        let slices = self.server.custom.served().find("discovery.k8s.io", "v1", "endpointslices");
        let slices = slices.ok_or_else(ApiError::no_resource)?;
        let query = Query {
            label_selector: Some(format!("kubernetes.io/service-name={}", name.name)),
            ..Query::default()
        };
        let (_, found) = self.server.list(slices, &self.target.namespace, &query)?;
        let slices = found.iter().filter_map(|entry| serde_json::from_slice(&entry.value).ok());
        let ends = slices.flat_map(|slice: Value| endpoints(&slice, port));
        ends.choose(&mut rand::rng()).ok_or_else(|| {
            ApiError::unavailable(format!("no endpoints available for service {:?}", name.name))
        })
    }
}

/// The first port that a container of the pod names.
fn first_port(pod: &Value) -> Option<u16> {
    let containers = pod["spec"]["containers"].as_array()?;
    let mut ports = containers.iter().filter_map(|one| one["ports"].get(0)?["containerPort"].as_u64());
    u16::try_from(ports.next()?).ok()
}

/// The name of the service's port with this name or number; without one, that of a port without a name.
fn port_name<'s>(service: &'s Value, asked: &'s str) -> Option<&'s str> {
    let Ok(number) = asked.parse::<u64>() else { return Some(asked) };
    let mut ports = service["spec"]["ports"].as_array()?.iter();
    let port = ports.find(|port| port["port"].as_u64() == Some(number))?;
    Some(port["name"].as_str().unwrap_or_default())
}

/// The ready pods of a slice, with the number of the port of this name.
fn endpoints(slice: &Value, port: &str) -> Vec<PodPort> {
    let mut ports = slice["ports"].as_array().into_iter().flatten();
    let number = ports.find(|one| one["name"].as_str().unwrap_or_default() == port);
    let number = number.and_then(|one| u16::try_from(one["port"].as_u64()?).ok());
    let Some(number) = number else { return Vec::new() };
    let ready = slice["endpoints"].as_array().into_iter().flatten();
    let ready = ready.filter(|endpoint| endpoint["conditions"]["ready"] != false);
    let pods = ready.filter(|endpoint| endpoint["targetRef"]["kind"] == "Pod");
    let pods = pods.filter_map(|endpoint| endpoint["targetRef"]["name"].as_str());
    pods.map(|pod| PodPort { pod: pod.to_owned(), port: number }).collect()
}

/// The request's headers for the pod or the function.
fn headers(from: &HeaderMap, uri: &Uri) -> HeaderMap {
    let mut headers = from.clone();
    for name in &DROPPED {
        headers.remove(name);
    }
    let impersonated: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with("impersonate-")).cloned().collect();
    for name in impersonated {
        headers.remove(name);
    }
    headers.insert("x-forwarded-proto", HeaderValue::from_static("https"));
    if let Some(host) = from.get(header::HOST).cloned() {
        headers.insert("x-forwarded-host", host);
    }
    if let Ok(path) = HeaderValue::from_str(uri.path()) {
        headers.insert("x-forwarded-uri", path);
    }
    headers
}

/// Rewrites the `Location` of a redirect within the pod to a path below the proxy.
fn prefix_location(headers: &mut HeaderMap, whole: &str, path: &str) {
    let Some(location) = headers.get(header::LOCATION).and_then(|value| value.to_str().ok()) else { return };
    if !location.starts_with('/') || location.starts_with("//") {
        return;
    }
    let prefix = whole.strip_suffix(path).unwrap_or(whole);
    if let Ok(value) = HeaderValue::from_str(&format!("{prefix}{location}")) {
        headers.insert(header::LOCATION, value);
    }
}

fn moved(uri: &Uri) -> Result<Response, ApiError> {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let location = HeaderValue::from_str(&format!("{}/{query}", uri.path())).map_err(ApiError::internal)?;
    let mut response = StatusCode::MOVED_PERMANENTLY.into_response();
    response.headers_mut().insert(header::LOCATION, location);
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_schemes_and_ports() {
        let parse = |text| ProxyName::parse(text).map(|one| (one.scheme, one.name, one.port));
        assert_eq!(parse("web"), Some(("", "web", "")));
        assert_eq!(parse("web:80"), Some(("", "web", "80")));
        assert_eq!(parse("http:web:http"), Some(("http", "web", "http")));
        assert_eq!(parse("https:web:"), Some(("https", "web", "")));
        assert_eq!(parse(":web:80"), Some(("", "web", "80")));
        for invalid in ["", ":80", "ftp:web:80", "http:web:80:90"] {
            assert_eq!(parse(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn paths_are_passed_on_as_they_were_sent() {
        let proxy = "/api/v1/namespaces/ns/pods/web:80/proxy";
        assert_eq!(proxied_path(proxy, SEGMENTS), None);
        assert_eq!(proxied_path(&format!("{proxy}/"), SEGMENTS), Some("/"));
        assert_eq!(proxied_path(&format!("{proxy}/a%20b//c/"), SEGMENTS), Some("/a%20b//c/"));
        assert_eq!(proxied_path(&format!("{proxy}/a%2Fb%FF"), SEGMENTS), Some("/a%2Fb%FF"));
        let segments = crate::request::segments(&format!("{proxy}/a%2Fb%FF/c")).unwrap();
        assert_eq!(segments[6..], ["proxy", "a%2Fb%FF", "c"]);
        assert_eq!(crate::request::segments("/api/v1/namespaces/ns/pods/a%2Fb/proxy"), None);
        let call = "/apis/mayfly.dev/v1/namespaces/ns/functions/f/proxy";
        assert_eq!(proxied_path(call, function::SEGMENTS), None);
        assert_eq!(proxied_path(&format!("{call}/a%2Fb"), function::SEGMENTS), Some("/a%2Fb"));
        assert_eq!(crate::request::segments(&format!("{call}/a%2Fb")).unwrap()[7..], ["proxy", "a%2Fb"]);
        let mut headers = HeaderMap::from_iter([(header::LOCATION, HeaderValue::from_static("/login"))]);
        prefix_location(&mut headers, &format!("{proxy}/a"), "/a");
        assert_eq!(headers[header::LOCATION], format!("{proxy}/login"));
        headers.insert(header::LOCATION, HeaderValue::from_static("https://example.com/"));
        prefix_location(&mut headers, &format!("{proxy}/a"), "/a");
        assert_eq!(headers[header::LOCATION], "https://example.com/");
    }

    #[test]
    fn ports_of_services_are_those_of_ready_pods() {
        let service = json!({"spec": {"ports": [{"name": "http", "port": 80}, {"port": 81}]}});
        assert_eq!(port_name(&service, "80"), Some("http"));
        assert_eq!(port_name(&service, "81"), Some(""));
        assert_eq!(port_name(&service, "82"), None);
        assert_eq!(port_name(&service, "grpc"), Some("grpc"));
        let pod = |name: &str| json!({"kind": "Pod", "name": name});
        let slice = json!({"ports": [{"name": "http", "port": 8080}, {"port": 8081}], "endpoints": [
            {"targetRef": pod("a")}, {"targetRef": pod("b"), "conditions": {"ready": false}}, {"addresses": ["1.2.3.4"]}]});
        let found = |port: &str| {
            endpoints(&slice, port).into_iter().map(|one| (one.pod, one.port)).collect::<Vec<_>>()
        };
        assert_eq!(found("http"), [("a".to_owned(), 8080)]);
        assert_eq!(found(""), [("a".to_owned(), 8081)]);
        assert_eq!(found("grpc"), []);
        let pod = json!({"spec": {"containers": [{}, {"ports": [{"containerPort": 9}]}]}});
        assert_eq!(first_port(&pod), Some(9));
    }
}
