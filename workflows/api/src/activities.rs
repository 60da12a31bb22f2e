//! CreateActivity, DescribeActivity, DeleteActivity, ListActivities, GetActivityTask.

use mayfly_workflows_language::arn::ActivityArn;
use serde_json::{Value, json};

use super::params::{ResponseFields, date, optional, text};
use super::{Answer, Api, StepFunctionsError, paging, state_machines, tags};
use mayfly_workflows_engine::service::{CreateActivity, CredentialScope, ResourceName};

fn activity_arn(params: &Value) -> Result<ActivityArn, StepFunctionsError> {
    Ok(ActivityArn::parse(text(params, "activityArn"))?)
}

impl Api {
    pub(super) async fn create_activity(&self, params: &Value, scope: &CredentialScope) -> Answer {
        let request = CreateActivity {
            scope: scope.clone(),
            name: ResourceName::parse(text(params, "name"))?,
            encryption: state_machines::encryption(params)?.unwrap_or_default(),
            tags: tags::of_creation(params),
        };
        let activity = self.service.create_activity(request).await?;
        Ok(json!({"activityArn": activity.arn.as_str(), "creationDate": date(activity.created)}))
    }

    pub(super) fn describe_activity(&self, params: &Value) -> Answer {
        let activity = self.service.describe_activity(&activity_arn(params)?)?;
        let fields = ResponseFields::default()
            .set("activityArn", activity.arn.as_str())
            .set("name", activity.name.as_str())
            .set("creationDate", date(activity.created))
            .set("encryptionConfiguration", json!(activity.encryption));
        Ok(fields.done())
    }

    pub(super) async fn delete_activity(&self, params: &Value) -> Answer {
        self.service.delete_activity(activity_arn(params)?).await?;
        Ok(json!({}))
    }

    pub(super) fn list_activities(&self, params: &Value, scope: &CredentialScope) -> Answer {
        const LIST: &str = "ListActivities";
        let page = self.service.list_activities(scope, &paging::request(LIST, params)?);
        let items = page.items.iter().map(|activity| {
            json!({
                "activityArn": activity.arn.as_str(),
                "name": activity.name,
                "creationDate": date(activity.created),
            })
        });
        let next = page.next.map(|position| paging::token(LIST, &position));
        Ok(ResponseFields::default()
            .set("activities", items.collect::<Vec<_>>())
            .maybe("nextToken", next)
            .done())
    }

    /// Waits for work. When none came, AWS answers with an empty object: no token, no input.
    pub(super) async fn get_activity_task(&self, params: &Value) -> Answer {
        let worker = optional(params, "workerName").map(str::to_owned);
        let task = self.service.activity_task(&activity_arn(params)?, worker).await?;
        Ok(match task {
            Some(task) => json!({"taskToken": task.token, "input": task.input}),
            None => json!({}),
        })
    }
}
