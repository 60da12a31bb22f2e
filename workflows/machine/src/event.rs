//! Events from outside. Each is written to the journal before it takes effect.

use super::ids::{EffectId, MapRunId, TimerId};
use serde::{Deserialize, Serialize};

use mayfly_workflows_language::execution::Payload;
use mayfly_workflows_language::execution::RunStatus;

/// One thing that happened to an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t")]
pub enum Event {
    /// The start. It is not stored as a record, because the execution's row contains it.
    #[serde(rename = "start")]
    Start,
    /// A timer is due.
    #[serde(rename = "timer")]
    Timer {
        /// The machine's number for it.
        n: TimerId,
    },
    /// An effect that had to be looked at first can be carried out (an
    /// activity exists).
    #[serde(rename = "accepted")]
    Accepted {
        /// The effect.
        n: EffectId,
    },
    /// It cannot: a runtime error of the state.
    #[serde(rename = "refused")]
    Refused {
        /// The effect.
        n: EffectId,
        /// AWS's sentence, without the state's name.
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
    /// The service took the task; its end is reported later.
    #[serde(rename = "submitted")]
    Submitted {
        /// The effect.
        n: EffectId,
        /// The service's answer.
        output: Payload,
    },
    /// The effect has a result.
    #[serde(rename = "ok")]
    Succeeded {
        /// The effect.
        n: EffectId,
        /// JSON text.
        output: Payload,
    },
    /// A function answered a `lambda:invoke`. What the service puts around an answer follows from the execution's
    /// seed and from when it came, and is not written.
    #[serde(rename = "answer")]
    Answered {
        /// The effect.
        n: EffectId,
        /// The function's answer.
        output: Payload,
        /// The call's HTTP status.
        status: u16,
        /// The version that answered; none is `$LATEST`.
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
    /// A child of a map run ended.
    #[serde(rename = "child")]
    Child {
        /// The map run.
        run: MapRunId,
        /// Which child.
        index: u32,
        /// The final status.
        status: RunStatus,
        /// Its output.
        output: Option<Payload>,
        /// Its error's name.
        error: Option<String>,
        /// Its error's cause.
        cause: Option<String>,
    },
    /// Map run settings were changed from outside.
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
    /// A request to redrive what failed.
    #[serde(rename = "redrive")]
    Redrive {
        /// Names the request, so that it can be said again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<String>,
    },
}

impl Event {
    /// The payload inside, if there is one: what moves into a part of its own.
    pub fn payload_mut(&mut self) -> Option<&mut Payload> {
        match self {
            Event::Submitted { output, .. }
            | Event::Succeeded { output, .. }
            | Event::Answered { output, .. } => Some(output),
            Event::Child { output, .. } => output.as_mut(),
            _ => None,
        }
    }
}
