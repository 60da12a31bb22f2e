//! What the engine is given where a test needs no function, no web and no files; and all of it put together.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::Request;
use mayfly_workflows_api::{Api, Wire};
use mayfly_workflows_engine::catalog::Catalog;
use mayfly_workflows_engine::engine::{
    Config, Engine, EngineDeps, FunctionCall, FunctionError, FunctionOutput, Functions, HttpTasks,
    InvokeError, NoIntegrations, ObjectBody, ObjectError, ObjectPage, ObjectStore, OsRandomness,
};
use mayfly_workflows_engine::service::WorkflowService;
use mayfly_workflows_engine::timers::Clock;

/// An engine with its catalog and the API on both, in this folder or in memory.
pub(crate) async fn engine(folder: Option<&Path>, clock: Arc<dyn Clock>) -> (Engine, Arc<Catalog>, Api) {
    let path = folder.map(|folder| folder.join("catalog.db"));
    let catalog = Arc::new(Catalog::open(path.as_deref()).expect("the catalog opens"));
    let deps = EngineDeps {
        http: Arc::new(Nowhere),
        objects: Arc::new(Nowhere),
        clock,
        randomness: Arc::new(OsRandomness),
        catalog: catalog.clone(),
        wire: Arc::new(Wire),
        activities: catalog.clone(),
        supports_integration: |_| false,
        mocks: None,
    };
    let config = Config { data_dir: folder.map(Path::to_owned), ..Config::default() };
    let opened = Engine::open(config, deps).await.expect("the engine opens");
    let engine = opened.start(Arc::new(Nowhere), Arc::new(NoIntegrations));
    let api = Api::new(WorkflowService::new(engine.clone()));
    (engine, catalog, api)
}

/// No function, no web, no files.
struct Nowhere;

impl Functions for Nowhere {
    fn invoke(&self, call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, InvokeError>> {
        let cause = format!("Function not found: {}", call.function);
        Box::pin(async { Err(FunctionError::new("Lambda.ResourceNotFoundException", cause).into()) })
    }
}

impl HttpTasks for Nowhere {
    fn send(&self, _: Request<Bytes>) -> BoxFuture<'_, Result<http::Response<Bytes>, String>> {
        Box::pin(async { Err("no network here".into()) })
    }
}

impl ObjectStore for Nowhere {
    fn get(&self, _: &str, _: &str, _: Option<&str>) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
        Box::pin(async { Err(ObjectError::no_such_bucket()) })
    }

    fn put(&self, _: &str, _: &str, _: Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
        Box::pin(async { Err(ObjectError::no_such_bucket()) })
    }

    fn list(&self, _: &str, _: &str, _: Option<String>) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
        Box::pin(async { Err(ObjectError::no_such_bucket()) })
    }
}
