//! Exec, attach, port-forward and proxied requests: the node's end of streams that the API server forwards.
//!
//! Requests of exec, attach and port-forward upgrade their connection to WebSocket or SPDY ([`upgrade`]); after the
//! response, a task of this module owns the connection. [`channels`] speaks the protocol of exec and attach over
//! WebSocket, [`process`] the one over SPDY, [`forward`] the protocols of port-forward. [`log`] sends a log over
//! WebSocket, [`proxy`] forwards HTTP.

use std::sync::Arc;

use axum::{
    extract::{Path, Request, State},
    http::StatusCode,
    response::Response,
};
use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};
use mayfly_informer::Informer;
use mayfly_runtime::{ContainerId, PodUid, Runtime, StreamOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::upgrade::{Protocols, Upgraded, upgrade};
use crate::runtimes::{NodeRuntimes, class_of};

mod channels;
mod forward;
pub(crate) mod log;
mod process;
pub(crate) mod proxy;
mod spdy;
pub(crate) mod upgrade;

/// The number of concurrent streams of one node: each holds some buffers and a connection.
const STREAMS_MAX: usize = 1000;
/// The number of concurrent proxied requests of one node; counted apart from streams, since pods that never answer hold
/// them.
const PROXIED_MAX: usize = 1000;
/// The protocols of exec and attach.
const PROCESS_PROTOCOLS: Protocols = Protocols { websocket: &channels::PROTOCOLS, spdy: &process::PROTOCOLS };

/// The dependencies of a node's streams.
#[derive(Clone)]
pub(crate) struct PodStreams {
    pub(crate) node: String,
    pub(crate) pods: Informer<Pod>,
    pub(crate) runtimes: NodeRuntimes,
    permits: Arc<Semaphore>,
    proxied: Arc<Semaphore>,
}

/// A refusal before the protocol is switched.
pub(crate) type HttpRefusal = (StatusCode, String);

impl PodStreams {
    pub(crate) fn new(node: String, pods: Informer<Pod>, runtimes: NodeRuntimes) -> Self {
        let (permits, proxied) = (Semaphore::new(STREAMS_MAX), Semaphore::new(PROXIED_MAX));
        Self { node, pods, runtimes, permits: Arc::new(permits), proxied: Arc::new(proxied) }
    }

    fn pod(&self, namespace: &str, name: &str) -> Result<Arc<Pod>, HttpRefusal> {
        let pod = self.pods.get(&ObjectKey::new(namespace, name));
        let is_here =
            |pod: &Arc<Pod>| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&self.node);
        pod.filter(is_here)
            .ok_or_else(|| (StatusCode::NOT_FOUND, format!("pod {name:?} is not on this node")))
    }

    fn runtime(&self, pod: &Pod) -> Result<Arc<dyn Runtime>, HttpRefusal> {
        let runtime = self.runtimes.of_pod(pod).filter(|runtime| runtime.streams().is_some()).cloned();
        let refusal = || {
            let class = class_of(pod);
            let message = format!(
                "pods of runtime class {class:?} have no shell, no terminal and no port that could be reached: kubectl \
                 logs shows what they write"
            );
            (StatusCode::BAD_REQUEST, message)
        };
        runtime.ok_or_else(refusal)
    }

    fn permit(&self) -> Result<OwnedSemaphorePermit, HttpRefusal> {
        self.permits.clone().try_acquire_owned().map_err(|_| {
            (StatusCode::TOO_MANY_REQUESTS, format!("{STREAMS_MAX} streams are open on this node already"))
        })
    }

    fn proxy_permit(&self) -> Result<OwnedSemaphorePermit, HttpRefusal> {
        self.proxied.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{PROXIED_MAX} requests to pods of this node are open already");
            (StatusCode::TOO_MANY_REQUESTS, message)
        })
    }
}

/// The container's current attempt.
fn container_id(pod: &Pod, container: &str) -> ContainerId {
    let status = pod.status.as_ref();
    let statuses = status.into_iter().flat_map(|status| {
        let lists = [
            &status.container_statuses,
            &status.init_container_statuses,
            &status.ephemeral_container_statuses,
        ];
        lists.into_iter().flatten().flatten()
    });
    let attempt =
        statuses.filter(|status| status.name == container).map(|status| status.restart_count).next();
    ContainerId {
        pod: PodUid(pod.metadata.uid.clone().unwrap_or_default()),
        name: container.to_owned(),
        attempt: attempt.and_then(|count| u32::try_from(count).ok()).unwrap_or(0),
    }
}

