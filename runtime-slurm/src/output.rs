//! Parses the output of Slurm's commands; pure functions. Times are in seconds since 1970, because [`crate::commands`]
//! sets `SLURM_TIME_FORMAT=%s`.

use crate::state::{JobEnd, SlurmJobId, SlurmState};

/// The format of `squeue` that [`queue`] parses: id, state, reason, start, name. The name is the last field, since it
/// is the only one that the submitter chooses.
pub const QUEUE_FORMAT: &str = "%A|%T|%r|%S|%j";
/// The fields of `sacct` that [`accounting`] parses.
pub const ACCOUNTING_FIELDS: &str = "JobIDRaw,State,ExitCode,Start,End,Reason";

/// A job in the queue, or one that ended recently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmQueueEntry {
    pub id: SlurmJobId,
    pub name: String,
    pub state: SlurmState,
    /// Why the job waits, as Slurm's reason code: `Resources`, `Priority`, `PartitionTimeLimit`, …
    pub reason: String,
    /// The start; the expected start of a waiting job.
    pub started_s: Option<i64>,
}

/// Parses `squeue --noheader --format` [`QUEUE_FORMAT`]. Lines that describe no job are skipped.
pub fn queue(text: &str) -> Vec<SlurmQueueEntry> {
    let job = |line: &str| {
        let mut fields = line.splitn(5, '|');
        let mut next = || fields.next().map(str::trim);
        let (id, state, reason, started, name) = (next()?, next()?, next()?, next()?, next()?);
        Some(SlurmQueueEntry {
            id: SlurmJobId(id.parse().ok()?),
            name: name.to_owned(),
            state: SlurmState::parse(state),
            reason: word(reason),
            started_s: started.parse().ok(),
        })
    };
    text.lines().filter_map(job).collect()
}

/// Parses `sacct --noheader --parsable2 --allocations --format` [`ACCOUNTING_FIELDS`].
pub fn accounting(text: &str) -> Vec<(SlurmJobId, JobEnd)> {
    let job = |line: &str| {
        let mut fields = line.splitn(6, '|');
        let mut next = || fields.next().map(str::trim);
        let (id, state, exit, started, finished, reason) =
            (next()?, next()?, next()?, next()?, next()?, next()?);
        let (exit_code, signal) = exit_code(exit)?;
        let state = SlurmState::parse(state);
        let (started_s, finished_s) = (started.parse().ok(), finished.parse().ok());
        let end = JobEnd { state, reason: word(reason), exit_code, signal, started_s, finished_s };
        Some((SlurmJobId(id.parse().ok()?), end))
    };
    text.lines().filter_map(job).collect()
}

/// Parses `scontrol --oneliner show job ID`.
pub fn shown_job(text: &str) -> Option<(SlurmJobId, JobEnd)> {
    let field = |name: &str| {
        let mut fields = text.split_whitespace();
        fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
    };
    let (exit_code, signal) = exit_code(field("ExitCode")?)?;
    let end = JobEnd {
        state: SlurmState::parse(field("JobState")?),
        reason: field("Reason").map(word).unwrap_or_default(),
        exit_code,
        signal,
        started_s: field("StartTime").and_then(|text| text.parse().ok()),
        finished_s: field("EndTime").and_then(|text| text.parse().ok()),
    };
    Some((SlurmJobId(field("JobId")?.parse().ok()?), end))
}

/// Parses `sbatch --parsable`: `ID`, or `ID;CLUSTER`. Messages may precede it.
pub fn submitted(text: &str) -> Option<SlurmJobId> {
    let last = text.lines().map(str::trim).rfind(|line| !line.is_empty())?;
    last.split(';').next()?.parse().ok().map(SlurmJobId)
}

/// The message of a failed command without the command's name, with its lines joined.
pub fn error_message(stderr: &str) -> String {
    let lines = stderr.lines().map(|line| {
        let line = line.trim();
        // `sbatch: error: …`, `squeue: error: …`, `slurm_load_jobs error: …`
        line.split_once("error: ").map_or(line, |(_, rest)| rest)
    });
    let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    lines.join("; ")
}

/// Whether Slurm rejected the job: another attempt with the same options fails in the same way. Otherwise Slurm did not
/// answer, and the job may have been accepted.
pub fn is_refusal(message: &str) -> bool {
    const UNANSWERED: [&str; 7] = [
        "Unable to contact slurm controller",
        "Connection refused",
        "Connection timed out",
        "Socket timed out",
        "Zero Bytes were transmitted or received",
        "Slurm temporarily unable to accept job",
        "Slurm backup controller in standby mode",
    ];
    !message.is_empty() && !UNANSWERED.iter().any(|cause| message.contains(cause))
}

