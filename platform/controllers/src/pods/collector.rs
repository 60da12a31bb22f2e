//! A round of the collector: plans over all pods, deletes those that the plan names.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use mayfly_api::k8s::{
    api::core::v1::{Node, Pod, PodCondition},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use mayfly_informer::{Informer, Informers};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Config, is_finished};
use crate::{
    metadata::{is_gone, only, status_patch, uid},
    resync::ResyncTicker,
};

/// Removes pods that are finished, lost their node, or were deleted before they were bound.
pub(crate) struct PodCollector {
    config: Config,
    client: Client,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    absent: AbsentNodes,
}

/// The time since which nodes that pods are bound to have been missing.
#[derive(Default)]
struct AbsentNodes {
    since: HashMap<String, Instant>,
}

impl AbsentNodes {
    /// The nodes that have been missing for long enough.
    fn observe(
        &mut self,
        nodes: &HashSet<String>,
        pods: &[Arc<Pod>],
        config: &Config,
        now: Instant,
    ) -> HashSet<String> {
        let named: HashSet<_> = pods.iter().filter_map(|pod| node_name(pod)).collect();
        self.since.retain(|node, _| named.contains(node.as_str()) && !nodes.contains(node));
        for node in named {
            if !nodes.contains(node) {
                self.since.entry(node.to_owned()).or_insert(now);
            }
        }
        let long =
            self.since.iter().filter(|(_, since)| now.duration_since(**since) >= config.orphaned_after);
        long.map(|(node, _)| node.clone()).collect()
    }
}

fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())
}

/// The pods to remove: pure.
fn plan(pods: &[Arc<Pod>], gone_nodes: &HashSet<String>, finished_max: usize) -> Vec<Arc<Pod>> {
    let mut doomed: Vec<_> = pods
        .iter()
        .filter(|pod| match node_name(pod) {
            Some(node) => gone_nodes.contains(node),
            None => pod.metadata.deletion_timestamp.is_some(),
        })
        .cloned()
        .collect();
    let mut finished: Vec<_> = pods.iter().filter(|pod| is_finished(pod)).cloned().collect();
    let surplus = finished.len().saturating_sub(finished_max);
    finished.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0));
    doomed.extend(finished.into_iter().take(surplus));
    doomed.sort_by(|one, other| uid(&**one).cmp(uid(&**other)));
    doomed.dedup_by(|one, other| uid(&**one) == uid(&**other));
    doomed
}

impl PodCollector {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self { config, client, pods: informers.of(), nodes: informers.of(), absent: AbsentNodes::default() }
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut resync = ResyncTicker::every(self.config.every, stop);
        while resync.next().await {
            if self.pods.is_synced() && self.nodes.is_synced() {
                self.sweep().await;
            }
        }
    }

    async fn sweep(&mut self) {
        let nodes: HashSet<_> = self.nodes.keys().into_iter().map(|key| key.name).collect();
        let pods = self.pods.list();
        let gone = self.absent.observe(&nodes, &pods, &self.config, Instant::now());
        for pod in plan(&pods, &gone, self.config.finished_max) {
            let is_lost = !is_finished(&pod) && node_name(&pod).is_some_and(|node| gone.contains(node));
            let result = remove(&self.client, &pod, is_lost).await;
            match &result {
                Err(error) if !is_gone(&result) => {
                    tracing::warn!(pod = %pod.name_any(), %error, "cannot remove a pod that is no longer needed");
                }
                _ => tracing::debug!(pod = %pod.name_any(), "removed a pod that is no longer needed"),
            }
        }
    }
}

/// Deletes a pod without grace. `is_lost`: its node does not exist any more, so that the pod has failed by no fault of
/// its program; the `podFailurePolicy` of its Job reads that.
async fn remove(client: &Client, pod: &Pod, is_lost: bool) -> kube::Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    if is_lost {
        let condition = PodCondition {
            type_: "DisruptionTarget".into(),
            status: "True".into(),
            reason: Some("DeletionByPodGC".into()),
            message: Some("PodGC: node no longer exists".into()),
            last_transition_time: Some(Time(Timestamp::now())),
            ..PodCondition::default()
        };
        let patch = status_patch(pod, json!({"phase": "Failed", "conditions": [condition]}));
        api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(patch)).await?;
    }
    let params = DeleteParams { grace_period_seconds: Some(0), ..only(uid(pod)) };
    api.delete(&pod.name_any(), &params).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn pod(name: &str, node: Option<&str>, phase: &str, deleting: bool, second: u32) -> Arc<Pod> {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        let pod = json!({
            "metadata": {"name": name, "uid": name, "deletionTimestamp": deletion,
                "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")},
            "spec": {"nodeName": node, "containers": []}, "status": {"phase": phase}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn names(pods: Vec<Arc<Pod>>) -> Vec<String> {
        pods.into_iter().map(|pod| pod.name_any()).collect()
    }

    #[test]
    fn removes_what_nobody_takes_care_of() {
        let pods = [
            pod("running", Some("here"), "Running", false, 0),
            pod("lost", Some("gone"), "Running", false, 0),
            pod("waiting", None, "Pending", false, 0),
            pod("given-up", None, "Pending", true, 0),
            pod("stopping", Some("here"), "Running", true, 0),
            pod("done-3", Some("here"), "Succeeded", false, 3),
            pod("done-1", Some("here"), "Failed", false, 1),
            pod("done-2", Some("here"), "Succeeded", false, 2),
        ];
        let gone = ["gone".to_owned()].into();
        assert_eq!(names(plan(&pods, &gone, 3)), ["given-up", "lost"]);
        assert_eq!(names(plan(&pods, &gone, 1)), ["done-1", "done-2", "given-up", "lost"]);
    }

    #[test]
    fn a_node_has_time_to_register() {
        let (config, now) = (Config::default(), Instant::now());
        let pods = [pod("a", Some("n"), "Running", false, 0)];
        let mut absent = AbsentNodes::default();
        assert!(absent.observe(&HashSet::new(), &pods, &config, now).is_empty());
        let later = now + config.orphaned_after;
        assert!(absent.observe(&["n".to_owned()].into(), &pods, &config, later).is_empty(), "it came back");
        assert!(absent.observe(&HashSet::new(), &pods, &config, later).is_empty(), "counted anew");
        let gone = absent.observe(&HashSet::new(), &pods, &config, later + config.orphaned_after);
        assert_eq!(gone, ["n".to_owned()].into());
        assert!(config.every < Duration::from_secs(60));
    }
}
