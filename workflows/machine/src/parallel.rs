//! Parallel: a thread per branch, with the outputs in the order of the branches.

use super::ids::ThreadId;
use mayfly_workflows_language::definition::{ParallelState, State};
use mayfly_workflows_language::value::Value;

use super::error_source::ErrorSource;
use super::stages::Unobserved;
use super::state::{ParentSlot, Phase, Thread};
use super::turn::Turn;

impl Turn<'_> {
    pub(super) fn run_parallel(
        &mut self,
        number: ThreadId,
        state: &State,
        parallel: &ParallelState,
    ) -> Result<(), ErrorSource> {
        let effective = self.effective_input(number, state)?;
        let cursor = self.cursor(number);
        let started = self.emit(cursor, "ParallelStateStarted", || None);
        self.set_cursor(number, started);
        let input = self.stages(number, state, |stages| stages.arguments(&effective, &mut Unobserved))?;
        let Some(thread) = self.m.threads.get_mut(&number) else { return Ok(()) };
        let variables = thread.variables.clone();
        let item = thread.item.clone();
        if let Some(active) = &mut thread.active {
            active.phase = Phase::Parallel { outputs: vec![None; parallel.branches.len()] };
        }
        let definition = self.m.definition.clone();
        for (slot, flow) in (0u32..).zip(&parallel.branches) {
            let branch = Thread {
                parent: Some(ParentSlot { thread: number, slot }),
                cursor: started,
                variables: variables.inner(),
                item: item.clone(),
                active: None,
                next: None,
            };
            let start_at = definition.flow(*flow).start_at;
            self.start_thread(start_at, input.clone(), branch);
        }
        Ok(())
    }

    pub(super) fn branch_ended(&mut self, place: ParentSlot, cursor: u64, output: Value) {
        let definition = self.m.definition.clone();
        let number = place.thread;
        let Some(active) = self.active_mut(number) else { return };
        let state = definition.state(active.state);
        let Phase::Parallel { outputs } = &mut active.phase else { return };
        outputs[place.slot as usize] = Some(output);
        if outputs.iter().any(Option::is_none) {
            return;
        }
        let result = Value::from_iter(std::mem::take(outputs).into_iter().flatten());
        active.phase = Phase::Entered;
        self.emit(cursor, "ParallelStateSucceeded", || None);
        // The exit event follows that of the last branch, as on AWS.
        self.set_cursor(number, cursor);
        self.leave_with_result(number, state, result);
    }

    /// Leaves a Task, Parallel or Map with its result.
    pub(super) fn leave_with_result(&mut self, number: ThreadId, state: &State, result: Value) {
        match self.check_size(state, &result) {
            Ok(()) => self.leave_with_checked(number, state, result),
            Err(source) => self.handle_error(number, state, source),
        }
    }

    /// The same, without a check of the result's size.
    pub(super) fn leave_with_checked(&mut self, number: ThreadId, state: &State, result: Value) {
        match self.stages(number, state, |stages| stages.finish(&result, &mut Unobserved)) {
            Ok(left) => self.leave(number, state, left, &state.next),
            Err(error) => self.handle_error(number, state, ErrorSource::Data(error)),
        }
    }
}
