//! `httpGet` of probes and lifecycle hooks: one request, any certificate accepted, redirects followed within a host.

use std::net::IpAddr;

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use mayfly_api::k8s::{
    api::core::v1::{Container, HTTPGetAction},
    apimachinery::pkg::util::intstr::IntOrString,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::rustls::pki_types::ServerName;
use url::Url;

use crate::unverified_tls;

/// The number of bytes of a response that are read (upstream's `maxRespBodyLength`).
const BODY_BYTES_MAX: usize = 10 << 10;
/// The number of redirects that are followed (Go's default).
const REDIRECTS_MAX: usize = 10;
/// The user agent of upstream's probes, which programs search for in their logs.
pub(crate) const PROBE_AGENT: &str = "kube-probe/1.33";
pub(crate) const HOOK_AGENT: &str = "kube-lifecycle/1.33";

/// A request that a probe or a hook makes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HttpGet {
    url: Url,
    headers: Vec<(String, String)>,
    agent: &'static str,
}

/// The answer to it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HttpAnswer {
    Status(StatusCode),
    /// A redirect to another host, which is not followed (a success, as upstream).
    RedirectAway(String),
}

/// The number of a port that may be given by a container port's name.
///
/// # Errors
/// A message: no port of the container has that name.
pub(crate) fn port_number(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let named = container.ports.iter().flatten().find(|port| port.name.as_ref() == Some(name));
            named.map(|port| port.container_port).or_else(|| name.parse().ok())
        }
    };
    let valid = number.and_then(|number| u16::try_from(number).ok()).filter(|number| *number > 0);
    valid.ok_or_else(|| match port {
        IntOrString::Int(number) => format!("invalid port number: {number}"),
        IntOrString::String(name) => format!("couldn't find port: {name:?}"),
    })
}

impl HttpGet {
    /// # Errors
    /// A message: the port or path is invalid.
    pub(crate) fn of(
        action: &HTTPGetAction,
        container: &Container,
        address: Option<IpAddr>,
        agent: &'static str,
    ) -> Result<Self, String> {
        let port = port_number(&action.port, container)?;
        let host = match action.host.as_deref().filter(|host| !host.is_empty()) {
            Some(host) => host.to_owned(),
            None => address.ok_or("the pod has no address")?.to_string(),
        };
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let scheme = action.scheme.as_deref().unwrap_or("HTTP").to_lowercase();
        let path = action.path.as_deref().unwrap_or("/");
        let slash = if path.starts_with('/') { "" } else { "/" };
        let text = format!("{scheme}://{host}:{port}{slash}{path}");
        let url = Url::parse(&text).map_err(|error| format!("{text:?} is not a URL: {error}"))?;
        let headers = action.http_headers.iter().flatten();
        let headers = headers.map(|header| (header.name.clone(), header.value.clone())).collect();
        Ok(Self { url, headers, agent })
    }

