//! The kubelet's HTTP API for the API server: logs, usage, streams into containers, images.

use std::{io, sync::Arc};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::Pod,
        jiff::{SignedDuration, Timestamp},
    },
    wellknown,
};
use mayfly_informer::Informer;
use mayfly_runtime::{
    ContainerId, PodUid,
    logs::{LogLayout, LogOptions, LogStream, read},
};
use serde::Deserialize;

use crate::{
    follow::Followed,
    function_logs::FunctionLogs,
    images::NodeImages,
    pod::container::log_path,
    streams::{self, HttpRefusal, PodStreams, upgrade::is_websocket},
    usage::Meters,
};

/// The content type of metrics.
const METRICS_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The locations of logs.
#[derive(Clone)]
pub(crate) struct Logs {
    pub(crate) node: String,
    pub(crate) pods: Informer<Pod>,
    pub(crate) layout: LogLayout,
    pub(crate) functions: FunctionLogs,
}

impl Logs {
    fn has(&self, pod: &Pod) -> bool {
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&self.node)
    }

    /// The replica under whose name a revision's log lines are shown, unless it is this one. Replicas of a revision
    /// on one node share its instances, so a line belongs to no single one; it must be shown once all the same when
    /// the logs of all are read. The oldest running replica is the one that is removed last.
    pub(crate) fn reporting_replica(&self, pod: &Pod) -> Option<String> {
        let revision = revision_of(pod)?;
        let siblings = self
            .pods
            .list()
            .into_iter()
            .filter(|other| self.has(other) && revision_of(other) == Some(revision) && is_running(other));
        let oldest = siblings.min_by_key(|other| {
            (other.metadata.creation_timestamp.as_ref().map(|time| time.0), other.metadata.name.clone())
        })?;
        oldest.metadata.name.clone().filter(|_| oldest.metadata.uid != pod.metadata.uid)
    }
}

/// The namespace and name of the revision that a pod is a replica of.
fn revision_of(pod: &Pod) -> Option<(&str, &str)> {
    let labels = pod.metadata.labels.as_ref()?;
    labels.get(wellknown::LABEL_FUNCTION)?;
    Some((pod.metadata.namespace.as_deref()?, labels.get(wellknown::LABEL_REVISION)?))
}

/// Whether a pod runs and is not being deleted.
fn is_running(pod: &Pod) -> bool {
    let running = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
    running && pod.metadata.deletion_timestamp.is_none()
}

/// The note that is sent instead of lines that another replica's log contains.
fn shared(at: &str, pod: &Pod, reporting_replica: &str) -> String {
    let revision = revision_of(pod).map_or("", |(_, name)| name);
    format!(
        "{at}(replicas of revision {revision} share its instances: see the log of pod {reporting_replica})\n"
    )
}

/// The query of `kubectl logs`, and `revision` for functions.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct LogQuery {
    follow: bool,
    timestamps: bool,
    previous: bool,
    tail_lines: Option<usize>,
    since_seconds: Option<i64>,
    since_time: Option<Timestamp>,
    limit_bytes: Option<u64>,
    revision: Option<String>,
}

impl LogQuery {
    fn options(&self) -> LogOptions {
        let ago = |seconds| {
            let since = Timestamp::now().checked_sub(SignedDuration::from_secs(seconds));
            // A time before the earliest timestamp: everything.
            since.unwrap_or(Timestamp::MIN)
        };
        LogOptions {
            follow: self.follow,
            timestamps: self.timestamps,
            tail_lines: self.tail_lines,
            since: self.since_time.or(self.since_seconds.map(ago)),
            limit_bytes: self.limit_bytes,
        }
    }
}

pub(crate) fn router(logs: Logs, meters: Arc<Meters>, streams: PodStreams, images: NodeImages) -> Router {
    let processes = Router::new()
        .route("/exec/{namespace}/{pod}/{container}", any(streams::exec))
        .route("/attach/{namespace}/{pod}/{container}", any(streams::attach))
        .route("/portForward/{namespace}/{pod}", any(streams::port_forward))
        .route("/proxy/{namespace}/{pod}/{port}/", any(streams::proxy::proxy))
        .route("/proxy/{namespace}/{pod}/{port}/{*path}", any(streams::proxy::proxy))
        .with_state(streams.clone());
    let container_logs = Router::new()
        .route("/containerLogs/{namespace}/{pod}/{container}", get(container_logs))
        .with_state((logs.clone(), streams));
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/pods", get(pods))
        .route("/functionLogs/{namespace}/{function}", get(function_logs))
        .with_state(logs)
        .merge(processes)
        .merge(container_logs)
        .merge(images.router())
        .merge(measurements(meters))
}

