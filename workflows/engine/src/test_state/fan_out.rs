//! Parallel and Map states: only their mocks run, their inner stages are evaluated.

use std::sync::Arc;

use mayfly_workflows_language::definition::{DataFlow, ItemReader, MapState, Quantity};
use mayfly_workflows_language::error::{StateError, names};
use mayfly_workflows_language::template::Template;
use mayfly_workflows_language::value::Value;

use super::failing::MockedError;
use super::inspection::InspectedStage;
use super::request::CheckedMock;
use super::run::{StageEvaluator, TestOutput, TestRun};
use crate::executor::files;
use mayfly_workflows_machine::{EDITION, batched, quantity};

impl TestRun<'_> {
    /// A Parallel state shows its result's stages only.
    pub(super) fn parallel(&mut self) -> Result<TestOutput, MockedError> {
        let input = self.effective_input(false)?;
        self.arguments(&input, false)?;
        match &self.request.mock {
            Some(CheckedMock::Error { error, cause }) => {
                Err(MockedError { error: error.clone(), cause: cause.clone() })
            }
            Some(CheckedMock::Result(result)) => Ok(self.finish(result)?),
            None => Ok(self.finish(&Value::Null)?),
        }
    }

    pub(super) fn map(&mut self, map: &MapState) -> Result<TestOutput, MockedError> {
        let input = self.effective_input(true)?;
        self.items(map, &input)?;
        let scope = self.stage.scope(&input);
        let concurrency = quantity::count(&scope, &map.max_concurrency, "MaxConcurrency")?;
        let count = map.tolerated_failure_count.as_ref();
        let count = count.map(|count| quantity::count(&scope, count, "ToleratedFailureCount")).transpose()?;
        let percentage = map.tolerated_failure_percentage.as_ref();
        let percentage = percentage.map(|share| quantity::percentage(&scope, share)).transpose()?;
        self.inspection.max_concurrency = Some(concurrency);
        self.inspection.tolerated_failure_count = count;
        self.inspection.tolerated_failure_percentage = percentage;
        match &self.request.mock {
            Some(CheckedMock::Error { error, cause }) => {
                Err(MockedError { error: error.clone(), cause: cause.clone() })
            }
            Some(CheckedMock::Result(result)) => {
                self.tolerate(result, count, percentage)?;
                Ok(self.finish(result)?)
            }
            None => Ok(self.finish(&Value::Null)?),
        }
    }

    /// The source of the items, and the input of each iteration.
    fn items(&mut self, map: &MapState, input: &Value) -> Result<(), StateError> {
        let jsonpath = matches!(self.state.data, DataFlow::JsonPath { .. });
        let items = match &map.item_reader {
            Some(reader) => match self.read(reader)? {
                Some(items) => return self.inputs(map, input, items),
                None => return Ok(()),
            },
            None => quantity::map_source(&self.stage.scope(input), map)?,
        };
        if jsonpath {
            self.inspection.stage(InspectedStage::AfterItemsPath, &items);
        }
        self.inputs(map, input, quantity::items_in(self.state, map, items, EDITION)?.to_vec())
    }

    /// The items in what the request says was read; `None` where it says nothing.
    fn read(&mut self, reader: &ItemReader) -> Result<Option<Vec<Value>>, StateError> {
        let Some(mut data) = self.request.reader_data.clone() else { return Ok(None) };
        if let Some(pointer) = &reader.items_pointer {
            data = files::at_pointer(&data, pointer).ok_or_else(|| {
                let cause = format!("ItemsPointer {pointer} points to nothing");
                StateError::new(names::ITEM_READER_FAILED, cause)
            })?;
            self.inspection.stage(InspectedStage::AfterItemsPointer, &data);
        }
        Ok(files::items_in(&data))
    }

    /// The input of each iteration or child. The API's model says what the stages hold; no recording shows one of
    /// `ItemBatcher`.
    fn inputs(&mut self, map: &MapState, input: &Value, mut items: Vec<Value>) -> Result<(), StateError> {
        if let Some(selector) = &map.item_selector {
            let selected: Result<Vec<Value>, StateError> = items
                .iter()
                .enumerate()
                .map(|(index, item)| self.selected(selector, input, index, item))
                .collect();
            items = selected?;
            self.inspection.stage(InspectedStage::AfterItemSelector, &Value::from(items.clone()));
        }
        let Some(batcher) = &map.item_batcher else { return Ok(()) };
        let scope = self.stage.scope(input);
        let limit = |quantity: &Option<Quantity<u64>>, field| match quantity {
            Some(quantity) => quantity::count(&scope, quantity, field),
            None => Ok(u64::MAX),
        };
        let count_max = limit(&batcher.max_items_per_batch, "MaxItemsPerBatch")?;
        let bytes_max = limit(&batcher.max_input_bytes_per_batch, "MaxInputBytesPerBatch")?;
        let batch_input = batcher.batch_input.as_ref();
        let batch_input = batch_input.map(|template| template.evaluate(&scope, "BatchInput")).transpose()?;
        let batches = batched(items.into_iter(), batch_input.as_ref(), count_max, bytes_max);
        let inputs: Vec<Value> = batches.into_iter().map(|(input, _)| input).collect();
        self.inspection.stage(InspectedStage::AfterItemBatcher, &Value::from(inputs));
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
        let stage = StageEvaluator { context: &context, ..*self.stage };
        selector.evaluate(&stage.scope(input), "ItemSelector")
    }

    /// Fails the map when more iterations failed than it tolerates.
    fn tolerate(
        &self,
        result: &Value,
        count: Option<u64>,
        percentage: Option<f64>,
    ) -> Result<(), MockedError> {
        let Some(failed) = self.request.failed_iterations.filter(|failed| *failed > 0) else {
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
        Err(MockedError {
            error: Some("States.ExceedToleratedFailureThreshold".into()),
            cause: Some("The specified tolerated failure threshold was exceeded".into()),
        })
    }
}