    /// Sends the request, and follows redirects within the host.
    ///
    /// # Errors
    /// Go's message, as upstream shows it.
    pub(crate) async fn send(&self) -> Result<HttpAnswer, String> {
        let mut url = self.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let failed = |error: String| format!("Get \"{url}\": {error}");
            let (status, location) = self.once(&url).await.map_err(failed)?;
            let target = location.filter(|_| status.is_redirection()).and_then(|text| url.join(&text).ok());
            match target {
                None => return Ok(HttpAnswer::Status(status)),
                Some(target) if target.host() != self.url.host() => {
                    return Ok(HttpAnswer::RedirectAway(target.to_string()));
                }
                Some(target) => url = target,
            }
        }
        Err(format!("Get \"{url}\": stopped after {REDIRECTS_MAX} redirects"))
    }

    /// The message of a timeout.
    pub(crate) fn timed_out(&self) -> String {
        let url = &self.url;
        format!("Get \"{url}\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)")
    }

    async fn once(&self, url: &Url) -> Result<(StatusCode, Option<String>), String> {
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let port = url.port_or_known_default().unwrap_or(80);
        let stream = connect(&host, port).await?;
        if url.scheme() == "https" {
            let name = ServerName::try_from(host).map_err(|error| error.to_string())?;
            let stream = unverified_tls::connector()
                .connect(name, stream)
                .await
                .map_err(|error| format!("tls: {error}"))?;
            return self.exchange(url, stream).await;
        }
        self.exchange(url, stream).await
    }

    async fn exchange<S>(&self, url: &Url, stream: S) -> Result<(StatusCode, Option<String>), String>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let words = |error: hyper::Error| error.to_string();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(words)?;
        let answer = async {
            let answer = sender.send_request(self.request(url)?).await.map_err(words)?;
            let status = answer.status();
            let location = answer.headers().get("location").and_then(|value| value.to_str().ok());
            let location = location.map(str::to_owned);
            // A response that is too long or truncated still counts.
            let _ = Limited::new(answer.into_body(), BODY_BYTES_MAX).collect().await;
            Ok((status, location))
        };
        tokio::pin!(answer);
        tokio::select! {
            biased;
            answer = &mut answer => return answer,
            ended = connection => if let Err(error) = ended { return Err(words(error)) },
        }
        answer.await
    }

    fn request(&self, url: &Url) -> Result<Request<Empty<Bytes>>, String> {
        let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let mut request = Request::get(path);
        let said = |name: &str| self.headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
        let authority = &url[url::Position::BeforeHost..url::Position::AfterPort];
        for (name, value) in [("host", authority), ("user-agent", self.agent), ("accept", "*/*")] {
            if !said(name) {
                request = request.header(name, value);
            }
        }
        // An empty value removes a default header.
        for (name, value) in self.headers.iter().filter(|(_, value)| !value.is_empty()) {
            request = request.header(name, value);
        }
        request.header("connection", "close").body(Empty::new()).map_err(|error| error.to_string())
    }
}

/// Connects; errors have Go's messages.
pub(crate) async fn connect(host: &str, port: u16) -> Result<TcpStream, String> {
    let address = match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    };
    TcpStream::connect((host, port)).await.map_err(|error| {
        let why = match error.kind() {
            std::io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
            _ => error.to_string(),
        };
        format!("dial tcp {address}: {why}")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn get(action: Value) -> Result<HttpGet, String> {
        let container = json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}]});
        let container: Container = serde_json::from_value(container).unwrap();
        let action: HTTPGetAction = serde_json::from_value(action).unwrap();
        HttpGet::of(&action, &container, Some("10.0.0.2".parse().unwrap()), PROBE_AGENT)
    }

    #[test]
    fn the_url_is_made_of_the_action_and_the_pods_address() {
        for (action, url) in [
            (json!({"port": 80}), "http://10.0.0.2/"),
            (json!({"port": "web", "path": "healthz?full=1"}), "http://10.0.0.2:8080/healthz?full=1"),
            (json!({"port": "81", "scheme": "HTTPS", "path": "/a"}), "https://10.0.0.2:81/a"),
            (json!({"port": 81, "host": "::1"}), "http://[::1]:81/"),
        ] {
            assert_eq!(get(action).unwrap().url.as_str(), url);
        }
        assert_eq!(get(json!({"port": "none"})).unwrap_err(), "couldn't find port: \"none\"");
        assert_eq!(get(json!({"port": 0})).unwrap_err(), "invalid port number: 0");
    }

    #[test]
    fn headers_of_the_action_replace_those_that_are_sent_otherwise() {
        let headers = json!([{"name": "Host", "value": "example.org"}, {"name": "Accept", "value": ""}]);
        let get = get(json!({"port": 8080, "httpHeaders": headers})).unwrap();
        let request = get.request(&get.url).unwrap();
        assert_eq!(request.headers()["host"], "example.org");
        assert_eq!(request.headers()["user-agent"], PROBE_AGENT);
        assert!(!request.headers().contains_key("accept"));
    }
}
