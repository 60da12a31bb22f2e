//! The request of TestState, and the refusal of what cannot be tested.

use std::fmt;

use mayfly_workflows_language::definition::{
    IntegrationPattern, Resource, State, StateId, StateKind, StateMachine, StateMachineType,
};
use mayfly_workflows_language::parse;
use mayfly_workflows_language::value::Value;

use super::{context, schema};
use crate::service::{CredentialScope, ServiceError, parse_input};

/// The name of a state whose definition has none.
const NAMELESS: &str = "TestState";

fn validation<T>(message: impl Into<String>) -> Result<T, ServiceError> {
    Err(ServiceError::validation(message))
}

fn definition(message: impl Into<String>) -> ServiceError {
    ServiceError::InvalidDefinition(message.into())
}

/// The level of detail of the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InspectionLevel {
    /// The result only.
    #[default]
    Info,
    /// The data between the stages too.
    Debug,
    /// The request and the response of an HTTP task too.
    Trace,
}

impl InspectionLevel {
    pub(super) fn shows_stages(self) -> bool {
        self != InspectionLevel::Info
    }

    pub(super) fn shows_exchanges(self) -> bool {
        self == InspectionLevel::Trace
    }
}

/// The strictness of comparing a mocked result with the model of the task's service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MockValidation {
    /// Required fields are present, and present fields have the right type.
    #[default]
    Strict,
    /// Present fields have the right type.
    Present,
    /// Not at all.
    None,
}

/// The replacement of the state's work.
#[derive(Clone)]
pub enum StateMock {
    /// The work has a result.
    Result {
        /// JSON text.
        result: String,
        /// How the result is compared with the model of the task's service.
        validation: MockValidation,
    },
    /// The work fails.
    Error {
        /// The error's name.
        error: Option<String>,
        /// The error's cause.
        cause: Option<String>,
    },
}

/// The assumed earlier events (`stateConfiguration`).
#[derive(Clone, Default)]
pub struct StateConfiguration {
    /// The number of earlier retries.
    pub retries: Option<u64>,
    /// The state whose error a Map or a Parallel has.
    pub caused_by: Option<String>,
    /// The number of failed iterations of a Map.
    pub failed_iterations: Option<u64>,
    /// The data that the `ItemReader` of a Map reads, as JSON text.
    pub reader_data: Option<String>,
}

/// A state to test. Its `Debug` has no payloads.
#[derive(Clone)]
pub struct TestState {
    /// The region and account of the request.
    pub scope: CredentialScope,
    /// The definition of a state; of a state machine if `state_name` is present.
    pub definition: String,
    /// The state of the state machine.
    pub state_name: Option<String>,
    /// The role that the test assumes.
    pub role_arn: Option<String>,
    /// The input, as JSON text; `{}` without it.
    pub input: Option<String>,
    /// The level of detail of the answer.
    pub level: InspectionLevel,
    /// Whether the answer may have secrets of connections.
    pub reveal_secrets: bool,
    /// The variables, as a JSON object.
    pub variables: Option<String>,
    /// The context object, as a JSON object.
    pub context: Option<String>,
    /// The replacement of the state's work.
    pub mock: Option<StateMock>,
    /// The assumed earlier events.
    pub configuration: StateConfiguration,
}

impl fmt::Debug for TestState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestState")
            .field("scope", &self.scope)
            .field("state_name", &self.state_name)
            .field("role_arn", &self.role_arn)
            .field("level", &self.level)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for StateMock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateMock::Result { validation, .. } => {
                f.debug_struct("Result").field("validation", validation).finish_non_exhaustive()
            }
            StateMock::Error { error, .. } => {
                f.debug_struct("Error").field("error", error).finish_non_exhaustive()
            }
        }
    }
}

impl fmt::Debug for StateConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StateConfiguration")
            .field("retries", &self.retries)
            .field("caused_by", &self.caused_by)
            .field("failed_iterations", &self.failed_iterations)
            .finish_non_exhaustive()
    }
}

/// A mock that was checked.
pub(super) enum CheckedMock {
    Result(Value),
    Error { error: Option<String>, cause: Option<String> },
}

/// A test that can be run.
pub(super) struct StateTest {
    pub(super) machine: StateMachine,
    state: StateId,
    pub(super) input: Value,
    pub(super) level: InspectionLevel,
    pub(super) variables: Value,
    pub(super) mock: Option<CheckedMock>,
    pub(super) context: Option<Value>,
    pub(super) retries: u64,
    pub(super) failed_iterations: Option<u64>,
    pub(super) reader_data: Option<Value>,
    pub(super) role_arn: Option<String>,
}

impl StateTest {
    /// The state under test.
    pub(super) fn state(&self) -> &State {
        self.machine.state(self.state)
    }

