//! What the engine is given where a test needs no function, no web and no files.

use bytes::Bytes;
use futures::future::BoxFuture;
use http::Request;
use mayfly_workflows_engine::engine::{
    FunctionCall, FunctionError, FunctionOutput, Functions, HttpTasks, ObjectEntry, Objects,
};

/// No function, no web, no files.
pub(crate) struct Nowhere;

impl Functions for Nowhere {
    fn invoke(&self, call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, FunctionError>> {
        let cause = format!("Function not found: {}", call.function);
        Box::pin(async {
            Err(FunctionError { error_type: "Lambda.ResourceNotFoundException".into(), cause })
        })
    }
}

impl HttpTasks for Nowhere {
    fn send(&self, _: Request<Bytes>) -> BoxFuture<'_, Result<http::Response<Bytes>, String>> {
        Box::pin(async { Err("no network here".into()) })
    }
}

impl Objects for Nowhere {
    fn get(&self, _: &str, _: &str) -> BoxFuture<'_, Result<Bytes, String>> {
        Box::pin(async { Err("no objects here".into()) })
    }

    fn put(&self, _: &str, _: &str, _: Bytes) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Err("no objects here".into()) })
    }

    fn list(&self, _: &str, _: &str) -> BoxFuture<'_, Result<Vec<ObjectEntry>, String>> {
        Box::pin(async { Err("no objects here".into()) })
    }
}
