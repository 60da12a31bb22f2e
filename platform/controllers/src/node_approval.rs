//! Approves the certificate requests of machines that join and of nodes.
//!
//! | signer | requested by | approved if |
//! |---|---|---|
//! | `kubernetes.io/kube-apiserver-client-kubelet` | a bootstrap token (group `system:bootstrappers`) | no ready Node has the name |
//! | `kubernetes.io/kube-apiserver-client-kubelet` | the node itself | always: a renewal |
//! | `kubernetes.io/kubelet-serving` | the node itself | its DNS name is the node's, its addresses belong to nothing else |
//!
//! A request that is not approved gets the condition `NotApproved` with the reason, and is examined again until it can
//! be approved; a user may approve it in spite of that. Requests of other users and for other purposes are left alone.
//!
//! The addresses of serving certificates are restricted because the same authority signs the API server's certificate:
//! a node must not be able to represent the API server, a Service or another node. (Behaviour: upstream
//! `pkg/controller/certificates/approver`, which approves by authorization and approves no serving certificates.)

mod plan;
mod request;

use std::{sync::Arc, time::Duration};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition},
            core::v1::{Node, Service},
        },
        jiff::Timestamp,
    },
};
use mayfly_informer::{
    EventRecorder, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use plan::{ApprovalDecision, decide};

/// The condition of a request that cannot be approved now.
const NOT_APPROVED: &str = "NotApproved";
/// The interval between two examinations of a request that is not approved: a node may stop being ready.
const EXAMINE_EVERY: Duration = Duration::from_secs(5);
const WORKERS_MAX: usize = 2;

/// Settings of the approval of nodes' requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeApproval {
    /// Names and addresses that no node may have in a certificate: those of the API server's own certificate. The
    /// names of the Service `kubernetes` and `localhost` are always reserved.
    pub reserved_names: Vec<String>,
}

/// Approves requests. Inactive without settings.
pub(crate) struct NodeApprovalController {
    config: Option<NodeApproval>,
    client: Client,
    requests: Informer<CertificateSigningRequest>,
    nodes: Informer<Node>,
    services: Informer<Service>,
}

impl NodeApprovalController {
    pub(crate) fn create(config: Option<NodeApproval>, client: Client, informers: &Informers) -> Self {
        Self { config, client, requests: informers.of(), nodes: informers.of(), services: informers.of() }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let Some(config) = self.config.clone() else { return };
        let synced = async {
            self.requests.synced().await;
            self.nodes.synced().await;
            self.services.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "node-approver", None, stop.clone());
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.requests.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        let controller = Arc::new((self, config, events));
        reconcile::run("node-approval", queue, WORKERS_MAX, stop, move |key| {
            let controller = controller.clone();
            async move {
                let (controller, config, events) = &*controller;
                controller.reconcile(key, config, events).await
            }
        })
        .await;
    }

    async fn reconcile(
        &self,
        key: ObjectKey,
        config: &NodeApproval,
        events: &EventRecorder,
    ) -> kube::Result<Outcome> {
        let Some(request) = self.requests.get(&key) else { return Ok(Outcome::Done) };
        let node = |name: &str| self.nodes.get(&ObjectKey::cluster(name));
        let decision = decide(&request, config, node, || self.nodes.list(), || self.services.list());
        let (condition, outcome) = match decision {
            ApprovalDecision::Leave => return Ok(Outcome::Done),
            ApprovalDecision::Approve { message } => {
                (condition("Approved", "AutoApproved", message), Outcome::Done)
            }
            ApprovalDecision::Hold { reason, message } => {
                let again = Outcome::RequeueAfter(EXAMINE_EVERY);
                if is_held(&request, reason, &message) {
                    return Ok(again);
                }
                events.warning(&*request, reason, message.clone());
                (condition(NOT_APPROVED, reason, message), again)
            }
        };
        self.write(&request, condition).await.map(|()| outcome)
    }

    /// Replaces the controller's earlier condition.
    async fn write(
        &self,
        request: &CertificateSigningRequest,
        condition: CertificateSigningRequestCondition,
    ) -> kube::Result<()> {
        let name = request.metadata.name.as_deref().unwrap_or_default();
        let conditions = request.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let mut conditions: Vec<_> =
            conditions.filter(|condition| condition.type_ != NOT_APPROVED).cloned().collect();
        conditions.push(condition);
        let metadata = json!({"resourceVersion": request.metadata.resource_version});
        let patch = Patch::Merge(json!({"metadata": metadata, "status": {"conditions": conditions}}));
        let requests: Api<CertificateSigningRequest> = Api::all(self.client.clone());
        match requests.patch_approval(name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            // Its next change starts another examination.
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn condition(kind: &str, reason: &str, message: String) -> CertificateSigningRequestCondition {
    let now = mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time(Timestamp::now());
    CertificateSigningRequestCondition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_update_time: Some(now.clone()),
        last_transition_time: Some(now),
    }
}

fn is_held(request: &CertificateSigningRequest, reason: &str, message: &str) -> bool {
    let conditions = request.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|known| {
        known.type_ == NOT_APPROVED
            && known.reason.as_deref() == Some(reason)
            && known.message.as_deref() == Some(message)
    })
}
