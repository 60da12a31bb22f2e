//! Activities: create, describe, delete, list; and the tags of activities and state machines.

use std::collections::BTreeMap;
use std::sync::Arc;

use mayfly_workflows_language::arn::{ActivityArn, TaggedArn};

use super::{CredentialScope, PageRequest, ResourceName, ServiceError, WorkflowService, page};
use crate::catalog::{Activity, EncryptionConfiguration, NewActivity};
use crate::engine::{ActivityTask, Page};

/// An activity to create.
#[derive(Debug, Clone)]
pub struct CreateActivity {
    /// The region and account it belongs to.
    pub scope: CredentialScope,
    /// Its name.
    pub name: ResourceName,
    /// The encryption of its tasks' data.
    pub encryption: EncryptionConfiguration,
    /// Tags by key.
    pub tags: BTreeMap<String, String>,
}

/// Refuses keys that begin with `aws:`, which are AWS's own ("Tagging in Step Functions"); the message is that of other
/// services, from memory.
pub(super) fn check_tags(tags: &BTreeMap<String, String>) -> Result<(), ServiceError> {
    let is_reserved = |key: &String| key.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("aws:"));
    match tags.keys().any(is_reserved) {
        true => {
            Err(ServiceError::validation("aws: prefixed tag key names are not allowed for external use."))
        }
        false => Ok(()),
    }
}

impl WorkflowService {
    /// CreateActivity. An equal request returns the activity that the first one created.
    ///
    /// # Errors
    /// The name is taken by an activity with another encryption, a tag is reserved, or the catalog cannot be written.
    pub async fn create_activity(&self, request: CreateActivity) -> Result<Arc<Activity>, ServiceError> {
        check_tags(&request.tags)?;
        let new = NewActivity {
            arn: request.scope.activity(&request.name),
            name: request.name.into_string(),
            encryption: request.encryption,
            tags: request.tags,
            now: self.now_ms(),
        };
        self.change(|book| book.plan_create_activity(new)).await
    }

    /// DescribeActivity.
    ///
    /// # Errors
    /// There is none with this ARN.
    pub fn describe_activity(&self, arn: &ActivityArn) -> Result<Arc<Activity>, ServiceError> {
        let found = self.catalog().read().activity(arn).cloned();
        found.ok_or_else(|| ServiceError::ActivityDoesNotExist(arn.clone()))
    }

    /// DeleteActivity. An activity that does not exist is deleted.
    ///
    /// # Errors
    /// The catalog cannot be written.
    pub async fn delete_activity(&self, arn: ActivityArn) -> Result<(), ServiceError> {
        self.change(move |book| book.plan_delete_activity(&arn)).await
    }

    /// ListActivities of one region and account, by name.
    pub fn list_activities(&self, scope: &CredentialScope, request: &PageRequest) -> Page<Arc<Activity>> {
        let book = self.catalog().read();
        let prefix = scope.arn(format_args!("activity:"));
        let page = page(book.activities(&prefix), request, |activity| activity.name.clone());
        Page { items: page.items.into_iter().cloned().collect(), next: page.next }
    }

    /// GetActivityTask: waits for work; `None` when none came.
    ///
    /// # Errors
    /// The activity does not exist.
    pub async fn activity_task(
        &self,
        arn: &ActivityArn,
        worker: Option<String>,
    ) -> Result<Option<ActivityTask>, ServiceError> {
        let activity = self.describe_activity(arn)?;
        Ok(self.engine.get_activity_task(&activity.arn, worker).await)
    }

    /// TagResource: adds tags, or replaces the values of tags that exist.
    ///
    /// # Errors
    /// The resource does not exist, a tag is reserved, there are too many, or the catalog cannot be written.
    pub async fn tag_resource(
        &self,
        arn: TaggedArn,
        added: BTreeMap<String, String>,
    ) -> Result<(), ServiceError> {
        check_tags(&added)?;
        self.change(move |book| book.plan_tags(&arn, |tags| tags.extend(added))).await
    }

    /// UntagResource.
    ///
    /// # Errors
    /// The resource does not exist, or the catalog cannot be written.
    pub async fn untag_resource(&self, arn: TaggedArn, keys: Vec<String>) -> Result<(), ServiceError> {
        self.change(move |book| {
            book.plan_tags(&arn, |tags| {
                for key in &keys {
                    tags.remove(key);
                }
            })
        })
        .await
    }

    /// ListTagsForResource.
    ///
    /// # Errors
    /// The resource does not exist.
    pub fn list_tags(&self, arn: &TaggedArn) -> Result<BTreeMap<String, String>, ServiceError> {
        Ok(self.catalog().read().tags(arn)?.clone())
    }
}
