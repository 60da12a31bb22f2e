//! A cluster of machines: the server's token for joining, the facts that it publishes, and requests between gateways.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use http_body_util::BodyExt as _;
use kube::{Api, Client, api::PostParams};
use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Node, Secret},
    wellknown::NAMESPACE_SYSTEM,
};
use mayfly_apiserver::{BootstrapToken, Identity};
use mayfly_cli::data_dir::DataDir;
use mayfly_gateway::{GatewayRole, LeaderCaller, NodeCallError};
use mayfly_informer::{Informer, Informers};
use mayfly_join::JoinToken;
use mayfly_network::ClusterFacts;
use mayfly_node_link::{
    AllowedClients, LinkAuthorities, LinkCertificate, LinkConfig, LinkServer, NodeLink, RemoteConnector,
    RemoteNodes, agent_address,
};
use mayfly_runtime::Body;
use tokio::{net::TcpListener, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    agent_port,
    data_files::write_private,
    listeners::{Ports, listen},
};
use crate::config::MachineConfig;

/// The pause between attempts to read the cluster's facts.
const FACTS_AGAIN: Duration = Duration::from_secs(1);
/// The group of nodes.
const NODES: &str = "system:nodes";
/// The label of the server's node, as upstream.
pub(super) const LABEL_CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";

/// The address of a machine's agent in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemberAddress {
    pub(super) ip: IpAddr,
    /// The actual port.
    pub(super) agent_port: u16,
}

impl MemberAddress {
    pub(super) fn new(config: &MachineConfig, agent: &TcpListener) -> anyhow::Result<Self> {
        Ok(Self { ip: config.node_ip, agent_port: agent.local_addr()?.port() })
    }
}

/// The server's connections with the cluster's other machines.
pub(super) struct Cluster {
    pub(super) member: MemberAddress,
    listener: TcpListener,
    server: LinkServer,
    link: NodeLink,
    nodes: Informer<Node>,
}

impl Cluster {
    /// Binds the port for the other machines; nothing is served before [`Self::serve`].
    pub(super) async fn create(
        config: &MachineConfig,
        identity: &Identity,
        ports: &Ports,
        informers: &Informers,
    ) -> anyhow::Result<Self> {
        let listener = listen(config.agent_listen, "agent-listen").await?;
        let member = MemberAddress::new(config, &listener)?;
        let client = identity.node_client(jiff::Timestamp::now()).context("cannot make a certificate")?;
        let calling = LinkCertificate::from_pem(&client.certificate_pem, &client.key_pem)?;
        let serving = identity.serving_certificate();
        let serving = LinkCertificate::from_pem(&serving.certificate_pem, &serving.key_pem)?;
        let authorities = LinkAuthorities::from_pem(&client.serving_authority_pem)?;
        let allowed = AllowedClients { names: Vec::new(), groups: vec![NODES.to_owned()] };
        let server =
            LinkServer::new(&serving, &authorities, allowed, LinkServer::limits_default(), &ports.metrics)?;
        let link = NodeLink::new(LinkConfig::default(), &calling, &authorities)?;
        Ok(Self { member, listener, server, link, nodes: informers.of() })
    }

    /// The part of the server's gateway, whose node has the name `node`.
    pub(super) fn gateway_role(&self, node: &str) -> GatewayRole {
        let (link, nodes) = (self.link.clone(), self.nodes.clone());
        GatewayRole::Leader {
            node: node.to_owned(),
            nodes: Arc::new(move |name, request| {
                let (link, node) = (link.clone(), nodes.get(&ObjectKey::cluster(name)));
                let unknown = format!("there is no node {name}");
                Box::pin(async move {
                    let node = node.ok_or_else(|| NodeCallError::Unreachable(unknown.into()))?;
                    call(&link, &node, request).await
                })
            }),
        }
    }

    /// Sends the API server's requests to the agents of the other machines.
    pub(super) fn connector(&self) -> RemoteConnector {
        RemoteNodes { link: self.link.clone(), nodes: self.nodes.clone() }.connector()
    }

