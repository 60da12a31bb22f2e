//! The replicas of a revision that is a container image: its pods, their readiness, and the choice of a pod for each
//! request.
//!
//! A pod that gets an address is probed at once and every few milliseconds, so that a waiting request does not depend
//! on the kubelet's probe period. [`PodEndpoints`], which has neither locks nor a clock, chooses the pod;
//! [`PodUpstream`] does the rest.

mod endpoints;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use http::{Request, Uri, Version, uri::Authority};
use http_body_util::BodyExt as _;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use mayfly_api::{
    ObjectKey, duration::Span, k8s::api::core::v1::Pod, quantity, validation::TIMEOUT_MAX, wellknown,
};
use mayfly_runtime::{Answer, Body, CallError, Timings};
use parking_lot::Mutex;
use tokio::{net::TcpStream, sync::Notify, time::Instant};

use self::endpoints::{PodAddress, PodEndpoints};
use crate::{
    body,
    deadline_body::DeadlineBody,
    refusal::{Refusal, RefusalCode},
    unread_body::{LentBody, UnreadBody},
};

/// The pause between probes of a pod that is not ready yet: far below the start time of a container.
const PROBE_PERIOD: Duration = Duration::from_millis(2);
/// The timeout of a probe, for an address that drops packets.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of idle connections kept to each pod: as many as one replica handles at a time by default.
const IDLE_CONNECTIONS_MAX: usize = 100;
/// Idle connections are closed before a server's usual keep-alive timeout (5 s in Node) can close them during a
/// request.
const IDLE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(4);

/// The key of the revision that a pod is a replica of: `namespace/revision`.
pub(crate) fn revision_of(pod: &Pod) -> Option<ObjectKey> {
    let revision = pod.metadata.labels.as_ref()?.get(wellknown::LABEL_REVISION)?;
    Some(ObjectKey::new(pod.metadata.namespace.clone().unwrap_or_default(), revision))
}

/// The kubelet's reason why a pod's container has not started.
fn waiting_reason(pod: &Pod) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().filter(|reason| *reason != "ContainerCreating")?;
        Some(format!("{reason}: {}", waiting.message.as_deref().unwrap_or_default()))
    })
}

/// Sends requests to the pods of one revision.
pub(crate) struct PodUpstream {
    revision: ObjectKey,
    port: u16,
    timeout: Duration,
    response_bytes_max: u64,
    client: Client<HttpConnector, LentBody>,
    endpoints: Mutex<PodEndpoints>,
    /// The reason why no pod starts, if a pod reports one.
    trouble: Mutex<Option<String>>,
    /// Wakes one waiter for each freed slot, and all when a pod starts to answer.
    room: Notify,
    closed: AtomicBool,
}

impl PodUpstream {
    pub(crate) fn new(revision: ObjectKey, spec: &mayfly_api::RevisionSpec) -> Arc<Self> {
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(IDLE_CONNECTION_TIMEOUT)
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .build({
                let mut connector = HttpConnector::new();
                connector.set_nodelay(true);
                connector.set_connect_timeout(Some(PROBE_TIMEOUT));
                connector
            });
        Arc::new(Self {
            revision,
            port: spec.source.port.unwrap_or(wellknown::FUNCTION_PORT),
            timeout: spec.limits.timeout.0.min(TIMEOUT_MAX),
            // Validation admits only quantities.
            response_bytes_max: quantity::whole(&spec.limits.response).unwrap_or(u64::MAX),
            client,
            endpoints: Mutex::new(PodEndpoints {
                pods: Vec::new(),
                concurrency: spec.limits.concurrency.max(1),
            }),
            trouble: Mutex::new(None),
            room: Notify::new(),
            closed: AtomicBool::new(false),
        })
    }

    /// Replaces the list of pods.
    pub(crate) fn update(self: &Arc<Self>, pods: &[Arc<Pod>]) {
        let addresses = pods.iter().filter_map(|pod| PodAddress::of(pod)).collect();
        *self.trouble.lock() = pods.iter().find_map(|pod| waiting_reason(pod));
        let new = self.endpoints.lock().set(addresses);
        for pod in new {
            self.probe(pod);
        }
    }

    /// Whether any pod has accepted a connection.
    pub(crate) fn has_answering_pod(&self) -> bool {
        self.endpoints.lock().pods.iter().any(|pod| pod.answers)
    }

    /// Ends the probes when the revision is removed.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Probes the pod until it accepts a connection or is no longer in the list.
    fn probe(self: &Arc<Self>, pod: PodAddress) {
        let upstream = Arc::downgrade(self);
        let address = (pod.ip, self.port);
        let probing = async move {
            loop {
                let tried = tokio::time::timeout(PROBE_TIMEOUT, TcpStream::connect(address)).await;
                let Some(upstream) = upstream.upgrade() else { return };
                if upstream.closed.load(Ordering::Acquire) {
                    return;
                }
                {
                    let mut endpoints = upstream.endpoints.lock();
                    let Some(endpoint) = endpoints.find(&pod) else { return };
                    endpoint.answers = matches!(tried, Ok(Ok(_)));
                    if endpoint.answers {
                        upstream.room.notify_waiters();
                        return;
                    }
                }
                drop(upstream);
                tokio::time::sleep(PROBE_PERIOD).await;
            }
        };
        drop(tokio::spawn(probing));
    }

