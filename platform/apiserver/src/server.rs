//! The server: made from its parts, then used in process and over TLS.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderValue, Request, header};
use mayfly_api::wellknown;
use mayfly_artifacts::Artifacts;
use mayfly_store::{Store, Write, WriteError};
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::{RwLock, Semaphore, SemaphorePermit};
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::{Service, ServiceExt};

use crate::{
    access::{Authenticator, User},
    admission::{self, Webhooks},
    artifacts::Uploads,
    compaction::{self, Compaction},
    config::{ApiServerDeps, Clock, Config, FunctionConnector, Inspector, NodeConnector},
    custom::{self, CustomKinds},
    event_objects::EventObjects,
    handler, meta,
    metrics::Metrics,
    namespaces,
    object::Object,
    rbac::{self, Rbac},
    registry::registry,
    services::Allocations,
    status::ApiError,
    tokens::{self, Tokens},
    verbs,
    views::{KindView, Views},
};

/// The longest wait of a request for a permit before it is refused with 429.
const TURN_WAIT_MAX: Duration = Duration::from_secs(2);
/// The namespaces that always exist.
pub(crate) const NAMESPACES: [&str; 4] = [
    wellknown::NAMESPACE_DEFAULT,
    wellknown::NAMESPACE_SYSTEM,
    wellknown::NAMESPACE_PUBLIC,
    wellknown::NAMESPACE_NODE_LEASE,
];

/// The reason why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerStartError {
    #[error("the standard namespaces cannot be written: {0}")]
    Namespaces(WriteError),
    #[error("the default roles and classes cannot be written: {0}")]
    Bootstrap(WriteError),
    #[error("the key of the service accounts is not an ECDSA P-256 key in PKCS #8")]
    ServiceAccountKey,
}

/// A handle of the API server. Clones share one server.
#[derive(Clone)]
pub struct ApiServer {
    pub(crate) inner: Arc<ServerState>,
    /// Ends background work and watches when the last handle is dropped.
    _stop: Arc<DropGuard>,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServer").finish_non_exhaustive()
    }
}

/// The state that requests share.
pub(crate) struct ServerState {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) artifacts: Artifacts,
    pub(crate) clock: Clock,
    pub(crate) nodes: NodeConnector,
    pub(crate) inspector: Inspector,
    pub(crate) authenticator: Authenticator,
    /// Held shared by creations and exclusively while a namespace is marked for deletion: no object is created in a
    /// marked namespace.
    pub(crate) namespaces: RwLock<()>,
    pub(crate) rbac: Rbac,
    pub(crate) custom: CustomKinds,
    pub(crate) webhooks: Webhooks,
    pub(crate) tokens: Tokens,
    pub(crate) compaction: Compaction,
    /// Held while an object that counts against a quota is written.
    pub(crate) quota: Arc<tokio::sync::Mutex<()>>,
    /// Held while a Service is written.
    pub(crate) allocations: tokio::sync::Mutex<Allocations>,
    in_flight: Semaphore,
    pub(crate) watches: Arc<Semaphore>,
    pub(crate) uploads: Uploads,
    pub(crate) event_objects: Arc<EventObjects>,
    pub(crate) metrics: Metrics,
    pub(crate) shutdown: CancellationToken,
    pub(crate) views: Views,
    /// Calls functions, once the gateway exists.
    pub(crate) functions: std::sync::OnceLock<FunctionConnector>,
    /// The registry that `/metrics` prints, once it is complete.
    pub(crate) exposition: std::sync::OnceLock<Arc<Registry>>,
}

impl ApiServer {
    /// Builds the server, creates the standard objects, and starts the background tasks. The metrics of requests are
    /// registered in `metrics`.
    pub async fn create(
        config: Config,
        deps: ApiServerDeps,
        metrics: &mut Registry,
    ) -> Result<Self, ServerStartError> {
        let shutdown = CancellationToken::new();
        let key = config.service_account_key.clone().unwrap_or_else(tokens::new_key);
        let tokens = Tokens::new(&key).ok_or(ServerStartError::ServiceAccountKey)?;
        let inner = Arc::new(ServerState {
            authenticator: Authenticator::new(&config.token),
            namespaces: RwLock::new(()),
            rbac: Rbac::default(),
            custom: CustomKinds::default(),
            webhooks: Webhooks::default(),
            tokens,
            compaction: Compaction::default(),
            quota: Arc::default(),
            allocations: Default::default(),
            in_flight: Semaphore::new(config.requests_in_flight_max),
            watches: Arc::new(Semaphore::new(config.watches_max)),
            uploads: Uploads::default(),
            event_objects: Arc::default(),
            metrics: Metrics::register(metrics),
            shutdown: shutdown.clone(),
            views: Views::default(),
            functions: std::sync::OnceLock::new(),
            exposition: std::sync::OnceLock::new(),
            store: deps.store,
            artifacts: deps.artifacts,
            clock: deps.clock,
            nodes: deps.nodes,
            inspector: deps.inspector,
            config,
        });
        inner.make_namespaces().await?;
        inner.make_bootstrap_objects().await.map_err(ServerStartError::Bootstrap)?;
        inner.make_flow_objects().await.map_err(ServerStartError::Bootstrap)?;
        inner.custom.reload(&inner.store);
        inner.webhooks.reload(&inner.store);
        tokio::spawn(custom::run(Arc::clone(&inner)));
        tokio::spawn(namespaces::run(Arc::clone(&inner)));
        tokio::spawn(admission::run_quota_status(Arc::clone(&inner)));
        tokio::spawn(rbac::run_aggregation(Arc::clone(&inner)));
        tokio::spawn(compaction::run(Arc::clone(&inner)));
        Ok(Self { inner, _stop: Arc::new(shutdown.drop_guard()) })
    }

