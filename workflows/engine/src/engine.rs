//! The handle others hold.
//!
//! [`Engine`] starts executions, answers questions about them and takes
//! outcomes from outside. Inside, one event goes one way: applied to the
//! machine, written to the journal, and only when that is durable are its
//! actions done ([`inner`]).

mod ask;
mod callbacks;
mod changes;
mod config;
mod counters;
mod definitions;
mod delivery;
mod deps;
mod due;
mod effects;
mod error;
mod history;
mod inner;
mod live;
mod load;
mod map_runs;
mod objects;
mod open;
mod open_executions;
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
    IntegrationCall, Integrations, InvokeError, MockAnswer, MockCall, Mocks, NoWireOperations,
    OperationError, OsRandomness, Randomness, Streamed, WireOperations,
};
pub(crate) use effects::{EffectGuards, Reporter};
pub use error::{EngineOpenError, ExecutionError, RedriveError, StartError, TokenError};
pub use map_runs::{MapRunCounts, MapRunDescription, MapRunUpdate};
pub use mayfly_workflows_language::{definition::StateMachineType, execution::RunStatus};
pub use mayfly_workflows_machine::ExecutionLimits;
pub use objects::{ObjectBody, ObjectCall, ObjectEntry, ObjectError, ObjectPage, ObjectStore};
pub use types::{
    ActivityTask, Description, HistoryQuery, ListQuery, Of, Page, RedriveStatus, RevisionDetails,
    StartRequest, Started, StartedMachine,
};

/// A workflow engine. Cloning it is cheap; the last clone takes the engine down.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<inner::Inner>,
}
