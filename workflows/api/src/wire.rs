//! The wire form for tasks of this process that call Step Functions (`states:startExecution`, `aws-sdk:sfn:…`): their
//! arguments are requests in AWS's JSON.

use futures::future::BoxFuture;
use serde_json::Value;

use mayfly_workflows_engine::engine::{OperationError, WireOperations};
use mayfly_workflows_engine::service::{CredentialScope, StartExecution, WorkflowService};

use super::{Api, StepFunctionsError, executions, model};

/// Decodes and carries out the requests of tasks. Resources that a task creates belong to the default scope.
#[derive(Debug, Default)]
pub struct Wire;

impl WireOperations for Wire {
    fn decode_start(&self, request: &Value) -> Result<StartExecution, OperationError> {
        let decoded = model::check("StartExecution", request).and_then(|()| executions::start_of(request));
        decoded.map_err(operation_error)
    }

    fn call<'a>(
        &'a self,
        service: &'a WorkflowService,
        operation: &'a str,
        request: &'a Value,
    ) -> BoxFuture<'a, Result<Value, OperationError>> {
        Box::pin(async move {
            let answer =
                Api::new(service.clone()).call(operation, request, &CredentialScope::default()).await;
            answer.map_err(operation_error)
        })
    }
}

fn operation_error(error: StepFunctionsError) -> OperationError {
    OperationError { code: error.code.to_owned(), message: error.message.unwrap_or_default() }
}