    /// Checks a request.
    pub(super) fn check(request: &TestState) -> Result<StateTest, ServiceError> {
        // That AWS refuses this is known (localstack/localstack#13468), its sentence is after that for missing mocks.
        if request.mock.is_some() && request.reveal_secrets {
            return validation("TestState does not support RevealSecrets when a mock is specified.");
        }
        let (machine, id) = find_state(&request.definition, request.state_name.as_deref())?;
        let state = machine.state(id);
        let configuration = &request.configuration;
        let reader_data = match configuration.reader_data.as_deref().map(Value::parse) {
            Some(Err(_)) => return validation("MapItemReaderData must be a valid JSON"),
            data => data.and_then(Result::ok),
        };
        check_kind(state, request)?;
        let context = match &request.context {
            Some(context) => {
                let waits = matches!(&state.kind, StateKind::Task(task) if lasts(&task.resource));
                Some(context::parse_context(context, waits).map_err(ServiceError::validation)?)
            }
            None => None,
        };
        let variables = match &request.variables {
            None => Value::empty_object(),
            Some(variables) => match Value::parse(variables) {
                Ok(variables @ Value::Object(_)) => variables,
                _ => return validation("Variables must be a valid JSON object"),
            },
        };
        let input = parse_input(&request.input.as_deref().unwrap_or("{}").into())?;
        let mock = request.mock.as_ref().map(|mock| check_mock(mock, state)).transpose()?;
        check_iterations(state, configuration, mock.as_ref())?;
        Ok(StateTest {
            state: id,
            input,
            level: request.level,
            variables,
            mock,
            context,
            retries: configuration.retries.unwrap_or(0),
            failed_iterations: configuration.failed_iterations,
            reader_data,
            role_arn: request.role_arn.clone(),
            machine,
        })
    }
}

/// A state named in a machine, or one that stands alone.
fn find_state(text: &str, name: Option<&str>) -> Result<(StateMachine, StateId), ServiceError> {
    let compiled = match name {
        Some(_) => parse::compile(text, StateMachineType::Standard),
        None => parse::compile_state(text, NAMELESS),
    };
    let machine = compiled.map_err(|rejection| definition(rejection.message()))?;
    let id = match name {
        None => Some(machine.flow(machine.root()).start_at),
        Some(name) => machine.state_named(name).map(|state| state.id),
    };
    match id {
        Some(id) => Ok((machine, id)),
        None => validation("State not found in definition"),
    }
}

/// Which kinds of states can be tested with what.
fn check_kind(state: &State, request: &TestState) -> Result<(), ServiceError> {
    let (mocked, given) = (request.mock.is_some(), &request.configuration);
    let needs_mock = [
        ("RetrierRetryCount", given.retries.is_some()),
        ("ErrorCausedByState", given.caused_by.is_some()),
        ("MapIterationFailureCount", given.failed_iterations.is_some()),
        ("MapItemReaderData", given.reader_data.is_some()),
        ("Context", request.context.is_some()),
    ];
    if let Some((field, _)) = needs_mock.iter().find(|(_, given)| *given && !mocked) {
        return validation(format!("TestState does not support {field} when a mock is not specified."));
    }
    match &state.kind {
        StateKind::Map(_) | StateKind::Parallel(_) if !mocked => Err(definition(
            "TestState API does not support Map or Parallel states. Supported state types include: [Task, Wait, \
             Pass, Succeed, Fail, Choice]",
        )),
        StateKind::Task(_) if !mocked && request.role_arn.is_none() => {
            validation("RoleArn must be specified when testing a Task state")
        }
        StateKind::Task(task) if !mocked && lasts(&task.resource) => Err(definition(
            "TestState API does not support Activity tasks, .sync or .waitForTaskToken service integration \
             patterns when a mock is not specified.",
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

fn check_mock(mock: &StateMock, state: &State) -> Result<CheckedMock, ServiceError> {
    let (result, strictness) = match mock {
        StateMock::Error { error, cause } => {
            return Ok(CheckedMock::Error { error: error.clone(), cause: cause.clone() });
        }
        StateMock::Result { result, validation } => (result, *validation),
    };
    let Ok(result) = Value::parse(result) else { return validation("Mocked result must be valid JSON") };
    match &state.kind {
        StateKind::Task(task) => {
            schema::check(&task.resource, &result, strictness).map_err(ServiceError::validation)?
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
    Ok(CheckedMock::Result(result))
}

fn check_iterations(
    state: &State,
    given: &StateConfiguration,
    mock: Option<&CheckedMock>,
) -> Result<(), ServiceError> {
    let Some(failed) = given.failed_iterations else { return Ok(()) };
    if !matches!(state.kind, StateKind::Map(_)) {
        return validation("MapIterationFailureCount can only be specified for Map states");
    }
    match mock {
        Some(CheckedMock::Result(result)) => {
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
