//! The service integrations of this process, beside those of the engine itself.

use std::sync::Arc;

use futures::future::BoxFuture;
use mayfly_workflows_engine::engine::{FunctionError, IntegrationCall, Integrations, InvokeError};
use serde_json::Value;

/// Several services as one: the first that supports a resource has it.
pub struct Services(pub Vec<Arc<dyn Integrations>>);

impl Integrations for Services {
    fn supports(&self, resource: &str) -> bool {
        self.0.iter().any(|service| service.supports(resource))
    }

    fn call(&self, call: IntegrationCall) -> BoxFuture<'_, Result<Value, InvokeError>> {
        match self.0.iter().find(|service| service.supports(&call.resource)) {
            Some(service) => service.call(call),
            None => Box::pin(async move {
                let cause = format!("no service of this process carries out {}", call.resource);
                Err(FunctionError::not_supported(cause).into())
            }),
        }
    }
}
