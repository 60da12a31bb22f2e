//! SendTaskSuccess, SendTaskFailure, SendTaskHeartbeat.

use serde_json::{Value, json};

use super::params::{optional, text};
use super::{Answer, Api};
use mayfly_workflows_engine::service::{SendTaskFailure, SendTaskSuccess};

impl Api {
    pub(super) async fn send_task_success(&self, params: &Value) -> Answer {
        let request = SendTaskSuccess {
            token: text(params, "taskToken").to_owned(),
            output: text(params, "output").to_owned(),
        };
        self.service.send_task_success(request).await?;
        Ok(json!({}))
    }

    pub(super) async fn send_task_failure(&self, params: &Value) -> Answer {
        let request = SendTaskFailure {
            token: text(params, "taskToken").to_owned(),
            error: optional(params, "error").map(str::to_owned),
            cause: optional(params, "cause").map(str::to_owned),
        };
        self.service.send_task_failure(request).await?;
        Ok(json!({}))
    }

    pub(super) async fn send_task_heartbeat(&self, params: &Value) -> Answer {
        self.service.send_task_heartbeat(text(params, "taskToken")).await?;
        Ok(json!({}))
    }
}
