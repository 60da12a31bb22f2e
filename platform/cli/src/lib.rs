//! The commands of `mayfly` that do not run a server in their own process, and the tool chains of guests.
//!
//! **Belongs here:** flags, finding the server ([`find`]), requests to it ([`server`]), showing results ([`output`],
//! [`failure`]), one file per command; scaffolding and building functions ([`guest`]); the layout of the data
//! directory, which the server writes and the commands read ([`data_dir`]). A command's result goes to stdout,
//! everything else to stderr.
//!
//! **Does not belong here:** the roles of the server and their settings (`platform/server`), wasmtime, the semantics
//! of objects.
//!
//! Start reading at [`Command`].

#![warn(missing_debug_implementations)]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

mod apply;
mod artifact;
mod bounded_read;
mod build;
mod completion;
mod component;
pub mod data_dir;
mod delete;
mod deploy;
mod deploy_patch;
mod describe;
mod dev;
mod discovery;
mod explain;
pub mod failure;
mod find;
mod format;
mod gateway;
mod get;
mod gpu;
mod guest;
pub mod http_client;
mod image;
mod invocations;
mod invoke;
mod logs;
mod manifest;
mod metrics;
mod middleware;
mod network;
mod new;
mod output;
mod server;
mod session;
mod spin;
mod table;
mod top;
mod upload;
mod version;
mod wait;
mod why;
mod workflow;
mod yaml;

use output::OutputFormat;
use session::Session;

/// The exit status of a process that was ended by Ctrl-C, as shells expect.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Flags of all commands.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Global options")]
pub struct Globals {
    /// The server's data directory [default: MAYFLY_DATA_DIR, else the XDG state directory]
    #[arg(long, global = true, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// The kubeconfig to connect with [default: KUBECONFIG, else the data directory's]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The API server's URL, instead of the kubeconfig's
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) server: Option<String>,
    /// The namespace [default: the kubeconfig's, else default]
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// The format of results
    #[arg(short, long, global = true, value_name = "FORMAT", value_enum)]
    pub(crate) output: Option<OutputFormat>,
    /// Print more to stderr
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

impl Globals {
    /// Whether errors are printed for programs: `--output json`.
    pub fn wants_json(&self) -> bool {
        self.output == Some(OutputFormat::Json)
    }
}

// A doc comment here would become the program's help.
#[derive(Subcommand, Debug)]
#[expect(private_interfaces, reason = "clap's arguments are constructed by parsing only")]
pub enum Command {
    /// Make a new function or job from a template
    New(new::NewArgs),
    /// Build a function into a component
    Build(build::BuildArgs),
    #[command(flatten)]
    Client(Box<ClientCommand>),
    /// Print a shell's completion script
    Completion(completion::CompletionArgs),
}

// The commands that use a server. (A doc comment here would become the program's help.)
#[derive(Subcommand, Debug)]
pub(crate) enum ClientCommand {
    /// Upload a component and run it as a function
    Deploy(deploy::DeployArgs),
    /// Rebuild and deploy on every save, and follow the logs
    Dev(dev::DevArgs),
    /// Call a function with an event
    Invoke(invoke::InvokeArgs),
    /// Asynchronous invocations of functions
    Invocations(invocations::InvocationsArgs),
    /// Show the output of a function
    Logs(logs::LogsArgs),
    /// List objects, or show some
    Get(get::GetArgs),
    /// Create or change objects to match manifests
    Apply(apply::ApplyArgs),
    /// Delete objects
    Delete(delete::DeleteArgs),
    /// Show an object readably, with its conditions and events
    Describe(describe::DescribeArgs),
    /// Show the fields of a kind
    Explain(explain::ExplainArgs),
    /// Show what functions, nodes and pods are doing
    Top(top::TopArgs),
    /// Show why a pod or a job waits, or how it ended
    Why(why::WhyArgs),
    /// Show how Services are reached
    Network(network::NetworkArgs),
    /// Workflows in the Amazon States Language, and their executions
    Workflow(workflow::WorkflowArgs),
    /// Components, and inputs and outputs of jobs
    Artifact(artifact::ArtifactArgs),
    /// Jobs on GPUs
    Gpu(gpu::GpuArgs),
    /// Images of containers on a node
    Image(image::ImageArgs),
    /// Print the versions of this program and of the server
    Version(version::VersionArgs),
}

