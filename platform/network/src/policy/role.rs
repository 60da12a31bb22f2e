//! The enforcer of a node for pods of containers: follows NetworkPolicies, pods and namespaces.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Namespace, Pod},
        networking::v1::NetworkPolicy,
    },
    wellknown::RUNTIME_CLASS_WASM,
};
use mayfly_informer::{EventRecorder, Informer, Informers};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    PolicyRules, PolicyTables,
    plan::{plan, selects},
};

/// Changes within this time are carried out together; within the time that planning took, if that is longer, so that
/// many policies and pods cost half a core at most.
const GATHER: Duration = Duration::from_millis(5);
/// The interval at which failed rules are retried and the kernel's tables are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Whether this node can enforce policies.
#[derive(Debug)]
pub enum PolicyMode {
    /// In kernel tables with this name, once `programmed` reports that the node's rules for Services exist: a node
    /// without them runs no pod that a policy could isolate. `bridge` as for [`PolicyTables::new`].
    Nftables { table: String, bridge: bool, programmed: watch::Receiver<bool> },
    /// The userspace proxy serves this node, which sees no packets of containers.
    Unenforced,
}

/// Enforces NetworkPolicies for the containers of a node, or says for each that selects some that it is not enforced.
pub struct PolicyEnforcer {
    mode: PolicyMode,
    node: String,
    client: kube::Client,
    policies: Informer<NetworkPolicy>,
    pods: Informer<Pod>,
    namespaces: Informer<Namespace>,
}

impl std::fmt::Debug for PolicyEnforcer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyEnforcer").field("node", &self.node).finish_non_exhaustive()
    }
}

impl PolicyEnforcer {
    #[must_use]
    pub fn create(mode: PolicyMode, node: &str, informers: &Informers, client: kube::Client) -> Self {
        Self {
            mode,
            node: node.to_owned(),
            client,
            policies: informers.of(),
            pods: informers.of(),
            namespaces: informers.of(),
        }
    }

    /// Runs until `stop`; then the kernel's tables are removed.
    pub async fn run(mut self, stop: CancellationToken) {
        let synced =
            async { tokio::join!(self.policies.synced(), self.pods.synced(), self.namespaces.synced()) };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        match std::mem::replace(&mut self.mode, PolicyMode::Unenforced) {
            PolicyMode::Unenforced => self.report(stop).await,
            PolicyMode::Nftables { table, bridge, mut programmed } => {
                let ready = stop.run_until_cancelled(programmed.wait_for(|is| *is)).await;
                if matches!(ready, Some(Ok(_))) {
                    drop(ready);
                    self.enforce(PolicyTables::new(table, bridge), stop).await;
                }
            }
        }
    }

    /// Writes an event about each policy that selects pods of containers; `kubectl describe networkpolicy` shows it.
    async fn report(self, stop: CancellationToken) {
        let node = Some(self.node.clone());
        let events = EventRecorder::start(self.client.clone(), "network-policy-enforcer", node, stop.clone());
        let (mut policies, mut pods) = (self.policies.subscribe(), self.pods.subscribe());
        let mut reported: BTreeSet<ObjectKey> = BTreeSet::new();
        let reporting = async {
            loop {
                tokio::select! {
                    _ = policies.next() => {}
                    _ = pods.next() => {}
                }
                reported.retain(|key| self.policies.get(key).is_some());
                let unreported = self.policies.list().into_iter().filter(|policy| {
                    let pods =
                        self.pods.list_namespace(policy.metadata.namespace.as_deref().unwrap_or_default());
                    !reported.contains(&ObjectKey::of(&**policy))
                        && pods.iter().any(|pod| self.is_container_here(pod) && selects(policy, pod))
                });
                for policy in unreported.collect::<Vec<_>>() {
                    let message = format!(
                        "Node {} does not enforce NetworkPolicies for pods of containers: Services are served in \
                         userspace; `mayfly up --network bridge` (root, nft) enforces them",
                        self.node
                    );
                    let key = ObjectKey::of(&*policy);
                    tracing::warn!(policy = key.name, "{message}");
                    events.warning(&*policy, "NotEnforced", message);
                    reported.insert(key);
                }
            }
        };
        let _: Option<()> = stop.run_until_cancelled(reporting).await;
    }

    /// Whether a pod of this node is one of containers, whose packets the kernel would have to judge.
    fn is_container_here(&self, pod: &Pod) -> bool {
        pod.spec.as_ref().is_some_and(|spec| {
            spec.node_name.as_deref() == Some(&*self.node)
                && spec.runtime_class_name.as_deref() != Some(RUNTIME_CLASS_WASM)
                && spec.host_network != Some(true)
        })
    }

    async fn enforce(self, mut tables: PolicyTables, stop: CancellationToken) {
        let (mut policies, mut pods) = (self.policies.subscribe(), self.pods.subscribe());
        let mut namespaces = self.namespaces.subscribe();
        let mut failing = false;
        loop {
            let began = Instant::now();
            let rules = self.plan();
            let gather = GATHER.max(began.elapsed());
            let result = tables.apply(&rules).await;
            match &result {
                Ok(true) => {
                    tracing::warn!(
                        "the kernel's policy rules were removed by another program; they are back"
                    );
                }
                Err(error) if !failing => {
                    let advice = tables.advice();
                    tracing::warn!(%error, advice, "NetworkPolicies cannot be enforced; trying again");
                }
                Ok(false) if failing => tracing::info!("NetworkPolicies are enforced again"),
                _ => {}
            }
            failing = result.is_err();
            let changed = async {
                tokio::select! {
                    _ = policies.next() => {}
                    _ = pods.next() => {}
                    _ = namespaces.next() => {}
                    () = tokio::time::sleep(CHECK_INTERVAL) => return,
                }
                tokio::time::sleep(gather).await;
            };
            if stop.run_until_cancelled(changed).await.is_none() {
                break;
            }
            policies.take();
            pods.take();
            namespaces.take();
        }
        if let Err(error) = tables.remove().await {
            tracing::warn!(%error, "the policy rules of the kernel could not be removed");
        }
    }

    fn plan(&self) -> PolicyRules {
        let policies = self.policies.list();
        if policies.is_empty() {
            return PolicyRules::default();
        }
        let (pods, namespaces) = (self.pods.list(), self.namespaces.list());
        plan(
            policies.iter().map(|policy| &**policy),
            pods.iter().map(|pod| &**pod),
            namespaces.iter().map(|namespace| &**namespace),
            &self.node,
        )
    }
}
