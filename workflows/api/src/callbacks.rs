//! SendTaskSuccess, SendTaskFailure, SendTaskHeartbeat.

use mayfly_workflows_language::value;
use serde_json::{Value, json};

use super::params::{optional, text};
use super::{Answer, Api, StepFunctionsError};
use mayfly_workflows_engine::engine::TokenError;
use mayfly_workflows_engine::service::ServiceError;

impl Api {
    pub(super) async fn send_task_success(&self, params: &Value) -> Answer {
        let (token, output) = (text(params, "taskToken"), text(params, "output"));
        match self.service.engine().send_task_success(token, output).await {
            // Worded like the errors of unreadable inputs; no recording shows one of these.
            Err(refusal @ TokenError::InvalidOutput(_)) => {
                let told = value::Value::parse(output).map_err(|error| error.describe(output));
                let what = told.err().unwrap_or_else(|| refusal.to_string());
                Err(StepFunctionsError::new("InvalidOutput", format!("Invalid Output: '{what}'")))
            }
            outcome => settled(outcome),
        }
    }

    pub(super) async fn send_task_failure(&self, params: &Value) -> Answer {
        let (error, cause) = (optional(params, "error"), optional(params, "cause"));
        let (error, cause) = (error.map(str::to_owned), cause.map(str::to_owned));
        settled(self.service.engine().send_task_failure(text(params, "taskToken"), error, cause).await)
    }

    pub(super) async fn send_task_heartbeat(&self, params: &Value) -> Answer {
        settled(self.service.engine().send_task_heartbeat(text(params, "taskToken")).await)
    }
}

fn settled(outcome: Result<(), TokenError>) -> Answer {
    match outcome {
        Ok(()) => Ok(json!({})),
        Err(TokenError::Invalid) => Err(ServiceError::InvalidToken.into()),
        Err(refusal @ TokenError::TimedOut) => {
            Err(StepFunctionsError::new("TaskTimedOut", refusal.to_string()))
        }
        Err(refusal @ TokenError::InvalidOutput(_)) => {
            Err(StepFunctionsError::new("InvalidOutput", refusal.to_string()))
        }
        Err(refusal @ TokenError::Unavailable(_)) => Err(StepFunctionsError::unavailable(&refusal)),
    }
}