    /// The API as a tower service, for a server or a test.
    pub fn service<B>(
        &self,
    ) -> impl Service<Request<B>, Response = Response, Error = Infallible, Future: Send>
    + Clone
    + Send
    + Sync
    + 'static
    where
        B: http_body::Body<Data = Bytes, Error: Into<axum::BoxError>> + Send + 'static,
    {
        let inner = Arc::clone(&self.inner);
        tower::service_fn(move |request: Request<B>| {
            handler::handle(Arc::clone(&inner), request.map(Body::new)).map(Ok)
        })
    }

    /// A client within the process, without socket and TLS; requests carry `user`. Fields that it writes are owned by
    /// the last part of the user's name (`kube-scheduler`; for controllers `kube-controller-manager`, for a node
    /// `kubelet`), as upstream names owners after the user agents of its components.
    pub fn client(&self, user: User) -> kube::Client {
        let service = self.service();
        let agent = HeaderValue::from_str(agent_of(&user.name)).ok();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (mut parts, body) = request.into_parts();
            parts.extensions.insert(user.clone());
            if let Some(agent) = &agent {
                parts.headers.insert(header::USER_AGENT, agent.clone());
            }
            service.clone().oneshot(Request::from_parts(parts, body))
        });
        kube::Client::new(service, wellknown::NAMESPACE_DEFAULT)
    }

    /// Sets the view that serves the objects of `resource` (`executions.mayfly.dev`). Before that, requests for it
    /// are refused.
    pub fn attach_view(&self, resource: &'static str, view: Arc<dyn KindView>) {
        self.inner.views.attach(resource, view);
    }

    /// Sets how `functions/x/proxy` calls functions. Before that, these requests are refused. Only the first call counts.
    pub fn attach_functions(&self, functions: FunctionConnector) {
        let _ = self.inner.functions.set(functions);
    }

    /// Gives the server the metrics that it prints at `/metrics`. Only the first call counts.
    pub fn attach_metrics(&self, metrics: Arc<Registry>) {
        let _ = self.inner.exposition.set(metrics);
    }

    /// Ends all watches and refuses new ones: the first step of a shutdown.
    pub fn shut_down(&self) {
        self.inner.shutdown.cancel();
    }
}

fn agent_of(user: &str) -> &str {
    if user.starts_with("system:node:") {
        return "kubelet";
    }
    if user == "system:mayfly:controllers" {
        return "kube-controller-manager";
    }
    user.rsplit(':').next().unwrap_or(user)
}

impl ServerState {
    pub(crate) fn now(&self) -> jiff::Timestamp {
        (self.clock)()
    }

    /// A permit among the concurrent requests. Parts of this process need none.
    pub(crate) async fn acquire_permit(&self, user: &User) -> Result<Option<SemaphorePermit<'_>>, ApiError> {
        if user.is_in_process() {
            return Ok(None);
        }
        let turn = tokio::time::timeout(TURN_WAIT_MAX, self.in_flight.acquire()).await;
        let permit =
            turn.map_err(|_| ApiError::too_many_requests("too many concurrent requests: retry in a moment"))?;
        Ok(permit.ok())
    }

    async fn make_namespaces(&self) -> Result<(), ServerStartError> {
        let kind = registry().find("", "v1", "namespaces").expect("the row is there");
        let missing =
            NAMESPACES.into_iter().filter(|name| self.store.get(&verbs::key(kind, "", name)).is_none());
        let writes: Vec<_> = missing
            .map(|name| {
                let mut object = Object::default();
                object.0.insert("apiVersion".into(), json!(kind.api_version()));
                object.0.insert("kind".into(), json!(kind.kind));
                object.meta_mut().insert("name".into(), json!(name));
                meta::on_create(&mut object, kind, self.now());
                (kind.on_create)(&mut object);
                (kind.defaults)(&mut object);
                Write::Create { key: verbs::key(kind, "", name), value: object.encode() }
            })
            .collect();
        if !writes.is_empty() {
            self.store.write_all(writes).await.map_err(ServerStartError::Namespaces)?;
        }
        Ok(())
    }
}
