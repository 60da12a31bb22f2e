//! Map runs: describe, list, update.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};

use super::{PageRequest, ServiceError, WorkflowService, page};
use crate::engine::{MapRunDescription, MapRunUpdate, Page};

impl WorkflowService {
    /// DescribeMapRun.
    ///
    /// # Errors
    /// The map run does not exist, or the journal fails.
    pub async fn describe_map_run(&self, arn: &MapRunArn) -> Result<MapRunDescription, ServiceError> {
        self.engine.describe_map_run(arn).await?.ok_or(ServiceError::ResourceNotFound)
    }

    /// ListMapRuns of an execution.
    ///
    /// # Errors
    /// The execution does not exist, or the journal fails.
    pub async fn list_map_runs(
        &self,
        execution: &ExecutionArn,
        request: &PageRequest,
    ) -> Result<Page<MapRunDescription>, ServiceError> {
        let found = self.engine.list_map_runs(execution).await?;
        let found = found.ok_or_else(|| ServiceError::ExecutionDoesNotExist(execution.clone()))?;
        Ok(page(found, request, |run| run.map_run_arn.to_string()))
    }

    /// UpdateMapRun.
    ///
    /// # Errors
    /// The map run does not exist or has ended, or the journal fails.
    pub async fn update_map_run(&self, arn: &MapRunArn, update: MapRunUpdate) -> Result<(), ServiceError> {
        if self.describe_map_run(arn).await?.stop_date.is_some() {
            return Err(ServiceError::Validation {
                message: format!("Cannot update a completed Map Run: '{arn}'"),
                reason: Some("CANNOT_UPDATE_COMPLETED_MAP_RUN"),
            });
        }
        Ok(self.engine.update_map_run(arn, update).await?)
    }
}
