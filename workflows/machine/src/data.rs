//! The data of a thread's state: its [`StateStages`], and what the machine's own steps evaluate besides.

use super::ids::ThreadId;
use std::sync::Arc;

use mayfly_workflows_language::dataflow::{Context, EvaluationScope};
use mayfly_workflows_language::definition::{MapState, Quantity, State, StateKind};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::value::Value;

use super::context::{StateContext, context_object};
use super::quantity;
use super::stages::{StateStages, Unobserved};
use super::state::Item;
use super::turn::Turn;

impl Turn<'_> {
    /// Evaluates the data of a thread's state.
    pub(super) fn stages<T>(
        &self,
        number: ThreadId,
        state: &State,
        evaluate: impl FnOnce(&StateStages<'_>) -> T,
    ) -> T {
        self.stages_with(number, state, None, None, evaluate)
    }

    /// The same with a task token or an item in the context object.
    pub(super) fn stages_with<T>(
        &self,
        number: ThreadId,
        state: &State,
        token: Option<&Arc<str>>,
        item: Option<&Item>,
        evaluate: impl FnOnce(&StateStages<'_>) -> T,
    ) -> T {
        let Some(thread) = self.m.threads.get(&number) else {
            unreachable!("a thread is evaluated while it runs")
        };
        let active = thread.active.as_ref();
        let (entered_ms, retries) =
            active.map_or((self.at_ms, 0), |active| (active.entered_ms, active.retries));
        let build = || {
            let around = StateContext {
                name: &state.name,
                entered_ms,
                retries: matches!(
                    state.kind,
                    StateKind::Task(_) | StateKind::Parallel(_) | StateKind::Map(_)
                )
                .then_some(retries),
                item: item.or(thread.item.as_ref()),
                token,
            };
            context_object(&self.m.facts, self.m.redrive_count, self.m.redrive_ms, around)
        };
        let input = active.map(|active| active.input.clone()).unwrap_or_default();
        evaluate(&StateStages {
            state,
            input: &input,
            context: Context::Build(&build),
            variables: &thread.variables,
            ambient: &self.ambient,
        })
    }

    /// Runs an evaluation in the scope of a thread's state.
    pub(super) fn evaluate<T>(
        &self,
        number: ThreadId,
        state: &State,
        input: &Value,
        evaluate: impl FnOnce(&EvaluationScope<'_>) -> T,
    ) -> T {
        self.stages(number, state, |stages| evaluate(&stages.scope(input)))
    }

    /// The input after `InputPath`; in JSONata the input itself.
    pub(super) fn effective_input(&self, number: ThreadId, state: &State) -> Result<Value, StateError> {
        self.stages(number, state, |stages| stages.effective_input(&mut Unobserved))
    }

    /// The items of a Map without an `ItemReader`.
    pub(super) fn map_items(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        effective: &Value,
    ) -> Result<Arc<Vec<Value>>, StateError> {
        let source =
            self.stages(number, state, |stages| stages.map_source(map, effective, &mut Unobserved))?;
        let items = quantity::items_in(state, map, source);
        // AWS records MapStateFailed for items that are not an array, although no iteration has started.
        self.parts_failed |= items.is_err();
        items
    }

    /// `MaxConcurrency` and its path; 0 means no limit.
    pub(super) fn max_concurrency(
        &self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        effective: &Value,
    ) -> Result<u64, StateError> {
        self.count(number, state, effective, &map.max_concurrency, "MaxConcurrency")
    }

    /// A numeric field of a Map.
    pub(super) fn count(
        &self,
        number: ThreadId,
        state: &State,
        effective: &Value,
        quantity: &Quantity<u64>,
        field: &str,
    ) -> Result<u64, StateError> {
        self.evaluate(number, state, effective, |scope| quantity::count(scope, quantity, field))
    }
}
