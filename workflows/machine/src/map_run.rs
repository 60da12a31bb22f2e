//! Distributed Map: a map run with child executions.

use super::ids::{EffectId, MapRunId, ThreadId};
use std::sync::Arc;

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};
use mayfly_workflows_language::dataflow::EvaluationScope;
use mayfly_workflows_language::definition::{
    Batcher, DataFlow, MapState, State, StateKind, StateMachineType,
};
use mayfly_workflows_language::value::Value;

use super::batches::batched;
use super::call::{Action, Call, ChildResult, ChildStart, ExecutionOutcome};
use super::error_source::ErrorSource;
use super::failure::RaisedError;
use super::quantity;
use super::state::{Child, Item, MapRunState, Phase, RunPhase};
use super::turn::{ROOT, Turn, failure_details};
use crate::history::EventDetails;
use mayfly_workflows_language::execution::RunStatus;

impl Turn<'_> {
    pub(super) fn run_distributed(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        execution_type: StateMachineType,
    ) -> Result<(), ErrorSource> {
        let effective = self.effective_input(number, state)?;
        let items = match &map.item_reader {
            Some(_) => None,
            None => Some(self.map_items(number, state, map, &effective)?),
        };
        let max_concurrency = self.max_concurrency(number, state, map, &effective)?;
        let cursor = self.cursor(number);
        let length = items.as_ref().map_or(0, |items| items.len() as u64);
        let started = self.map_state_started(cursor, length);
        self.set_cursor(number, started);
        let mut run = self.new_run(state, map, execution_type, max_concurrency);
        if let Some(quantity) = &map.tolerated_failure_count {
            run.tolerated_count =
                Some(self.count(number, state, &effective, quantity, "ToleratedFailureCount")?);
        }
        if let Some(quantity) = &map.tolerated_failure_percentage {
            let ask = |scope: &EvaluationScope<'_>| quantity::percentage(scope, quantity);
            run.tolerated_percentage = Some(self.evaluate(number, state, &effective, ask)?);
        }
        let arn = run.arn.clone();
        let run_started = self.emit(started, "MapRunStarted", || {
            Some(EventDetails::new("mapRunStartedEventDetails").text("mapRunArn", arn.clone()))
        });
        self.set_cursor(number, run_started);
        let run_number = MapRunId(self.number());
        self.m.runs.insert(run_number, run);
        self.out.actions.push(Action::RegisterRun { arn });
        if let Some(active) = self.active_mut(number) {
            active.phase =
                Phase::Run(Box::new(RunPhase { run: run_number, input: effective.clone(), effect: None }));
        }
        match items {
            Some(items) => self.begin_children(number, state, map, run_number, &items),
            None => self.read_items(number, state, map, &effective),
        }
    }

    fn new_run(
        &mut self,
        state: &State,
        map: &MapState,
        execution_type: StateMachineType,
        max_concurrency: u64,
    ) -> MapRunState {
        let facts = self.m.facts.clone();
        let label: Arc<str> = match &map.label {
            Some(label) => label.clone(),
            None => self.ambient.next_uuid().to_string().into(),
        };
        let name: Arc<str> = format!("{}/{label}", facts.machine_name).into();
        let id = self.ambient.next_uuid();
        let arn =
            format!("arn:{}:states:{}:{}:mapRun:{name}:{id}", facts.partition, facts.region, facts.account);
        MapRunState {
            arn: MapRunArn::from_trusted(arn),
            state: state.id,
            status: RunStatus::Running,
            start_ms: self.at_ms,
            stop_ms: None,
            max_concurrency,
            tolerated_count: None,
            tolerated_percentage: None,
            redrive_count: 0,
            redrive_ms: None,
            children: Vec::new(),
            next: 0,
            running: 0,
            name,
            flow: map.processor,
            express: execution_type == StateMachineType::Express,
            results_written: false,
        }
    }

    fn read_items(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        effective: &Value,
    ) -> Result<(), ErrorSource> {
        let Some(reader) = &map.item_reader else { return Ok(()) };
        let field = "ItemReader";
        let template = reader.arguments.as_ref();
        let arguments = self.stages(number, state, |stages| stages.template(template, effective, field))?;
        let max_items =
            reader.max_items.as_ref().map(|max| self.count(number, state, effective, max, "MaxItems"));
        let max_items = match max_items.transpose() {
            // An invalid number at a path fails the run, like an unreadable file.
            Err(error) if matches!(state.data, DataFlow::JsonPath { .. }) => {
                self.run_failed(number, RaisedError::new(&error.error, error.cause));
                return Ok(());
            }
            max_items => max_items?,
        };
        self.run_effect(number, Call::ReadItems { state: state.id, arguments, max_items });
        Ok(())
    }

    fn run_effect(&mut self, number: ThreadId, call: Call) {
        let effect = EffectId(self.number());
        self.m.effects.insert(effect, number);
        if let Some(Phase::Run(run)) = self.active_mut(number).map(|active| &mut active.phase) {
            run.effect = Some((effect, call.clone()));
        }
        self.out.actions.push(Action::Effect { n: effect, call });
    }

    /// Creates the children's inputs and starts the first children.
    fn begin_children(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        run: MapRunId,
        items: &[Value],
    ) -> Result<(), ErrorSource> {
        let Some(Phase::Run(phase)) = self.active(number).map(|active| &active.phase) else { return Ok(()) };
        let input = phase.input.clone();
        let mut inputs = Vec::with_capacity(items.len());
        for (index, value) in items.iter().enumerate() {
            let selected = match &map.item_selector {
                Some(selector) => {
                    let item = Item { index: index as u64, value: value.clone() };
                    self.stages_with(number, state, None, Some(&item), |stages| {
                        stages.select_item(selector, &input)
                    })?
                }
                None => value.clone(),
            };
            inputs.push((selected, 1));
        }
        if let Some(batcher) = &map.item_batcher {
            inputs = self.batches(number, state, &input, batcher, inputs)?;
        }
        let facts = self.m.facts.clone();
        let Some(name) = self.m.runs.get(&run).map(|run| run.name.clone()) else { return Ok(()) };
        let mut children = Vec::with_capacity(inputs.len());
        for (input, items) in inputs {
            let id = self.ambient.next_uuid();
            let what =
                if self.m.runs.get(&run).is_some_and(|run| run.express) { "express" } else { "execution" };
            let arn = format!(
                "arn:{}:states:{}:{}:{what}:{name}:{id}",
                facts.partition, facts.region, facts.account
            );
            let arn = ExecutionArn::from_trusted(arn);
            children.push(Child { arn, input, items, start_ms: self.at_ms, result: None });
        }
        if let Some(run) = self.m.runs.get_mut(&run) {
            run.children = children;
        }
        self.start_children(number, run);
        Ok(())
    }

    /// `ItemBatcher`: groups by count and by size, whichever limit is reached first.
    fn batches(
        &mut self,
        number: ThreadId,
        state: &State,
        input: &Value,
        batcher: &Batcher,
        items: Vec<(Value, u64)>,
    ) -> Result<Vec<(Value, u64)>, ErrorSource> {
        let limits = self.stages(number, state, |stages| stages.batch_limits(batcher, input))?;
        Ok(batched(items.into_iter().map(|(item, _)| item), &limits))
    }

    /// Starts as many children as permitted; completes the run if all have ended.
    fn start_children(&mut self, number: ThreadId, run_number: MapRunId) {
        let at_ms = self.at_ms;
        let limit_all = self.m.facts.limits.map_run_children_max;
        let Some(run) = self.m.runs.get_mut(&run_number) else { return };
        let limit = if run.max_concurrency == 0 { limit_all } else { run.max_concurrency.min(limit_all) };
        while run.running < limit && run.next < run.children.len() {
            let index = run.next;
            run.next += 1;
            if run.children[index].result.is_some() {
                continue;
            }
            run.running += 1;
            run.children[index].start_ms = at_ms;
            self.out.actions.push(run.start_of(run_number, index));
        }
        if run.running == 0 && run.next == run.children.len() {
            self.children_ended(number, run_number);
        }
    }

    pub(super) fn child_ended(&mut self, run_number: MapRunId, index: u32, outcome: ExecutionOutcome) {
        let at_ms = self.at_ms;
        let Some(run) = self.m.runs.get_mut(&run_number) else { return };
        if run.status != RunStatus::Running {
            return;
        }
        let Some(child) = run.children.get_mut(index as usize) else { return };
        if child.result.is_some() {
            return;
        }
        let has_failed = outcome.status != RunStatus::Succeeded;
        child.result = Some(ChildResult {
            arn: child.arn.clone(),
            input: child.input.to_text().into(),
            start_ms: child.start_ms,
            stop_ms: at_ms,
            outcome,
        });
        run.running -= 1;
        // Not for each child: this counts all of them.
        let exceeded = has_failed && run.exceeded();
        let Some(number) = self.thread_of_run(run_number) else { return };
        if exceeded {
            self.run_failed(number, threshold_exceeded());
        } else {
            self.start_children(number, run_number);
        }
    }

    fn thread_of_run(&self, run: MapRunId) -> Option<ThreadId> {
        self.m.threads.iter().find_map(|(number, thread)| match &thread.active.as_ref()?.phase {
            Phase::Run(phase) if phase.run == run => Some(*number),
            _ => None,
        })
    }

    fn children_ended(&mut self, number: ThreadId, run_number: MapRunId) {
        let definition = self.m.definition.clone();
        let Some(active) = self.active(number) else { return };
        let state = definition.state(active.state);
        let StateKind::Map(map) = &state.kind else { return };
        let Phase::Run(phase) = &active.phase else { return };
        let input = phase.input.clone();
        let Some(run) = self.m.runs.get(&run_number) else { return };
        let (run_arn, results) = (run.arn.clone(), run.results());
        match &map.result_writer {
            Some(writer) => {
                let field = "ResultWriter";
                let template = writer.arguments.as_ref();
                match self.stages(number, state, |stages| stages.template(template, &input, field)) {
                    Ok(arguments) => {
                        let call = Call::WriteResults { state: state.id, arguments, run_arn, results };
                        self.run_effect(number, call);
                    }
                    Err(error) => self.handle_error(number, state, ErrorSource::Data(error)),
                }
            }
            None => {
                let outputs = results.iter().filter_map(|result| result.outcome.output.as_deref());
                let output = outputs.map(|text| Value::parse(text).unwrap_or_default()).collect();
                self.run_succeeded(number, state, run_number, output);
            }
        }
    }

    fn run_succeeded(&mut self, number: ThreadId, state: &State, run_number: MapRunId, output: Value) {
        let cursor = self.cursor(number);
        let succeeded = self.emit(cursor, "MapRunSucceeded", || None);
        if let Some(run) = self.m.runs.get_mut(&run_number) {
            run.status = RunStatus::Succeeded;
            run.stop_ms = Some(self.at_ms);
        }
        let Some(active) = self.active_mut(number) else { return };
        let is_first = number == ROOT && active.entered == 2;
        active.phase = Phase::Entered;
        self.emit(succeeded, "MapStateSucceeded", || None);
        // As recorded on AWS: the exit of a Map that is the first state follows the end of its run, the exit of any
        // other Map follows its run's start.
        if is_first {
            self.set_cursor(number, succeeded);
        }
        self.leave_with_result(number, state, output);
    }

    fn run_failed(&mut self, number: ThreadId, failure: RaisedError) {
        let definition = self.m.definition.clone();
        let Some(active) = self.active(number) else { return };
        let state = definition.state(active.state);
        let Phase::Run(phase) = &active.phase else { return };
        let run_number = phase.run;
        self.snapshot_failure();
        let cursor = self.cursor(number);
        let event =
            self.emit(cursor, "MapRunFailed", || Some(failure_details("mapRunFailedEventDetails", &failure)));
        self.set_cursor(number, event);
        self.stop_run(run_number, RunStatus::Failed);
        self.parts_failed = true;
        self.handle_error(number, state, ErrorSource::Failed(failure));
    }

    fn stop_run(&mut self, run_number: MapRunId, status: RunStatus) {
        let at_ms = self.at_ms;
        let Some(run) = self.m.runs.get_mut(&run_number) else { return };
        if run.status != RunStatus::Running {
            return;
        }
        run.status = status;
        run.stop_ms = Some(at_ms);
        run.running = 0;
        for child in &run.children[..run.next] {
            if child.result.is_none() {
                self.out.actions.push(Action::StopChild { arn: child.arn.clone() });
            }
        }
    }

    /// Cancels a run whose Map state does not wait for it any more.
    pub(super) fn cancel_run(&mut self, phase: &RunPhase) {
        if let Some((effect, _)) = &phase.effect
            && self.m.effects.remove(effect).is_some()
        {
            self.out.actions.push(Action::Forget { n: *effect });
        }
        self.stop_run(phase.run, RunStatus::Aborted);
    }

    /// Handles the success of reading items or writing results.
    pub(super) fn run_effect_succeeded(&mut self, number: ThreadId, state: &State, text: &Arc<str>) {
        let StateKind::Map(map) = &state.kind else { return };
        let Some(Phase::Run(phase)) = self.active_mut(number).map(|active| &mut active.phase) else { return };
        let run = phase.run;
        let Some((effect, call)) = phase.effect.take() else { return };
        self.m.effects.remove(&effect);
        let value = Value::parse(text).unwrap_or_default();
        match call {
            Call::ReadItems { .. } => {
                let items = value.as_array().unwrap_or_default().to_vec();
                if let Err(source) = self.begin_children(number, state, map, run, &items) {
                    self.handle_error(number, state, source);
                }
            }
            Call::WriteResults { .. } => {
                if let Some(run) = self.m.runs.get_mut(&run) {
                    run.results_written = true;
                }
                self.run_succeeded(number, state, run, value);
            }
            Call::Task(_) => {}
        }
    }

    /// Handles the failure of reading items or writing results.
    pub(super) fn run_effect_failed(&mut self, number: ThreadId, failure: RaisedError) {
        let Some(Phase::Run(phase)) = self.active_mut(number).map(|active| &mut active.phase) else { return };
        if let Some((effect, _)) = phase.effect.take() {
            self.m.effects.remove(&effect);
        }
        self.run_failed(number, failure);
    }

    /// Applies a client's change of a run's settings.
    pub(super) fn update_run(
        &mut self,
        run_number: MapRunId,
        max_concurrency: Option<u64>,
        count: Option<u64>,
        percentage: Option<f64>,
    ) {
        let Some(run) = self.m.runs.get_mut(&run_number) else { return };
        run.max_concurrency = max_concurrency.unwrap_or(run.max_concurrency);
        run.tolerated_count = count.or(run.tolerated_count);
        run.tolerated_percentage = percentage.or(run.tolerated_percentage);
        let exceeded = run.exceeded();
        let Some(number) = self.thread_of_run(run_number) else { return };
        let reading = matches!(
            self.active(number).map(|active| &active.phase),
            Some(Phase::Run(phase)) if phase.effect.is_some()
        );
        match (reading, exceeded) {
            (true, _) => {}
            (false, true) => self.run_failed(number, threshold_exceeded()),
            (false, false) => self.start_children(number, run_number),
        }
    }

    /// Redrives a failed run: children that did not succeed run again.
    pub(super) fn redrive_run(&mut self, number: ThreadId) {
        let at_ms = self.at_ms;
        let Some(Phase::Run(phase)) = self.active_mut(number).map(|active| &mut active.phase) else { return };
        let run_number = phase.run;
        let Some(run) = self.m.runs.get_mut(&run_number) else { return };
        if run.children.is_empty() {
            if let Some(active) = self.active_mut(number) {
                active.phase = Phase::Entered;
            }
            self.queue.push_back(number);
            return;
        }
        run.status = RunStatus::Running;
        run.stop_ms = None;
        run.redrive_count += 1;
        run.redrive_ms = Some(at_ms);
        run.next = 0;
        run.running = 0;
        for child in &mut run.children {
            if child.result.as_ref().is_some_and(|result| result.outcome.status != RunStatus::Succeeded) {
                child.result = None;
            }
        }
        let (arn, count) = (run.arn.clone(), run.redrive_count);
        let cursor = self.cursor(number);
        let redriven = self.emit(cursor, "MapRunRedriven", || {
            Some(
                EventDetails::new("mapRunRedrivenEventDetails")
                    .text("mapRunArn", arn)
                    .number("redriveCount", count.into()),
            )
        });
        self.set_cursor(number, redriven);
        self.start_children(number, run_number);
    }
}