pub(crate) async fn exec(
    State(streams): State<PodStreams>,
    Path((namespace, name, container)): Path<(String, String, String)>,
    request: Request,
) -> Response {
    answered(open_process(&streams, &namespace, &name, &container, request, true))
}

pub(crate) async fn attach(
    State(streams): State<PodStreams>,
    Path((namespace, name, container)): Path<(String, String, String)>,
    request: Request,
) -> Response {
    answered(open_process(&streams, &namespace, &name, &container, request, false))
}

pub(crate) async fn port_forward(
    State(streams): State<PodStreams>,
    Path((namespace, name)): Path<(String, String)>,
    request: Request,
) -> Response {
    answered(open_forward(&streams, &namespace, &name, request))
}

fn answered(result: Result<Response, HttpRefusal>) -> Response {
    result.unwrap_or_else(axum::response::IntoResponse::into_response)
}

fn open_process(
    streams: &PodStreams,
    namespace: &str,
    name: &str,
    container: &str,
    request: Request,
    is_exec: bool,
) -> Result<Response, HttpRefusal> {
    let pod = streams.pod(namespace, name)?;
    let runtime = streams.runtime(&pod)?;
    let (command, options) = process_query(request.uri().query().unwrap_or(""));
    if is_exec && command.is_empty() {
        return Err((
            StatusCode::BAD_REQUEST,
            "you must specify at least 1 command for the container".into(),
        ));
    }
    let id = container_id(&pod, container);
    let permit = streams.permit()?;
    upgrade(request, &PROCESS_PROTOCOLS, move |connection| async move {
        let _permit = permit;
        let Some(streams) = runtime.streams() else { return };
        let open = async {
            match is_exec {
                true => streams.exec(&id, command, options).await,
                false => streams.attach(&id, options).await,
            }
        };
        match connection {
            Upgraded::WebSocket(socket, protocol) => channels::run(*socket, protocol, open.await).await,
            Upgraded::Spdy(connection, protocol) => process::run(connection, protocol, options, open).await,
        }
    })
}

fn open_forward(
    streams: &PodStreams,
    namespace: &str,
    name: &str,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let pod = streams.pod(namespace, name)?;
    let runtime = streams.runtime(&pod)?;
    let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
    let permit = streams.permit()?;
    let ports = pairs(request.uri().query().unwrap_or(""))
        .filter(|(name, _)| name == "ports" || name == "port")
        .flat_map(|(_, list)| list.split(',').map(str::parse::<u16>).collect::<Vec<_>>())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| (StatusCode::BAD_REQUEST, "ports: not a list of port numbers".to_owned()))?;
    upgrade(request, &forward::PROTOCOLS, move |connection| async move {
        let _permit = permit;
        forward::run(connection, runtime, uid, ports).await;
    })
}

/// Upstream's parameters of exec and attach.
fn process_query(query: &str) -> (Vec<String>, StreamOptions) {
    let (mut command, mut options) = (Vec::new(), StreamOptions::default());
    for (name, value) in pairs(query) {
        let is_set = value == "1" || value.eq_ignore_ascii_case("true");
        match &*name {
            "command" => command.push(value),
            "stdin" => options.stdin = is_set,
            "stdout" => options.stdout = is_set,
            "stderr" => options.stderr = is_set,
            "tty" => options.tty = is_set,
            _ => {}
        }
    }
    (command, options)
}

fn pairs(query: &str) -> impl Iterator<Item = (String, String)> {
    url::form_urlencoded::parse(query.as_bytes()).map(|(name, value)| (name.into_owned(), value.into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_exec() {
        let (command, options) =
            process_query("command=sh&command=-c&command=a%20b&stdin=true&tty=1&stdout=false");
        assert_eq!(command, ["sh", "-c", "a b"]);
        assert_eq!(options, StreamOptions { stdin: true, stdout: false, stderr: false, tty: true });
    }

    #[test]
    fn the_current_attempt_is_reached() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p", "uid": "u"},
            "status": {"containerStatuses": [{"name": "a", "restartCount": 3, "image": "", "imageID": "", "ready": true}]}
        }))
        .unwrap();
        assert_eq!(container_id(&pod, "a").attempt, 3);
        assert_eq!(container_id(&pod, "b").attempt, 0);
    }
}
