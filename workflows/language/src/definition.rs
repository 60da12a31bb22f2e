//! The compiled model of a state machine, interpreted by `mayfly-workflows-machine`.
//!
//! Every part of a definition exists once, in the form in which it is used: paths, templates, expressions and choice
//! rules are compiled, transitions are ids, defaults are filled in. Flows and states are in one arena per machine, so
//! an execution stores its position as a number. A [`StateMachine`] is immutable after [`crate::parse::compile`], and
//! shared as an `Arc`.

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

pub use mayfly_vocabulary::StateMachineType;

/// The maximum value of fields in seconds, as AWS documents it.
pub const SECONDS_MAX: u64 = 99_999_999;

/// The language of a state's expressions.
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

/// A state's index in its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StateId(pub u32);

/// A flow's index in its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlowId(pub u32);

/// A compiled definition.
#[derive(Debug, Clone)]
pub struct StateMachine {
    pub comment: Option<Arc<str>>,
    /// `Version`, the language version that the author specified.
    pub version: Option<Arc<str>>,
    pub query_language: QueryLanguage,
    /// The timeout of an execution, in seconds.
    pub timeout_seconds: Option<u64>,
    pub machine_type: StateMachineType,
    flows: Vec<Flow>,
    states: Vec<State>,
    by_name: HashMap<Arc<str>, StateId>,
    long_expressions: bool,
}

/// States that run in sequence: the machine itself, a branch of a Parallel state, the processor of a Map state.
#[derive(Debug, Clone)]
pub struct Flow {
    pub id: FlowId,
    pub start_at: StateId,
    /// In the order of the definition.
    pub states: Vec<StateId>,
    /// The Parallel or Map state of the flow; `None` for the machine itself.
    pub parent: Option<StateId>,
    pub comment: Option<Arc<str>>,
    /// The flow's source as compact JSON: the definition of the child executions of a distributed Map.
    pub definition: Arc<str>,
}

impl StateMachine {
    /// `flows` and `states` are indexed by their ids; the first flow is the machine's own.
    pub(crate) fn new(
        head: Head,
        machine_type: StateMachineType,
        flows: Vec<Flow>,
        states: Vec<State>,
    ) -> StateMachine {
        let by_name = states.iter().map(|state| (state.name.clone(), state.id)).collect();
        let long_expressions = references::has_long_expressions(&states);
        StateMachine {
            comment: head.comment,
            version: head.version,
            query_language: head.query_language,
            timeout_seconds: head.timeout_seconds,
            machine_type,
            flows,
            states,
            by_name,
            long_expressions,
        }
    }

    /// Whether an evaluation of any JSONata expression may take long: seconds, and a wait for another thread. If not,
    /// all of them are [light](crate::jsonata::Expression::is_light).
    pub fn has_long_expressions(&self) -> bool {
        self.long_expressions
    }

    /// The flow in which an execution starts.
    pub fn root(&self) -> FlowId {
        FlowId(0)
    }

    /// # Panics
    /// If the id belongs to another machine.
    pub fn flow(&self, id: FlowId) -> &Flow {
        &self.flows[id.0 as usize]
    }

    /// # Panics
    /// If the id belongs to another machine.
    pub fn state(&self, id: StateId) -> &State {
        &self.states[id.0 as usize]
    }

    /// The state of this name. Names are unique in the whole machine, including nested flows.
    pub fn state_named(&self, name: &str) -> Option<&State> {
        self.by_name.get(name).map(|id| self.state(*id))
    }

    /// All states, including nested ones, in the order of the definition.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }
}

/// The properties of a machine apart from its states.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(crate) comment: Option<Arc<str>>,
    pub(crate) version: Option<Arc<str>>,
    pub(crate) query_language: QueryLanguage,
    pub(crate) timeout_seconds: Option<u64>,
}
