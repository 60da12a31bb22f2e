//! `mayfly gpu run`: runs a source file or a folder as a Job with GPUs, and follows it to its end.
//!
//! The sources are uploaded as artifacts, the Job is a `batch/v1` Job (created by [`plan`]), and its outputs are listed
//! in its outcome ([`mayfly_api::job_io`]).

mod plan;
mod sources;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use http::Method;
use mayfly_api::job_io::{ANNOTATION_OUTCOMES, ArtifactRef, JobOutcome, Outputs, is_name};
use serde_json::{Value, json};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

use super::{
    failure::{self, ErrorCode, Failure},
    logs, output,
    server::{Server, is_not_found, segment, with_query},
    session::Session,
    upload,
};
use plan::{GpuAmount, GpuJobPlan};

/// The interval of polling the Job and its pod.
const PAUSE: Duration = Duration::from_millis(200);
/// The default image, with CUDA's compiler and libraries.
const IMAGE_DEFAULT: &str = "nvidia/cuda:12.6.2-devel-ubuntu22.04";

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly gpu run job.cu
  mayfly gpu run train/ --gpus 2 --out results -- make run")]
pub(crate) struct GpuArgs {
    #[command(subcommand)]
    command: GpuCommand,
}

#[derive(Subcommand, Debug)]
enum GpuCommand {
    /// Run a source file or a folder on GPUs, follow its log, and fetch its outputs
    ///
    /// The sources are copied into the container's working folder. Files that the program writes to the folder
    /// $MAYFLY_OUT are kept after the pod is gone. Without a command, a .cu file is compiled and run, a .py or .sh file
    /// is run, and a folder with a Makefile is run by `make run`. The exit code is the program's. Ctrl-C deletes the
    /// Job.
    #[command(after_help = "Example:
  mayfly gpu run job.cu
  mayfly gpu run job.py --gpus 0.5 --gpu-memory 8Gi --image pytorch/pytorch
  mayfly gpu run train/ --gpus 2 --out results -- make run")]
    Run(RunArgs),
}

#[derive(Args, Debug)]
struct RunArgs {
    /// Files, or one folder
    #[arg(required = true, value_name = "SOURCE")]
    sources: Vec<PathBuf>,
    /// GPUs: a whole number, or a share of one below 1, such as 0.5
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    gpus: GpuAmount,
    /// A share of one GPU's time in percent, instead of --gpus
    #[arg(long, value_name = "PERCENT", conflicts_with = "gpus", value_parser = clap::value_parser!(u32).range(1..100))]
    share: Option<u32>,
    /// GPU memory of a share, such as 8Gi
    #[arg(long, value_name = "QUANTITY")]
    gpu_memory: Option<String>,
    /// The JobQueue in which the Job waits for its turn
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,
    /// The container image
    #[arg(long, default_value = IMAGE_DEFAULT)]
    image: String,
    /// The Job's name [default: the first source's, and some digits]
    #[arg(long)]
    name: Option<String>,
    /// The folder to which the job's output files are written [default: they are listed]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Create the Job and print its name, without waiting for it
    #[arg(long, conflicts_with = "out")]
    detach: bool,
    /// The program and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(crate) async fn run(args: GpuArgs, session: &Session) -> anyhow::Result<ExitCode> {
    let GpuCommand::Run(args) = args.command;
    run_job(args, session).await
}

