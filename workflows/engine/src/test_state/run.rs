//! Taking one state through its stages.

use std::sync::Arc;

use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::dataflow::{Ambient, Context, Variables};
use mayfly_workflows_language::definition::{Resource, StateKind, StateMachineType, TaskState, Transition};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::parse;
use mayfly_workflows_language::value::Value;
use serde_json::json;

use super::failing::{MockedError, settle};
use super::inspection::InspectionData;
use super::request::{self, CheckedMock, StateTest};
use super::{TestEnvironment, TestStatus, context, http_trace, waits};
use crate::engine::{self, StartRequest};
use crate::service::ServiceError;
use mayfly_workflows_machine::stages::{DataStage, StageObserver, StateOutput, StateStages};
use mayfly_workflows_machine::time_text;

/// The result of a test.
pub(super) struct TestOutcome {
    pub(super) status: TestStatus,
    pub(super) output: Option<Value>,
    pub(super) error: Option<Arc<str>>,
    pub(super) cause: Option<Arc<str>>,
    pub(super) next: Option<String>,
    pub(super) inspection: InspectionData,
}

/// The data of the test beside its request. Owned, because it outlives the wait for a task's work.
struct TestData {
    context: Value,
    variables: Variables,
    ambient: Ambient,
}

impl TestData {
    /// The stages of the state under test. Not held while a task is awaited: its evaluations are of one thread.
    fn stages<'a>(&'a self, test: &'a StateTest) -> StateStages<'a> {
        StateStages {
            state: test.state(),
            input: &test.input,
            context: Context::Ready(&self.context),
            variables: &self.variables,
            ambient: &self.ambient,
        }
    }
}

/// The output of a state that did not fail.
pub(super) struct TestOutput {
    pub(super) output: Value,
    pub(super) next: Option<String>,
}

pub(super) async fn run(
    test: &StateTest,
    environment: &TestEnvironment<'_>,
) -> Result<TestOutcome, ServiceError> {
    let state = test.state();
    let variables = match &test.variables {
        Value::Object(own) => Variables::of(mayfly_workflows_language::value::Map::clone(own)),
        _ => Variables::new(),
    };
    let ambient = Ambient::new(environment.now_ms, environment.seed);
    let data = TestData { context: made_context(test, environment), variables, ambient };
    let mut inspection = InspectionData::default();
    inspection.observe(DataStage::Input, &test.input);
    let left = match &state.kind {
        StateKind::Task(task) => {
            let arguments = begin_task(&data.stages(test), &mut inspection);
            match arguments {
                Err(error) => Err(MockedError::from(error)),
                Ok(arguments) => match work(test, task, &arguments, environment, &mut inspection).await? {
                    Err(failure) => Err(failure),
                    Ok(result) => {
                        let mut run =
                            TestRun { test, stages: data.stages(test), inspection: &mut inspection };
                        run.end_task(&result).map_err(MockedError::from)
                    }
                },
            }
        }
        _ => TestRun { test, stages: data.stages(test), inspection: &mut inspection }.alone(),
    };
    Ok(match left {
        Ok(left) => TestOutcome {
            status: TestStatus::Succeeded,
            output: Some(left.output),
            error: None,
            cause: None,
            next: left.next,
            inspection,
        },
        Err(failure) => settle(test, &data.stages(test), inspection, failure),
    })
}

/// The arguments of a task.
fn begin_task(stages: &StateStages<'_>, inspection: &mut InspectionData) -> Result<Value, StateError> {
    let effective = stages.effective_input(inspection)?;
    stages.arguments(&effective, inspection)
}

/// The name of the state that a transition leads to; none at the end.
pub(super) fn target(test: &StateTest, transition: &Transition) -> Option<String> {
    match transition {
        Transition::End => None,
        Transition::Next(id) => Some(test.machine.state(*id).name.to_string()),
        Transition::Outside(name) => Some(name.to_string()),
    }
}

fn made_context(test: &StateTest, environment: &TestEnvironment<'_>) -> Value {
    if let Some(context) = &test.context {
        return context.clone();
    }
    context::TestContext {
        execution_arn: format!("{}:express:TestStateMachine:{}", environment.arn_prefix, environment.uuid),
        execution_name: environment.uuid.clone(),
        machine_arn: format!("{}:stateMachine:TestStateMachine", environment.arn_prefix),
        role_arn: test.role_arn.as_deref().unwrap_or_default(),
        input: &test.input,
        state: &test.state().name,
        now: time_text(environment.now_ms),
        retried: matches!(test.state().kind, StateKind::Task(_) | StateKind::Parallel(_) | StateKind::Map(_)),
        token: match &test.state().kind {
            StateKind::Task(task) if request::lasts(&task.resource) => Some(environment.uuid.clone()),
            _ => None,
        },
    }
    .context()
}