    /// Serves the other machines until `stop`.
    pub(super) async fn serve(self, router: axum::Router, stop: CancellationToken) {
        self.server.serve(self.listener, router, stop).await;
    }
}

/// The facts of the cluster's network, however long the server cannot be reached or has not published them.
pub(super) async fn facts(client: &Client) -> ClusterFacts {
    let mut waits = false;
    loop {
        match ClusterFacts::fetch(client.clone()).await {
            Ok(facts) => return facts,
            Err(error) if !std::mem::replace(&mut waits, true) => {
                tracing::warn!(%error, "the cluster's network is not known yet");
            }
            Err(_) => {}
        }
        sleep(FACTS_AGAIN).await;
    }
}

/// What machines need to join this server.
pub(super) struct Invitation {
    pub(super) client: Client,
    pub(super) facts: ClusterFacts,
    /// The address of the API for other machines.
    pub(super) server: SocketAddr,
}

impl Invitation {
    /// Publishes the facts of the network, and makes a token unless there is one; returns the command that starts a
    /// machine that joins.
    pub(super) async fn publish(&self, data_dir: &DataDir, identity: &Identity) -> anyhow::Result<String> {
        self.facts.publish(self.client.clone()).await.context("cannot publish the cluster's network")?;
        let file = data_dir.join_token();
        self.token(&file, identity).await?;
        let server = self.server;
        Ok(format!("mayfly node --server https://{server} --token $(cat {})", file.display()))
    }

    /// The token with which machines join: that of the file, otherwise a new one, whose Secret is created. A token is
    /// revoked by deleting its Secret; deleting the file, too, makes the next start create another.
    async fn token(&self, file: &Path, identity: &Identity) -> anyhow::Result<JoinToken> {
        let damaged =
            || format!("{} has no token; delete it, and the next start makes another", file.display());
        if let Ok(text) = std::fs::read_to_string(file) {
            return text.trim().parse().with_context(damaged);
        }
        let token = BootstrapToken::generate();
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), NAMESPACE_SYSTEM);
        let secret = token.to_secret("made by mayfly server, for machines that join", None);
        let created = secrets.create(&PostParams::default(), &secret).await;
        created.context("cannot create the token for joining")?;
        let text = format!("{token}.{}", identity.ca_hash());
        write_private(file, &format!("{text}\n"))
            .with_context(|| format!("cannot write {}", file.display()))?;
        text.parse().with_context(damaged)
    }
}

/// Sends requests to the gateway of the server: of the node with the label of the control plane.
pub(super) fn leader_caller(link: NodeLink, nodes: Informer<Node>) -> LeaderCaller {
    Arc::new(move |request| {
        let (link, nodes) = (link.clone(), nodes.clone());
        Box::pin(async move {
            let all = nodes.list();
            let server = all.iter().find(|node| {
                let labels = node.metadata.labels.as_ref();
                labels.is_some_and(|labels| labels.contains_key(LABEL_CONTROL_PLANE))
            });
            let server =
                server.ok_or_else(|| NodeCallError::Unreachable("no node is the server's".into()))?;
            call(&link, server, request).await
        })
    })
}

async fn call(
    link: &NodeLink,
    node: &Node,
    mut request: http::Request<Body>,
) -> Result<http::Response<Body>, NodeCallError> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let address = agent_address(node);
    let address = address.ok_or_else(|| {
        NodeCallError::Unreachable(format!("node {name} has not reported its address").into())
    })?;
    *request.uri_mut() = agent_port::gateway_uri(request.uri());
    let response = link.call(name, address, request.map(axum::body::Body::new)).await;
    let response = response.map_err(|error| match error.is_unprocessed() {
        true => NodeCallError::Unreachable(error.into()),
        false => NodeCallError::Lost(error.into()),
    })?;
    Ok(response.map(|body| body.map_err(Into::into).boxed_unsync()))
}
