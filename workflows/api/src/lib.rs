//! The Step Functions API: 37 operations over the engine and the catalog.
//!
//! [`http`] implements the protocol (awsJson1_0), [`model`] checks a request against the public service model,
//! [`Api::call`] dispatches the operation. Each operation reads its parameters, calls the catalog or the engine, and
//! builds the answer in AWS's form; the messages of refusals are in [`error`].
//!
//! Not here: the meaning of a definition (the language), executions (the engine), authentication (any signature is
//! accepted; the listener's address decides who reaches it).

mod activities;
mod aliases;
mod arn;
mod callbacks;
mod error;
mod executions;
mod http;
mod map_runs;
mod model;
mod paging;
mod params;
mod resolve;
mod state_machines;
mod tags;
mod test_state;
mod validate;
mod versions;

pub use arn::CredentialScope;
pub use error::StepFunctionsError;
pub use http::router;
pub use model::operations;

use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::Value;

use mayfly_workflows_engine::catalog::{
    Catalog, CatalogChange, CatalogError, CatalogRejection, CatalogState,
};
use mayfly_workflows_engine::engine::{Activities, Engine, OperationError, Operations, Randomness};
use mayfly_workflows_engine::timers::Clock;
use mayfly_workflows_journal::WaitedBy;

/// The API over one engine and one catalog. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    engine: Engine,
    catalog: Arc<Catalog>,
    clock: Arc<dyn Clock>,
    randomness: Arc<dyn Randomness>,
}

/// The answer of an operation: the body of the response, or an error.
pub(crate) type Answer = Result<Value, StepFunctionsError>;

impl Api {
    /// Puts the API on top of an engine, and tells the engine how to reach it for tasks that call Step
    /// Functions themselves (`states:startExecution`, `aws-sdk:sfn:*`, activities).
    pub fn new(
        engine: Engine,
        catalog: Arc<Catalog>,
        clock: Arc<dyn Clock>,
        randomness: Arc<dyn Randomness>,
    ) -> Api {
        let api = Api { engine, catalog, clock, randomness };
        api.engine.bind_activities(Arc::new(KnownActivities(Arc::clone(&api.catalog))));
        api.engine.bind_operations(Arc::new(OwnOperations(api.clone())));
        api
    }

    /// The catalog below the API.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.catalog
    }

    /// Runs one operation for `scope`: checks the parameters against the model, then does it.
    pub async fn call(&self, operation: &str, params: &Value, scope: &CredentialScope) -> Answer {
        model::check(operation, params)?;
        match operation {
            "CreateActivity" => self.create_activity(params, scope).await,
            "CreateStateMachine" => self.create_state_machine(params, scope).await,
            "CreateStateMachineAlias" => self.create_alias(params).await,
            "DeleteActivity" => self.delete_activity(params).await,
            "DeleteStateMachine" => self.delete_state_machine(params).await,
            "DeleteStateMachineAlias" => self.delete_alias(params).await,
            "DeleteStateMachineVersion" => self.delete_version(params).await,
            "DescribeActivity" => self.describe_activity(params),
            "DescribeExecution" => self.describe_execution(params).await,
            "DescribeMapRun" => self.describe_map_run(params).await,
            "DescribeStateMachine" => self.describe_state_machine(params).await,
            "DescribeStateMachineAlias" => self.describe_alias(params),
            "DescribeStateMachineForExecution" => self.describe_for_execution(params).await,
            "GetActivityTask" => self.get_activity_task(params).await,
            "GetExecutionHistory" => self.get_execution_history(params).await,
            "ListActivities" => self.list_activities(params, scope),
            "ListExecutions" => self.list_executions(params).await,
            "ListMapRuns" => self.list_map_runs(params).await,
            "ListStateMachineAliases" => self.list_aliases(params),
            "ListStateMachineVersions" => self.list_versions(params),
            "ListStateMachines" => self.list_state_machines(params, scope).await,
            "ListTagsForResource" => self.list_tags(params),
            "PublishStateMachineVersion" => self.publish_version(params).await,
            "RedriveExecution" => self.redrive_execution(params).await,
            "SendTaskFailure" => self.send_task_failure(params).await,
            "SendTaskHeartbeat" => self.send_task_heartbeat(params).await,
            "SendTaskSuccess" => self.send_task_success(params).await,
            "StartExecution" => self.start_execution(params).await,
            "StartSyncExecution" => self.start_sync_execution(params).await,
            "StopExecution" => self.stop_execution(params).await,
            "TagResource" => self.tag_resource(params).await,
            "TestState" => self.test_state(params, scope).await,
            "UntagResource" => self.untag_resource(params).await,
            "UpdateMapRun" => self.update_map_run(params).await,
            "UpdateStateMachine" => self.update_state_machine(params).await,
            "UpdateStateMachineAlias" => self.update_alias(params).await,
            "ValidateStateMachineDefinition" => {
                validate::validate_definition(params, |resource| self.engine.carries_out(resource))
            }
            _ => Err(StepFunctionsError::unknown_operation()),
        }
    }

    fn now(&self) -> i64 {
        self.clock.now_ms()
    }

    fn uuid(&self) -> String {
        self.randomness.uuid().to_string()
    }

    /// A change of the catalog. It waits for the disk, so it has a thread for blocking work.
    async fn change<T: Send + 'static>(
        &self,
        plan: impl FnOnce(&CatalogState) -> Result<(Vec<CatalogChange>, T), CatalogRejection> + Send + 'static,
    ) -> Result<T, CatalogRejection> {
        let catalog = Arc::clone(&self.catalog);
        match tokio::task::spawn_blocking(move || catalog.change(plan)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(CatalogRejection::Store(CatalogError::Interrupted)),
        }
    }
}

/// The engine's question to the catalog.
struct KnownActivities(Arc<Catalog>);

impl Activities for KnownActivities {
    fn exists(&self, arn: &str) -> bool {
        self.0.read().activity(arn).is_some()
    }
}

/// The engine's way to our own operations. The scope is that of the resources the request names; what is
/// created from inside a workflow belongs to the default scope.
struct OwnOperations(Api);

impl Operations for OwnOperations {
    fn call(&self, operation: &str, request: Value) -> BoxFuture<'_, Result<Value, OperationError>> {
        let operation = operation.to_owned();
        Box::pin(async move {
            self.0.call(&operation, &request, &CredentialScope::default()).await.map_err(operation_error)
        })
    }

    fn start_for(&self, request: Value, waited_by: WaitedBy) -> BoxFuture<'_, Result<Value, OperationError>> {
        Box::pin(async move { self.0.start_for(&request, waited_by).await.map_err(operation_error) })
    }
}

fn operation_error(error: StepFunctionsError) -> OperationError {
    OperationError { code: error.code.to_owned(), message: error.message.unwrap_or_default() }
}
