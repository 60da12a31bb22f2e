//! Carries out a preemption at the API: nominates the node, marks the victims and deletes them.

use std::sync::Arc;

use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use mayfly_api::k8s::{
    api::core::v1::{Pod, PodCondition},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use mayfly_informer::{EventRecorder, Informer};
use serde_json::json;

use crate::request::PodRequest;

/// The pods to delete, as they were observed, and the pod that they make room for.
pub(crate) struct Eviction {
    request: PodRequest,
    node: String,
    victims: Vec<Arc<Pod>>,
}

impl Eviction {
    /// Victims that are removed or terminating already are left out.
    pub(crate) fn new(
        request: &PodRequest,
        node: String,
        victims: &[Arc<PodRequest>],
        pods: &Informer<Pod>,
    ) -> Self {
        let pods = victims.iter().filter_map(|victim| {
            let pod = pods.get(&victim.key)?;
            let is_same = pod.metadata.uid.as_deref() == Some(&victim.uid);
            (is_same && pod.metadata.deletion_timestamp.is_none()).then_some(pod)
        });
        Self { request: request.clone(), node, victims: pods.collect() }
    }

    pub(crate) fn announce(&self, events: &EventRecorder) {
        for victim in &self.victims {
            let message = format!("Preempted by pod {} on node {}", self.request.uid, self.node);
            events.normal(&**victim, "Preempted", message);
        }
    }

    /// A failure is logged; the next try of the pod searches victims again.
    pub(crate) async fn carry_out(self, client: Client) {
        for victim in &self.victims {
            if let Err(error) = evict(&client, victim).await {
                let pod = victim.metadata.name.as_deref().unwrap_or_default();
                tracing::warn!(pod, %error, "cannot preempt a pod; will retry");
            }
        }
        let key = &self.request.key;
        let api: Api<Pod> = Api::namespaced(client, &key.namespace);
        let patch =
            json!({"metadata": {"uid": self.request.uid}, "status": {"nominatedNodeName": self.node}});
        if let Err(error) = api.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            tracing::debug!(pod = %key, %error, "cannot write the nominated node");
        }
    }
}

async fn evict(client: &Client, victim: &Pod) -> kube::Result<()> {
    let namespace = victim.metadata.namespace.as_deref().unwrap_or_default();
    let name = victim.metadata.name.as_deref().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let status = victim.status.as_ref();
    let mut conditions = status.and_then(|status| status.conditions.clone()).unwrap_or_default();
    conditions.retain(|condition| condition.type_ != "DisruptionTarget");
    conditions.push(PodCondition {
        type_: "DisruptionTarget".into(),
        status: "True".into(),
        reason: Some("PreemptionByScheduler".into()),
        message: Some("default-scheduler: preempting to accommodate a higher priority pod".into()),
        last_transition_time: Some(Time(Timestamp::now())),
        ..PodCondition::default()
    });
    // Conditional on the observed version: a newer status is not overwritten. The condition is informational.
    let seen = json!({"uid": victim.metadata.uid, "resourceVersion": victim.metadata.resource_version});
    let patch = Patch::Merge(json!({"metadata": seen, "status": {"conditions": conditions}}));
    if let Err(error) = api.patch_status(name, &PatchParams::default(), &patch).await {
        tracing::debug!(pod = name, %error, "cannot mark a pod as a disruption target");
    }
    let preconditions = Preconditions { uid: victim.metadata.uid.clone(), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match api.delete(name, &params).await {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        result => result.map(|_| ()),
    }
}
