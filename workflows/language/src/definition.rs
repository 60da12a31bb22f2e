//! The compiled model of a state machine, which the engine's machine interprets.
//!
//! Every part of a definition exists once, in the form in which it is used: paths, templates, expressions and choice
//! rules are compiled, transitions are ids, defaults are filled in. Flows and states are in one arena per machine, so
//! an execution stores its position as a number; a [`StateMachine`] never changes after [`crate::parse::compile`] and
//! is shared as an `Arc`.

mod integrations;
mod parameters;
mod references;
mod resource;
mod state;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use parameters::{ParametersShape, unsupported};
pub use references::variable_references;
pub use resource::{FunctionArn, IntegrationKind, IntegrationPattern, Resource, ResourceError};
pub use state::{
    Batcher, Catcher, ChoiceRule, ChoiceState, Condition, DataFlow, FailState, ItemReader, Items, Jitter,
    MapMode, MapState, ParallelState, PassState, PathField, Quantity, ResultPath, ResultWriter, Retrier,
    State, StateKind, TaskState, Text, TimestampField, Transition, WaitState,
};

/// The most that fields in seconds take, as AWS documents it.
pub const SECONDS_MAX: u64 = 99_999_999;

/// STANDARD or EXPRESS: the type of a state machine, and of the executions of a distributed Map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StateMachineType {
    /// Every step is journalled; executions survive a crash and have a history.
    #[serde(rename = "STANDARD", alias = "Standard")]
    Standard,
    /// Executions run in memory, five minutes at most, and leave their result only.
    #[serde(rename = "EXPRESS", alias = "Express")]
    Express,
}

impl StateMachineType {
    /// The word of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            StateMachineType::Standard => "STANDARD",
            StateMachineType::Express => "EXPRESS",
        }
    }

    /// The type of a word of the API, in any case; `None` for other words.
    pub fn from_word(word: &str) -> Option<Self> {
        let types = [StateMachineType::Standard, StateMachineType::Express];
        types.into_iter().find(|it| it.as_str().eq_ignore_ascii_case(word))
    }
}

/// The language a state's expressions are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum QueryLanguage {
    #[serde(rename = "JSONPath")]
    JsonPath,
    #[serde(rename = "JSONata")]
    Jsonata,
}

impl fmt::Display for QueryLanguage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QueryLanguage::JsonPath => "JSONPath",
            QueryLanguage::Jsonata => "JSONata",
        })
    }
}

/// A state's place in its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StateId(pub u32);

/// A flow's place in its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlowId(pub u32);

/// A compiled definition.
#[derive(Debug, Clone)]
pub struct StateMachine {
    pub comment: Option<Arc<str>>,
    /// `Version`, the version of the language the author names.
    pub version: Option<Arc<str>>,
    pub query_language: QueryLanguage,
    /// The timeout of an execution, in seconds.
    pub timeout_seconds: Option<u64>,
    pub machine_type: StateMachineType,
    flows: Vec<Flow>,
    states: Vec<State>,
    by_name: HashMap<Arc<str>, StateId>,
}

/// States that run one after the other: the machine itself, a branch of a
/// Parallel state, the processor of a Map state.
#[derive(Debug, Clone)]
pub struct Flow {
    pub id: FlowId,
    pub start_at: StateId,
    /// In the order of the text.
    pub states: Vec<StateId>,
    /// The Parallel or Map state it belongs to; none for the machine itself.
    pub parent: Option<StateId>,
    pub comment: Option<Arc<str>>,
    /// The flow's own text, compact JSON: the definition of the child executions
    /// of a distributed Map.
    pub definition: Arc<str>,
}

impl StateMachine {
    /// `flows` and `states` lie at their ids; the first flow is the machine's own.
    pub(crate) fn new(
        head: Head,
        machine_type: StateMachineType,
        flows: Vec<Flow>,
        states: Vec<State>,
    ) -> StateMachine {
        let by_name = states.iter().map(|state| (state.name.clone(), state.id)).collect();
        StateMachine {
            comment: head.comment,
            version: head.version,
            query_language: head.query_language,
            timeout_seconds: head.timeout_seconds,
            machine_type,
            flows,
            states,
            by_name,
        }
    }

    /// The flow an execution starts in.
    pub fn root(&self) -> FlowId {
        FlowId(0)
    }

    /// # Panics
    /// When the id is of another machine.
    pub fn flow(&self, id: FlowId) -> &Flow {
        &self.flows[id.0 as usize]
    }

    /// # Panics
    /// When the id is of another machine.
    pub fn state(&self, id: StateId) -> &State {
        &self.states[id.0 as usize]
    }

    /// Names are unique in the whole machine, nested flows included.
    pub fn state_named(&self, name: &str) -> Option<&State> {
        self.by_name.get(name).map(|id| self.state(*id))
    }

    /// Every state, nested ones too, in the order of the text.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }
}

/// The properties of a machine besides its states.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(crate) comment: Option<Arc<str>>,
    pub(crate) version: Option<Arc<str>>,
    pub(crate) query_language: QueryLanguage,
    pub(crate) timeout_seconds: Option<u64>,
}
