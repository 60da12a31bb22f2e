//! Parallel and Map states: only their mocks run, their inner stages are evaluated.

use std::sync::Arc;

use mayfly_workflows_language::dataflow::Context;
use mayfly_workflows_language::definition::{ItemReader, MapState};
use mayfly_workflows_language::error::{StateError, names};
use mayfly_workflows_language::template::Template;
use mayfly_workflows_language::value::Value;

use super::failing::MockedError;
use super::request::CheckedMock;
use super::run::{TestOutput, TestRun};
use crate::executor::files;
use mayfly_workflows_machine::stages::{DataStage, StageObserver, StateStages, Unobserved};
use mayfly_workflows_machine::{batched, quantity};

impl TestRun<'_> {
    /// A Parallel state shows its result's stages only.
    pub(super) fn parallel(&mut self) -> Result<TestOutput, MockedError> {
        let effective = self.stages.effective_input(&mut Unobserved)?;
        self.stages.arguments(&effective, &mut Unobserved)?;
        match &self.test.mock {
            Some(CheckedMock::Error { error, cause }) => Err(MockedError::mocked(error, cause)),
            Some(CheckedMock::Result(result)) => Ok(self.finish(result)?),
            None => Ok(self.finish(&Value::Null)?),
        }
    }

    pub(super) fn map(&mut self, map: &MapState) -> Result<TestOutput, MockedError> {
        let effective = self.stages.effective_input(self.inspection)?;
        self.items(map, &effective)?;
        let scope = self.stages.scope(&effective);
        let concurrency = quantity::count(&scope, &map.max_concurrency, "MaxConcurrency")?;
        let count = map.tolerated_failure_count.as_ref();
        let count = count.map(|count| quantity::count(&scope, count, "ToleratedFailureCount")).transpose()?;
        let percentage = map.tolerated_failure_percentage.as_ref();
        let percentage = percentage.map(|share| quantity::percentage(&scope, share)).transpose()?;
        self.inspection.max_concurrency = Some(concurrency);
        self.inspection.tolerated_failure_count = count;
        self.inspection.tolerated_failure_percentage = percentage;
        match &self.test.mock {
            Some(CheckedMock::Error { error, cause }) => Err(MockedError::mocked(error, cause)),
            Some(CheckedMock::Result(result)) => {
                self.tolerate(result, count, percentage)?;
                Ok(self.finish(result)?)
            }
            None => Ok(self.finish(&Value::Null)?),
        }
    }

    /// The source of the items, and the input of each iteration.
    fn items(&mut self, map: &MapState, effective: &Value) -> Result<(), StateError> {
        if let Some(reader) = &map.item_reader {
            return match self.read(reader)? {
                Some(items) => self.inputs(map, effective, items),
                None => Ok(()),
            };
        }
        let source = self.stages.map_source(map, effective, self.inspection)?;
        let items = quantity::items_in(self.stages.state, map, source)?;
        self.inputs(map, effective, items.to_vec())
    }

    /// The items in what the request says was read; `None` where it says nothing.
    fn read(&mut self, reader: &ItemReader) -> Result<Option<Vec<Value>>, StateError> {
        let Some(mut data) = self.test.reader_data.clone() else { return Ok(None) };
        if let Some(pointer) = &reader.items_pointer {
            data = files::at_pointer(&data, pointer).ok_or_else(|| {
                let cause = format!("ItemsPointer {pointer} points to nothing");
                StateError::new(names::ITEM_READER_FAILED, cause)
            })?;
            self.inspection.observe(DataStage::AfterItemsPointer, &data);
        }
        Ok(files::items_in(&data))
    }

    /// The input of each iteration or child. The API's model says what the stages hold; no recording shows one of
    /// `ItemBatcher`.
    fn inputs(&mut self, map: &MapState, effective: &Value, mut items: Vec<Value>) -> Result<(), StateError> {
        if let Some(selector) = &map.item_selector {
            let selected: Result<Vec<Value>, StateError> = items
                .iter()
                .enumerate()
                .map(|(index, item)| self.selected(selector, effective, index, item))
                .collect();
            items = selected?;
            self.inspection.observe(DataStage::AfterItemSelector, &Value::from(items.clone()));
        }
        let Some(batcher) = &map.item_batcher else { return Ok(()) };
        let limits = self.stages.batch_limits(batcher, effective)?;
        let inputs: Vec<Value> =
            batched(items.into_iter(), &limits).into_iter().map(|(input, _)| input).collect();
        self.inspection.observe(DataStage::AfterItemBatcher, &Value::from(inputs));
        Ok(())
    }

    fn selected(
        &self,
        selector: &Template,
        effective: &Value,
        index: usize,
        item: &Value,
    ) -> Result<Value, StateError> {
        let mut context = self.stages.context.get();
        if let Value::Object(fields) = &mut context {
            let index = i64::try_from(index).unwrap_or(i64::MAX);
            let item = Value::object([("Index", Value::from(index)), ("Value", item.clone())]);
            Arc::make_mut(fields).insert(Arc::<str>::from("Map"), Value::object([("Item", item)]));
        }
        let stages = StateStages { context: Context::Ready(&context), ..self.stages };
        stages.select_item(selector, effective)
    }

    /// Fails the map when more iterations failed than it tolerates.
    fn tolerate(
        &self,
        result: &Value,
        count: Option<u64>,
        percentage: Option<f64>,
    ) -> Result<(), MockedError> {
        let Some(failed) = self.test.failed_iterations.filter(|failed| *failed > 0) else {
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
