//! TestState.

use serde_json::Value;

use super::params::optional;
use super::{Answer, Api, StepFunctionsError};
use mayfly_workflows_engine::service::{CredentialScope, check_input, check_role};
use mayfly_workflows_engine::test_state::{Request, TestOptions, TestRejection, answer};

impl Api {
    pub(super) async fn test_state(&self, params: &Value, scope: &CredentialScope) -> Answer {
        optional(params, "roleArn").map(check_role).transpose()?;
        let request = Request::read(params).map_err(|refusal| refused(refusal, params))?;
        let [a, b, c, d, e, f, g, h, ..] = self.service.random_bytes();
        let around = TestOptions {
            engine: self.service.engine(),
            now_ms: self.service.now_ms(),
            seed: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            arn_prefix: format!("arn:{}:states:{}:{}", scope.partition(), scope.region, scope.account),
            uuid: self.service.random_uuid(),
        };
        answer(&request, &around).await.map_err(|refusal| refused(refusal, params))
    }
}

fn refused(refusal: TestRejection, params: &Value) -> StepFunctionsError {
    match refusal {
        TestRejection::Validation(message) => StepFunctionsError::validation(message),
        TestRejection::Definition(message) => StepFunctionsError::new("InvalidDefinition", message),
        TestRejection::Input(_) => {
            let refused = check_input(optional(params, "input").unwrap_or_default()).err();
            refused.map_or_else(
                || StepFunctionsError::new("InvalidExecutionInput", "Invalid input"),
                StepFunctionsError::from,
            )
        }
        TestRejection::Internal(cause) => StepFunctionsError::internal(&cause),
    }
}