/// A task's work: its mock, or an express execution of this task alone, whose input is the task's arguments.
async fn work(
    test: &StateTest,
    task: &TaskState,
    arguments: &Value,
    environment: &TestEnvironment<'_>,
    inspection: &mut InspectionData,
) -> Result<Result<Value, MockedError>, ServiceError> {
    match &test.mock {
        Some(CheckedMock::Result(result)) => return Ok(Ok(result.clone())),
        Some(CheckedMock::Error { error, cause }) => {
            return Ok(Err(MockedError::mocked(error, cause)));
        }
        None => {}
    }
    if task.resource == Resource::HttpInvoke {
        let http = &*environment.engine.inner.deps.http;
        let traced = test.level.shows_exchanges().then_some(inspection);
        return Ok(http_trace::invoke(http, arguments, traced).await);
    }
    let name = &*test.state().name;
    let mut work = json!({"Type": "Task", "Resource": &*task.arn, "End": true});
    if let Some(parameters) = taken_over(task, arguments) {
        work["Parameters"] = parameters;
    }
    let alone = json!({"StartAt": name, "States": {name: work}});
    let text: Arc<str> = alone.to_string().into();
    let definition = parse::compile(&text, StateMachineType::Express)
        .map_err(|rejection| ServiceError::InvalidDefinition(rejection.message()))?;
    let machine = engine::StartedMachine {
        arn: StateMachineArn::from_trusted(format!(
            "{}:stateMachine:TestStateMachine",
            environment.arn_prefix
        )),
        name: "TestStateMachine".into(),
        role_arn: test.role_arn.clone().unwrap_or_default(),
        kind: StateMachineType::Express,
        definition_text: text,
        definition: Arc::new(definition),
        details: None,
        flow: None,
    };
    let start = StartRequest {
        state_machine: Arc::new(machine),
        name: Some(environment.uuid.clone()),
        input: arguments.to_text().into(),
        trace_header: None,
        version_arn: None,
        alias_arn: None,
    };
    let ended = environment
        .engine
        .start_sync(start)
        .await
        .map_err(|error| ServiceError::Internal(error.to_string()))?;
    Ok(match &ended.output {
        Some(output) => Ok(Value::parse(output).map_err(|error| ServiceError::Internal(error.to_string()))?),
        None => Err(MockedError { error: ended.error.map(Into::into), cause: ended.cause.map(Into::into) }),
    })
}

/// An integration's parameters, each taken from the input: its definition has to name the required ones.
/// A function's own ARN takes any input.
fn taken_over(task: &TaskState, arguments: &Value) -> Option<serde_json::Value> {
    if matches!(task.resource, Resource::Function(_)) {
        return None;
    }
    let one = |(name, _): (&Arc<str>, &Value)| (format!("{name}.$"), json!(format!("$['{name}']")));
    Some(serde_json::Value::Object(arguments.as_object()?.iter().map(one).collect()))
}

/// The test of one state, with the stages that the machine runs.
pub(super) struct TestRun<'a> {
    pub(super) test: &'a StateTest,
    pub(super) stages: StateStages<'a>,
    pub(super) inspection: &'a mut InspectionData,
}

/// Keeps the values of all stages except one.
struct Hiding<'a> {
    inspection: &'a mut InspectionData,
    hidden: DataStage,
}

impl StageObserver for Hiding<'_> {
    fn observe(&mut self, stage: DataStage, value: &Value) {
        if stage != self.hidden {
            self.inspection.observe(stage, value);
        }
    }
}

impl TestRun<'_> {
    /// States without effects, or with a mocked result.
    fn alone(&mut self) -> Result<TestOutput, MockedError> {
        let state = self.test.state();
        match &state.kind {
            StateKind::Parallel(_) => self.parallel(),
            StateKind::Map(map) => self.map(map),
            StateKind::Pass(pass) => {
                // With a Result, input and parameters do not matter and are not shown.
                let hidden = match pass.result {
                    Some(_) => DataStage::AfterInputPath,
                    None => DataStage::AfterArguments,
                };
                let mut observer = Hiding { inspection: self.inspection, hidden };
                let left = self.stages.pass(pass, &mut observer)?;
                Ok(self.leave(left, state.assign.is_some(), &state.next))
            }
            StateKind::Choice(choice) => {
                let effective = self.stages.effective_input(self.inspection)?;
                let chosen = self.stages.choose(choice, &effective)?;
                let assign = chosen.rule.map_or(&state.assign, |rule| &rule.assign);
                Ok(self.leave(chosen.left, assign.is_some(), chosen.next))
            }
            StateKind::Fail(fail) => {
                self.stages.effective_input(self.inspection)?;
                let (error, cause) = self.stages.failure(fail)?;
                Err(MockedError { error, cause })
            }
            StateKind::Wait(wait) => {
                // A wait is not waited for, but what it would wait for has to be a time.
                let effective = self.stages.effective_input(self.inspection)?;
                waits::check(wait, &self.stages.scope(&effective))?;
                let left = self.stages.finish_without_result(&effective)?;
                Ok(self.leave(left, state.assign.is_some(), &state.next))
            }
            StateKind::Succeed | StateKind::Task(_) => {
                let effective = self.stages.effective_input(self.inspection)?;
                let left = self.stages.finish_without_result(&effective)?;
                Ok(self.leave(left, state.assign.is_some(), &state.next))
            }
        }
    }

    fn end_task(&mut self, result: &Value) -> Result<TestOutput, StateError> {
        self.inspection.observe(DataStage::Result, result);
        self.finish(result)
    }

    /// From a result to the output.
    pub(super) fn finish(&mut self, result: &Value) -> Result<TestOutput, StateError> {
        let state = self.test.state();
        let left = self.stages.finish(result, self.inspection)?;
        Ok(self.leave(left, state.assign.is_some(), &state.next))
    }

    /// Shows the variables, if there are any or the state has an `Assign`.
    fn leave(&mut self, left: StateOutput, assigns: bool, next: &Transition) -> TestOutput {
        if assigns || !self.stages.variables.is_empty() {
            let variables = self.stages.variables.assign(&left.assigned).visible();
            self.inspection.observe(DataStage::Variables, &Value::from(variables));
        }
        TestOutput { output: left.output, next: target(self.test, next) }
    }
}
