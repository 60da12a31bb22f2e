//! Parallel and Map states: only their mocks run, their inner stages are evaluated.

use super::failing::Failure;
use super::request::Mock;
use super::run::{Left, Passage, Stage};
use mayfly_workflows_language::dataflow::Scope;
use mayfly_workflows_language::definition::{DataFlow, Items, Map, Quantity};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::template::Template;
use mayfly_workflows_language::value::Value;
use serde_json::json;
use std::sync::Arc;

impl Passage<'_> {
    /// A Parallel state shows its result's stages only.
    pub(super) fn parallel(&mut self) -> Result<Left, Failure> {
        let input = self.effective_input(false)?;
        self.arguments(&input, false)?;
        match &self.request.mock {
            Some(Mock::Error { error, cause }) => Err(Failure { error: error.clone(), cause: cause.clone() }),
            Some(Mock::Result(result)) => Ok(self.finish(result)?),
            None => Ok(self.finish(&Value::Null)?),
        }
    }

    pub(super) fn map(&mut self, map: &Map) -> Result<Left, Failure> {
        let input = self.effective_input(true)?;
        self.items(map, &input)?;
        let scope = self.stage.scope(&input);
        let written = |name: &str| self.request.written.get(name).is_some();
        let concurrency = number(&map.max_concurrency, &scope, "MaxConcurrency")?;
        let count = map.tolerated_failure_count.as_ref();
        let count = count.map(|count| number(count, &scope, "ToleratedFailureCount")).transpose()?;
        let percentage = map.tolerated_failure_percentage.as_ref();
        let percentage = percentage.map(|share| share_of(share, &scope)).transpose()?;
        if written("MaxConcurrency") || written("MaxConcurrencyPath") {
            self.inspection.fact("maxConcurrency", json!(concurrency));
        }
        if let Some(count) = count {
            self.inspection.fact("toleratedFailureCount", json!(count));
        }
        if let Some(percentage) = percentage {
            self.inspection.fact("toleratedFailurePercentage", json!(percentage));
        }
        match &self.request.mock {
            Some(Mock::Error { error, cause }) => Err(Failure { error: error.clone(), cause: cause.clone() }),
            Some(Mock::Result(result)) => {
                self.tolerate(result, count, percentage)?;
                Ok(self.finish(result)?)
            }
            None => Ok(self.finish(&Value::Null)?),
        }
    }

    /// Where the items come from, and what each iteration is given.
    fn items(&mut self, map: &Map, input: &Value) -> Result<(), StateError> {
        let jsonpath = matches!(self.state.data, DataFlow::JsonPath { .. });
        let items = match (&map.item_reader, &map.items) {
            (Some(_), _) => return Ok(()),
            (None, Items::Whole) => input.clone(),
            (None, Items::Path(path)) => {
                let found = path.evaluate(&self.stage.scope(input));
                found.map_err(|error| StateError::runtime(error.to_string()))?
            }
            (None, Items::Template(items)) => items.evaluate(&self.stage.scope(input), "Items")?,
        };
        if jsonpath {
            self.inspection.stage("afterItemsPath", &items);
        }
        if jsonpath && items.as_array().is_none() {
            let path = match &map.items {
                Items::Path(path) => path.source(),
                _ => "$",
            };
            return Err(StateError::runtime(format!("Reference path \"{path}\" must point to array.")));
        }
        if let (Some(selector), Some(items)) = (&map.item_selector, items.as_array()) {
            let selected: Result<Vec<Value>, StateError> = items
                .iter()
                .enumerate()
                .map(|(index, item)| self.selected(selector, input, index, item))
                .collect();
            self.inspection.stage("afterItemSelector", &Value::from(selected?));
        }
        Ok(())
    }

    fn selected(
        &self,
        selector: &Template,
        input: &Value,
        index: usize,
        item: &Value,
    ) -> Result<Value, StateError> {
        let mut context = self.stage.context.clone();
        if let Value::Object(fields) = &mut context {
            let index = i64::try_from(index).unwrap_or(i64::MAX);
            let item = Value::object([("Index", Value::from(index)), ("Value", item.clone())]);
            Arc::make_mut(fields).insert(Arc::<str>::from("Map"), Value::object([("Item", item)]));
        }
        let stage = Stage { context: &context, ..*self.stage };
        selector.evaluate(&stage.scope(input), "ItemSelector")
    }

    /// Fails the map when more iterations failed than it tolerates.
    fn tolerate(&self, result: &Value, count: Option<u64>, percentage: Option<f64>) -> Result<(), Failure> {
        let Some(failed) = self.request.configuration.failed_iterations.filter(|failed| *failed > 0) else {
            return Ok(());
        };
        let total = result.as_array().map_or(0, |items| items.len());
        let share = failed as f64 * 100.0 / total.max(1) as f64;
        let within = match (count, percentage) {
            (None, None) => false,
            (count, percentage) => {
                count.is_none_or(|count| failed <= count) && percentage.is_none_or(|most| share <= most)
            }
        };
        if within {
            return Ok(());
        }
        Err(Failure {
            error: Some("States.ExceedToleratedFailureThreshold".into()),
            cause: Some("The specified tolerated failure threshold was exceeded".into()),
        })
    }
}

fn number(quantity: &Quantity<u64>, scope: &Scope<'_>, field: &str) -> Result<u64, StateError> {
    let found = found(quantity, scope, field)?;
    let number = match (quantity, &found) {
        (Quantity::Value(number), _) => Some(*number),
        // AWS takes a number's text in these places too.
        (_, Some(Value::String(text))) => text.parse().ok(),
        (_, found) => found.as_ref().and_then(Value::as_i64).and_then(|number| u64::try_from(number).ok()),
    };
    number.ok_or_else(|| StateError::runtime(format!("The value of {field} must be a non-negative integer")))
}

fn share_of(quantity: &Quantity<f64>, scope: &Scope<'_>) -> Result<f64, StateError> {
    let found = found(quantity, scope, "ToleratedFailurePercentage")?;
    let number = match (quantity, &found) {
        (Quantity::Value(number), _) => Some(*number),
        (_, Some(Value::String(text))) => text.parse().ok(),
        (_, found) => found.as_ref().and_then(Value::as_f64),
    };
    number.ok_or_else(|| StateError::runtime("The value of ToleratedFailurePercentage must be a number"))
}

fn found<T>(quantity: &Quantity<T>, scope: &Scope<'_>, field: &str) -> Result<Option<Value>, StateError> {
    match quantity {
        Quantity::Value(_) => Ok(None),
        Quantity::Path(path) => {
            path.evaluate(scope).map(Some).map_err(|error| StateError::runtime(error.to_string()))
        }
        Quantity::Expression(expression) => expression.evaluate(scope, field).map(Some),
    }
}
