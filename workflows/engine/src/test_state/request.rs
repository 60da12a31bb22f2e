//! Reading a TestState request and refusing what cannot be tested.

use mayfly_workflows_language::definition::{
    IntegrationPattern, Resource, State, StateId, StateKind, StateMachine, StateMachineType,
};
use mayfly_workflows_language::parse;
use mayfly_workflows_language::value::Value;
use serde_json::Value as Params;

use super::{context, schema};

/// The name of a state whose definition has none.
const NAMELESS: &str = "TestState";

/// Why a test is not run.
#[derive(Debug, PartialEq)]
pub enum TestRejection {
    /// A rule of the API, in AWS's words.
    Validation(String),
    /// The definition is none.
    Definition(String),
    /// The input is no JSON.
    Input(String),
    /// Something of ours failed.
    Internal(String),
}

fn validation<T>(message: impl Into<String>) -> Result<T, TestRejection> {
    Err(TestRejection::Validation(message.into()))
}

/// The level of detail of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Info,
    Debug,
    Trace,
}

impl Level {
    pub fn shows_stages(self) -> bool {
        self != Level::Info
    }

    pub fn shows_exchanges(self) -> bool {
        self == Level::Trace
    }
}

/// The replacement of the state's work.
#[derive(Debug)]
pub enum StateMock {
    Result(Value),
    Error { error: Option<String>, cause: Option<String> },
}

/// The assumed earlier events (`stateConfiguration`).
#[derive(Debug, Default)]
pub struct Configuration {
    pub retries: Option<u64>,
    pub caused_by: Option<String>,
    pub failed_iterations: Option<u64>,
    pub reader_data: Option<Value>,
}

/// A test that can be run.
#[derive(Debug)]
pub struct Request {
    pub machine: StateMachine,
    state: StateId,
    /// The state as it is written.
    pub written: Value,
    pub input: Value,
    pub level: Level,
    pub variables: Value,
    pub mock: Option<StateMock>,
    pub context: Option<Value>,
    pub configuration: Configuration,
    pub role_arn: Option<String>,
}

impl Request {
    /// The state under test.
    pub fn state(&self) -> &State {
        self.machine.state(self.state)
    }

    /// Reads parameters that the service model has checked.
    pub fn read(params: &Params) -> Result<Request, TestRejection> {
        let text = |name: &str| params.get(name).and_then(Params::as_str);
        let mock_params = params.get("mock").filter(|mock| !mock.is_null());
        let has = |name: &str| mock_params.is_some_and(|mock| mock.get(name).is_some_and(|v| !v.is_null()));
        if has("result") && has("errorOutput") {
            return validation(
                "A test mock should have only one of the following fields: [result, errorOutput].",
            );
        }
        // That AWS refuses this is known (localstack/localstack#13468), its sentence is after that for missing mocks.
        if (has("result") || has("errorOutput")) && params.get("revealSecrets") == Some(&Params::Bool(true)) {
            return validation("TestState does not support RevealSecrets when a mock is specified.");
        }
        let (machine, state, written) =
            find_state(text("definition").unwrap_or_default(), text("stateName"))?;
        let configuration = configuration(params)?;
        let mocked = has("result") || has("errorOutput");
        let (has_role, has_context) = (text("roleArn").is_some(), text("context").is_some());
        check_kind(machine.state(state), mocked, has_role, has_context, &configuration)?;
        let context = match text("context") {
            Some(context) => {
                let waits =
                    matches!(&machine.state(state).kind, StateKind::Task(task) if lasts(&task.resource));
                Some(context::parse_context(context, waits).map_err(TestRejection::Validation)?)
            }
            None => None,
        };
        let variables = match text("variables") {
            None => Value::empty_object(),
            Some(variables) => match Value::parse(variables) {
                Ok(variables @ Value::Object(_)) => variables,
                _ => return validation("Variables must be a valid JSON object"),
            },
        };
        let input = Value::parse(text("input").unwrap_or("{}"))
            .map_err(|error| TestRejection::Input(error.to_string()))?;
        let mock = match mock_params.filter(|_| mocked) {
            Some(mock) => Some(read_mock(mock, machine.state(state))?),
            None => None,
        };
        check_iterations(machine.state(state), &configuration, mock.as_ref())?;
        let level = match text("inspectionLevel") {
            Some("TRACE") => Level::Trace,
            Some("DEBUG") => Level::Debug,
            _ => Level::Info,
        };
        let role_arn = text("roleArn").map(str::to_owned);
        Ok(Request {
            machine,
            state,
            written,
            input,
            level,
            variables,
            mock,
            context,
            configuration,
            role_arn,
        })
    }
}

/// A state named in a machine, or one that stands alone.
fn find_state(definition: &str, name: Option<&str>) -> Result<(StateMachine, StateId, Value), TestRejection> {
    let refused = |rejection: parse::Rejection| TestRejection::Definition(rejection.message());
    let compiled = match name {
        Some(_) => parse::compile(definition, StateMachineType::Standard),
        None => parse::compile_state(definition, NAMELESS),
    };
    let machine = compiled.map_err(refused)?;
    let written = Value::parse(definition).map_err(|error| TestRejection::Definition(error.to_string()))?;
    let Some(name) = name else {
        let state = machine.flow(machine.root()).start_at;
        return Ok((machine, state, written));
    };
    match (machine.state_named(name).map(|state| state.id), written_state(&written, name)) {
        (Some(state), Some(written)) => Ok((machine, state, written)),
        _ => validation("State not found in definition"),
    }
}

