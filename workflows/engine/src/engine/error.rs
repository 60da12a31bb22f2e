//! Errors of the engine's operations. The API maps them to AWS's names.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};

/// Starting failed; nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The name is taken: by a run with another input, or one that ended.
    #[error("execution already exists: '{arn}'")]
    AlreadyExists {
        /// The execution that has the name.
        arn: ExecutionArn,
    },
    /// More executions are running than the limit allows.
    #[error("too many open executions ({limit}); start more when some have ended")]
    TooMany {
        /// `limits.open_executions`.
        limit: usize,
    },
    /// The engine is shutting down.
    #[error("the workflow engine is shutting down")]
    Closed,
    /// The journal could not take it.
    #[error("the workflow journal refused the write: {0}")]
    Journal(#[from] mayfly_workflows_journal::JournalError),
}

/// A request about one execution failed.
#[derive(Debug, thiserror::Error)]
pub enum ExecutionError {
    /// The execution does not exist.
    #[error("execution does not exist: '{0}'")]
    NotFound(ExecutionArn),
    /// The map run does not exist.
    #[error("map run does not exist: '{0}'")]
    MapRunNotFound(MapRunArn),
    /// The page token was not made here.
    #[error("invalid token")]
    InvalidPage,
    /// The engine is shutting down.
    #[error("the workflow engine is shutting down")]
    Closed,
    /// The journal failed.
    #[error("the workflow journal failed: {0}")]
    Journal(#[from] mayfly_workflows_journal::JournalError),
}

/// A redrive was refused.
#[derive(Debug, thiserror::Error)]
pub enum RedriveError {
    /// The execution cannot be redriven; the reason, worded as AWS words it.
    #[error("{0}")]
    NotRedrivable(String),
    /// The execution runs, or another request redrives or reads it at this moment (AWS's message).
    #[error("Execution is RUNNING and cannot be redriven")]
    AlreadyRunning,
    /// Anything else.
    #[error(transparent)]
    Execution(#[from] ExecutionError),
}

/// A reported outcome was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The token was not made by this engine.
    #[error("the task token is invalid")]
    Invalid,
    /// The task or its execution has ended.
    #[error("the task of the token has ended")]
    TimedOut,
    /// The output is not JSON; with AWS's description of the error.
    #[error("the output is invalid: {0}")]
    InvalidOutput(String),
    /// The journal could not take it; the caller may try again.
    #[error("the outcome could not be written to the journal: {0}")]
    Unavailable(String),
}

/// The engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum EngineOpenError {
    /// The journal's file must not or cannot be opened.
    #[error("the workflow journal could not be opened: {0}")]
    Database(#[from] mayfly_sqlite::DatabaseError),
    /// The journal's rows cannot be read.
    #[error("the workflow journal could not be read: {0}")]
    Journal(#[from] mayfly_workflows_journal::JournalError),
    /// The data directory cannot be created.
    #[error("the workflow data directory {path} cannot be created: {source}")]
    Directory {
        /// The path of the directory.
        path: std::path::PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
}
