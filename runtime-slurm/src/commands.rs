//! Runs Slurm's commands: `sbatch`, `squeue`, `sacct`, `scontrol`, `scancel`. [`crate::output`] parses their output.

use std::{
    collections::HashMap,
    path::PathBuf,
    process::{Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::{process::Command, sync::Semaphore};

use crate::{
    output::{self, SlurmQueueEntry},
    state::{JobEnd, JobPhase, SlurmJobId},
};

/// The maximum number of concurrent commands: each is a request to Slurm's controller, which has other clients.
const COMMANDS_MAX: usize = 4;
/// The timeout of a command. Slurm's own timeout of one message is 10 s by default, and commands retry some.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum number of job ids in one call, which limits the length of the command line.
const IDS_MAX: usize = 200;
/// The maximum size of a command's error message, in bytes; the rest is cut off.
const MESSAGE_BYTES_MAX: usize = 1024;

/// Why a command failed.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum SlurmError {
    /// Slurm rejected the request, with its own message; a retry fails again.
    #[error("{command}: {message}")]
    Refused { command: &'static str, message: String },
    /// Slurm's controller did not answer, or the command is missing. The request may still have been executed.
    #[error("{command}: {message}")]
    Unanswered { command: &'static str, message: String },
}

/// The location of Slurm's commands, and their environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlurmClient {
    /// The directory of the commands; `None`: they are on the `PATH` of `environment`.
    pub folder: Option<PathBuf>,
    /// The complete environment of the commands, which batch jobs inherit.
    pub environment: Vec<(String, String)>,
}

/// Runs Slurm's commands, with limited concurrency.
pub struct SlurmCommands {
    client: SlurmClient,
    permits: Semaphore,
    /// Whether the cluster has accounting; cleared when `sacct` reports that it has none.
    has_accounting: AtomicBool,
}

impl std::fmt::Debug for SlurmCommands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlurmCommands").finish_non_exhaustive()
    }
}

impl SlurmCommands {
    pub fn new(client: SlurmClient) -> Self {
        Self { client, permits: Semaphore::new(COMMANDS_MAX), has_accounting: AtomicBool::new(true) }
    }

    /// Submits a batch job with these arguments of `sbatch`.
    ///
    /// # Errors
    /// After [`SlurmError::Unanswered`] Slurm may already have accepted the job, or may still accept it.
    pub async fn submit(&self, arguments: &[String]) -> Result<SlurmJobId, SlurmError> {
        const COMMAND: &str = "sbatch";
        let printed = self.run(COMMAND, arguments).await?;
        output::submitted(&printed).ok_or_else(|| SlurmError::Unanswered {
            command: COMMAND,
            message: format!("expected the id of a job, got {printed:?}"),
        })
    }

    /// All jobs of this user that are queued, run, or ended within the cluster's `MinJobAge`; only those called `name`
    /// if it is given.
    pub async fn queue(&self, name: Option<&str>) -> Result<Vec<SlurmQueueEntry>, SlurmError> {
        let fixed = ["--me", "--all", "--states=all", "--noheader"].map(str::to_owned);
        let format = format!("--format={}", output::QUEUE_FORMAT);
        let name = name.map(|name| format!("--name={name}"));
        let arguments: Vec<String> = fixed.into_iter().chain([format]).chain(name).collect();
        Ok(output::queue(&self.run("squeue", &arguments).await?))
    }

    /// The ends of these jobs, without jobs that are unknown to Slurm or have not ended. Queries accounting if the
    /// cluster has it, and the controller for the remaining jobs.
    pub async fn ends(&self, ids: &[SlurmJobId]) -> Result<HashMap<SlurmJobId, JobEnd>, SlurmError> {
        let mut ends = HashMap::new();
        if self.has_accounting.load(Ordering::Relaxed) {
            for ids in ids.chunks(IDS_MAX) {
                match self.accounting(ids).await {
                    Ok(known) => ends.extend(known),
                    Err(error) => {
                        if error.to_string().contains("accounting storage is disabled") {
                            tracing::info!("this cluster has no accounting: ended jobs are read by scontrol");
                            self.has_accounting.store(false, Ordering::Relaxed);
                        } else {
                            tracing::warn!(%error, "cannot read Slurm's accounting");
                        }
                        break;
                    }
                }
            }
        }
        for id in ids {
            if !ends.contains_key(id)
                && let Some(end) = self.show_job(*id).await?
            {
                ends.insert(*id, end);
            }
        }
        Ok(ends)
    }