/// The text of a state somewhere in a machine, nested flows included.
fn written_state(flow: &Value, name: &str) -> Option<Value> {
    let states = flow.get("States")?.as_object()?;
    if let Some(state) = states.get(name) {
        return Some(state.clone());
    }
    states.iter().find_map(|(_, state)| {
        let branches = state.get("Branches").and_then(Value::as_array).into_iter().flatten();
        let processor = ["ItemProcessor", "Iterator"].into_iter().filter_map(|field| state.get(field));
        branches.chain(processor).find_map(|flow| written_state(flow, name))
    })
}

fn configuration(params: &Params) -> Result<Configuration, TestRejection> {
    let Some(given) = params.get("stateConfiguration").filter(|given| !given.is_null()) else {
        return Ok(Configuration::default());
    };
    let reader_data = match given.get("mapItemReaderData").and_then(Params::as_str) {
        None => None,
        Some(data) => match Value::parse(data) {
            Ok(data) => Some(data),
            Err(_) => return validation("MapItemReaderData must be a valid JSON"),
        },
    };
    Ok(Configuration {
        retries: given.get("retrierRetryCount").and_then(Params::as_u64),
        caused_by: given.get("errorCausedByState").and_then(Params::as_str).map(str::to_owned),
        failed_iterations: given.get("mapIterationFailureCount").and_then(Params::as_u64),
        reader_data,
    })
}

/// Which kinds of states can be tested with what.
fn check_kind(
    state: &State,
    mocked: bool,
    has_role: bool,
    has_context: bool,
    given: &Configuration,
) -> Result<(), TestRejection> {
    let needs_mock = [
        ("RetrierRetryCount", given.retries.is_some()),
        ("ErrorCausedByState", given.caused_by.is_some()),
        ("MapIterationFailureCount", given.failed_iterations.is_some()),
        ("MapItemReaderData", given.reader_data.is_some()),
        ("Context", has_context),
    ];
    if let Some((field, _)) = needs_mock.iter().find(|(_, given)| *given && !mocked) {
        return validation(format!("TestState does not support {field} when a mock is not specified."));
    }
    match &state.kind {
        StateKind::Map(_) | StateKind::Parallel(_) if !mocked => Err(TestRejection::Definition(
            "TestState API does not support Map or Parallel states. Supported state types include: [Task, Wait, \
             Pass, Succeed, Fail, Choice]"
                .into(),
        )),
        StateKind::Task(_) if !mocked && !has_role => validation("RoleArn must be specified when testing a Task state"),
        StateKind::Task(task) if !mocked && lasts(&task.resource) => Err(TestRejection::Definition(
            "TestState API does not support Activity tasks, .sync or .waitForTaskToken service integration \
             patterns when a mock is not specified."
                .into(),
        )),
        StateKind::Task(_) | StateKind::Map(_) | StateKind::Parallel(_) => Ok(()),
        kind if mocked => {
            validation(format!("State type '{}' is not supported when a mock is specified", kind.name()))
        }
        _ => Ok(()),
    }
}

/// Whether a task's end is reported by another party than the called service.
pub(super) fn lasts(resource: &Resource) -> bool {
    matches!(resource, Resource::Activity(_)) || resource.pattern() != IntegrationPattern::RequestResponse
}

fn read_mock(mock: &Params, state: &State) -> Result<StateMock, TestRejection> {
    if let Some(error) = mock.get("errorOutput").filter(|error| !error.is_null()) {
        let text = |name: &str| error.get(name).and_then(Params::as_str).map(str::to_owned);
        return Ok(StateMock::Error { error: text("error"), cause: text("cause") });
    }
    let result = mock.get("result").and_then(Params::as_str).unwrap_or_default();
    let Ok(result) = Value::parse(result) else { return validation("Mocked result must be valid JSON") };
    let mode = match mock.get("fieldValidationMode").and_then(Params::as_str) {
        Some("NONE") => schema::Mode::None,
        Some("PRESENT") => schema::Mode::Present,
        _ => schema::Mode::Strict,
    };
    match &state.kind {
        StateKind::Task(task) => {
            schema::check(&task.resource, &result, mode).map_err(TestRejection::Validation)?
        }
        // A map that writes its results elsewhere answers with where they are.
        StateKind::Map(map) if map.result_writer.is_some() && result.as_object().is_none() => {
            return validation("Mocked result must be a JSON object.");
        }
        StateKind::Map(map) if map.result_writer.is_some() => {}
        StateKind::Map(_) | StateKind::Parallel(_) if result.as_array().is_none() => {
            return validation("Mocked result must be an array.");
        }
        // That AWS compares the sizes is known; the sentence is ours.
        StateKind::Parallel(branches)
            if result.as_array().map(<[Value]>::len) != Some(branches.branches.len()) =>
        {
            return validation("Mocked result must be an array with one element per branch.");
        }
        _ => {}
    }
    Ok(StateMock::Result(result))
}

fn check_iterations(
    state: &State,
    given: &Configuration,
    mock: Option<&StateMock>,
) -> Result<(), TestRejection> {
    let Some(failed) = given.failed_iterations else { return Ok(()) };
    if !matches!(state.kind, StateKind::Map(_)) {
        return validation("MapIterationFailureCount can only be specified for Map states");
    }
    match mock {
        Some(StateMock::Result(result)) => {
            let iterations = result.as_array().map_or(0, |items| items.len() as u64);
            if failed > iterations {
                return validation(
                    "Map iteration failure count must be less than or equal to the number of Map iterations",
                );
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
