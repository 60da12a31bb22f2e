//! The ports of a server: bound before anything runs, so that a port in use is reported at once.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use mayfly_accept::{AcceptPort, ConnectionMetrics};
use mayfly_cli::data_dir::Endpoints;
use mayfly_gateway::{Gateway, GatewayCreateError};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use super::{open_files::Connections, runtimes::Handles};
use crate::config::UpConfig;

/// The ports other than the gateway's.
pub(super) struct Listeners {
    pub(super) api: TcpListener,
    pub(super) workflows: TcpListener,
    pub(super) admin: TcpListener,
}

impl Listeners {
    pub(super) async fn bind(config: &UpConfig, handles: &Handles) -> anyhow::Result<Self> {
        let (api, workflows) = (config.api_listen, config.workflows_listen);
        // A listener belongs to the Tokio runtime that created it.
        let served = async move {
            anyhow::Ok((listen(api, "api-listen").await?, listen(workflows, "workflows-listen").await?))
        };
        let (api, workflows) = handles.serving.spawn(served).await??;
        Ok(Self { api, workflows, admin: listen(config.node.admin_listen, "admin-listen").await? })
    }

    /// The addresses of all listeners, with the actual ports.
    pub(super) fn endpoints(&self, gateway: &Gateway) -> anyhow::Result<Endpoints> {
        Ok(Endpoints {
            api: format!("https://{}", local_address(self.api.local_addr()?)),
            http: format!("http://{}", gateway.address()),
            https: gateway.https_address().map(|address| format!("https://{address}")),
            workflows: Some(format!("http://{}", self.workflows.local_addr()?)),
            admin: Some(format!("http://{}", self.admin.local_addr()?)),
        })
    }
}

/// The connection limits of the ports other than the gateway's.
pub(super) struct Ports {
    pub(super) api: mayfly_accept::Config,
    workflows_max: usize,
    admin_max: usize,
    pub(super) metrics: ConnectionMetrics,
}

impl Ports {
    pub(super) fn create(connections: Connections, metrics: &mut Registry) -> Self {
        Self {
            api: mayfly_accept::Config::with_connections(connections.api),
            workflows_max: connections.workflows,
            admin_max: connections.admin,
            metrics: ConnectionMetrics::register(metrics),
        }
    }

    pub(super) fn workflows(&self) -> AcceptPort {
        let limits = mayfly_accept::Config::with_connections(self.workflows_max);
        let limits = mayfly_accept::Config { drain_timeout: super::workflows::DRAIN, ..limits };
        AcceptPort::new("workflows", limits, &self.metrics)
    }

    /// The ports for load balancers' health checks of Services.
    pub(super) fn health_checks(&self) -> AcceptPort {
        let limits = mayfly_accept::Config::with_connections(HEALTH_CHECKS_MAX);
        let limits = mayfly_accept::Config { drain_timeout: HEALTH_CHECK_DRAIN, ..limits };
        AcceptPort::new("health-checks", limits, &self.metrics)
    }

    pub(super) fn admin(&self) -> AcceptPort {
        let limits = mayfly_accept::Config::with_connections(self.admin_max);
        let limits = mayfly_accept::Config { drain_timeout: super::workflows::DRAIN, ..limits };
        AcceptPort::new("admin", limits, &self.metrics)
    }
}

/// The number of connections of load balancers' health checks, over all ports.
const HEALTH_CHECKS_MAX: usize = 64;
/// The time for responses in flight when a port closes.
const HEALTH_CHECK_DRAIN: Duration = Duration::from_secs(1);

/// The address for clients on this machine of a listener that may listen on all addresses.
pub(super) fn local_address(mut listener: SocketAddr) -> SocketAddr {
    match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => listener.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => listener.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    listener
}

/// Binds a port; the error names the flag to change.
pub(super) async fn listen(address: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| refused(address, flag, &error))
}

/// The reason why the gateway could not be created, in the same form.
pub(super) fn gateway_refused(error: &GatewayCreateError) -> anyhow::Error {
    match error {
        GatewayCreateError::Listen { address, source } => refused(*address, "http-listen", source),
        GatewayCreateError::ListenTls { address, source } => refused(*address, "https-listen", source),
        GatewayCreateError::Tls(_) => anyhow::anyhow!("{error}"),
    }
}

fn refused(address: SocketAddr, flag: &str, error: &io::Error) -> anyhow::Error {
    let todo = match error.kind() {
        io::ErrorKind::AddrInUse => "stop what uses it, or choose another one (port 0: any)",
        io::ErrorKind::PermissionDenied => "ports below 1024 need root: choose another one",
        _ => "choose another one",
    };
    anyhow::anyhow!("cannot listen on {address}: {error}; {todo} with --{flag}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_that_is_taken_is_told_with_the_way_out() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        let error = listen(address, "api-listen").await.unwrap_err().to_string();
        assert!(error.contains(&address.to_string()) && error.contains("stop what uses it"), "{error}");
        assert!(error.ends_with("with --api-listen"), "{error}");
        let denied = GatewayCreateError::Listen { address, source: io::ErrorKind::PermissionDenied.into() };
        let error = gateway_refused(&denied).to_string();
        assert!(error.contains("need root") && error.ends_with("with --http-listen"), "{error}");
    }
}