/// The error of a run of which more items failed than are tolerated.
fn threshold_exceeded() -> RaisedError {
    RaisedError::new(
        "States.ExceedToleratedFailureThreshold",
        "The specified tolerated failure threshold was exceeded",
    )
}

impl MapRunState {
    fn start_of(&self, run: MapRunId, index: usize) -> Action {
        let child = &self.children[index];
        Action::StartChild(Box::new(ChildStart {
            run,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            arn: child.arn.clone(),
            run_arn: self.arn.clone(),
            machine_name: self.name.clone(),
            flow: self.flow,
            express: self.express,
            input: child.input.clone(),
            items: child.items,
            redrive: self.redrive_count > 0,
        }))
    }

    /// Whether the run is open and this child has not ended yet.
    pub fn waits_for(&self, index: u32) -> bool {
        let child = self.children.get(index as usize);
        self.status == RunStatus::Running && child.is_some_and(|child| child.result.is_none())
    }

    /// Whether all children before this one have ended.
    pub fn is_first_unfinished(&self, index: u32) -> bool {
        let before = self.children.get(..index as usize).unwrap_or_default();
        // Most children before it have no result either, so the search for one without is short.
        before.iter().rev().all(|child| child.result.is_some())
    }

    /// The children that were started and have not ended.
    pub(super) fn children_under_way(&self, run: MapRunId) -> Vec<Action> {
        let started = self.children[..self.next].iter().enumerate();
        started
            .filter(|(_, child)| child.result.is_none())
            .map(|(index, _)| self.start_of(run, index))
            .collect()
    }

    fn results(&self) -> Arc<Vec<ChildResult>> {
        Arc::new(self.children.iter().filter_map(|child| child.result.clone()).collect())
    }
}
