//! The leader's calls of other nodes: a request goes to a node with room, from there to another one if it was not run,
//! and at last to this node.

use std::sync::Arc;

use futures::future::BoxFuture;
use http::Request;
use http_body_util::BodyExt as _;
use mayfly_runtime::{Answer, Body};
use tokio::time::Instant;

use super::{
    NodeCaller,
    attempt::{Attempt, attempt, for_gateway},
    replicas::{NodeSlot, PeerNodes},
    wire::NodeAction,
};
use crate::{
    body, deadline_body::DeadlineBody, metrics::GatewayCounts, refusal::Refusal, run, target::RevisionTarget,
    unread_body::UnreadBody,
};

/// Sends requests to the gateways of nodes with replicas.
pub(crate) struct NodeForwarder {
    /// The name of this node.
    pub(crate) node: Arc<str>,
    pub(crate) peers: Arc<PeerNodes>,
    pub(super) caller: NodeCaller,
    counts: Arc<GatewayCounts>,
}

impl NodeForwarder {
    pub(crate) fn new(node: &str, caller: NodeCaller, counts: Arc<GatewayCounts>) -> Self {
        Self { node: node.into(), peers: Arc::default(), caller, counts }
    }

    /// A slot on another node, if the request, which was admitted, should not run here. `from`: the node that sent the
    /// request because it had no room.
    pub(crate) fn place(&self, target: &RevisionTarget, from: Option<&Arc<str>>) -> Option<NodeSlot> {
        if !target.replicas.is_elsewhere() {
            return None;
        }
        target.replicas.acquire(
            target.gate.running(),
            target.concurrency,
            from.map(std::slice::from_ref).unwrap_or_default(),
        )
    }

    /// Sends a request to the node of the slot.
    pub(crate) fn call(
        self: &Arc<Self>,
        target: &Arc<RevisionTarget>,
        slot: NodeSlot,
        from: Option<&Arc<str>>,
        request: Request<Body>,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Answer, Refusal>> {
        let (forwarder, target) = (self.clone(), target.clone());
        let mut excluded: Vec<_> = from.cloned().into_iter().collect();
        Box::pin(async move {
            let (parts, mut next) = request.into_parts();
            let is_empty = http_body::Body::is_end_stream(&next);
            let mut repeats = parts.method.is_idempotent() && is_empty;
            let unread = UnreadBody::default();
            let mut place = Some(slot);
            while let Some(slot) = place.take() {
                let request = Request::from_parts(parts.clone(), unread.lend(next).boxed_unsync());
                let may_have_run = match forwarder.attempt(&target, &slot, request, deadline).await {
                    Attempt::Answered(answer) => return Ok(holding(answer, &target, deadline, slot)),
                    Attempt::Refused(refusal) => return Err(refusal),
                    Attempt::Lost(refusal) => {
                        // Repeated once, like the requests to pods.
                        if !std::mem::take(&mut repeats) {
                            return Err(refusal);
                        }
                        refusal
                    }
                    Attempt::NotRun(refusal) | Attempt::Unreachable(refusal) => refusal,
                };
                excluded.push(slot.node().name.clone());
                drop(slot);
                let body = if is_empty { Some(body::empty()) } else { unread.take() };
                next = body.ok_or(may_have_run)?;
                place = target.replicas.acquire(target.gate.running(), target.concurrency, &excluded);
            }
            run::here(&target, Request::from_parts(parts, next), deadline).await
        })
    }

    async fn attempt(
        &self,
        target: &RevisionTarget,
        slot: &NodeSlot,
        request: Request<Body>,
        deadline: Instant,
    ) -> Attempt {
        let request = match for_gateway(NodeAction::Run, target, &self.node, deadline, request) {
            Ok(request) => request,
            Err(refusal) => return Attempt::Refused(refusal),
        };
        let call = (self.caller)(&slot.node().name, request);
        attempt(target, slot.node(), &self.counts.calls_of_nodes, call, deadline).await
    }
}

/// The answer, which holds the slot until the end of its body.
fn holding(answer: Answer, target: &RevisionTarget, deadline: Instant, slot: NodeSlot) -> Answer {
    let Answer { response, timings } = answer;
    // The other node's host limits the size.
    let response =
        response.map(|body| DeadlineBody::new(body, deadline, target.timeout, u64::MAX, slot).boxed_unsync());
    Answer { response, timings }
}
