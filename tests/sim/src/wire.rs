//! The connections between the parts and the API server, with their faults.

use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use futures::stream;
use http::{Method, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::{Client, client::Body};
use mayfly_api::wellknown;
use mayfly_apiserver::User;
use mayfly_store::Key;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    faults::{RequestFault, WatchFault},
    model::{controller, text},
    run::Broken,
    simulation_state::SimulationState,
    target::Target,
};

/// A connection of one part of the platform, or of the user.
#[derive(Clone)]
pub struct SimulatedWire {
    pub simulation: Arc<SimulationState>,
    /// The name of the part, for the trace.
    pub part: &'static str,
    pub user: User,
    /// Cancelled when the part crashes: nothing of it reaches the server any more.
    pub crashed: CancellationToken,
    /// Requests of the user meet no faults but those of the server.
    pub is_faultless: bool,
}

impl std::fmt::Debug for SimulatedWire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedWire").field("part", &self.part).finish_non_exhaustive()
    }
}

/// A broken connection.
#[derive(Clone, Copy, Debug)]
pub struct WireError(&'static str);

type WireBody = UnsyncBoxBody<Bytes, WireError>;

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for WireError {}

impl SimulatedWire {
    pub fn client(self) -> Client {
        let service = tower::service_fn(move |request| {
            let wire = self.clone();
            async move { wire.call(request).await }
        });
        Client::new(service, wellknown::NAMESPACE_DEFAULT)
    }

    async fn call(&self, request: Request<Body>) -> Result<Response<WireBody>, WireError> {
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await.map_err(|_| WireError("the request cannot be read"))?;
        let target = Target::of(parts.uri.path());
        let sent: Value = if parts.method == Method::GET {
            Value::Null
        } else {
            serde_json::from_slice(&body).unwrap_or_default()
        };
        // There are no artifacts, and the server would list them on a thread of its own: when that is done depends on
        // the machine.
        if parts.uri.path() == "/artifacts" {
            return Ok(answer(StatusCode::OK, &json!({"items": []})));
        }
        let is_watch =
            parts.uri.query().is_some_and(|query| query.split('&').any(|part| part == "watch=true"));
        let fault = self.fault(&parts.method, &target, &sent, is_watch);
        self.simulation.latency().await;
        match fault {
            RequestFault::Refused => return Err(WireError("connection refused")),
            RequestFault::Busy(code) => return Ok(refusal(code, "ServiceUnavailable")),
            RequestFault::Conflict => return Ok(refusal(409, "Conflict")),
            RequestFault::Expired => return Ok(refusal(410, "Expired")),
            RequestFault::None | RequestFault::LostAnswer => {}
        }
        if self.crashed.is_cancelled() {
            return Err(WireError("this process has ended"));
        }
        let (client, server_crashed) =
            self.simulation.server(&self.user).ok_or(WireError("connection refused"))?;
        let collected = self.begins_collection(&parts.method, &target, &sent);
        let request = Request::from_parts(parts.clone(), Body::from(body));
        let answer = tokio::select! {
            biased;
            () = self.crashed.cancelled() => None,
            () = server_crashed.cancelled() => None,
            answer = client.send(request) => Some(answer),
        };
        if let Some(key) = collected {
            self.ends_collection(&key);
        }
        let answer = match answer {
            Some(answer) if fault != RequestFault::LostAnswer => answer,
            _ => {
                self.lost(&parts.method, &target, &sent);
                return Err(WireError("connection reset by peer"));
            }
        };
        let answer = answer.map_err(|_| WireError("the server failed"))?;
        self.simulation.latency().await;
        if self.crashed.is_cancelled() || server_crashed.is_cancelled() {
            self.lost(&parts.method, &target, &sent);
            return Err(WireError("connection reset by peer"));
        }
        let (head, body) = answer.into_parts();
        let body = if is_watch && head.status == StatusCode::OK {
            WatchLines::new(self.clone(), server_crashed, body, target.resource()).body()
        } else {
            body.map_err(|_| WireError("the answer broke off")).boxed_unsync()
        };
        Ok(Response::from_parts(head, body))
    }

    /// The fault of a request. Those of the garbage collector and of nodes are judged too: a lost node reaches nothing.
    fn fault(&self, method: &Method, target: &Target, sent: &Value, is_watch: bool) -> RequestFault {
        if self.part == "nodes" && method != Method::GET && self.is_of_lost_node(target) {
            return RequestFault::Refused;
        }
        if self.is_faultless {
            return RequestFault::None;
        }
        let is_conditional = matches!(*method, Method::PUT | Method::PATCH)
            && !text(sent, "/metadata/resourceVersion").is_empty();
        let fault = self.simulation.draw(|rates, random| rates.request(random, is_watch, is_conditional));
        if fault != RequestFault::None {
            self.simulation.trace(format_args!("fault {}: {method} {target} {fault:?}", self.part));
        }
        fault
    }

    fn is_of_lost_node(&self, target: &Target) -> bool {
        let Some(key) = &target.key else { return false };
        match &*key.resource {
            "nodes" | "leases.coordination.k8s.io" => self.simulation.is_lost(&key.name),
            "pods" => {
                let oracle = self.simulation.oracle.lock();
                let node = oracle.get(key).map(|pod| text(pod, "/spec/nodeName").to_owned());
                drop(oracle);
                node.is_some_and(|node| self.simulation.is_lost(&node))
            }
            _ => false,
        }
    }

    /// The garbage collector alone deletes upon the version that it judged.
    fn begins_collection(&self, method: &Method, target: &Target, sent: &Value) -> Option<Key> {
        let is_collector = self.part == "controllers"
            && method == Method::DELETE
            && !text(sent, "/preconditions/resourceVersion").is_empty();
        let key = target.key.clone().filter(|_| is_collector)?;
        *self.simulation.oracle.lock().hints.collecting.entry(key.clone()).or_default() += 1;
        Some(key)
    }

    fn ends_collection(&self, key: &Key) {
        let collecting = &mut self.simulation.oracle.lock().hints.collecting;
        if let Some(count) = collecting.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                collecting.remove(key);
            }
        }
    }

    /// The client does not learn the outcome of this request.
    fn lost(&self, method: &Method, target: &Target, sent: &Value) {
        if method != Method::POST {
            return;
        }
        let hints = &mut self.simulation.oracle.lock().hints;
        match (target.resource(), &target.key) {
            ("pods", None) => {
                if let Some(owner) = controller(sent) {
                    *hints.lost_creations.entry(text(owner, "/uid").into()).or_default() += 1;
                }
            }
            ("pods", Some(key)) if target.subresource == "binding" => {
                hints.lost_bindings.insert(key.clone());
            }
            _ => {}
        }
    }
}

