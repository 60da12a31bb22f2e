//! CreateActivity, DescribeActivity, DeleteActivity, ListActivities, GetActivityTask.

use mayfly_workflows_language::arn::ArnParts;
use std::sync::Arc;

use serde_json::{Value, json};

use super::arn::{CredentialScope, check_name};
use super::params::{ResponseFields, date, optional, text};
use super::{Answer, Api, StepFunctionsError, paging, state_machines, tags};
use mayfly_workflows_engine::catalog::{Activity, NewActivity};

impl Api {
    pub(super) async fn create_activity(&self, params: &Value, scope: &CredentialScope) -> Answer {
        let name = text(params, "name").to_owned();
        check_name(&name)?;
        let new = NewActivity {
            arn: scope.arn(format_args!("activity:{name}")),
            name,
            encryption: state_machines::encryption(params)?,
            tags: tags::of_creation(params)?,
            now: self.now(),
        };
        let activity = self.change(|book| book.plan_create_activity(new)).await?;
        Ok(json!({"activityArn": activity.arn, "creationDate": date(activity.created)}))
    }

    pub(super) fn describe_activity(&self, params: &Value) -> Answer {
        let activity = self.known_activity(params)?;
        let fields = ResponseFields::default()
            .set("activityArn", activity.arn.as_str())
            .set("name", activity.name.as_str())
            .set("creationDate", date(activity.created))
            .set("encryptionConfiguration", activity.encryption.clone());
        Ok(fields.done())
    }

    pub(super) async fn delete_activity(&self, params: &Value) -> Answer {
        let arn = ArnParts::of(text(params, "activityArn"), &["activity"])?.text.to_owned();
        self.change(move |book| book.plan_delete_activity(&arn)).await?;
        Ok(json!({}))
    }

    pub(super) fn list_activities(&self, params: &Value, scope: &CredentialScope) -> Answer {
        const LIST: &str = "ListActivities";
        let after = paging::position(LIST, params)?;
        let book = self.catalog.read();
        let prefix = scope.arn(format_args!("activity:"));
        let all = book.activities(&prefix);
        let size = paging::page_size(params);
        let (page, next) = paging::page(all, size, after.as_deref(), |activity| activity.name.clone());
        let items = page.into_iter().map(|activity| {
            json!({
                "activityArn": activity.arn,
                "name": activity.name,
                "creationDate": date(activity.created),
            })
        });
        let next = next.map(|position| paging::token(LIST, &position));
        Ok(ResponseFields::default()
            .set("activities", items.collect::<Vec<_>>())
            .maybe("nextToken", next)
            .done())
    }

    /// Waits for work. When none came, AWS answers with an empty object: no token, no input.
    pub(super) async fn get_activity_task(&self, params: &Value) -> Answer {
        let activity = self.known_activity(params)?;
        let worker = optional(params, "workerName").map(str::to_owned);
        let task = self.engine.get_activity_task(&activity.arn, worker).await;
        Ok(match task {
            Some(task) => json!({"taskToken": task.token, "input": task.input}),
            None => json!({}),
        })
    }

    fn known_activity(&self, params: &Value) -> Result<Arc<Activity>, StepFunctionsError> {
        let arn = ArnParts::of(text(params, "activityArn"), &["activity"])?.text;
        self.catalog.read().activity(arn).cloned().ok_or_else(|| StepFunctionsError::activity_missing(arn))
    }
}