/// Whether the end of a job's stderr says that Slurm's accounting killed it for its memory usage. Such a job has the
/// state `FAILED`; `OUT_OF_MEMORY` is used only if a cgroup limit was exceeded (`slurm.conf(5)`,
/// "JobAcctGatherParams").
pub fn is_memory_exceeded(stderr: &str) -> bool {
    stderr.lines().any(|line| line.starts_with("slurmstepd-") && line.contains("Exceeded job memory limit"))
}

/// Parses `CODE:SIGNAL`.
fn exit_code(text: &str) -> Option<(i32, i32)> {
    let (code, signal) = text.split_once(':')?;
    Some((code.parse().ok()?, signal.parse().ok()?))
}

/// A reason; empty for Slurm's `None` and `(null)`.
fn word(text: &str) -> String {
    match text {
        "None" | "(null)" | "N/A" => String::new(),
        word => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::JobPhase;

    /// Output of Slurm 22.05.8.
    const SHOWN: &str = "JobId=1 JobName=mayfly-x_a_0 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 \
        Nice=0 Account=(null) QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=0 Restarts=0 \
        BatchFlag=1 Reboot=0 ExitCode=7:0 RunTime=00:00:01 TimeLimit=00:01:00 TimeMin=N/A SubmitTime=1795635920 \
        StartTime=1795635921 EndTime=1795635922 Deadline=N/A Comment=ns/pod JobState=no \
        StdErr=/tmp/err StdIn=/dev/null StdOut=/tmp/out Power= ";

    #[test]
    fn the_queue_is_read() {
        let text = "2|PENDING|PartitionConfig|N/A|wrap\n\
            slurm_load_jobs error: noise\n\
            3|PENDING|Resources|1795636056|big\n\
            1|RUNNING|None|1795635921|a|b\n";
        let jobs = queue(text);
        let seen: Vec<_> = jobs
            .iter()
            .map(|job| (job.id.0, job.state.as_str(), job.reason.as_str(), job.started_s, job.name.as_str()))
            .collect();
        assert_eq!(
            seen,
            [
                (2, "PENDING", "PartitionConfig", None, "wrap"),
                (3, "PENDING", "Resources", Some(1_795_636_056), "big"),
                (1, "RUNNING", "", Some(1_795_635_921), "a|b"),
            ]
        );
    }

    #[test]
    fn a_shown_job_is_read() {
        let (id, end) = shown_job(SHOWN).unwrap();
        assert_eq!(id, SlurmJobId(1));
        assert_eq!(
            (end.state.as_str(), end.reason.as_str(), end.exit_code, end.signal),
            ("FAILED", "NonZeroExitCode", 7, 0)
        );
        assert_eq!((end.started_s, end.finished_s), (Some(1_795_635_921), Some(1_795_635_922)));
        assert_eq!(shown_job("slurm_load_jobs error: Invalid job id specified"), None);
    }

    #[test]
    fn accounting_is_read() {
        let text =
            "12|CANCELLED by 0|0:15|1795635921|1795635930|None\n13|RUNNING|0:0|1795635921|Unknown|None\n";
        let jobs = accounting(text);
        assert_eq!(jobs.len(), 2);
        let (id, end) = &jobs[0];
        assert_eq!((id.0, end.state.as_str(), end.signal), (12, "CANCELLED", 15));
        assert_eq!(end.finished_s, Some(1_795_635_930));
        assert_eq!(jobs[1].1.state.phase(), JobPhase::Active);
        assert_eq!(jobs[1].1.finished_s, None);
    }

    #[test]
    fn the_id_of_a_submitted_job_is_the_last_line() {
        for (text, id) in [
            ("17\n", Some(17)),
            ("17;cluster\n", Some(17)),
            ("a site's plugin says hello\n18\n", Some(18)),
            ("", None),
            ("nothing", None),
        ] {
            assert_eq!(submitted(text), id.map(SlurmJobId), "{text:?}");
        }
    }

    #[test]
    fn a_kill_for_memory_is_read_from_stderr() {
        let killed =
            "a\nslurmstepd-vm: error: Exceeded job memory limit\nslurmstepd-vm: error: *** JOB 7 ON vm\n";
        assert!(is_memory_exceeded(killed));
        assert!(!is_memory_exceeded("my program: Exceeded job memory limit\n"));
    }

    #[test]
    fn refusals_are_distinguished_from_failed_requests() {
        let refused = "sbatch: error: invalid partition specified: nope\n\
            sbatch: error: Batch job submission failed: Invalid partition name specified\n";
        let message = error_message(refused);
        assert_eq!(
            message,
            "invalid partition specified: nope; Batch job submission failed: Invalid partition name specified"
        );
        assert!(is_refusal(&message));
        assert!(is_refusal(&error_message("sbatch: error: Invalid generic resource (gres) specification")));
        for unanswered in [
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.",
            "",
        ] {
            assert!(!is_refusal(&error_message(unanswered)), "{unanswered}");
        }
    }
}