    async fn accounting(&self, ids: &[SlurmJobId]) -> Result<Vec<(SlurmJobId, JobEnd)>, SlurmError> {
        let ids: Vec<_> = ids.iter().map(ToString::to_string).collect();
        let arguments = [
            "--allocations".to_owned(),
            "--noheader".to_owned(),
            "--parsable2".to_owned(),
            format!("--format={}", output::ACCOUNTING_FIELDS),
            format!("--jobs={}", ids.join(",")),
        ];
        let jobs = output::accounting(&self.run("sacct", &arguments).await?);
        Ok(jobs.into_iter().filter(|(_, end)| end.state.phase() == JobPhase::Ended).collect())
    }

    async fn show_job(&self, id: SlurmJobId) -> Result<Option<JobEnd>, SlurmError> {
        let arguments = ["--oneliner", "show", "job", &id.to_string()].map(str::to_owned);
        let shown = match self.run("scontrol", &arguments).await {
            Ok(shown) => shown,
            Err(SlurmError::Refused { message, .. }) if message.contains("Invalid job id") => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let job = output::shown_job(&shown);
        let job = job.filter(|(known, end)| *known == id && end.state.phase() == JobPhase::Ended);
        Ok(job.map(|(_, end)| end))
    }

    /// Sends a signal, by its name without `SIG`, to all processes of a running job. Does nothing if the job has ended.
    pub async fn signal(&self, id: SlurmJobId, signal: &str) -> Result<(), SlurmError> {
        // Without --full only job steps would get the signal, not the batch script's own processes.
        let arguments = ["--full".to_owned(), format!("--signal={signal}"), id.to_string()];
        self.run("scancel", &arguments).await.map(drop).or_else(unless_ended)
    }

    /// Kills a job, or removes it from the queue. Does nothing if the job has ended.
    pub async fn cancel(&self, id: SlurmJobId) -> Result<(), SlurmError> {
        self.run("scancel", &[id.to_string()]).await.map(drop).or_else(unless_ended)
    }

    /// Runs a command and returns its stdout.
    async fn run(&self, command: &'static str, arguments: &[String]) -> Result<String, SlurmError> {
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        let program = match &self.client.folder {
            Some(folder) => folder.join(command),
            None => PathBuf::from(command),
        };
        let unanswered = |message: String| SlurmError::Unanswered { command, message };
        let mut process = Command::new(&program);
        process
            .args(arguments)
            .env_clear()
            .envs(self.client.environment.iter().map(|(name, value)| (name, value)))
            .env("SLURM_TIME_FORMAT", "%s")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let ran = match tokio::time::timeout(COMMAND_TIMEOUT, process.output()).await {
            Ok(ran) => ran,
            Err(_) => return Err(unanswered(format!("no answer within {} s", COMMAND_TIMEOUT.as_secs()))),
        };
        let Output { status, stdout, stderr } = ran.map_err(|error| {
            unanswered(format!(
                "cannot run {}: {error}; install Slurm's commands on this machine (Debian: slurm-client)",
                program.display()
            ))
        })?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&stdout).into_owned());
        }
        let mut message = output::error_message(&String::from_utf8_lossy(&stderr));
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        Err(match output::is_refusal(&message) {
            true => SlurmError::Refused { command, message },
            false if message.is_empty() => unanswered(status.to_string()),
            false => unanswered(message),
        })
    }
}

/// Maps errors that mean that the job has ended to success.
fn unless_ended(error: SlurmError) -> Result<(), SlurmError> {
    match &error {
        SlurmError::Refused { message, .. }
            if message.contains("Invalid job id") || message.contains("already completing or completed") =>
        {
            Ok(())
        }
        _ => Err(error),
    }
}
