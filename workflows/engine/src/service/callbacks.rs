//! Task tokens: the outcomes and heartbeats that are reported for tasks.

use std::fmt;

use super::{ServiceError, WorkflowService};

/// The result of a task. Its `Debug` has neither the token nor the payload.
#[derive(Clone)]
pub struct SendTaskSuccess {
    /// The task's token.
    pub token: String,
    /// The result, as JSON text.
    pub output: String,
}

/// The error of a task. Its `Debug` has neither the token nor the cause.
#[derive(Clone)]
pub struct SendTaskFailure {
    /// The task's token.
    pub token: String,
    /// The error's name.
    pub error: Option<String>,
    /// The error's cause.
    pub cause: Option<String>,
}

impl fmt::Debug for SendTaskSuccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendTaskSuccess").finish_non_exhaustive()
    }
}

impl fmt::Debug for SendTaskFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendTaskFailure").field("error", &self.error).finish_non_exhaustive()
    }
}

impl WorkflowService {
    /// SendTaskSuccess; returns when the result is durable.
    ///
    /// # Errors
    /// The token is not one of this engine, its task has ended, the output is not JSON (the task continues to wait), or
    /// the journal cannot be written.
    pub async fn send_task_success(&self, request: SendTaskSuccess) -> Result<(), ServiceError> {
        Ok(self.engine.send_task_success(&request.token, &request.output).await?)
    }

    /// SendTaskFailure; returns when the error is durable.
    ///
    /// # Errors
    /// The token is not one of this engine, its task has ended, or the journal cannot be written.
    pub async fn send_task_failure(&self, request: SendTaskFailure) -> Result<(), ServiceError> {
        let SendTaskFailure { token, error, cause } = request;
        Ok(self.engine.send_task_failure(&token, error, cause).await?)
    }

    /// SendTaskHeartbeat: the interval of heartbeats of the task with this token begins again.
    ///
    /// # Errors
    /// The token is not one of this engine, its task has ended, or the journal cannot be read.
    pub async fn send_task_heartbeat(&self, token: &str) -> Result<(), ServiceError> {
        Ok(self.engine.send_task_heartbeat(token).await?)
    }
}
