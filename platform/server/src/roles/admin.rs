//! The admin address: health, readiness, metrics, and the image registry.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::StatusCode,
    http::header,
    response::{IntoResponse as _, Response},
    routing::get,
};
use hyper_util::service::TowerToHyperService;
use mayfly_accept::AcceptPort;
use mayfly_registry::RegistryServer;
use mayfly_store::Store;
use mayfly_workflows_engine::{catalog::Catalog, engine::Engine};
use mayfly_workflows_journal::WriteFault;
use prometheus_client::registry::Registry;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

/// The sources of `/readyz` and `/metrics`.
#[derive(Clone)]
pub(crate) struct Admin {
    pub(crate) ready: watch::Receiver<bool>,
    pub(crate) metrics: Arc<Registry>,
    /// Not ready while writes to the object store fail.
    pub(crate) store: Store,
    /// Not ready while writes to the journal fail.
    pub(crate) workflows: Engine,
    /// Not ready while writes to the catalog of state machines fail.
    pub(crate) catalog: Arc<Catalog>,
    /// Images and artifacts, below `/v2/`.
    pub(crate) registry: RegistryServer,
}

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

impl Admin {
    /// Serves until `stop`.
    pub(crate) async fn serve(self, port: AcceptPort, listener: TcpListener, stop: CancellationToken) {
        let registry = self.registry.clone();
        let service = TowerToHyperService::new(self.router());
        tokio::join!(port.serve(listener, None, service, stop.clone()), registry.run(stop));
    }

    fn store_failure(&self) -> Option<String> {
        let failure = self.store.failure()?;
        Some(format!(
            "the object store takes no more writes; look at its disk, then start Mayfly again (what was \
             acknowledged is kept): {failure}\n"
        ))
    }

    fn router(self) -> Router {
        let registry = self.registry.router();
        Router::new()
            .route(
                "/",
                get(|| async {
                    "mayfly: /healthz  /livez  /readyz  /metrics  /v2/ (a registry of images)\n"
                }),
            )
            .route("/healthz", get(healthy))
            .route("/livez", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self)
            .merge(registry)
    }
}

/// Unhealthy only if a restart of the process helps.
async fn healthy(State(admin): State<Admin>) -> (StatusCode, String) {
    match (admin.store_failure(), admin.workflows.health()) {
        (Some(failure), _) => (StatusCode::SERVICE_UNAVAILABLE, failure),
        (None, Err(trouble @ WriteFault::Failed(_))) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("{trouble}\n"))
        }
        (None, Ok(()) | Err(WriteFault::Retrying(_))) => (StatusCode::OK, "ok\n".into()),
    }
}

async fn ready(State(admin): State<Admin>) -> (StatusCode, String) {
    if let Some(failure) = admin.store_failure() {
        return (StatusCode::SERVICE_UNAVAILABLE, failure);
    }
    if admin.store.is_full() {
        let full =
            "the object store's disk is full: writes are refused until there is room in the data directory\n";
        return (StatusCode::SERVICE_UNAVAILABLE, full.into());
    }
    if let Err(trouble) = admin.workflows.health() {
        return (StatusCode::SERVICE_UNAVAILABLE, format!("{trouble}\n"));
    }
    let catalog = admin.catalog.clone();
    // May block on the disk.
    match tokio::task::spawn_blocking(move || catalog.health()).await {
        Ok(Err(trouble)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{trouble}\n")),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        Ok(Ok(())) if *admin.ready.borrow() => (StatusCode::OK, "ok\n".into()),
        Ok(Ok(())) => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n".into()),
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    exposition(&admin.metrics)
}

/// The response with the metrics of a registry, in the OpenMetrics format.
pub(super) fn exposition(metrics: &Registry) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, metrics) {
        Ok(()) => ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
