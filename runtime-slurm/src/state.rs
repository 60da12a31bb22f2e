//! The states of Slurm's jobs and their meaning for a container; pure functions. The states are those of `squeue(1)`,
//! "JOB STATE CODES", of Slurm 22.05.

use mayfly_runtime::{REASON_NODE_FAIL, REASON_PREEMPTED};
use serde::{Deserialize, Serialize};

/// The waiting reason of a container whose job is in Slurm's queue.
pub const REASON_PENDING: &str = "SlurmPending";
/// The exit code of a container that was killed: 128 + SIGKILL.
const EXIT_KILLED: i32 = 137;
/// The exit code of a container that was stopped: 128 + SIGTERM.
const EXIT_TERMINATED: i32 = 143;

/// The id of a batch job, unique within a cluster until its counter wraps around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SlurmJobId(pub u64);

impl std::fmt::Display for SlurmJobId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A job's state in Slurm's extended form, such as `RUNNING`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmState(String);

/// The phase of a job's lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobPhase {
    /// In the queue, or its machines are being configured.
    Queued,
    /// Its program runs, is suspended, or its machines are being cleaned up.
    Active,
    Ended,
}

impl SlurmState {
    /// Takes the first word: `sacct` appends the user (`CANCELLED by 0`), and marks a truncated word with `+`.
    pub fn parse(text: &str) -> Self {
        let word = text.split_whitespace().next().unwrap_or_default();
        Self(word.trim_end_matches('+').to_owned())
    }

