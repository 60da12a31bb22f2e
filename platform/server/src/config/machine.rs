//! The settings of machines that form a cluster: the server that others join (`mayfly server`), and a machine that
//! joins it (`mayfly node`).

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use clap::Args;
use mayfly_cli::failure::{ErrorCode, Failure};
use mayfly_runtime_oci::availability::ContainersMode;

use super::{
    ConfigFile, UpArgs, UpConfig,
    node::{NodeConfig, NodeOptions},
    values::address,
};

/// Other machines connect to the API.
const API_LISTEN: &str = "0.0.0.0:6443";
/// The port of a Kubernetes node's agent.
const AGENT_LISTEN: &str = "0.0.0.0:10250";
/// An address for documentation (RFC 5737): the route to it is the default route. Nothing is sent to it.
const ELSEWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

/// Flags of a machine of a cluster.
#[derive(Args, Clone, Debug, Default)]
struct MachineOptions {
    /// The address at which the other machines reach this one [default: that of the route to the server, on the server
    /// that of the default route]
    #[arg(long, env = "MAYFLY_NODE_IP", value_name = "IP")]
    node_ip: Option<IpAddr>,
    /// The address for connections of the cluster's other machines (mutual TLS) [default: 0.0.0.0:10250]
    #[arg(long, env = "MAYFLY_AGENT_LISTEN", value_name = "ADDR:PORT")]
    agent_listen: Option<String>,
}

/// How the cluster's other machines reach this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MachineConfig {
    pub(crate) node_ip: IpAddr,
    pub(crate) agent_listen: SocketAddr,
}

/// Flags of `mayfly server`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ServerArgs {
    #[command(flatten)]
    machine: MachineOptions,
    #[command(flatten)]
    up: UpArgs,
}

/// Flags of `mayfly node`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct JoinArgs {
    /// The API of the server, such as https://10.0.0.1:6443
    #[arg(long, env = "MAYFLY_SERVER", value_name = "URL")]
    server: Option<String>,
    /// The token that `mayfly server` prints; needed until the machine has joined. Better in the environment or the
    /// config file, since process lists show flags
    #[arg(long, env = "MAYFLY_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    token: Option<String>,
    #[command(flatten)]
    machine: MachineOptions,
    #[command(flatten)]
    node: NodeOptions,
}

/// The parsed settings of `mayfly node`.
#[derive(Clone, Debug)]
pub(crate) struct JoinSettings {
    /// The value of the config file; a flag and the environment have precedence.
    pub(crate) data_dir: Option<PathBuf>,
    /// The URL of the API, without a path.
    pub(crate) server: String,
    /// `None`: the machine has joined before.
    pub(crate) token: Option<String>,
    pub(crate) machine: MachineConfig,
    pub(crate) node: NodeConfig,
}

impl ServerArgs {
    /// Resolves flags, environment and config file.
    pub(crate) fn resolve(self) -> anyhow::Result<UpConfig> {
        let mut file = self.up.read_file()?;
        let machine = self.machine.resolve(&mut file, || source_address(ELSEWHERE))?;
        Ok(UpConfig { machine: Some(machine), ..self.up.resolve_with(file, API_LISTEN)? })
    }
}

impl JoinArgs {
    /// Resolves flags, environment and config file.
    pub(crate) fn resolve(self) -> anyhow::Result<JoinSettings> {
        let mut file = ConfigFile::read_if(self.node.config.as_deref())?;
        let server = self.server.or(file.server.take());
        let server = server.ok_or_else(|| {
            let todo = "give the API of the server: mayfly node --server https://10.0.0.1:6443";
            Failure::new(ErrorCode::Usage, "--server is missing", todo)
        })?;
        let server = server.trim_end_matches('/').to_owned();
        let authority = server_authority(&server)?;
        let machine = self.machine.resolve(&mut file, || {
            use std::net::ToSocketAddrs as _;
            let mut addresses = authority.to_socket_addrs().with_context(|| format!("--server {server}"))?;
            let address =
                addresses.next().with_context(|| format!("--server {server}: it has no address"))?;
            source_address(address)
        })?;
        Ok(JoinSettings {
            data_dir: file.data_dir.take(),
            token: self.token.or(file.token.take()).filter(|token| !token.is_empty()),
            machine,
            node: self.node.resolve(&mut file, ContainersMode::default())?,
            server,
        })
    }
}

