//! The receiving side of requests from other gateways.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, header};
use mayfly_api::ObjectKey;
use mayfly_runtime::{Answer, Body, Timings};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    load::LoadReport,
    wire::{self, NodeAction, NodeRefusal, NodeRequest},
};
use crate::{
    body::ResponseBody,
    invocations,
    proxy::Proxy,
    refusal::Refusal,
    run::{RequestTurn, RunAnswer},
    target::{RevisionTarget, Targets, Upstream},
};

/// The time for which a request waits until this node knows the revision and its replica: the sender may have heard of
/// them first. A request whose body was sent cannot be sent elsewhere.
const KNOWN_WITHIN: Duration = Duration::from_secs(1);

/// Serves the requests of other gateways: those that a `NodeCaller` or a `LeaderCaller` sends. Cheap to clone.
#[derive(Clone)]
pub struct NodeRequests {
    proxy: Arc<Proxy>,
    targets: Arc<Targets>,
    applied: watch::Receiver<u64>,
    stop: CancellationToken,
    /// Distinguishes the counters of this process from those of an earlier one.
    instance: Arc<str>,
}

impl std::fmt::Debug for NodeRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeRequests").field("instance", &self.instance).finish_non_exhaustive()
    }
}

impl NodeRequests {
    pub(crate) fn new(
        proxy: Arc<Proxy>,
        targets: Arc<Targets>,
        applied: watch::Receiver<u64>,
        stop: CancellationToken,
        instance: Arc<str>,
    ) -> Self {
        Self { proxy, targets, applied, stop, instance }
    }

    /// Serves one request. It may call every function, so the sender must have been authenticated: as the server
    /// at a follower, as a node at the leader. Paths are those of the sending gateway, without a prefix.
    /// Dropping the future, or the response's body, cancels the guest.
    pub async fn serve(&self, request: Request<Body>) -> Response<ResponseBody> {
        if self.stop.is_cancelled() {
            return wire::encode_refusal(NodeRefusal::Refused(Refusal::shutting_down()));
        }
        if request.uri().path() == wire::LOAD_PATH && request.method() == Method::GET {
            return self.load();
        }
        let arrived = Instant::now();
        let Some(request) = NodeRequest::decode(request) else {
            return wire::encode_refusal(NodeRefusal::Refused(Refusal::no_route()));
        };
        let answered = match request.action {
            NodeAction::Run => self.run(request, arrived).await,
            NodeAction::Place => self.place(request, arrived).await,
            NodeAction::Invoke => self.invoke(request).await,
        };
        answered.unwrap_or_else(wire::encode_refusal)
    }

    /// Runs a request by this node's replicas. It is never sent on.
    async fn run(
        &self,
        request: NodeRequest<Body>,
        arrived: Instant,
    ) -> Result<Response<ResponseBody>, NodeRefusal> {
        let deadline = arrived + request.remaining;
        // A replica that is being removed still runs while its component is in memory.
        let hosts = |target: &RevisionTarget| match &**target.upstream.load() {
            Upstream::Local(function) => target.replicas.here() > 0 || function.is_loaded(),
            Upstream::Pod(_) | Upstream::Unavailable(_) => false,
        };
        let target = self.target(&request.uid, &request.key, deadline, hosts).await?;
        let relayed = target.relay(arrived);
        let turn =
            RequestTurn::begin(&target, &self.proxy.demand, None, None, request.request, arrived, deadline);
        let mut answered = turn.end(&target, arrived).await.map_err(NodeRefusal::Refused)?;
        if let Some(permit) = &mut answered.permit {
            permit.relayed = Some(relayed);
        }
        Ok(encoded(answered))
    }

    /// Finds a place for a follower's request: here, or on another node.
    async fn place(
        &self,
        request: NodeRequest<Body>,
        arrived: Instant,
    ) -> Result<Response<ResponseBody>, NodeRefusal> {
        if self.proxy.peers.is_follower() {
            return Err(NodeRefusal::NotHosted);
        }
        let (deadline, from) = (arrived + request.remaining, Arc::from(request.from));
        let target = self.target(&request.uid, &request.key, deadline, |_| true).await?;
        let (demand, nodes) = (&self.proxy.demand, self.proxy.peers.nodes());
        let turn = RequestTurn::begin(&target, demand, nodes, Some(from), request.request, arrived, deadline);
        turn.end(&target, arrived).await.map(encoded).map_err(NodeRefusal::Refused)
    }

    async fn invoke(&self, request: NodeRequest<Body>) -> Result<Response<ResponseBody>, NodeRefusal> {
        if self.proxy.peers.is_follower() {
            return Err(NodeRefusal::NotHosted);
        }
        let (queue, key) = (self.proxy.queue.clone(), request.key);
        let id = invocations::queued(queue.as_deref(), key, request.request).await;
        let response = Response::new(ResponseBody::full(Bytes::from(id.map_err(NodeRefusal::Refused)?)));
        Ok(wire::encode_answer(response, &Timings::default(), Duration::ZERO))
    }

    /// The revision of a request, once `is_usable` holds for it; waits for that for a short time.
    async fn target(
        &self,
        uid: &str,
        key: &ObjectKey,
        deadline: Instant,
        is_usable: impl Fn(&RevisionTarget) -> bool,
    ) -> Result<Arc<RevisionTarget>, NodeRefusal> {
        let mut applied = self.applied.clone();
        let until = deadline.min(Instant::now() + KNOWN_WITHIN);
        loop {
            applied.mark_unchanged();
            let known = self.targets.get(uid).filter(|target| target.key == *key);
            if let Some(target) = known.filter(|target| is_usable(target)) {
                return Ok(target);
            }
            match tokio::time::timeout_at(until, applied.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(NodeRefusal::NotHosted),
            }
        }
    }

    fn load(&self) -> Response<ResponseBody> {
        let report = LoadReport::of(&self.targets, &self.instance, Instant::now());
        let text = serde_json::to_vec(&report).unwrap_or_default();
        let mut response = Response::new(ResponseBody::full(text.into()));
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
        response
    }
}

fn encoded(answered: RunAnswer) -> Response<ResponseBody> {
    let RunAnswer { answer: Answer { response, timings }, permit, queue } = answered;
    let response = wire::encode_answer(response, &timings, queue);
    response.map(|body| ResponseBody::guest(body, permit))
}
