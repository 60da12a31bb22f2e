//! `mayfly network show service`: the addresses of a Service, its endpoints, and what happens to connections.

use std::net::SocketAddr;

use clap::{Args, Subcommand, ValueEnum};
use mayfly_api::k8s::api::{core::v1::Service, discovery::v1::EndpointSlice};
use mayfly_network::{
    Backend, Frontend, ProxyNode, RuleSet,
    plan::{self, SERVICE_NAME_LABEL},
};
use serde::Serialize;

use super::{
    output,
    server::{segment, with_query},
    session::Session,
    table,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly network show service web")]
pub(crate) struct NetworkArgs {
    #[command(subcommand)]
    command: NetworkCommand,
}

// A doc comment here would become the command's help.
#[derive(Subcommand, Debug)]
enum NetworkCommand {
    /// Show where connections to a Service go
    #[command(after_help = "Example:
  mayfly network show service web -n shop")]
    Show(ShowArgs),
}

#[derive(Args, Debug)]
struct ShowArgs {
    /// The kind of object
    #[arg(value_enum)]
    kind: ShownKind,
    /// Its name
    name: String,
    /// The node whose view is shown: Local traffic policies keep to its own endpoints
    #[arg(long, value_name = "NAME", default_value = "")]
    node: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ShownKind {
    #[value(alias = "services", alias = "svc")]
    Service,
}

/// One address of a Service.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ServiceRule {
    address: String,
    port: String,
    endpoints: Vec<String>,
    rule: String,
}

pub(crate) async fn run(args: NetworkArgs, session: &Session) -> anyhow::Result<()> {
    let NetworkCommand::Show(ShowArgs { kind: ShownKind::Service, name, node }) = args.command;
    let (server, namespace) = (session.server().await?, session.namespace().await?);
    let namespace = segment(&namespace);
    let path = format!("/api/v1/namespaces/{namespace}/services/{}", segment(&name));
    let service: Service = serde_json::from_value(server.get(&path).await?)?;
    let selector = format!("{SERVICE_NAME_LABEL}={name}");
    let path = format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices");
    let list = server.get(&with_query(&path, &[("labelSelector", Some(&*selector))])).await?;
    let slices = list["items"].as_array().into_iter().flatten();
    let slices = slices.map(|slice| serde_json::from_value(slice.clone()));
    let slices: Vec<EndpointSlice> = slices.collect::<Result<_, _>>()?;
    let path = format!("/api/v1/nodes/{}", segment(&node));
    // Only the node's zone is needed, and only if the endpoints have hints.
    let of_node = server.get(&path).await.ok().and_then(|of| serde_json::from_value(of).ok());
    let node = ProxyNode::of(&node, of_node.as_ref());
    let rules = service_rules(&plan::plan([&service], &slices, &node));
    output::result(session.format(), &rules, || match rules.is_empty() {
        true => without_rules(&service),
        false => rule_table(&rules),
    })
}

fn service_rules(rules: &RuleSet) -> Vec<ServiceRule> {
    let rule = |(frontend, backend): (&Frontend, &Backend)| ServiceRule {
        address: match frontend {
            Frontend::Address(protocol, at) => format!("{at}/{}", protocol.name()),
            Frontend::NodePort(protocol, port) => format!("each node:{port}/{}", protocol.name()),
        },
        port: backend.service.port.clone(),
        endpoints: backend.endpoints.iter().map(ToString::to_string).collect(),
        rule: in_words(backend),
    };
    rules.frontends.iter().map(rule).collect()
}

fn in_words(backend: &Backend) -> String {
    let mut words = vec![match backend.endpoints.len() {
        0 if backend.drops => "dropped: there is no ready endpoint on this node".to_owned(),
        0 => "refused: there is no ready endpoint".to_owned(),
        1 => "to the only endpoint".to_owned(),
        endpoints => format!("to one of {endpoints} endpoints at random"),
    }];
    if let (Some(timeout), 2..) = (backend.affinity, backend.endpoints.len()) {
        words.push(format!(
            "a client stays with its endpoint for {}s after its last connection",
            timeout.as_secs()
        ));
    }
    if backend.masquerade {
        words.push("the endpoint sees the node's address, not the client's".to_owned());
    }
    if let Some(inside) = backend.inside_endpoints.as_ref().filter(|inside| **inside != backend.endpoints) {
        words.push(format!("clients in the cluster: to one of {}", addresses(inside)));
    }
    if !backend.source_ranges.is_empty() {
        words.push(format!("only for clients in {}", backend.source_ranges.join(", ")));
    }
    words.join("; ")
}

fn addresses(endpoints: &[SocketAddr]) -> String {
    endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn rule_table(rules: &[ServiceRule]) -> String {
    let row = |rule: &ServiceRule| {
        let endpoints =
            if rule.endpoints.is_empty() { "<none>".to_owned() } else { rule.endpoints.join(",") };
        let port = if rule.port.is_empty() { "<unnamed>" } else { &rule.port };
        vec![rule.address.clone(), port.to_owned(), endpoints, rule.rule.clone()]
    };
    let rows: Vec<_> = rules.iter().map(row).collect();
    table::render(&["ADDRESS", "PORT", "ENDPOINTS", "CONNECTIONS GO"], &rows)
}

/// The reason why a Service has no address.
fn without_rules(service: &Service) -> String {
    let spec = service.spec.as_ref();
    match spec.and_then(|spec| spec.external_name.as_deref()) {
        Some(name) if !name.is_empty() => format!("an alias of {name}: it has no address of its own\n"),
        _ if spec.and_then(|spec| spec.cluster_ip.as_deref()) == Some("None") => {
            "headless: it has no address; cluster DNS, if enabled, resolves it to the endpoints' addresses\n"
                .to_owned()
        }
        _ => "no address: the Service has no ports, or no cluster IP was allocated\n".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(spec: Value) -> Service {
        serde_json::from_value(json!({"metadata": {"namespace": "shop", "name": "web"}, "spec": spec}))
            .unwrap()
    }

    #[test]
    fn rules_are_told_in_words() {
        let service = service(json!({
            "clusterIP": "10.96.0.7", "sessionAffinity": "ClientIP",
            "ports": [{"name": "http", "port": 80, "nodePort": 30080}, {"name": "admin", "port": 81}],
        }));
        let slice: EndpointSlice = serde_json::from_value(json!({
            "metadata": {"namespace": "shop", "labels": {SERVICE_NAME_LABEL: "web"}}, "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080}],
            "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}],
        }))
        .unwrap();
        let rules = service_rules(&plan::plan([&service], [&slice], &ProxyNode::default()));
        let words: Vec<_> = rules.iter().map(|rule| (&*rule.address, &*rule.rule)).collect();
        let stays = "to one of 2 endpoints at random; a client stays with its endpoint for 10800s after its last connection";
        let node = format!("{stays}; the endpoint sees the node's address, not the client's");
        assert_eq!(
            words,
            [
                ("10.96.0.7:80/tcp", stays),
                ("10.96.0.7:81/tcp", "refused: there is no ready endpoint"),
                ("each node:30080/tcp", &*node),
            ]
        );
        assert!(rule_table(&rules).contains("10.0.0.1:8080,10.0.0.2:8080"));
    }

    #[test]
    fn a_service_without_addresses_says_why() {
        for (spec, why) in [
            (json!({"clusterIP": "None"}), "headless"),
            (json!({"type": "ExternalName", "externalName": "db.example"}), "an alias of db.example"),
            (json!({}), "no address"),
        ] {
            assert!(without_rules(&service(spec)).starts_with(why));
        }
    }
}
