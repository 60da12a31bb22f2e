//! Taking one state through its stages.

use std::sync::Arc;

use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::choice;
use mayfly_workflows_language::dataflow::{self, Ambient, Context, EvaluationScope, Variables};
use mayfly_workflows_language::definition::{
    ChoiceRule, ChoiceState, Condition, DataFlow, FailState, PassState, Resource, State, StateKind,
    StateMachineType, TaskState, Text, Transition, WaitState,
};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::parse;
use mayfly_workflows_language::template::Template;
use mayfly_workflows_language::value::Value;
use serde_json::json;

use super::failing::{MockedError, settle};
use super::inspection::{InspectedStage, InspectionData};
use super::request::{self, CheckedMock, StateTest};
use super::{TestEnvironment, TestStatus, context, http_trace, waits};
use crate::engine::{self, StartRequest};
use crate::service::ServiceError;
use mayfly_workflows_machine::time_text;

/// The result of a test.
pub(super) struct TestOutcome {
    pub(super) status: TestStatus,
    pub(super) output: Option<Value>,
    pub(super) error: Option<String>,
    pub(super) cause: Option<String>,
    pub(super) next: Option<String>,
    pub(super) inspection: InspectionData,
}

/// The environment of the test, owned: it outlives the wait for a task's work.
struct TestEnv {
    context: Value,
    variables: Variables,
    ambient: Ambient,
}

impl TestEnv {
    fn stage(&self) -> StageEvaluator<'_> {
        StageEvaluator { context: &self.context, variables: &self.variables, ambient: &self.ambient }
    }

    fn walk<T>(
        &self,
        request: &StateTest,
        inspection: &mut InspectionData,
        walk: impl FnOnce(&mut TestRun<'_>) -> T,
    ) -> T {
        let stage = self.stage();
        walk(&mut TestRun { request, state: request.state(), stage: &stage, inspection })
    }
}

/// The inputs of every evaluation of the test.
pub(super) struct StageEvaluator<'a> {
    pub(super) context: &'a Value,
    pub(super) variables: &'a Variables,
    pub(super) ambient: &'a Ambient,
}

impl StageEvaluator<'_> {
    pub(super) fn scope<'b>(&'b self, input: &'b Value) -> EvaluationScope<'b> {
        EvaluationScope {
            input,
            result: None,
            error_output: None,
            context: Context::Ready(self.context),
            variables: self.variables,
            ambient: self.ambient,
        }
    }
}

/// The output of a state that did not fail.
pub(super) struct TestOutput {
    pub(super) output: Value,
    pub(super) next: Option<String>,
}

pub(super) async fn run(
    request: &StateTest,
    around: &TestEnvironment<'_>,
) -> Result<TestOutcome, ServiceError> {
    let state = request.state();
    let variables = match &request.variables {
        Value::Object(own) => Variables::of(mayfly_workflows_language::value::Map::clone(own)),
        _ => Variables::new(),
    };
    let ambient = Ambient::new(around.now_ms, around.seed);
    let ground = TestEnv { context: made_context(request, around), variables, ambient };
    let mut inspection = InspectionData::default();
    inspection.stage(InspectedStage::Input, &request.input);
    let left = match &state.kind {
        StateKind::Task(task) => {
            match ground.walk(request, &mut inspection, |passage| passage.begin_task()) {
                Err(error) => Err(MockedError::from(error)),
                Ok(arguments) => match work(request, task, &arguments, around, &mut inspection).await? {
                    Err(failure) => Err(failure),
                    Ok(result) => ground
                        .walk(request, &mut inspection, |passage| passage.end_task(&result))
                        .map_err(MockedError::from),
                },
            }
        }
        _ => ground.walk(request, &mut inspection, |passage| passage.alone()),
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
        Err(failure) => settle(request, state, &ground.stage(), inspection, failure),
    })
}

/// The name of the state that a transition leads to; none at the end.
pub(super) fn target(request: &StateTest, transition: &Transition) -> Option<String> {
    match transition {
        Transition::End => None,
        Transition::Next(id) => Some(request.machine.state(*id).name.to_string()),
        Transition::Outside(name) => Some(name.to_string()),
    }
}

