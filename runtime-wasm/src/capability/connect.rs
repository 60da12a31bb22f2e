//! Connections to checked addresses: resolves a name, checks every address, connects to one that the function's rules
//! and NetworkPolicies allow.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use mayfly_api::egress::{EgressRule, EgressVerdict, is_public, judge};
use mayfly_runtime::{ClusterHost, OutboundRoute};
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use wasmtime_wasi_http::Error;

use super::{
    egress::Connecting,
    lookup::{HostLookups, Lookups},
    policy::PodPolicies,
};
use crate::config::EgressConfig;

/// Endpoints of a Service that are tried for one connection, as by the userspace proxy.
const ENDPOINT_ATTEMPTS: usize = 3;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("not listed")]
    Denied,
    #[error("none of its addresses is allowed")]
    Prohibited,
    #[error("NetworkPolicies do not allow it")]
    Forbidden,
    #[error("too many connections")]
    Limit,
    #[error("no connection in time")]
    TimedOut,
    #[error("the name has no address: {0}")]
    Dns(io::Error),
    #[error("{0}")]
    Io(io::Error),
}

impl ConnectError {
    pub(crate) fn to_guest(&self) -> Error {
        match self {
            Self::Denied | Self::Forbidden => Error::HttpRequestDenied,
            Self::Prohibited => Error::DestinationIpProhibited,
            Self::Limit => Error::ConnectionLimitReached,
            Self::TimedOut => Error::ConnectionTimeout,
            Self::Dns(error) => Error::DnsError { rcode: Some(error.to_string()), info_code: None },
            Self::Io(error) => match error.kind() {
                io::ErrorKind::ConnectionRefused => Error::ConnectionRefused,
                io::ErrorKind::TimedOut => Error::ConnectionTimeout,
                _ => Error::DestinationUnavailable,
            },
        }
    }
}

/// Makes the connections of one program.
#[derive(Clone)]
pub(crate) struct CheckedConnector {
    rules: Arc<[EgressRule]>,
    timeout: Duration,
    connections: Arc<Semaphore>,
    lookups: Lookups,
    policies: PodPolicies,
}

impl CheckedConnector {
    pub(crate) fn new(
        rules: Arc<[EgressRule]>,
        config: &EgressConfig,
        lookups: HostLookups,
        policies: PodPolicies,
    ) -> Self {
        Self {
            rules,
            timeout: config.connect_timeout,
            connections: Arc::new(Semaphore::new(config.connections_max)),
            lookups: Lookups::new(lookups),
            policies,
        }
    }

    async fn connect(self, uri: Uri) -> Result<CountedStream, ConnectError> {
        let (scheme, host) = (uri.scheme_str().unwrap_or_default(), uri.host().unwrap_or_default());
        let verdict = judge(&self.rules, scheme, host, uri.port_u16());
        if verdict == EgressVerdict::Denied {
            return Err(ConnectError::Denied);
        }
        let until = Instant::now() + self.timeout;
        // Limits the requests that connect at the same time to the number of connections, as browsers do; a pooled
        // connection that becomes idle first is used instead.
        let turn = tokio::time::timeout_at(until, self.connections.clone().acquire_owned()).await;
        // The semaphore is never closed.
        let permit = turn.ok().and_then(Result::ok).ok_or(ConnectError::Limit)?;
        let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        let addresses = self.addresses(verdict, &uri, port, until).await?;
        let stream = self.to_any(&addresses, until).await?;
        // A failure costs only latency.
        stream.set_nodelay(true).ok();
        Ok(CountedStream { stream: TokioIo::new(stream), _permit: permit })
    }