    /// Sends a request: waits for a pod with a free slot, at most until the deadline. A pod that refuses the connection
    /// is replaced by another one. A request whose connection breaks before the response may have been processed: it is
    /// repeated once, if its method is idempotent and it has no body (a server may close an idle connection at the
    /// moment in which the request is sent on it).
    pub(crate) fn call(
        self: &Arc<Self>,
        request: Request<Body>,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Answer, Refusal>> {
        let upstream = self.clone();
        Box::pin(async move {
            let arrived = Instant::now();
            let (parts, body) = request.into_parts();
            let mut repeats = parts.method.is_idempotent() && http_body::Body::is_end_stream(&body);
            let unread = UnreadBody::default();
            let mut next = body;
            let (cold, permit, started, response) = loop {
                let (cold, permit) = upstream.place(deadline).await?;
                let started = Instant::now();
                let request = Request::from_parts(parts.clone(), unread.lend(next));
                let request = upstream.addressed(request, &permit.pod)?;
                let error = match tokio::time::timeout_at(deadline, upstream.client.request(request)).await {
                    Err(_) => return Err(CallError::TimedOut { limit: upstream.timeout }.into()),
                    Ok(Ok(response)) => break (cold, permit, started, response),
                    Ok(Err(error)) => error,
                };
                if !error.is_connect() {
                    if !std::mem::take(&mut repeats) {
                        return Err(upstream.no_answer(&error));
                    }
                    next = body::empty();
                    continue;
                }
                upstream.lost(&permit.pod);
                // The pod ended without its object saying so yet, and has received nothing of the request.
                next = unread.take().ok_or_else(|| upstream.no_answer(&error))?;
            };
            let waited = started - arrived;
            let (load, queue) = if cold { (waited, Duration::ZERO) } else { (Duration::ZERO, waited) };
            let timings = Timings { cold, queue, load, instantiate: Duration::ZERO, run: started.elapsed() };
            let (limit, room) = (upstream.timeout, upstream.response_bytes_max);
            if http_body::Body::size_hint(response.body()).lower() > room {
                return Err(CallError::ResponseTooLarge { limit_bytes: room }.into());
            }
            let response =
                response.map(|body| DeadlineBody::new(body, deadline, limit, room, permit).boxed_unsync());
            Ok(Answer { response, timings })
        })
    }

    /// A slot at a pod, and whether no pod answered when the request arrived.
    async fn place(self: &Arc<Self>, deadline: Instant) -> Result<(bool, PodPermit), Refusal> {
        let mut cold = false;
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            // Enabled before the check, so that a slot that is freed in between is not missed.
            room.as_mut().enable();
            {
                let mut endpoints = self.endpoints.lock();
                if let Some(pod) = endpoints.acquire() {
                    return Ok((cold, PodPermit { upstream: self.clone(), pod }));
                }
                cold |= !endpoints.pods.iter().any(|pod| pod.answers);
            }
            if tokio::time::timeout_at(deadline, room).await.is_err() {
                return Err(self.no_pod());
            }
        }
    }

    /// Addresses the request to the pod, in HTTP/1.1; the `host` header remains the client's.
    fn addressed<B>(&self, mut request: Request<B>, pod: &PodAddress) -> Result<Request<B>, Refusal> {
        let authority = std::net::SocketAddr::new(pod.ip, self.port).to_string();
        let broken = |error: http::Error| Refusal::from(CallError::Internal(error.to_string()));
        let authority = Authority::try_from(authority).map_err(|error| broken(error.into()))?;
        let path = request.uri().path_and_query().cloned();
        let mut uri = Uri::builder().scheme("http").authority(authority);
        uri = uri.path_and_query(path.as_ref().map_or("/", |path| path.as_str()));
        *request.uri_mut() = uri.build().map_err(broken)?;
        *request.version_mut() = Version::HTTP_11;
        Ok(request)
    }

    /// Removes a pod that refuses connections: it gets no request until it answers again.
    fn lost(self: &Arc<Self>, pod: &PodAddress) {
        let was_answering = {
            let mut endpoints = self.endpoints.lock();
            endpoints.find(pod).is_some_and(|endpoint| std::mem::replace(&mut endpoint.answers, false))
        };
        if was_answering {
            self.probe(pod.clone());
        }
    }

    fn no_pod(&self) -> Refusal {
        let timeout = Span(self.timeout);
        let why = self.trouble.lock().clone().map_or_else(String::new, |why| format!(" ({why})"));
        let message = format!("no pod of revision {} was free within {timeout}{why}", self.revision);
        let hint = "see `kubectl get pods` and `kubectl describe pod`; the server must have containers (mayfly \
                    up --containers on), and the image must listen on spec.source.port";
        Refusal::new(RefusalCode::QueueTimeout, message, hint)
    }

    fn no_answer(&self, error: &dyn std::error::Error) -> Refusal {
        let cause = error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"));
        let message = format!("a pod of revision {} gave no answer: {cause}", self.revision);
        Refusal::new(
            RefusalCode::NoAnswer,
            message,
            "`mayfly logs` shows what it wrote; it may have been ended",
        )
    }
}

/// A request's slot at a pod; released on drop.
struct PodPermit {
    upstream: Arc<PodUpstream>,
    pod: PodAddress,
}

impl Drop for PodPermit {
    fn drop(&mut self) {
        self.upstream.endpoints.lock().release(&self.pod);
        self.upstream.room.notify_one();
    }
}

#[cfg(test)]
mod tests;
