//! PublishStateMachineVersion, ListStateMachineVersions, DeleteStateMachineVersion.

use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};
use serde_json::{Value, json};

use super::params::{ResponseFields, date, optional, text};
use super::{Answer, Api, StepFunctionsError, paging};

impl Api {
    pub(super) async fn publish_version(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        let revision_id = optional(params, "revisionId").map(str::to_owned);
        let description = optional(params, "description").map(str::to_owned);
        self.finish_deletion(&arn).await?;
        let now = self.now();
        let (_, version) = self
            .change(move |book| book.plan_publish(&arn, revision_id.as_deref(), description, now))
            .await?;
        let version = version.ok_or_else(|| StepFunctionsError::internal(&"publishing made no version"))?;
        Ok(json!({"stateMachineVersionArn": version.arn.as_str(), "creationDate": date(version.created)}))
    }

    /// Newest first, as the API reference has it.
    pub(super) fn list_versions(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineArn"))?;
        let list = format!("ListStateMachineVersions {arn}");
        let after = paging::position(&list, params)?;
        let book = self.catalog.read();
        let size = paging::page_size(params);
        let all = book.versions(&arn).rev();
        let (page, next) = paging::page(all, size, after.as_deref(), |version| version.number.to_string());
        let items = page.into_iter().map(
            |version| json!({"stateMachineVersionArn": version.arn.as_str(), "creationDate": date(version.created)}),
        );
        let next = next.map(|position| paging::token(&list, &position));
        let fields = ResponseFields::default().set("stateMachineVersions", items.collect::<Vec<_>>());
        Ok(fields.maybe("nextToken", next).done())
    }

    pub(super) async fn delete_version(&self, params: &Value) -> Answer {
        let arn = StateMachineArn::parse(text(params, "stateMachineVersionArn"))?;
        let Some(ArnQualifier::Version(number)) = arn.qualifier() else {
            return Err(StepFunctionsError::invalid_arn(format_args!("ARN is not a version: {arn}")));
        };
        let machine_arn = arn.unqualified();
        self.change(move |book| book.plan_delete_version(&machine_arn, number)).await?;
        Ok(json!({}))
    }
}
