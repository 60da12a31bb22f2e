//! The service integrations of this process, beside those of the engine itself.

use std::sync::Arc;

use futures::future::BoxFuture;
use mayfly_workflows_engine::engine::{FunctionError, IntegrationCall, Integrations, InvokeError};
use serde_json::Value;

use super::events::PutEvents;
use super::invocations::Invocations;
use super::jobs::Jobs;

/// The services of this process that tasks can call.
pub struct Services {
    /// Runs jobs.
    pub jobs: Arc<Jobs>,
    /// Publishes events to triggers.
    pub events: PutEvents,
    /// Calls functions for their asynchronous invocations.
    pub invocations: Arc<Invocations>,
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Services").finish_non_exhaustive()
    }
}

impl Services {
    /// Whether one of the services carries out a resource (`arn:aws:states:::job:run.sync`).
    pub fn supports(resource: &str) -> bool {
        Jobs::supports(resource) || PutEvents::supports(resource) || Invocations::supports(resource)
    }
}

impl Integrations for Services {
    fn call(&self, call: IntegrationCall) -> BoxFuture<'_, Result<Value, InvokeError>> {
        Box::pin(async move {
            match &*call.resource {
                resource if Jobs::supports(resource) => Ok(self.jobs.run(call).await?),
                resource if PutEvents::supports(resource) => self.events.put(call).await,
                resource if Invocations::supports(resource) => Box::pin(self.invocations.attempt(call)).await,
                resource => {
                    let cause = format!("no service of this process carries out {resource}");
                    Err(FunctionError::not_supported(cause).into())
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resources_of_the_services_are_supported() {
        for resource in ["job:run", "job:run.sync", "events:putEvents", "mayfly:invoke"] {
            assert!(Services::supports(&format!("arn:aws:states:::{resource}")), "{resource}");
        }
        assert!(!Services::supports("arn:aws:states:::sqs:sendMessage"));
    }
}
