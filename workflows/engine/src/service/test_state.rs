//! TestState.

use super::{ServiceError, WorkflowService, check_role};
use crate::test_state::{TestEnvironment, TestState, TestedState, run_test};

impl WorkflowService {
    /// TestState: runs one state alone. A state that fails is an answer, not an error of the operation.
    ///
    /// # Errors
    /// The definition does not compile, the input is not JSON, the state cannot be tested in the requested way, or a
    /// task cannot be carried out because of a fault of this process.
    pub async fn test_state(&self, request: &TestState) -> Result<TestedState, ServiceError> {
        request.role_arn.as_deref().map(check_role).transpose()?;
        let [a, b, c, d, e, f, g, h, ..] = self.random_bytes();
        let scope = &request.scope;
        let environment = TestEnvironment {
            engine: &self.engine,
            now_ms: self.now_ms(),
            seed: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            arn_prefix: format!("arn:{}:states:{}:{}", scope.partition(), scope.region, scope.account),
            uuid: self.random_uuid(),
        };
        run_test(request, &environment).await
    }
}