    /// The addresses of a destination that may be connected to. The name of a Service resolves to the Service's
    /// addresses, which are private, if a rule lists it exactly; a wildcard gives no access to the cluster.
    async fn addresses(
        &self,
        verdict: EgressVerdict,
        uri: &Uri,
        port: u16,
        until: Instant,
    ) -> Result<Vec<SocketAddr>, ConnectError> {
        let host = uri.host().unwrap_or_default();
        let of_cluster = match is_listed_itself(&self.rules, uri.scheme_str().unwrap_or_default(), host, port)
        {
            true => self.lookups.cluster(host),
            false => ClusterHost::Unknown,
        };
        let alias = match of_cluster {
            ClusterHost::Addresses(addresses) if addresses.is_empty() => {
                return Err(ConnectError::Dns(io::Error::other(
                    "the cluster has no such Service, or it has no address",
                )));
            }
            ClusterHost::Addresses(addresses) => {
                return Ok(addresses.into_iter().map(|address| SocketAddr::new(address, port)).collect());
            }
            ClusterHost::Alias(target) => Some(target),
            ClusterHost::Unknown => None,
        };
        let host = alias.as_deref().unwrap_or(host);
        let resolving = tokio::time::timeout_at(until, self.lookups.resolve(host, port)).await;
        allowed(verdict, resolving.map_err(|_| ConnectError::TimedOut)??)
    }

    /// Connects to the first address that accepts. Each has an equal part of the remaining time, so that a silent one
    /// does not use up the time of the others.
    async fn to_any(&self, addresses: &[SocketAddr], until: Instant) -> Result<TcpStream, ConnectError> {
        let mut last = ConnectError::TimedOut;
        for (tried, address) in addresses.iter().enumerate() {
            let left = until.saturating_duration_since(Instant::now());
            let part = left / u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
            match tokio::time::timeout(part, self.to_one(*address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error,
                Err(_) => last = ConnectError::TimedOut,
            }
        }
        Err(last)
    }

    /// Connects to an address; where policies chose an endpoint for it, to another one when that refuses.
    async fn to_one(&self, address: SocketAddr) -> Result<TcpStream, ConnectError> {
        let (mut tried, mut last) = (Vec::new(), io::Error::from(io::ErrorKind::ConnectionRefused));
        while tried.len() < ENDPOINT_ATTEMPTS && !tried.contains(&address) {
            let to = match self.policies.route(address, &tried).await {
                OutboundRoute::To(to) => to,
                OutboundRoute::NoEndpoint => break,
                OutboundRoute::Forbidden => return Err(ConnectError::Forbidden),
            };
            match TcpStream::connect(to).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
            tried.push(to);
        }
        Err(ConnectError::Io(last))
    }
}

/// Whether a rule lists this destination exactly, not by a wildcard.
fn is_listed_itself(rules: &[EgressRule], scheme: &str, host: &str, port: u16) -> bool {
    let host = host.trim_end_matches('.');
    let exact = format!("{scheme}://{host}:{port}").parse();
    exact.is_ok_and(|exact: EgressRule| rules.contains(&exact))
}

/// Filters the addresses of a destination that may be connected to.
fn allowed(verdict: EgressVerdict, mut addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, ConnectError> {
    match verdict {
        EgressVerdict::Denied => return Err(ConnectError::Denied),
        EgressVerdict::AnyAddress => {}
        EgressVerdict::PublicAddressesOnly => addresses.retain(|address| is_public(address.ip())),
    }
    if addresses.is_empty() {
        return Err(ConnectError::Prohibited);
    }
    Ok(addresses)
}

impl tower::Service<Uri> for CheckedConnector {
    type Response = CountedStream;
    type Error = ConnectError;
    type Future = Connecting<CountedStream>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// A connection that counts against its program's limit while it is open.
pub(crate) struct CountedStream {
    stream: TokioIo<TcpStream>,
    _permit: OwnedSemaphorePermit,
}

impl Connection for CountedStream {
    fn connected(&self) -> Connected {
        self.stream.connected()
    }
}

impl Read for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl Write for CountedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }
}

#[cfg(test)]
mod tests {
    use mayfly_api::ObjectKey;

