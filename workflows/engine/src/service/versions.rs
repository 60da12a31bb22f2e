//! Versions of state machines: publish, list, delete.

use std::sync::Arc;

use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};

use super::{PageRequest, ServiceError, WorkflowService, page};
use crate::catalog::Version;
use crate::engine::Page;

impl WorkflowService {
    /// PublishStateMachineVersion: the newest revision becomes a version, unless it is one already. With `revision_id`
    /// only if that is the newest one.
    ///
    /// # Errors
    /// The state machine does not exist, has another revision, or the catalog cannot be written.
    pub async fn publish_version(
        &self,
        arn: StateMachineArn,
        revision_id: Option<String>,
        description: Option<String>,
    ) -> Result<Arc<Version>, ServiceError> {
        self.finish_deletion(&arn).await?;
        let now = self.now_ms();
        let (_, version) = self
            .change(move |book| book.plan_publish(&arn, revision_id.as_deref(), description, now))
            .await?;
        version.ok_or_else(|| ServiceError::Internal("publishing made no version".to_owned()))
    }

    /// ListStateMachineVersions, newest first (API reference).
    pub fn list_versions(&self, arn: &StateMachineArn, request: &PageRequest) -> Page<Arc<Version>> {
        let book = self.catalog().read();
        let page = page(book.versions(arn).rev(), request, |version| version.number.to_string());
        Page { items: page.items.into_iter().cloned().collect(), next: page.next }
    }

    /// DeleteStateMachineVersion. A version that does not exist is deleted.
    ///
    /// # Errors
    /// The ARN is not a version's, an alias routes to the version, or the catalog cannot be written.
    pub async fn delete_version(&self, arn: &StateMachineArn) -> Result<(), ServiceError> {
        let Some(ArnQualifier::Version(number)) = arn.qualifier() else {
            return Err(ServiceError::InvalidArn(format!("ARN is not a version: {arn}")));
        };
        let machine_arn = arn.unqualified();
        self.change(move |book| book.plan_delete_version(&machine_arn, number)).await
    }
}
