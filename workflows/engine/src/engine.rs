//! The handle that other crates hold.
//!
//! [`Engine`] starts executions, describes them and accepts outcomes from outside. [`Engine::open`] returns an
//! [`OpenedEngine`]; it runs when it is started with the functions and integrations that tasks call, which may have been
//! made from it. An event is applied to the machine, then written to the journal, and when that is durable, its actions
//! are performed ([`inner`]).

mod callbacks;
mod changes;
mod config;
mod counters;
mod definitions;
mod delivery;
mod deps;
mod due;
mod effect_queue;
mod effects;
mod error;
mod evaluations;
mod history;
mod inner;
mod live;
mod load;
mod map_runs;
mod objects;
mod open;
mod open_executions;
mod queries;
mod redrive;
mod residency;
mod retention;
mod start;
mod timers;
mod types;
mod wait;
mod work;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use crate::executor::endpoint::{AwsEndpoints, Credentials, EndpointError};
pub use changes::{ExecutionChange, ExecutionChanged};
pub use config::{ACCOUNT_DEFAULT, REGION_DEFAULT};
pub use config::{Config, EngineLimits};
pub use counters::ExecutionCount;
pub use deps::{
    Activities, CallOrigin, EngineDeps, FunctionCall, FunctionError, FunctionOutput, Functions, HttpTasks,
    IntegrationCall, Integrations, InvokeError, MockAnswer, MockCall, Mocks, NoIntegrations,
    NoWireOperations, OperationError, OsRandomness, Randomness, Streamed, WireOperations,
};
pub(crate) use effects::{EffectGuards, Reporter};
pub use error::{EngineOpenError, ExecutionError, RedriveError, StartError, TokenError};
pub use map_runs::{MapRunCounts, MapRunDescription, MapRunUpdate};
pub use mayfly_workflows_journal::ExecutionOwner;
pub use mayfly_workflows_language::{definition::StateMachineType, execution::RunStatus};
pub use mayfly_workflows_machine::ExecutionLimits;
pub use objects::{ObjectBody, ObjectCall, ObjectEntry, ObjectError, ObjectPage, ObjectStore};
pub use open::OpenedEngine;
pub use types::{
    ActivityTask, Description, HistoryQuery, ListQuery, Page, RedriveStatus, RevisionDetails, StartRequest,
    Started, StartedMachine,
};

/// A workflow engine. Cloning it is cheap; the last clone takes the engine down.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<inner::Inner>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}
