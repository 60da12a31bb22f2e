//! TagResource, UntagResource, ListTagsForResource.

use mayfly_workflows_language::arn::ArnParts;
use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::params::text;
use super::{Answer, Api, StepFunctionsError};

/// The tags of a creation, by key; the same key twice keeps the last value.
pub(super) fn of_creation(params: &Value) -> Result<BTreeMap<String, String>, StepFunctionsError> {
    let tags = params.get("tags").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let tag = |tag: &Value| (text(tag, "key").to_owned(), text(tag, "value").to_owned());
    let tags: BTreeMap<String, String> = tags.iter().map(tag).collect();
    tags.keys().try_for_each(|key| not_reserved(key))?;
    Ok(tags)
}

/// Keys that begin with `aws:` are AWS's own ("Tagging in Step Functions"); the sentence is that of other services,
/// remembered.
fn not_reserved(key: &str) -> Result<(), StepFunctionsError> {
    let reserved = key.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("aws:"));
    match reserved {
        true => Err(StepFunctionsError::validation(
            "aws: prefixed tag key names are not allowed for external use.",
        )),
        false => Ok(()),
    }
}

impl Api {
    pub(super) async fn tag_resource(&self, params: &Value) -> Answer {
        let arn = tagged(params)?;
        let added = of_creation(params)?;
        self.change(move |book| book.plan_tags(&arn, |tags| tags.extend(added))).await?;
        Ok(json!({}))
    }

    pub(super) async fn untag_resource(&self, params: &Value) -> Answer {
        let arn = tagged(params)?;
        let keys = params.get("tagKeys").and_then(Value::as_array).cloned().unwrap_or_default();
        self.change(move |book| {
            book.plan_tags(&arn, |tags| {
                for key in keys.iter().filter_map(Value::as_str) {
                    tags.remove(key);
                }
            })
        })
        .await?;
        Ok(json!({}))
    }

    pub(super) fn list_tags(&self, params: &Value) -> Answer {
        let arn = tagged(params)?;
        let book = self.catalog.read();
        let tags = book.tags(&arn)?;
        let tags: Vec<Value> = tags.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
        Ok(json!({"tags": tags}))
    }
}

fn tagged(params: &Value) -> Result<String, StepFunctionsError> {
    Ok(ArnParts::of(text(params, "resourceArn"), &["stateMachine", "activity"])?.text.to_owned())
}
