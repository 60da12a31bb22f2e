//! The objects and leases of simulated nodes.

use std::{collections::BTreeMap, time::Duration};

use futures::{StreamExt as _, stream};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use mayfly_api::{
    k8s::{
        api::{
            coordination::v1::{Lease, LeaseSpec},
            core::v1::{Node, NodeAddress, NodeCondition, NodeStatus, NodeSystemInfo},
        },
        apimachinery::pkg::{
            api::resource::Quantity,
            apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time},
        },
        jiff::Timestamp,
    },
    wellknown,
};
use tokio_util::sync::CancellationToken;

use crate::Config;

/// The label of simulated nodes.
pub(crate) const LABEL_SIMULATED: &str = "mayfly.dev/simulated";
const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
const LABEL_REGION: &str = "topology.kubernetes.io/region";
/// The number of zones over which simulated nodes are distributed.
const ZONES: u32 = 3;
/// Leases are written seldom, so that thousands of idle nodes cost nothing. The node controller waits for the
/// duration in a lease before it treats a node as silent.
const LEASE_SECONDS: i32 = 3600;
const LEASE_RENEW_EVERY: Duration = Duration::from_secs(900);
/// The pause before nodes that could not be written are retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const FIELD_MANAGER: &str = "simulated-nodes";

/// The name of a simulated node; the first has the number 1.
pub(crate) fn name(number: u32) -> String {
    format!("sim-{number:05}")
}

/// The number in the name of a simulated node.
pub(crate) fn number(name: &str) -> Option<u32> {
    let number = name.strip_prefix("sim-")?.parse().ok().filter(|number| *number > 0)?;
    (self::name(number) == name).then_some(number)
}

/// The address of a simulated node: of a range that is reserved for benchmarks of networks (RFC 2544).
pub(crate) fn address(number: u32) -> String {
    let [_, b, c, d] = number.to_be_bytes();
    format!("198.{}.{c}.{d}", 18 + (b & 1))
}

/// Maintains all nodes and their leases until `stop`.
pub(crate) async fn keep(config: &Config, client: &Client, stop: &CancellationToken) {
    let work = async {
        while let Err(error) = remove_others(config, client).await {
            tracing::warn!(%error, "cannot remove simulated nodes of an earlier run; will retry");
            tokio::time::sleep(RETRY_AFTER).await;
        }
        let mut missing: Vec<u32> = (1..=config.count).collect();
        loop {
            missing = each(config, missing, |number| register(config, client, number)).await;
            if missing.is_empty() {
                break;
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
        tracing::info!(nodes = config.count, "simulated nodes are registered");
        loop {
            tokio::time::sleep(LEASE_RENEW_EVERY).await;
            each(config, (1..=config.count).collect(), |number| renew(client, number, None)).await;
            match not_ready(client).await {
                Ok(nodes) => drop(each(config, nodes, |number| register(config, client, number)).await),
                Err(error) => tracing::warn!(%error, "cannot list simulated nodes; will retry"),
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = work => {}
    }
}

/// Runs `work` for each node, with limited concurrency; returns the nodes for which it failed.
async fn each<F>(config: &Config, numbers: Vec<u32>, work: impl Fn(u32) -> F) -> Vec<u32>
where
    F: Future<Output = kube::Result<()>>,
{
    let work = &work;
    let results = stream::iter(numbers).map(|number| async move { (number, work(number).await) });
    let results = results.buffer_unordered(config.writes_max);
    let failed = results.filter_map(|(number, result)| async move {
        let error = result.err()?;
        tracing::warn!(node = name(number), %error, "cannot write a simulated node; will retry");
        Some(number)
    });
    failed.collect().await
}

/// Removes simulated nodes of an earlier run beyond the configured number; their pods are collected.
async fn remove_others(config: &Config, client: &Client) -> kube::Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    let nodes = api.list(&ListParams::default().labels(LABEL_SIMULATED)).await?;
    for node in nodes {
        let node = node.metadata.name.unwrap_or_default();
        if number(&node).is_none_or(|number| number > config.count) {
            api.delete(&node, &DeleteParams::default()).await?;
        }
    }
    Ok(())
}

/// The nodes that the node controller has taken for silent, for example after this machine was suspended for longer
/// than their leases. Only the node itself reports that it is ready again.
async fn not_ready(client: &Client) -> kube::Result<Vec<u32>> {
    let api: Api<Node> = Api::all(client.clone());
    let nodes = api.list(&ListParams::default().labels(LABEL_SIMULATED)).await?;
    let is_ready = |node: &Node| {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref());
        conditions.unwrap_or_default().iter().any(|one| one.type_ == "Ready" && one.status == "True")
    };
    let silent = nodes.into_iter().filter(|node| !is_ready(node));
    Ok(silent.filter_map(|node| number(&node.metadata.name?)).collect())
}

async fn register(config: &Config, client: &Client, number: u32) -> kube::Result<()> {
    let (api, name): (Api<Node>, _) = (Api::all(client.clone()), name(number));
    let node = match api.get_opt(&name).await? {
        Some(node) => node,
        None => {
            let metadata = ObjectMeta {
                name: Some(name.clone()),
                labels: Some(labels(number)),
                annotations: Some([("node.alpha.kubernetes.io/ttl".into(), "0".into())].into()),
                ..ObjectMeta::default()
            };
            api.create(&PostParams::default(), &Node { metadata, ..Node::default() }).await?
        }
    };
    let patch = Patch::Merge(serde_json::json!({"status": status(config, number, Timestamp::now())}));
    api.patch_status(&name, &params(), &patch).await?;
    renew(client, number, node.metadata.uid).await
}

async fn renew(client: &Client, number: u32, uid: Option<String>) -> kube::Result<()> {
    let api: Api<Lease> = Api::namespaced(client.clone(), wellknown::NAMESPACE_NODE_LEASE);
    let (name, now) = (name(number), MicroTime(Timestamp::now()));
    let patch = Patch::Merge(serde_json::json!({"spec": {"renewTime": now}}));
    match api.patch(&name, &params(), &patch).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        result => return result.map(|_| ()),
    }
    let owner = uid.map(|uid| OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: name.clone(),
        uid,
        ..OwnerReference::default()
    });
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            owner_references: owner.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(name),
            lease_duration_seconds: Some(LEASE_SECONDS),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }),
    };
    api.create(&PostParams::default(), &lease).await.map(|_| ())
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() }
}

