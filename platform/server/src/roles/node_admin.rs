//! The admin address of a joined node: health, readiness, metrics.

use std::sync::Arc;

use axum::{Router, extract::State, http::StatusCode, routing::get};
use hyper_util::service::TowerToHyperService;
use mayfly_accept::AcceptPort;
use prometheus_client::registry::Registry;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use super::admin;

/// The sources of `/readyz` and `/metrics`.
#[derive(Clone)]
pub(super) struct NodeAdmin {
    pub(super) ready: watch::Receiver<bool>,
    pub(super) metrics: Arc<Registry>,
}

impl NodeAdmin {
    /// Serves until `stop`.
    pub(super) async fn serve(self, port: AcceptPort, listener: TcpListener, stop: CancellationToken) {
        let router = Router::new()
            .route("/", get(|| async { "mayfly node: /healthz  /livez  /readyz  /metrics\n" }))
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/livez", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route(
                "/metrics",
                get(|State(admin): State<Self>| async move { admin::exposition(&admin.metrics) }),
            )
            .with_state(self);
        port.serve(listener, None, TowerToHyperService::new(router), stop).await;
    }
}

async fn ready(State(admin): State<NodeAdmin>) -> (StatusCode, &'static str) {
    match *admin.ready.borrow() {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
    }
}