/// The usage of the node and its pods.
fn measurements(meters: Arc<Meters>) -> Router {
    Router::new()
        .route(
            "/stats/summary",
            get(|State(meters): State<Arc<Meters>>| async move { Json(meters.summary()) }),
        )
        .route("/metrics", get(metrics))
        .with_state(meters)
}

/// The node's metrics in Prometheus' text format.
async fn metrics(State(meters): State<Arc<Meters>>) -> Response {
    ([(header::CONTENT_TYPE, METRICS_FORMAT)], meters.metrics()).into_response()
}

/// The pods bound to this node, from this process's informer.
async fn pods(State(logs): State<Logs>) -> Json<serde_json::Value> {
    let items: Vec<_> = logs.pods.list().into_iter().filter(|pod| logs.has(pod)).collect();
    let items: Vec<_> = items.iter().map(|pod| &**pod).collect();
    Json(serde_json::json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
}

/// Responds with the log of a container, as text or as messages of a WebSocket.
async fn container_logs(
    State((logs, streams)): State<(Logs, PodStreams)>,
    Path(path): Path<(String, String, String)>,
    Query(query): Query<LogQuery>,
    request: Request,
) -> Response {
    match container_lines(logs, path, query).await {
        Ok(lines) if is_websocket(request.headers()) => {
            streams::log::respond(&streams, request, lines).unwrap_or_else(IntoResponse::into_response)
        }
        Ok(lines) => Body::from_stream(lines).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

async fn container_lines(
    logs: Logs,
    (namespace, name, container): (String, String, String),
    query: LogQuery,
) -> Result<LogStream, HttpRefusal> {
    let pod = logs.pods.get(&ObjectKey::new(namespace, &name));
    let Some(pod) = pod.filter(|pod| logs.has(pod)) else {
        return Err((StatusCode::NOT_FOUND, format!("pod {name:?} is not on this node")));
    };
    let statuses = pod.status.iter().flat_map(|status| {
        let listed = status.container_statuses.iter().chain(&status.init_container_statuses);
        listed.chain(&status.ephemeral_container_statuses).flatten()
    });
    let status = statuses.into_iter().find(|status| status.name == container);
    let attempt = status.map_or(0, |status| u32::try_from(status.restart_count).unwrap_or(0));
    let waiting = status.and_then(|status| status.state.as_ref()?.waiting.as_ref());
    let attempt = match (query.previous, waiting, attempt) {
        (true, _, 0) => {
            let message = format!("previous terminated container {container:?} in pod {name:?} not found");
            return Err((StatusCode::BAD_REQUEST, message));
        }
        // While the container waits to be restarted, its log is that of the attempt that ended, which is also the
        // previous one.
        (true, _, attempt) | (false, Some(_), attempt @ 1..) => attempt - 1,
        (false, Some(waiting), 0) => {
            let reason = waiting.reason.as_deref().unwrap_or("ContainerCreating");
            let message = format!("container {container:?} in pod {name:?} is waiting to start: {reason}");
            return Err((StatusCode::BAD_REQUEST, message));
        }
        (false, None, attempt) => attempt,
    };
    let at = if query.timestamps { format!("{} ", Timestamp::now()) } else { String::new() };
    let said = logs.reporting_replica(&pod).map(|reporting_replica| shared(&at, &pod, &reporting_replica));
    let id =
        ContainerId { pod: PodUid(pod.metadata.uid.clone().unwrap_or_default()), name: container, attempt };
    let lines = match said {
        said if query.follow => Followed::open(logs, pod, id, query.options(), said).await,
        Some(said) => Ok(stream::once(async { Ok(Bytes::from(said)) }).boxed()),
        None => read(log_path(&pod, &id, &logs.layout), query.options()).await,
    };
    lines.map_err(unreadable)
}

async fn function_logs(
    State(logs): State<Logs>,
    Path((namespace, function)): Path<(String, String)>,
    Query(query): Query<LogQuery>,
) -> Response {
    let options = query.options();
    match logs.functions.read(namespace, function, query.revision, options).await {
        Ok(lines) => Body::from_stream(lines).into_response(),
        Err(error) => unreadable(error).into_response(),
    }
}

fn unreadable(error: io::Error) -> HttpRefusal {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("cannot read the log: {error}"))
}