    /// An unknown state of a later version of Slurm counts as active, so that its job is neither lost nor submitted
    /// again.
    pub fn phase(&self) -> JobPhase {
        match self.0.as_str() {
            "PENDING" | "CONFIGURING" | "REQUEUED" | "REQUEUE_FED" | "REQUEUE_HOLD" | "RESV_DEL_HOLD"
            | "SPECIAL_EXIT" => JobPhase::Queued,
            "BOOT_FAIL" | "CANCELLED" | "COMPLETED" | "DEADLINE" | "FAILED" | "NODE_FAIL"
            | "OUT_OF_MEMORY" | "PREEMPTED" | "REVOKED" | "TIMEOUT" => JobPhase::Ended,
            _ => JobPhase::Active,
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The end of a job as Slurm reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEnd {
    pub state: SlurmState,
    /// Slurm's reason code, such as `NonZeroExitCode`; empty if there is none.
    pub reason: String,
    /// The exit code of the batch script.
    pub exit_code: i32,
    /// The signal that killed the batch script; 0 if none did.
    pub signal: i32,
    /// Seconds since 1970; `None` if Slurm does not know the time.
    pub started_s: Option<i64>,
    pub finished_s: Option<i64>,
}

impl JobEnd {
    /// Marks the end of a job whose stderr says that it exceeded its memory limit.
    #[must_use]
    pub fn with_memory_exceeded(self) -> Self {
        let (state, reason) =
            (SlurmState("OUT_OF_MEMORY".into()), "the job exceeded its memory limit".into());
        Self { state, reason, ..self }
    }
}

/// The end of a container in Kubernetes' terms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerEnd {
    /// The exit code as shells report it: 128 + signal for a killed program.
    pub exit_code: i32,
    pub reason: String,
    /// Empty if the exit code needs no explanation.
    pub message: String,
}

impl JobEnd {
    /// The end of the container of job `id`. A job that Slurm ended has an exit code other than 0.
    pub fn container_end(&self, id: SlurmJobId) -> ContainerEnd {
        let by_itself = match (self.exit_code, self.signal) {
            (0, 0) => None,
            (0, signal) => Some(128_i32.saturating_add(signal)),
            (code, _) => Some(code),
        };
        let (exit_code, reason) = match self.state.as_str() {
            "COMPLETED" => match by_itself {
                None => (0, "Completed"),
                Some(code) => (code, "Error"),
            },
            "FAILED" => (by_itself.unwrap_or(1), "Error"),
            "OUT_OF_MEMORY" => (EXIT_KILLED, "OOMKilled"),
            "TIMEOUT" | "DEADLINE" => (by_itself.unwrap_or(EXIT_TERMINATED), "DeadlineExceeded"),
            "CANCELLED" => (by_itself.unwrap_or(EXIT_TERMINATED), "Cancelled"),
            "PREEMPTED" => (by_itself.unwrap_or(EXIT_TERMINATED), REASON_PREEMPTED),
            "NODE_FAIL" | "BOOT_FAIL" => (by_itself.unwrap_or(EXIT_KILLED), REASON_NODE_FAIL),
            _ => (by_itself.unwrap_or(EXIT_KILLED), "Error"),
        };
        let says_everything = self.state.as_str() == "COMPLETED"
            || (self.state.as_str() == "FAILED" && matches!(self.reason.as_str(), "" | "NonZeroExitCode"));
        let message = match (says_everything, self.reason.as_str()) {
            (true, _) => String::new(),
            (false, "") => format!("Slurm job {id}: {}", self.state.as_str()),
            (false, reason) => format!("Slurm job {id}: {} ({reason})", self.state.as_str()),
        };
        ContainerEnd { exit_code, reason: reason.into(), message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(state: &str, reason: &str, exit_code: i32, signal: i32) -> JobEnd {
        let (state, reason) = (SlurmState::parse(state), reason.to_owned());
        JobEnd { state, reason, exit_code, signal, started_s: None, finished_s: None }
    }

    #[test]
    fn ends_become_exit_codes_and_reasons_of_kubernetes() {
        for (state, reason, code, signal, expected) in [
            ("COMPLETED", "", 0, 0, (0, "Completed", "")),
            ("FAILED", "NonZeroExitCode", 3, 0, (3, "Error", "")),
            ("FAILED", "", 0, 11, (139, "Error", "")),
            (
                "FAILED",
                "RaisedSignal:53(Real-time_signal_19)",
                0,
                53,
                (181, "Error", "Slurm job 7: FAILED (RaisedSignal:53(Real-time_signal_19))"),
            ),
            (
                "OUT_OF_MEMORY",
                "OutOfMemory",
                0,
                125,
                (137, "OOMKilled", "Slurm job 7: OUT_OF_MEMORY (OutOfMemory)"),
            ),
            ("TIMEOUT", "TimeLimit", 0, 0, (143, "DeadlineExceeded", "Slurm job 7: TIMEOUT (TimeLimit)")),
            ("DEADLINE", "", 0, 15, (143, "DeadlineExceeded", "Slurm job 7: DEADLINE")),
            ("CANCELLED by 0", "", 0, 15, (143, "Cancelled", "Slurm job 7: CANCELLED")),
            ("CANCELLED", "", 0, 0, (143, "Cancelled", "Slurm job 7: CANCELLED")),
            ("NODE_FAIL", "NodeDown", 0, 0, (137, "NodeFail", "Slurm job 7: NODE_FAIL (NodeDown)")),
            ("PREEMPTED", "", 0, 15, (143, "Preempted", "Slurm job 7: PREEMPTED")),
            ("BOOT_FAIL", "", 0, 0, (137, "NodeFail", "Slurm job 7: BOOT_FAIL")),
        ] {
            let end = end(state, reason, code, signal).container_end(SlurmJobId(7));
            assert_eq!((end.exit_code, end.reason.as_str(), end.message.as_str()), expected, "{state}");
        }
    }

    #[test]
    fn a_job_that_slurm_ended_never_counts_as_successful() {
        for state in
            ["CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY"]
        {
            assert_eq!(SlurmState::parse(state).phase(), JobPhase::Ended, "{state}");
            assert_ne!(end(state, "", 0, 0).container_end(SlurmJobId(1)).exit_code, 0, "{state}");
        }
    }

    #[test]
    fn states_have_phases() {
        for (state, phase) in [
            ("PENDING", JobPhase::Queued),
            ("CONFIGURING", JobPhase::Queued),
            ("RUNNING", JobPhase::Active),
            ("SUSPENDED", JobPhase::Active),
            ("COMPLETING", JobPhase::Active),
            ("A_STATE_OF_TOMORROW", JobPhase::Active),
            ("COMPLETED", JobPhase::Ended),
            ("CANCELLED+", JobPhase::Ended),
        ] {
            assert_eq!(SlurmState::parse(state).phase(), phase, "{state}");
        }
    }
}