impl MachineOptions {
    fn resolve(
        self,
        file: &mut ConfigFile,
        node_ip: impl FnOnce() -> anyhow::Result<IpAddr>,
    ) -> anyhow::Result<MachineConfig> {
        let node_ip = match self.node_ip.or(file.node_ip) {
            Some(address) if address.is_unspecified() || address.is_multicast() => {
                bail!("--node-ip {address}: other machines cannot connect to this address")
            }
            Some(address) => address,
            None => node_ip()?,
        };
        let listen = address(self.agent_listen, file.agent_listen.take(), AGENT_LISTEN, "agent-listen")?;
        Ok(MachineConfig { node_ip, agent_listen: listen })
    }
}

/// The host and port of the server's URL.
fn server_authority(server: &str) -> anyhow::Result<String> {
    let wrong = || format!("--server {server}: expected a URL such as https://10.0.0.1:6443");
    let uri: http::Uri = server.parse().with_context(wrong)?;
    anyhow::ensure!(uri.scheme_str() == Some("https") && uri.path() == "/" && uri.query().is_none(), wrong());
    let host = uri.host().with_context(wrong)?;
    Ok(format!("{host}:{}", uri.port_u16().unwrap_or(443)))
}

/// This machine's address in connections to another one. Nothing is sent.
fn source_address(to: SocketAddr) -> anyhow::Result<IpAddr> {
    let from = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let route = UdpSocket::bind(from).and_then(|socket| {
        socket.connect(to)?;
        socket.local_addr()
    });
    let route =
        route.context("this machine's address is not known: it has no route; name one with --node-ip")?;
    Ok(route.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_needs_a_server() {
        let joined = |server: Option<&str>| {
            let args = JoinArgs { server: server.map(str::to_owned), ..Default::default() };
            args.resolve().map_err(|error| format!("{error:#}"))
        };
        assert!(joined(None).unwrap_err().contains("--server is missing"));
        for wrong in ["10.0.0.1:6443", "http://10.0.0.1:6443", "https://10.0.0.1:6443/path", "https://"] {
            assert!(joined(Some(wrong)).unwrap_err().contains("expected a URL"), "{wrong}");
        }
        let config = joined(Some("https://127.0.0.1:6443/")).unwrap();
        assert_eq!(config.server, "https://127.0.0.1:6443");
        assert_eq!(config.machine.node_ip, IpAddr::V4(Ipv4Addr::LOCALHOST), "the route to the server");
        assert_eq!(config.machine.agent_listen.port(), 10250);
    }

    #[test]
    fn a_server_listens_for_other_machines() {
        let node_ip: IpAddr = "10.1.2.3".parse().unwrap();
        let machine = MachineOptions { node_ip: Some(node_ip), agent_listen: Some("localhost:0".into()) };
        let config = ServerArgs { machine, ..Default::default() }.resolve().unwrap();
        assert_eq!(config.api_listen.to_string(), API_LISTEN);
        let expected = MachineConfig { node_ip, agent_listen: "127.0.0.1:0".parse().unwrap() };
        assert_eq!(config.machine, Some(expected));
        assert_eq!(UpArgs::default().resolve().unwrap().machine, None);
        let machine = MachineOptions { node_ip: Some("0.0.0.0".parse().unwrap()), agent_listen: None };
        let error = ServerArgs { machine, ..Default::default() }.resolve().unwrap_err().to_string();
        assert!(error.contains("--node-ip 0.0.0.0"), "{error}");
    }
}