fn labels(number: u32) -> BTreeMap<String, String> {
    [
        (wellknown::LABEL_HOSTNAME.into(), name(number)),
        (wellknown::LABEL_OS.into(), "linux".into()),
        (wellknown::LABEL_ARCH.into(), "amd64".into()),
        (LABEL_ZONE.into(), format!("zone-{}", number % ZONES + 1)),
        (LABEL_REGION.into(), "simulated".into()),
        (LABEL_SIMULATED.into(), "true".into()),
        // Functions and other components stay on the node that runs them.
        (format!("{}{}", wellknown::LABEL_RUNTIME_PREFIX, wellknown::RUNTIME_OCI), "true".into()),
    ]
    .into()
}

fn status(config: &Config, number: u32, now: Timestamp) -> NodeStatus {
    let capacity: BTreeMap<String, Quantity> = [
        ("cpu".into(), Quantity(format!("{}m", config.cpu_millis))),
        ("memory".into(), Quantity(format!("{}Ki", config.memory_bytes / 1024))),
        ("ephemeral-storage".into(), Quantity("100Gi".into())),
        ("pods".into(), Quantity(config.pods_max.to_string())),
    ]
    .into();
    let condition = |kind: &str, status: &str, reason: &str, message: &str| NodeCondition {
        type_: kind.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    };
    let pressure = |kind: &str, what: &str| {
        condition(kind, "False", &format!("KubeletHas{what}"), &format!("simulated node has {what}"))
    };
    NodeStatus {
        allocatable: Some(capacity.clone()),
        capacity: Some(capacity),
        addresses: Some(vec![
            NodeAddress { type_: "InternalIP".into(), address: address(number) },
            NodeAddress { type_: "Hostname".into(), address: name(number) },
        ]),
        conditions: Some(vec![
            pressure("MemoryPressure", "SufficientMemory"),
            pressure("DiskPressure", "NoDiskPressure"),
            pressure("PIDPressure", "SufficientPID"),
            condition("Ready", "True", "KubeletReady", "the simulated node is ready"),
        ]),
        node_info: Some(NodeSystemInfo {
            architecture: "amd64".into(),
            kubelet_version: config.version.clone(),
            kube_proxy_version: config.version.clone(),
            container_runtime_version: format!("simulated://{}", env!("CARGO_PKG_VERSION")),
            operating_system: "linux".into(),
            os_image: "simulated".into(),
            kernel_version: "simulated".into(),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    }
}

#[cfg(test)]
mod tests;
