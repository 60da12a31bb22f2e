//! Health checks of load balancers: an HTTP port of the node for each Service of the type LoadBalancer whose
//! `externalTrafficPolicy` is Local. A balancer uses the nodes that answer 200, which are those with a local ready
//! endpoint. Answers are those of upstream (`pkg/proxy/healthcheck/service_health.go`).

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use hyper::service::service_fn;
use mayfly_accept::AcceptPort;
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::watch,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{plan::HealthCheck, userspace::FrontendError};

/// The length of the kernel's accept queue.
const BACKLOG: u32 = 128;
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// The current answer of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HealthAnswer {
    check: HealthCheck,
    /// Whether the node's proxy applies its rules successfully.
    is_proxy_healthy: bool,
}

impl HealthAnswer {
    fn response(&self) -> Response<Full<Bytes>> {
        let HealthCheck { namespace, service, local_endpoints } = &self.check;
        let is_healthy = self.is_proxy_healthy;
        let body = format!(
            "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{namespace}\",\n\t\t\"name\": \"{service}\"\n\t}},\n\
             \t\"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": {is_healthy}\n}}"
        );
        let mut response = Response::new(Full::new(Bytes::from(body)));
        if *local_endpoints == 0 || !is_healthy {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(WEIGHT, HeaderValue::from(*local_endpoints));
        response
    }
}

/// A port that is served until this is dropped.
struct ServedCheck {
    answer: watch::Sender<HealthAnswer>,
    _stop: DropGuard,
}

/// Serves the health checks of a rule set.
pub(crate) struct HealthCheckServer {
    /// The node's address; the unspecified address stands for all of them.
    address: IpAddr,
    port: AcceptPort,
    served: BTreeMap<u16, ServedCheck>,
}

impl HealthCheckServer {
    pub(crate) fn new(address: IpAddr, port: AcceptPort) -> Self {
        Self { address, port, served: BTreeMap::new() }
    }

    /// Serves exactly `checks`. Returns ports that cannot be served; the next call retries them.
    pub(crate) fn apply(
        &mut self,
        checks: &BTreeMap<u16, HealthCheck>,
        is_proxy_healthy: bool,
    ) -> Vec<FrontendError> {
        self.served.retain(|number, _| checks.contains_key(number));
        let mut failed = Vec::new();
        for (number, check) in checks {
            let answer = HealthAnswer { check: check.clone(), is_proxy_healthy };
            if let Some(served) = self.served.get(number) {
                served.answer.send_replace(answer);
                continue;
            }
            match self.serve(*number, answer) {
                Ok(served) => drop(self.served.insert(*number, served)),
                Err(source) => failed.push(FrontendError {
                    service: format!("the health check of {}/{}", check.namespace, check.service),
                    address: SocketAddr::new(self.address, *number),
                    source,
                }),
            }
        }
        failed
    }

    fn serve(&self, number: u16, answer: HealthAnswer) -> io::Result<ServedCheck> {
        let listener = listen(self.address, number)?;
        let (sender, answer) = watch::channel(answer);
        let stop = CancellationToken::new();
        let (port, until) = (self.port.clone(), stop.clone());
        tokio::spawn(async move {
            let service = service_fn(move |_| {
                let response = answer.borrow().response();
                async move { Ok::<_, Infallible>(response) }
            });
            port.serve(listener, None, service, until).await;
        });
        Ok(ServedCheck { answer: sender, _stop: stop.drop_guard() })
    }
}

/// Listens on an address of the node; for the unspecified address on both families, if the kernel supports both.
fn listen(address: IpAddr, port: u16) -> io::Result<TcpListener> {
    let bound = |address: IpAddr| {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(SocketAddr::new(address, port))?;
        socket.listen(BACKLOG)
    };
    match address.is_unspecified() {
        true => match bound(Ipv6Addr::UNSPECIFIED.into()) {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => bound(address),
            listening => listening,
        },
        false => bound(address),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn answers_are_those_of_upstream() {
        for (local_endpoints, is_proxy_healthy, status) in [(2, true, 200), (0, true, 503), (2, false, 503)] {
            let check = HealthCheck { namespace: "shop".into(), service: "web".into(), local_endpoints };
            let response = HealthAnswer { check, is_proxy_healthy }.response();
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()["content-type"], "application/json");
            assert_eq!(response.headers()[WEIGHT], local_endpoints.to_string());
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body = std::str::from_utf8(&body).unwrap();
            let expected = format!(
                "{{\n\t\"service\": {{\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t}},\n\t\
                 \"localEndpoints\": {local_endpoints},\n\t\"serviceProxyHealthy\": {is_proxy_healthy}\n}}"
            );
            assert_eq!(body, expected);
            serde_json::from_str::<serde_json::Value>(body).unwrap();
        }
    }
}
