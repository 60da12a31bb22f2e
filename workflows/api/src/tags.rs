//! TagResource, UntagResource, ListTagsForResource.

use std::collections::BTreeMap;

use mayfly_workflows_language::arn::TaggedArn;
use serde_json::{Value, json};

use super::params::text;
use super::{Answer, Api, StepFunctionsError};

/// The tags of a request, by key; the same key twice keeps the last value.
pub(super) fn of_creation(params: &Value) -> BTreeMap<String, String> {
    let tags = params.get("tags").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    tags.iter().map(|tag| (text(tag, "key").to_owned(), text(tag, "value").to_owned())).collect()
}

fn tagged(params: &Value) -> Result<TaggedArn, StepFunctionsError> {
    Ok(TaggedArn::parse(text(params, "resourceArn"))?)
}

impl Api {
    pub(super) async fn tag_resource(&self, params: &Value) -> Answer {
        self.service.tag_resource(tagged(params)?, of_creation(params)).await?;
        Ok(json!({}))
    }

    pub(super) async fn untag_resource(&self, params: &Value) -> Answer {
        let keys = params.get("tagKeys").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let keys = keys.iter().filter_map(Value::as_str).map(str::to_owned).collect();
        self.service.untag_resource(tagged(params)?, keys).await?;
        Ok(json!({}))
    }

    pub(super) fn list_tags(&self, params: &Value) -> Answer {
        let tags = self.service.list_tags(&tagged(params)?)?;
        let tags: Vec<Value> = tags.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
        Ok(json!({"tags": tags}))
    }
}