async fn run_job(args: RunArgs, session: &Session) -> anyhow::Result<ExitCode> {
    let sources = sources::read(&args.sources)?;
    let command = match args.command.is_empty() {
        true => sources.command()?,
        false => args.command,
    };
    let gpus = args.share.map_or(args.gpus, GpuAmount::Percent);
    let limits = plan::limits(gpus, args.gpu_memory.as_deref())?;
    let (server, namespace) = (session.server().await?, session.namespace().await?);
    let mut interrupted = std::pin::pin!(interrupted()?);
    let artifacts = tokio::select! {
        pushed = sources.push(server) => pushed?,
        () = &mut interrupted => return Ok(failure::interrupted(session.globals().wants_json())),
    };
    let plan = GpuJobPlan {
        name: args.name,
        stem: sources.stem(),
        image: args.image,
        command,
        folder: sources.folder(),
        executables: sources.executables(),
        limits,
        queue: args.queue,
    };
    let jobs = format!("/apis/batch/v1/namespaces/{}/jobs", segment(&namespace));
    // Not interrupted: a Job whose creation was not acknowledged could not be deleted.
    let created =
        server.send(Method::POST, &jobs, "application/json", &plan.manifest(artifacts)?).await?.body;
    let name = created["metadata"]["name"].as_str().context("the server created a Job without a name")?;
    if args.detach {
        output::line(name)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::note(format_args!("job {name} created; Ctrl-C deletes it"));
    let run = RunningJob { server, namespace: &namespace, name, path: format!("{jobs}/{}", segment(name)) };
    tokio::select! {
        code = run.follow(session, args.out.as_deref()) => code,
        () = &mut interrupted => {
            run.delete(created["metadata"]["uid"].as_str().unwrap_or_default()).await?;
            Ok(failure::interrupted(session.globals().wants_json()))
        }
    }
}

/// Completes at the first Ctrl-C or SIGTERM. Listens from the call on, so that no signal is missed.
fn interrupted() -> anyhow::Result<impl Future<Output = ()>> {
    let hear = |kind| signal(kind).context("cannot listen for signals");
    let (mut interrupt, mut terminate) = (hear(SignalKind::interrupt())?, hear(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// A Job that was created.
struct RunningJob<'a> {
    server: &'a Server,
    namespace: &'a str,
    name: &'a str,
    /// The Job's path in the API.
    path: String,
}

impl RunningJob<'_> {
    /// Shows the log, fetches the outputs, and returns the program's exit code.
    async fn follow(&self, session: &Session, out: Option<&Path>) -> anyhow::Result<ExitCode> {
        let Self { server, namespace, name, path } = self;
        if let Some(pod) = started_pod(server, namespace, name, path).await? {
            let log = format!("/api/v1/namespaces/{}/pods/{}/log", segment(namespace), segment(&pod));
            logs::copy(session, &with_query(&log, &[("follow", Some("true"))])).await?;
        }
        let FinishedGpuJob { outcomes, gpu_time } = ended(server, path).await?;
        let Some(outcome) = outcomes.last() else {
            let todo = format!("see why: mayfly why job {name} -n {namespace}");
            return Err(Failure::error(
                ErrorCode::RunFailed,
                format!("job {name} failed before its program ran"),
                todo,
            ));
        };
        let wall = fetch(server, outcome, out).await?;
        if let Some(used) = gpu_time {
            output::note(plan::gpu_time_line(used, outcomes.len(), wall));
        }
        if !outcome.succeeded {
            let message = if outcome.message.is_empty() { &outcome.reason } else { &outcome.message };
            output::note(format_args!("job {name} failed: {message}"));
        }
        let code = outcome.exit_code.unwrap_or(i32::from(!outcome.succeeded));
        Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
    }

    /// Deletes the Job and its pods, but not a later Job of the same name.
    async fn delete(&self, uid: &str) -> anyhow::Result<()> {
        let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background",
            "preconditions": {"uid": uid}});
        let deleted = self.server.send(Method::DELETE, &self.path, "application/json", &options).await;
        match deleted {
            Ok(_) => output::note(format_args!("job {} deleted", self.name)),
            Err(error) if is_not_found(&error) => {}
            Err(error) => {
                let todo = format!("delete it: mayfly delete job {} -n {}", self.name, self.namespace);
                return Err(Failure::error(
                    ErrorCode::ServerError,
                    format!("cannot delete job {}: {error}", self.name),
                    todo,
                ));
            }
        }
        Ok(())
    }
}

