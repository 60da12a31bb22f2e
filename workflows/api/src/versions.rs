//! PublishStateMachineVersion, ListStateMachineVersions, DeleteStateMachineVersion.

use mayfly_workflows_language::arn::StateMachineArn;
use serde_json::{Value, json};

use super::params::{ResponseFields, date, optional, text};
use super::{Answer, Api, paging};

impl Api {
    pub(super) async fn publish_version(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        let revision_id = optional(params, "revisionId").map(str::to_owned);
        let description = optional(params, "description").map(str::to_owned);
        let version = self.service.publish_version(arn, revision_id, description).await?;
        Ok(json!({"stateMachineVersionArn": version.arn.as_str(), "creationDate": date(version.created)}))
    }

    pub(super) fn list_versions(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        let list = format!("ListStateMachineVersions {arn}");
        let page = self.service.list_versions(&arn, &paging::request(&list, params)?);
        let items = page.items.iter().map(|version| {
            json!({"stateMachineVersionArn": version.arn.as_str(), "creationDate": date(version.created)})
        });
        let next = page.next.map(|position| paging::token(&list, &position));
        let fields = ResponseFields::default().set("stateMachineVersions", items.collect::<Vec<_>>());
        Ok(fields.maybe("nextToken", next).done())
    }

    pub(super) async fn delete_version(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineVersionArn"))?;
        self.service.delete_version(&arn).await?;
        Ok(json!({}))
    }
}