fn refusal(code: u16, reason: &str) -> Response<WireBody> {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "a simulated fault", "reason": reason, "code": code,
    });
    answer(StatusCode::from_u16(code).unwrap_or(StatusCode::SERVICE_UNAVAILABLE), &status)
}

fn answer(code: StatusCode, object: &Value) -> Response<WireBody> {
    let body = Full::new(Bytes::from(object.to_string())).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

/// The events of a watch on their way to its client.
struct WatchLines {
    wire: SimulatedWire,
    server_crashed: CancellationToken,
    body: Body,
    resource: String,
    /// Bytes of a line that is not complete.
    partial: BytesMut,
    lines: VecDeque<Bytes>,
    again: Option<Bytes>,
    stalled_at: Option<Duration>,
    /// Of the last event.
    revision: u64,
    has_ended: bool,
}

/// A watch stalls at most this often, so that its delays do not add up.
const STALL_EVERY: Duration = Duration::from_secs(30);

impl WatchLines {
    fn new(wire: SimulatedWire, server_crashed: CancellationToken, body: Body, resource: &str) -> Self {
        Self {
            wire,
            server_crashed,
            body,
            resource: resource.into(),
            partial: BytesMut::new(),
            lines: VecDeque::new(),
            again: None,
            stalled_at: None,
            revision: 0,
            has_ended: false,
        }
    }

    fn body(self) -> WireBody {
        let frames = stream::unfold(self, |mut lines| async move {
            let line = lines.next().await?;
            Some((line.map(Frame::data), lines))
        });
        StreamBody::new(frames).boxed_unsync()
    }

    async fn next(&mut self) -> Option<Result<Bytes, WireError>> {
        if self.has_ended {
            return None;
        }
        let line = self.next_line().await;
        self.has_ended = !matches!(line, Some(Ok(_)));
        line
    }

    async fn next_line(&mut self) -> Option<Result<Bytes, WireError>> {
        if let Some(line) = self.again.take() {
            return Some(Ok(line));
        }
        loop {
            if let Some(line) = self.lines.pop_front() {
                if self.is_dropped() {
                    continue;
                }
                return Some(self.deliver(line).await);
            }
            let frame = tokio::select! {
                biased;
                () = self.wire.crashed.cancelled() => return Some(Err(WireError("this process has ended"))),
                () = self.server_crashed.cancelled() => return Some(Err(WireError("connection reset by peer"))),
                frame = self.body.frame() => frame,
            };
            match frame {
                None => return None,
                Some(Err(_)) => return Some(Err(WireError("the watch broke off"))),
                Some(Ok(frame)) => self.take(&frame.into_data().unwrap_or_default()),
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.partial.extend_from_slice(bytes);
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line = self.partial.split_to(end + 1).freeze();
            self.check(&line);
            self.lines.push_back(line);
        }
    }

    /// The revisions of a watch increase.
    fn check(&mut self, line: &[u8]) {
        let event: Value = serde_json::from_slice(line).unwrap_or_default();
        let revision = text(&event, "/object/metadata/resourceVersion").parse().unwrap_or(0);
        let kind = text(&event, "/type");
        let is_fine = match kind {
            "BOOKMARK" => revision >= self.revision,
            "ERROR" => true,
            _ => revision > self.revision,
        };
        if !is_fine {
            let problem = format!(
                "a watch of {} sends {kind} of revision {revision} after {}",
                self.resource, self.revision
            );
            self.wire.simulation.oracle.lock().violate(problem);
        }
        self.revision = self.revision.max(revision);
    }

    async fn deliver(&mut self, line: Bytes) -> Result<Bytes, WireError> {
        let simulation = self.wire.simulation.clone();
        simulation.latency().await;
        let fault = if self.wire.is_faultless {
            WatchFault::None
        } else {
            simulation.draw(|rates, random| rates.watch(random))
        };
        match fault {
            WatchFault::None => {}
            WatchFault::Stalled(pause) => {
                if self.stalled_at.is_none_or(|at| simulation.now().saturating_sub(at) > STALL_EVERY) {
                    simulation.trace(format_args!(
                        "fault {}: the watch of {} stalls",
                        self.wire.part, self.resource
                    ));
                    tokio::time::sleep(pause).await;
                    self.stalled_at = Some(simulation.now());
                }
            }
            WatchFault::Cut => {
                simulation
                    .trace(format_args!("fault {}: the watch of {} breaks", self.wire.part, self.resource));
                return Err(WireError("connection reset by peer"));
            }
            WatchFault::Doubled => self.again = Some(line.clone()),
        }
        Ok(line)
    }

    /// A deliberately broken watch loses events without an end: some pods' changes never reach the controllers.
    fn is_dropped(&self) -> bool {
        self.wire.simulation.broken == Some(Broken::SilentWatch)
            && self.wire.part == "controllers"
            && self.resource == "pods"
            && self.wire.simulation.draw(|_, random| random.chance(0.2))
    }
}
