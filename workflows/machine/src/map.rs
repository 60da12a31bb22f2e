//! Map: a thread per item in inline mode; see [`super::map_run`] for distributed mode.

use super::ids::ThreadId;
use std::sync::Arc;

use mayfly_workflows_language::definition::{MapMode, MapState, State, StateKind};
use mayfly_workflows_language::value::Value;

use super::error_source::ErrorSource;
use super::state::{Item, MapPhase, ParentSlot, Phase, Thread};
use super::turn::{Turn, iteration};
use crate::history::EventDetails;

impl Turn<'_> {
    pub(super) fn run_map(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
    ) -> Result<(), ErrorSource> {
        if let MapMode::Distributed(execution_type) = map.mode {
            return self.run_distributed(number, state, map, execution_type);
        }
        let effective = self.effective_input(number, state)?;
        let items = self.map_items(number, state, map, &effective)?;
        let concurrency = self.max_concurrency(number, state, map, &effective)?;
        let cursor = self.cursor(number);
        let started = self.map_state_started(cursor, items.len() as u64);
        self.set_cursor(number, started);
        if let Some(active) = self.active_mut(number) {
            active.phase = Phase::Map(Box::new(MapPhase {
                outputs: vec![None; items.len()],
                items,
                input: effective,
                next: 0,
                running: 0,
                concurrency,
                cursor: started,
            }));
        }
        self.start_iterations(number, state, map, started)
    }

    pub(super) fn map_state_started(&mut self, cursor: u64, length: u64) -> u64 {
        self.emit(cursor, "MapStateStarted", || {
            Some(EventDetails::new("mapStateStartedEventDetails").number("length", length))
        })
    }

    /// Starts as many iterations as permitted; ends the state if there are none.
    fn start_iterations(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        cursor: u64,
    ) -> Result<(), ErrorSource> {
        loop {
            let limit = self.m.facts.limits.inline_iterations_max;
            let Some(active) = self.active_mut(number) else { return Ok(()) };
            let Phase::Map(phase) = &mut active.phase else { return Ok(()) };
            let limit = if phase.concurrency == 0 { limit } else { phase.concurrency };
            if phase.next == phase.items.len() || phase.running >= limit {
                break;
            }
            let index = phase.next;
            phase.next += 1;
            phase.running += 1;
            let (value, input) = (phase.items[index].clone(), phase.input.clone());
            let item = Item { index: index as u64, value };
            self.start_iteration(number, state, map, cursor, item, &input)?;
        }
        self.end_map_when_done(number, state);
        Ok(())
    }

    fn start_iteration(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        cursor: u64,
        item: Item,
        input: &Value,
    ) -> Result<(), ErrorSource> {
        let slot = u32::try_from(item.index).unwrap_or(u32::MAX);
        let selected = match &map.item_selector {
            Some(selector) => self.stages_with(number, state, None, Some(&item), |stages| {
                stages.select_item(selector, input)
            })?,
            None => item.value.clone(),
        };
        let started = self.emit(cursor, "MapIterationStarted", || {
            Some(iteration("mapIterationStartedEventDetails", state, slot))
        });
        let variables =
            self.m.threads.get(&number).map(|thread| thread.variables.inner()).unwrap_or_default();
        let start_at = self.m.definition.flow(map.processor).start_at;
        let thread = Thread {
            parent: Some(ParentSlot { thread: number, slot }),
            cursor: started,
            variables,
            item: Some(item),
            active: None,
            next: None,
        };
        self.start_thread(start_at, selected, thread);
        Ok(())
    }

    pub(super) fn iteration_ended(&mut self, place: ParentSlot, cursor: u64, output: Value) {
        let definition = self.m.definition.clone();
        let number = place.thread;
        let Some(active) = self.active(number) else { return };
        let state = definition.state(active.state);
        let StateKind::Map(map) = &state.kind else { return };
        let succeeded = self.emit(cursor, "MapIterationSucceeded", || {
            Some(iteration("mapIterationSucceededEventDetails", state, place.slot))
        });
        let Some(active) = self.active_mut(number) else { return };
        let Phase::Map(phase) = &mut active.phase else { return };
        phase.outputs[place.slot as usize] = Some(output);
        phase.running -= 1;
        phase.cursor = succeeded;
        // The next iteration follows the one that freed its slot.
        if let Err(source) = self.start_iterations(number, state, map, cursor) {
            self.handle_error(number, state, source);
        }
    }

    fn end_map_when_done(&mut self, number: ThreadId, state: &State) {
        let Some(active) = self.active_mut(number) else { return };
        let Phase::Map(phase) = &mut active.phase else { return };
        if phase.running > 0 || phase.next < phase.items.len() {
            return;
        }
        let outputs: Vec<Value> = std::mem::take(&mut phase.outputs).into_iter().flatten().collect();
        let cursor = phase.cursor;
        active.phase = Phase::Entered;
        self.emit(cursor, "MapStateSucceeded", || None);
        self.set_cursor(number, cursor);
        self.leave_with_result(number, state, Value::Array(Arc::new(outputs)));
    }
}