/// Waits until the Job's pod has started, and returns its name; `None` if the Job ended without one. Prints each reason
/// why the pod waits once.
async fn started_pod(
    server: &Server,
    namespace: &str,
    name: &str,
    job: &str,
) -> anyhow::Result<Option<String>> {
    let pods = format!("/api/v1/namespaces/{}/pods", segment(namespace));
    let pods = with_query(&pods, &[("labelSelector", Some(&format!("batch.kubernetes.io/job-name={name}")))]);
    let mut shown = String::new();
    loop {
        let list = server.get(&pods).await?;
        let pod = list["items"].as_array().and_then(|items| items.first());
        if let Some(pod) = pod {
            if pod["status"]["phase"].as_str().is_some_and(|phase| phase != "Pending") {
                return Ok(pod["metadata"]["name"].as_str().map(str::to_owned));
            }
            let why = plan::waiting_reason(pod).unwrap_or_default();
            if !why.is_empty() && why != shown {
                output::note(format_args!("waiting: {why}"));
                shown = why;
            }
        }
        let found = read_job(server, job).await?;
        if plan::has_ended(&found) {
            return Ok(None);
        }
        if let Some(queue) = plan::waits_in_queue(&found)
            && shown.is_empty()
        {
            shown = format!("for its turn in queue {queue}; see why: mayfly why job {name} -n {namespace}");
            output::note(format_args!("waiting {shown}"));
        }
        sleep(PAUSE).await;
    }
}

/// A Job that is complete or has failed.
struct FinishedGpuJob {
    /// Of its pods, in the order of their ends.
    outcomes: Vec<JobOutcome>,
    /// Of all its pods together; `None`: they had no GPU.
    gpu_time: Option<Duration>,
}

/// Waits until the Job has ended.
async fn ended(server: &Server, job: &str) -> anyhow::Result<FinishedGpuJob> {
    loop {
        let found = read_job(server, job).await?;
        if plan::has_ended(&found) {
            let outcomes = found["metadata"]["annotations"][ANNOTATION_OUTCOMES].as_str().unwrap_or("[]");
            let outcomes: Vec<JobOutcome> =
                serde_json::from_str(outcomes).context("the Job's outcomes cannot be read")?;
            return Ok(FinishedGpuJob { outcomes, gpu_time: plan::gpu_time(&found) });
        }
        sleep(PAUSE).await;
    }
}

async fn read_job(server: &Server, job: &str) -> anyhow::Result<Value> {
    server.get(job).await.map_err(|error| match is_not_found(&error) {
        true => Failure::error(
            ErrorCode::RunFailed,
            "the Job was deleted while it was waited for",
            "run it again",
        ),
        false => error.into(),
    })
}

/// Prints the outputs of a pod, or writes them to a folder. Returns the time for which the pod ran, if it left outputs.
async fn fetch(
    server: &Server,
    outcome: &JobOutcome,
    out: Option<&Path>,
) -> anyhow::Result<Option<Duration>> {
    let Some(collected) = &outcome.outputs else { return Ok(None) };
    let mut document = Vec::new();
    upload::download(server, &collected.document, &mut document).await?;
    let outputs: Outputs = serde_json::from_slice(&document).context("the job's outputs cannot be read")?;
    for problem in &outputs.problems {
        output::note(format_args!("not kept: {problem}"));
    }
    for (name, artifact) in &outputs.artifacts {
        // The document is written within the namespace: its names must not lead out of the folder.
        if !is_name(name) {
            output::note(format_args!("not written: {name:?} is not a file name"));
            continue;
        }
        match out {
            Some(folder) => save(server, artifact, folder, name).await?,
            None => output::note(format_args!("output {name}: mayfly artifact get {}", artifact.digest)),
        }
    }
    Ok(Some(Duration::from_millis(outputs.wall_ms.unsigned_abs())))
}

async fn save(server: &Server, artifact: &ArtifactRef, folder: &Path, name: &str) -> anyhow::Result<()> {
    let refused = |error: std::io::Error| {
        Failure::error(
            ErrorCode::FileError,
            format!("cannot write to {}: {error}", folder.display()),
            "name another --out",
        )
    };
    std::fs::create_dir_all(folder).map_err(refused)?;
    let path = folder.join(name);
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(refused)?;
    upload::download(server, &artifact.digest, &mut file).await?;
    if artifact.directory {
        let content = file.reopen().map_err(refused)?;
        tar::Archive::new(content).unpack(&path).map_err(refused)?;
    } else {
        // Readable by all users, like the output of a compiler.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(open).map_err(refused)?;
        file.persist(&path).map_err(|error| refused(error.error))?;
    }
    output::note(format_args!("{} written", path.display()));
    Ok(())
}