fn made_context(request: &StateTest, around: &TestEnvironment<'_>) -> Value {
    if let Some(context) = &request.context {
        return context.clone();
    }
    context::TestContext {
        execution_arn: format!("{}:express:TestStateMachine:{}", around.arn_prefix, around.uuid),
        execution_name: around.uuid.clone(),
        machine_arn: format!("{}:stateMachine:TestStateMachine", around.arn_prefix),
        role_arn: request.role_arn.as_deref().unwrap_or_default(),
        input: &request.input,
        state: &request.state().name,
        now: time_text(around.now_ms),
        retried: matches!(
            request.state().kind,
            StateKind::Task(_) | StateKind::Parallel(_) | StateKind::Map(_)
        ),
        token: match &request.state().kind {
            StateKind::Task(task) if request::lasts(&task.resource) => Some(around.uuid.clone()),
            _ => None,
        },
    }
    .context()
}

/// A task's work: its mock, or an express execution of this task alone, whose input is the task's arguments.
async fn work(
    request: &StateTest,
    task: &TaskState,
    arguments: &Value,
    around: &TestEnvironment<'_>,
    inspection: &mut InspectionData,
) -> Result<Result<Value, MockedError>, ServiceError> {
    match &request.mock {
        Some(CheckedMock::Result(result)) => return Ok(Ok(result.clone())),
        Some(CheckedMock::Error { error, cause }) => {
            return Ok(Err(MockedError { error: error.clone(), cause: cause.clone() }));
        }
        None => {}
    }
    if task.resource == Resource::HttpInvoke {
        let http = &*around.engine.inner.deps.http;
        let traced = request.level.shows_exchanges().then_some(inspection);
        return Ok(http_trace::invoke(http, arguments, traced).await);
    }
    let name = &*request.state().name;
    let mut work = json!({"Type": "Task", "Resource": &*task.arn, "End": true});
    if let Some(parameters) = taken_over(task, arguments) {
        work["Parameters"] = parameters;
    }
    let alone = json!({"StartAt": name, "States": {name: work}});
    let text: Arc<str> = alone.to_string().into();
    let definition = parse::compile(&text, StateMachineType::Express)
        .map_err(|rejection| ServiceError::InvalidDefinition(rejection.message()))?;
    let machine = engine::StartedMachine {
        arn: StateMachineArn::from_trusted(format!("{}:stateMachine:TestStateMachine", around.arn_prefix)),
        name: "TestStateMachine".into(),
        role_arn: request.role_arn.clone().unwrap_or_default(),
        kind: StateMachineType::Express,
        definition_text: text,
        definition: Arc::new(definition),
        details: None,
        flow: None,
    };
    let start = StartRequest {
        state_machine: Arc::new(machine),
        name: Some(around.uuid.clone()),
        input: arguments.to_text(),
        trace_header: None,
        version_arn: None,
        alias_arn: None,
    };
    let ended =
        around.engine.start_sync(start).await.map_err(|error| ServiceError::Internal(error.to_string()))?;
    Ok(match &ended.output {
        Some(output) => Ok(Value::parse(output).map_err(|error| ServiceError::Internal(error.to_string()))?),
        None => Err(MockedError { error: ended.error, cause: ended.cause }),
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

pub(super) struct TestRun<'a> {
    pub(super) request: &'a StateTest,
    pub(super) state: &'a State,
    pub(super) stage: &'a StageEvaluator<'a>,
    pub(super) inspection: &'a mut InspectionData,
}

impl TestRun<'_> {
    /// States without effects, or with a mocked result.
    fn alone(&mut self) -> Result<TestOutput, MockedError> {
        let state = self.state;
        match &state.kind {
            StateKind::Parallel(_) => self.parallel(),
            StateKind::Map(map) => self.map(map),
            StateKind::Pass(kind) => Ok(self.pass(kind)?),
            StateKind::Choice(kind) => Ok(self.choice(kind)?),
            StateKind::Fail(kind) => Err(self.fail(kind).unwrap_or_else(MockedError::from)),
            StateKind::Wait(wait) => Ok(self.wait(wait)?),
            StateKind::Succeed | StateKind::Task(_) => Ok(self.unchanged()?),
        }
    }

    pub(super) fn effective_input(&mut self, show: bool) -> Result<Value, StateError> {
        let DataFlow::JsonPath { input_path, .. } = &self.state.data else {
            return Ok(self.request.input.clone());
        };
        let input = dataflow::effective_input(input_path, &self.stage.scope(&self.request.input))?;
        if show {
            self.inspection.stage(InspectedStage::AfterInputPath, &input);
        }
        Ok(input)
    }

    /// `Parameters` or `Arguments`, of a Task or a Pass.
    pub(super) fn arguments(&mut self, input: &Value, show: bool) -> Result<Value, StateError> {
        let scope = self.stage.scope(input);
        match &self.state.data {
            DataFlow::JsonPath { parameters, .. } => {
                let value = dataflow::parameters(parameters.as_ref(), &scope, "Parameters")?;
                if show {
                    self.inspection.stage(InspectedStage::AfterParameters, &value);
                }
                Ok(value)
            }
            DataFlow::Jsonata { arguments, .. } => {
                let value = dataflow::parameters(arguments.as_ref(), &scope, "Arguments")?;
                if show {
                    self.inspection.stage(InspectedStage::AfterArguments, &value);
                }
                Ok(value)
            }
        }
    }

    fn begin_task(&mut self) -> Result<Value, StateError> {
        let input = self.effective_input(true)?;
        self.arguments(&input, true)
    }

    fn end_task(&mut self, result: &Value) -> Result<TestOutput, StateError> {
        self.inspection.stage(InspectedStage::Result, result);
        self.finish(result)
    }

    fn pass(&mut self, pass: &PassState) -> Result<TestOutput, StateError> {
        // With a Result, input and parameters do not matter and are not shown.
        let show = pass.result.is_none();
        let input = self.effective_input(show)?;
        if let Some(result) = &pass.result {
            self.inspection.stage(InspectedStage::Result, result);
            return self.finish(result);
        }
        let jsonata = matches!(self.state.data, DataFlow::Jsonata { .. });
        let value = self.arguments(&input, show && !jsonata)?;
        self.finish(&value)
    }

    fn unchanged(&mut self) -> Result<TestOutput, StateError> {
        let input = self.effective_input(true)?;
        self.finish_unchanged(&input)
    }

    /// A wait is not waited for, but what it would wait for has to be a time.
    fn wait(&mut self, wait: &WaitState) -> Result<TestOutput, StateError> {
        let input = self.effective_input(true)?;
        waits::check(wait, &self.stage.scope(&input))?;
        self.finish_unchanged(&input)
    }

    fn choice(&mut self, choice: &ChoiceState) -> Result<TestOutput, StateError> {
        let input = self.effective_input(true)?;
        for (index, rule) in choice.rules.iter().enumerate() {
            let scope = self.stage.scope(&input);
            let matched = match &rule.condition {
                Condition::JsonPath(condition) => condition.matches(&scope)?,
                Condition::Jsonata(condition) => {
                    choice::condition(condition, &scope, &format!("Choices[{index}]/Condition"))?
                }
                Condition::Always(matched) => *matched,
            };
            if matched {
                return self.chosen(&input, Some((index, rule)), &rule.next);
            }
        }
        match &choice.default {
            Some(default) => self.chosen(&input, None, default),
            None => Err(StateError::runtime(
                "Failed to transition out of the state. The state does not point to a next state.",
            )),
        }
    }

    fn chosen(
        &mut self,
        input: &Value,
        rule: Option<(usize, &ChoiceRule)>,
        next: &Transition,
    ) -> Result<TestOutput, StateError> {
        let next = target(self.request, next);
        let at = |field: &str| choice::field_of(rule.map(|(index, _)| index), field);
        let left = match (&self.state.data, rule) {
            (DataFlow::Jsonata { output, .. }, rule) => {
                let own = rule.and_then(|(_, rule)| rule.output.as_ref());
                let field = if own.is_some() { at("Output") } else { "Output".to_owned() };
                dataflow::output(own.or(output.as_ref()), &self.stage.scope(input), input, &field)?
            }
            (DataFlow::JsonPath { .. }, _) => self.finish_unchanged(input)?.output,
        };
        let assign = match rule {
            Some((_, rule)) => rule.assign.as_ref(),
            None => self.state.assign.as_ref(),
        };
        self.assign(assign, &self.stage.scope(input), &at("Assign"))?;
        Ok(TestOutput { output: left, next })
    }

    fn fail(&mut self, fail: &FailState) -> Result<MockedError, StateError> {
        self.effective_input(true)?;
        let text = |text: &Option<Text>, field: &str| match text {
            None => Ok(None),
            Some(Text::Literal(text)) => Ok(Some(text.to_string())),
            Some(Text::Template(template)) => template
                .evaluate(&self.stage.scope(&self.request.input), &format!("{field}Path"))
                .map(Some)
                .map(plain),
            Some(Text::Expression(expression)) => {
                expression.evaluate(&self.stage.scope(&self.request.input), field).map(Some).map(plain)
            }
        };
        Ok(MockedError { error: text(&fail.error, "Error")?, cause: text(&fail.cause, "Cause")? })
    }

    /// From a result to the output.
    pub(super) fn finish(&mut self, result: &Value) -> Result<TestOutput, StateError> {
        let input = &self.request.input;
        let scope = self.stage.scope(input);
        let (output, scope_input) = match &self.state.data {
            DataFlow::JsonPath { result_selector, result_path, output_path, .. } => {
                let selected = dataflow::select_result(result_selector.as_ref(), &scope, result)?;
                self.inspection.stage(InspectedStage::AfterResultSelector, &selected);
                let placed = dataflow::place_result(result_path, input, selected.clone())?;
                self.inspection.stage(InspectedStage::AfterResultPath, &placed);
                (dataflow::effective_output(output_path, &self.stage.scope(&placed))?, selected)
            }
            DataFlow::Jsonata { output, .. } => {
                let scope = scope.with_result(result);
                (dataflow::output(output.as_ref(), &scope, result, "Output")?, input.clone())
            }
        };
        self.assign(
            self.state.assign.as_ref(),
            &self.stage.scope(&scope_input).with_result(result),
            "Assign",
        )?;
        Ok(TestOutput { output, next: target(self.request, &self.state.next) })
    }

    /// The output of states without a result.
    fn finish_unchanged(&mut self, input: &Value) -> Result<TestOutput, StateError> {
        let output = match &self.state.data {
            DataFlow::JsonPath { output_path, .. } => {
                dataflow::effective_output(output_path, &self.stage.scope(input))?
            }
            DataFlow::Jsonata { output, .. } => {
                dataflow::output(output.as_ref(), &self.stage.scope(input), input, "Output")?
            }
        };
        if !matches!(self.state.kind, StateKind::Choice(_)) {
            self.assign(self.state.assign.as_ref(), &self.stage.scope(input), "Assign")?;
        }
        Ok(TestOutput { output, next: target(self.request, &self.state.next) })
    }

    fn assign(
        &mut self,
        template: Option<&Template>,
        scope: &EvaluationScope<'_>,
        field: &str,
    ) -> Result<(), StateError> {
        if template.is_none() && self.request.variables.as_object().is_none_or(|own| own.is_empty()) {
            return Ok(());
        }
        let assigned = dataflow::assign(template, scope, field)?;
        self.inspection
            .stage(InspectedStage::Variables, &Value::from(self.stage.variables.assign(&assigned).visible()));
        Ok(())
    }
}

fn plain(value: Option<Value>) -> Option<String> {
    value.map(|value| value.as_str().map_or_else(|| value.to_text(), str::to_owned))
}
