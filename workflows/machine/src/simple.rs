//! States without effects: Pass, Succeed, Choice, Fail, Wait.

use super::ids::ThreadId;
use jiff::Timestamp;
use mayfly_workflows_language::dataflow::EvaluationScope;
use mayfly_workflows_language::definition::{
    ChoiceState, FailState, PassState, State, TimestampField, WaitState,
};
use mayfly_workflows_language::value::Value;

use super::error_source::ErrorSource;
use super::failure::RaisedError;
use super::quantity;
use super::stages::{StateOutput, Unobserved};
use super::state::{Phase, Wakes};
use super::turn::{Turn, milliseconds};

impl Turn<'_> {
    pub(super) fn run_pass(
        &mut self,
        number: ThreadId,
        state: &State,
        pass: &PassState,
    ) -> Result<(), ErrorSource> {
        let left = self.stages(number, state, |stages| stages.pass(pass, &mut Unobserved))?;
        self.leave(number, state, left, &state.next);
        Ok(())
    }

    pub(super) fn run_succeed(&mut self, number: ThreadId, state: &State) -> Result<(), ErrorSource> {
        let effective = self.effective_input(number, state)?;
        let left = self.finish_without_result(number, state, effective)?;
        self.leave(number, state, left, &mayfly_workflows_language::definition::Transition::End);
        Ok(())
    }

    pub(super) fn run_choice(
        &mut self,
        number: ThreadId,
        state: &State,
        choice: &ChoiceState,
    ) -> Result<(), ErrorSource> {
        let effective = self.effective_input(number, state)?;
        let chosen = self.stages(number, state, |stages| stages.choose(choice, &effective))?;
        self.leave(number, state, chosen.left, chosen.next);
        Ok(())
    }

    pub(super) fn run_fail(
        &mut self,
        number: ThreadId,
        state: &State,
        fail: &FailState,
    ) -> Result<(), ErrorSource> {
        let (error, cause) = self.stages(number, state, |stages| stages.failure(fail))?;
        Err(ErrorSource::Failed(RaisedError::of(error, cause)))
    }

    pub(super) fn run_wait(
        &mut self,
        number: ThreadId,
        state: &State,
        wait: &WaitState,
    ) -> Result<(), ErrorSource> {
        let effective = self.effective_input(number, state)?;
        let until_ms = match wait {
            WaitState::Seconds(seconds) => {
                let ask = |scope: &EvaluationScope<'_>| quantity::wait_seconds(scope, seconds);
                let seconds = self.evaluate(number, state, &effective, ask)?;
                self.at_ms.saturating_add(milliseconds(seconds))
            }
            WaitState::Timestamp(TimestampField::Value(at, _)) => wait_end_ms(*at),
            WaitState::Timestamp(field) => {
                let ask = |scope: &EvaluationScope<'_>| quantity::wait_timestamp(scope, field);
                wait_end_ms(self.evaluate(number, state, &effective, ask)?)
            }
        };
        if until_ms <= self.at_ms {
            let left = self.finish_without_result(number, state, effective)?;
            self.leave(number, state, left, &state.next);
            return Ok(());
        }
        let timer = self.set_timer(until_ms, Wakes::Wait(number));
        if let Some(active) = self.active_mut(number) {
            active.phase = Phase::Wait { timer };
        }
        Ok(())
    }

    pub(super) fn wait_over(&mut self, number: ThreadId) {
        let definition = self.m.definition.clone();
        let Some(active) = self.active_mut(number) else { return };
        active.phase = Phase::Entered;
        let state = definition.state(active.state);
        let outcome = self.effective_input(number, state).map_err(ErrorSource::from).and_then(|effective| {
            let left = self.finish_without_result(number, state, effective)?;
            self.leave(number, state, left, &state.next);
            Ok(())
        });
        if let Err(source) = outcome {
            self.handle_error(number, state, source);
        }
    }

    /// The output of states without a result (Wait, Succeed).
    fn finish_without_result(
        &mut self,
        number: ThreadId,
        state: &State,
        effective: Value,
    ) -> Result<StateOutput, ErrorSource> {
        Ok(self.stages(number, state, |stages| stages.finish_without_result(&effective))?)
    }
}

/// AWS considers whole seconds of a timestamp and truncates the rest.
fn wait_end_ms(at: Timestamp) -> i64 {
    at.as_second().saturating_mul(1_000)
}