impl Command {
    /// Runs the command to its end. `program` is the whole command line, for completion scripts.
    pub fn run(self, globals: Globals, program: clap::Command) -> anyhow::Result<ExitCode> {
        match self {
            Self::New(args) => new::run(args, &globals),
            Self::Build(args) => build::run(args, &globals),
            Self::Completion(args) => completion::run(&args, program),
            Self::Client(command) => {
                if !command.handles_interrupt() {
                    force_exit_on_interrupt()?;
                }
                client_runtime()?.block_on(command.run(globals))
            }
        }
    }
}

impl ClientCommand {
    /// Whether the command handles Ctrl-C itself: `dev` prints the functions that stay deployed, `gpu run` deletes its
    /// Job.
    fn handles_interrupt(&self) -> bool {
        matches!(self, Self::Dev(_) | Self::Gpu(_))
    }

    async fn run(self, globals: Globals) -> anyhow::Result<ExitCode> {
        let session = Session::new(globals);
        let handles_interrupt = self.handles_interrupt();
        let work = Box::pin(self.run_with(&session));
        let done = tokio::select! {
            done = work => done,
            _ = tokio::signal::ctrl_c(), if !handles_interrupt => {
                return Ok(failure::interrupted(session.globals().wants_json()));
            }
        };
        done.map_err(|error| session.explain(error))
    }

    async fn run_with(self, session: &Session) -> anyhow::Result<ExitCode> {
        match self {
            Self::Deploy(args) => deploy::run(args, session).await?,
            Self::Dev(args) => dev::run(args, session).await?,
            Self::Invoke(args) => return invoke::run(args, session).await,
            Self::Invocations(args) => invocations::run(args, session).await?,
            Self::Logs(args) => logs::run(args, session).await?,
            Self::Get(args) => get::run(args, session).await?,
            Self::Apply(args) => apply::run(args, session).await?,
            Self::Delete(args) => delete::run(args, session).await?,
            Self::Describe(args) => describe::run(args, session).await?,
            Self::Explain(args) => explain::run(args, session).await?,
            Self::Top(args) => top::run(args, session).await?,
            Self::Why(args) => why::run(args, session).await?,
            Self::Network(args) => network::run(args, session).await?,
            Self::Workflow(args) => return workflow::run(args, session).await,
            Self::Artifact(args) => artifact::run(args, session).await?,
            Self::Gpu(args) => return gpu::run(args, session).await,
            Self::Image(args) => image::run(args, session).await?,
            Self::Version(args) => version::run(args, session).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Commands mostly wait: one thread drives them, and blocking work runs in the pool.
fn client_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// The time for a command to end after Ctrl-C.
const INTERRUPT_PATIENCE: Duration = Duration::from_millis(250);

/// Ends the process after Ctrl-C if the command does not: its thread may be blocked by a read from the terminal or a
/// disk.
fn force_exit_on_interrupt() -> anyhow::Result<()> {
    let listening = client_runtime()?;
    let mut interrupts = {
        let _in_it = listening.enter();
        signal(SignalKind::interrupt())?
    };
    let listen = async move {
        if interrupts.recv().await.is_some() {
            tokio::time::sleep(INTERRUPT_PATIENCE).await;
            std::process::exit(EXIT_INTERRUPTED.into());
        }
    };
    std::thread::Builder::new().name("interrupts".into()).spawn(move || listening.block_on(listen))?;
    Ok(())
}
