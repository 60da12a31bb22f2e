//! Workflows in this process: the engine on its journal, and the Step Functions API in front of it.
//!
//! The engine asks for four things from outside, and they are handed to it here: functions (the gateway, in
//! process, under the same rules as a request from a socket), HTTP for `http:invoke`, files for the items and
//! results of distributed maps, time.

mod buckets;
mod functions;
mod web;

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use mayfly_gateway::GatewayHandle;
use mayfly_workflows_engine::{
    api::{Api, router},
    catalog::Catalog,
    engine::{Config, Deps, Endpoints, Engine, Limits, OsRandomness},
    timers::SystemClock,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::{buckets::Buckets, functions::GatewayFunctions, web::Web};

/// The largest answer of a function or of `http:invoke` that is read; a payload's own limit is smaller, and
/// is the machine's to tell.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// How long requests under way may take at a stop. A worker's question for work stays open for a minute, and
/// nobody waits for that.
const DRAIN: Duration = Duration::from_secs(2);

/// The workflow engine and its API, open and not yet serving.
pub(crate) struct Workflows {
    engine: Engine,
    api: Api,
}

impl Workflows {
    /// Opens journal, catalog and files below `folder`.
    pub(crate) async fn create(
        folder: &Path,
        functions: GatewayHandle,
        endpoints: Endpoints,
        retention: Duration,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (clock, randomness) = (Arc::new(SystemClock), Arc::new(OsRandomness));
        let deps = Deps {
            functions: Arc::new(GatewayFunctions::new(functions)),
            http: Arc::new(Web::new()),
            objects: Arc::new(Buckets { folder: folder.join("buckets") }),
            clock: clock.clone(),
            randomness: randomness.clone(),
        };
        let limits = Limits { retention, ..Limits::default() };
        let config = Config { limits, data_dir: Some(folder.to_owned()), endpoints, ..Config::default() };
        let engine = Engine::open(config, deps).await.context("cannot open the workflow journal")?;
        let catalog = folder.join("catalog.db");
        let catalog = Catalog::open(Some(&catalog)).context("cannot open the catalog of state machines")?;
        let api = Api::new(engine.clone(), Arc::new(catalog), clock, randomness);
        Ok(Self { engine, api })
    }

    /// The engine itself.
    pub(crate) fn engine(&self) -> Engine {
        self.engine.clone()
    }

    /// Goes on with what was running, and serves until `stop`; then leaves the rest for the next start.
    pub(crate) async fn serve(self, listener: TcpListener, stop: CancellationToken) -> anyhow::Result<()> {
        let resumed = self.engine.resume().await.context("cannot go on with executions")?;
        if resumed > 0 {
            tracing::info!(executions = resumed, "going on with executions");
        }
        let engine = self.engine;
        let stopped = stop.clone().cancelled_owned();
        let served = async { axum::serve(listener, router(self.api)).with_graceful_shutdown(stopped).await };
        let result = tokio::select! {
            result = served => result,
            () = async { stop.cancelled().await; tokio::time::sleep(DRAIN).await } => Ok(()),
        };
        engine.shutdown().await;
        Ok(result?)
    }
}
