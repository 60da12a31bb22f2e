//! The wire form of the Step Functions API: 37 operations in AWS's JSON.
//!
//! [`http`] implements the protocol (awsJson1_0), [`model`] checks a request against the public service model,
//! [`Api::call`] dispatches the operation. Each operation decodes its parameters, calls the
//! [`WorkflowService`](mayfly_workflows_engine::service::WorkflowService) and encodes the answer; the errors' bodies are
//! in [`error`].
//!
//! Not here: the rules of the operations (the service), the meaning of a definition (the language), executions (the
//! engine), authentication (any signature is accepted; the listener's address decides who reaches it).

// A public type without `Debug` cannot be part of one that has it. Payloads and secrets are left out.
#![warn(missing_debug_implementations)]

mod activities;
mod aliases;
mod callbacks;
mod error;
mod executions;
mod http;
mod map_runs;
mod model;
mod paging;
mod params;
mod state_machines;
mod tags;
mod test_state;
mod validate;
mod versions;
mod wire;

pub use error::StepFunctionsError;
pub use http::router;
pub use model::operations;
pub use wire::Wire;

use serde_json::Value;

use mayfly_workflows_engine::service::{CredentialScope, WorkflowService};

/// The wire form over one service. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Api {
    service: WorkflowService,
}

/// The answer of an operation: the body of the response, or an error.
pub(crate) type Answer = Result<Value, StepFunctionsError>;

impl Api {
    /// The wire form of this service's operations.
    pub fn new(service: WorkflowService) -> Api {
        Api { service }
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
            "ValidateStateMachineDefinition" => self.validate_definition(params),
            _ => Err(StepFunctionsError::unknown_operation()),
        }
    }
}
