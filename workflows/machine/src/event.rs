//! External events. Each is written to the journal before it is applied.

use super::ids::{EffectId, MapRunId, TimerId};
use serde::{Deserialize, Serialize};

use mayfly_workflows_language::execution::Payload;
use mayfly_workflows_language::execution::RunStatus;

/// An event of an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t")]
pub enum Event {
    /// The start. It is not stored as a record, because the execution's row contains it.
    #[serde(rename = "start")]
    Start,
    /// A timer is due.
    #[serde(rename = "timer")]
    Timer {
        /// The number of the timer.
        n: TimerId,
    },
    /// An effect that had to be checked first can be performed (the activity exists).
    #[serde(rename = "accepted")]
    Accepted {
        /// The effect.
        n: EffectId,
    },
    /// The effect cannot be performed, which is a runtime error of the state.
    #[serde(rename = "refused")]
    Refused {
        /// The effect.
        n: EffectId,
        /// AWS's message, without the state's name.
        cause: String,
    },
    /// A worker took the task.
    #[serde(rename = "began")]
    Began {
        /// The effect.
        n: EffectId,
        /// The worker's name.
        worker: Option<String>,
    },
    /// The service accepted the task; its end is reported later.
    #[serde(rename = "submitted")]
    Submitted {
        /// The effect.
        n: EffectId,
        /// The service's response.
        output: Payload,
    },
    /// The effect has a result.
    #[serde(rename = "ok")]
    Succeeded {
        /// The effect.
        n: EffectId,
        /// The result, as JSON text.
        output: Payload,
    },
    /// A function responded to a `lambda:invoke`. The envelope of the response is derived from the execution's seed and
    /// the time of the event, and is not stored.
    #[serde(rename = "answer")]
    Answered {
        /// The effect.
        n: EffectId,
        /// The function's response.
        output: Payload,
        /// The call's HTTP status.
        status: u16,
        /// The version that responded; `None` is `$LATEST`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        version: Option<String>,
    },
    /// The effect failed.
    #[serde(rename = "failed")]
    Failed {
        /// The effect.
        n: EffectId,
        /// The error's name.
        error: Option<String>,
        /// The error's cause.
        cause: Option<String>,
    },
    /// The end of a task was reported from outside. The task has ended, but its result is evaluated with the next
    /// [`Event::Continue`], so that the report is durable before an evaluation that may take long.
    #[serde(rename = "reported")]
    Reported {
        /// The effect.
        n: EffectId,
        /// The reported end.
        end: ReportedEnd,
    },
    /// A child of a map run ended.
    #[serde(rename = "child")]
    Child {
        /// The map run.
        run: MapRunId,
        /// The index of the child.
        index: u32,
        /// The final status.
        status: RunStatus,
        /// The child's output.
        output: Option<Payload>,
        /// The name of the child's error.
        error: Option<String>,
        /// The cause of the child's error.
        cause: Option<String>,
    },
    /// A client changed the settings of a map run.
    #[serde(rename = "update_run")]
    UpdateRun {
        /// The map run.
        run: MapRunId,
        /// New `maxConcurrency`.
        max_concurrency: Option<u64>,
        /// New `toleratedFailureCount`.
        tolerated_failure_count: Option<u64>,
        /// New `toleratedFailurePercentage`.
        tolerated_failure_percentage: Option<f64>,
    },
    /// Continues after a pause for other executions.
    #[serde(rename = "continue")]
    Continue,
    /// A request to stop the execution.
    #[serde(rename = "stop")]
    Stop {
        /// The error's name.
        error: Option<String>,
        /// The error's cause.
        cause: Option<String>,
    },
    /// A request to redrive the failed states.
    #[serde(rename = "redrive")]
    Redrive {
        /// The client's token of the request, which makes it idempotent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<String>,
        /// Whether the states are entered with the next [`Event::Continue`], so that the redrive is durable before
        /// an evaluation that may take long.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        deferred: bool,
    },
}

/// The end of a task that a token's holder or a worker reported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ReportedEnd {
    /// A result.
    #[serde(rename = "ok")]
    Succeeded {
        /// The result, as JSON text.
        output: Payload,
    },
    /// An error.
    #[serde(rename = "failed")]
    Failed {
        /// The error's name.
        error: Option<String>,
        /// The error's cause.
        cause: Option<String>,
    },
}

impl ReportedEnd {
    /// The event for the end of this effect: evaluated with a later event if `deferred`.
    pub fn event(self, n: EffectId, deferred: bool) -> Event {
        match self {
            end if deferred => Event::Reported { n, end },
            Self::Succeeded { output } => Event::Succeeded { n, output },
            Self::Failed { error, cause } => Event::Failed { n, error, cause },
        }
    }
}

impl Event {
    /// Whether the application of this event evaluates no expression.
    pub fn is_prompt(&self) -> bool {
        matches!(self, Self::Stop { .. } | Self::Reported { .. } | Self::Redrive { deferred: true, .. })
    }

    /// The payload of the event, if it has one, which may be stored as a part.
    pub fn payload_mut(&mut self) -> Option<&mut Payload> {
        match self {
            Event::Submitted { output, .. }
            | Event::Succeeded { output, .. }
            | Event::Answered { output, .. }
            | Event::Reported { end: ReportedEnd::Succeeded { output }, .. } => Some(output),
            Event::Child { output, .. } => output.as_mut(),
            _ => None,
        }
    }
}