    use super::{super::policy::HostPolicies, *};

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| SocketAddr::new(text.parse().unwrap(), 80)).collect()
    }

    #[test]
    fn a_name_reaches_its_public_addresses_only() {
        let mixed = addresses(&["10.0.0.1", "1.1.1.1", "169.254.169.254", "::1"]);
        assert_eq!(
            allowed(EgressVerdict::PublicAddressesOnly, mixed.clone()).unwrap(),
            addresses(&["1.1.1.1"]),
            "a name that also resolves inside the network must not lead there"
        );
        assert_eq!(allowed(EgressVerdict::AnyAddress, mixed.clone()).unwrap(), mixed);
        let private = addresses(&["127.0.0.1", "fd00::1"]);
        assert!(matches!(
            allowed(EgressVerdict::PublicAddressesOnly, private),
            Err(ConnectError::Prohibited)
        ));
        assert!(matches!(allowed(EgressVerdict::Denied, mixed), Err(ConnectError::Denied)));
    }

    fn no_policies() -> PodPolicies {
        HostPolicies::default().of_revision(&ObjectKey::new("default", "f-00001"), "f")
    }

    /// Knows one Service and one alias.
    struct OneService;

    impl mayfly_runtime::ClusterHosts for OneService {
        fn lookup(&self, host: &str) -> ClusterHost {
            match host {
                "web.shop" => ClusterHost::Addresses(vec!["127.0.0.1".parse().unwrap()]),
                "empty.shop" => ClusterHost::Addresses(Vec::new()),
                "away.shop" => ClusterHost::Alias("127.0.0.1".into()),
                _ => ClusterHost::Unknown,
            }
        }
    }

    #[tokio::test]
    async fn a_service_is_reached_where_a_rule_names_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let lookups = HostLookups::default();
        lookups.attach(Arc::new(OneService));
        let connect = |rule: String, host: &str| {
            let rules = vec![rule.parse().unwrap()];
            let config = EgressConfig::default();
            let connector = CheckedConnector::new(rules.into(), &config, lookups.clone(), no_policies());
            connector.connect(format!("http://{host}:{port}/").parse().unwrap())
        };
        connect(format!("http://web.shop:{port}"), "web.shop").await.unwrap();
        // A wildcard matches hosts of the internet only, not those of the cluster.
        for (rule, is_listed) in
            [("http://*.shop", false), ("http://web.shop", true), ("https://web.shop", false)]
        {
            let rules = [rule.parse().unwrap()];
            assert_eq!(is_listed_itself(&rules, "http", "Web.shop.", 80), is_listed, "{rule}");
        }
        let unlisted = connect(format!("http://other.shop:{port}"), "web.shop").await;
        assert!(matches!(unlisted, Err(ConnectError::Denied)));
        let empty = connect(format!("http://empty.shop:{port}"), "empty.shop").await;
        assert!(matches!(empty, Err(ConnectError::Dns(_))));
        // An alias resolves outside the cluster, to public addresses only.
        let alias = connect(format!("http://away.shop:{port}"), "away.shop").await;
        assert!(matches!(alias, Err(ConnectError::Prohibited)));
    }

    #[tokio::test]
    async fn connections_are_limited_and_waited_for() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri: Uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let rules = vec![uri.to_string().parse().unwrap()];
        let connect_timeout = Duration::from_millis(100);
        let config = EgressConfig { connections_max: 1, connect_timeout, ..EgressConfig::default() };
        let connector = CheckedConnector::new(rules.into(), &config, HostLookups::default(), no_policies());
        let first = connector.clone().connect(uri.clone()).await.unwrap();
        assert!(matches!(connector.clone().connect(uri.clone()).await, Err(ConnectError::Limit)));
        let mut waits = std::pin::pin!(connector.clone().connect(uri));
        assert!(futures::poll!(&mut waits).is_pending());
        drop(first);
        waits.await.unwrap();
        let other = "http://127.0.0.1:1".parse().unwrap();
        assert!(matches!(connector.connect(other).await, Err(ConnectError::Denied)));
    }
}
