//! A follower's calls of the leader: for requests that no replica on this node has room for, and for asynchronous
//! invocations.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use mayfly_api::ObjectKey;
use mayfly_runtime::{Answer, Body};
use tokio::time::Instant;

use super::{
    LeaderCaller,
    attempt::{Attempt, attempt, for_gateway},
    replicas::PeerNode,
    wire::{self, NodeAction, NodeRefusal, NodeRequest},
};
use crate::{
    body,
    deadline_body::DeadlineBody,
    invocations::{INVOCATION_TIMEOUT, InvocationQueue},
    metrics::GatewayCounts,
    refusal::{Refusal, RefusalCode},
    run::{RequestTurn, RunAnswer},
    target::{DemandSignal, RevisionTarget, Upstream},
    unread_body::UnreadBody,
};

/// The size limit of an invocation's id, in bytes.
const INVOCATION_ID_BYTES_MAX: usize = 4096;

/// Sends requests to the leader.
pub(crate) struct LeaderForwarder {
    /// The name of this node.
    pub(crate) node: Arc<str>,
    leader: PeerNode,
    caller: LeaderCaller,
    counts: Arc<GatewayCounts>,
}

impl LeaderForwarder {
    pub(crate) fn new(node: &str, caller: LeaderCaller, counts: Arc<GatewayCounts>) -> Self {
        Self { node: node.into(), leader: PeerNode::new("of the server".into()), caller, counts }
    }

    /// Whether a request for this revision goes to the leader. The leader also gets all requests for container images:
    /// it has to know of their demand, and pods are as near to it as to this node.
    pub(crate) fn is_for_leader(&self, target: &RevisionTarget) -> bool {
        match &**target.upstream.load() {
            Upstream::Local(_) if self.leader.is_avoided() && target.replicas.here() > 0 => false,
            Upstream::Local(_) => {
                let room = u64::from(target.concurrency) * u64::from(target.replicas.here());
                u64::from(target.gate.running()) + u64::from(target.gate.waiting()) >= room
            }
            Upstream::Pod(pods) => !(self.leader.is_avoided() && pods.has_answering_pod()),
            Upstream::Unavailable(_) => false,
        }
    }

    /// Sends the request to the leader. Replicas on this node serve it if the leader does not.
    pub(crate) fn call(
        self: &Arc<Self>,
        target: &Arc<RevisionTarget>,
        demand: &Arc<DemandSignal>,
        request: Request<Body>,
        arrived: Instant,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<RunAnswer, Refusal>> {
        let (forwarder, target, demand) = (self.clone(), target.clone(), demand.clone());
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let is_empty = http_body::Body::is_end_stream(&body);
            let repeats = parts.method.is_idempotent() && is_empty;
            let unread = UnreadBody::default();
            let request = Request::from_parts(parts.clone(), unread.lend(body).boxed_unsync());
            let refusal = match forwarder.attempt(&target, request, deadline).await {
                Attempt::Answered(answer) => return Ok(forwarded(answer, &target, deadline)),
                Attempt::Refused(refusal) => return Err(refusal),
                Attempt::Lost(refusal) if !repeats => return Err(refusal),
                Attempt::Lost(_) | Attempt::Unreachable(_) => Refusal::leader_unreachable(&target),
                // The leader counts the requests of all nodes: its limit holds here, too.
                Attempt::NotRun(refusal) if refusal.code == RefusalCode::QueueFull => return Err(refusal),
                Attempt::NotRun(refusal) => refusal,
            };
            let body = if is_empty { Some(body::empty()) } else { unread.take() };
            let (Some(body), true) = (body, can_run_here(&target)) else { return Err(refusal) };
            let request = Request::from_parts(parts, body);
            RequestTurn::begin(&target, &demand, None, None, request, arrived, deadline)
                .end(&target, arrived)
                .await
        })
    }

    async fn attempt(&self, target: &RevisionTarget, request: Request<Body>, deadline: Instant) -> Attempt {
        let request = match for_gateway(NodeAction::Place, target, &self.node, deadline, request) {
            Ok(request) => request,
            Err(refusal) => return Attempt::Refused(refusal),
        };
        let call = (self.caller)(request);
        attempt(target, &self.leader, &self.counts.calls_of_leader, call, deadline).await
    }
}

fn can_run_here(target: &RevisionTarget) -> bool {
    match &**target.upstream.load() {
        Upstream::Local(_) => target.replicas.here() > 0,
        Upstream::Pod(pods) => pods.has_answering_pod(),
        Upstream::Unavailable(_) => false,
    }
}

/// The leader's answer. This gateway has admitted nothing, so there is no permit.
fn forwarded(answer: Answer, target: &RevisionTarget, deadline: Instant) -> RunAnswer {
    let Answer { response, timings } = answer;
    let response =
        response.map(|body| DeadlineBody::new(body, deadline, target.timeout, u64::MAX, ()).boxed_unsync());
    RunAnswer { answer: Answer { response, timings }, permit: None, queue: std::time::Duration::ZERO }
}

/// The leader's queue of asynchronous invocations.
impl InvocationQueue for LeaderForwarder {
    fn enqueue(
        &self,
        function: ObjectKey,
        request: Request<Bytes>,
    ) -> BoxFuture<'_, Result<String, Refusal>> {
        Box::pin(async move {
            let request = NodeRequest {
                action: NodeAction::Invoke,
                key: function,
                uid: String::new(),
                remaining: INVOCATION_TIMEOUT,
                from: self.node.to_string(),
                request: request.map(|body| Full::new(body).map_err(|never| match never {}).boxed_unsync()),
            };
            let request =
                request.encode().ok_or_else(|| Refusal::invocation_refused("its address is too long"))?;
            let unreachable = |error: &dyn std::fmt::Display| {
                Refusal::invocation_refused(format_args!("the server cannot be reached: {error}"))
            };
            let called = tokio::time::timeout(INVOCATION_TIMEOUT, (self.caller)(request)).await;
            let response = called.map_err(|late| unreachable(&late))?.map_err(|error| unreachable(&error))?;
            match wire::decode_answer(response).await {
                Ok(answer) => {
                    let id = body::collect(answer.response.into_body(), INVOCATION_ID_BYTES_MAX).await;
                    let id = id.map_err(|error| unreachable(&error))?;
                    Ok(String::from_utf8_lossy(&id).into_owned())
                }
                Err(NodeRefusal::Refused(refusal)) => Err(refusal),
                Err(NodeRefusal::NotHosted) => {
                    Err(Refusal::invocation_refused("it did not reach the server"))
                }
            }
        })
    }
}
