//! The commands of the `mayfly` binary that talk to a server, and those that need none.
//!
//! Here belong: flags, finding the server ([`find`]), speaking to it ([`server`]), showing what it said
//! ([`output`], [`failure`]). One file per command; each begins with its arguments and ends with what it
//! prints. The product goes to stdout, everything else to stderr.
//!
//! Not here: what an object means, how a function is scaffolded or built (`guest`), the roles (`roles`).

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

mod apply;
mod artifact;
mod build;
mod completion;
mod component;
mod delete;
mod deploy;
mod describe;
mod dev;
mod discovery;
mod explain;
mod failure;
mod find;
mod format;
mod gateway;
mod get;
mod image;
mod invoke;
mod logs;
mod manifest;
mod metrics;
mod new;
mod output;
mod server;
mod session;
mod table;
mod top;
mod upload;
mod version;
mod wait;
mod wish;
mod workflow;
mod yaml;

use output::OutputFormat;
use session::Session;

use crate::EXIT_INTERRUPTED;

/// Functions, workflows and Kubernetes objects in one process; start it with: mayfly up
#[derive(Parser, Debug)]
#[command(name = "mayfly", version, disable_help_subcommand = true, max_term_width = 110)]
#[command(after_help = "Example:
  mayfly up &
  mayfly new rust hello && cd hello && mayfly deploy
  mayfly invoke hello -d '{\"name\":\"Ada\"}'")]
pub(crate) struct Cli {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: Command,
}

/// Flags of every command.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Globals {
    /// The server's data directory [default: MAYFLY_DATA_DIR, else the XDG state directory]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// The kubeconfig to connect with [default: KUBECONFIG, else the data directory's]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The API server's URL, instead of the kubeconfig's
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) server: Option<String>,
    /// The namespace [default: the kubeconfig's, else default]
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// How results are shown
    #[arg(short, long, global = true, value_name = "FORMAT", value_enum)]
    pub(crate) output: Option<OutputFormat>,
    /// Say more on stderr
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Start everything in this process: API, scheduler, controllers, node and gateway
    #[command(after_help = "Example:\n  mayfly up --data-dir ./data --http-listen 127.0.0.1:8080")]
    Up(Box<crate::config::UpArgs>),
    /// The control plane alone, which this build does not have
    #[command(hide = true, after_help = "Example:\n  mayfly up    # everything in one process")]
    Server {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// A machine that joins a control plane, which this build does not have
    #[command(hide = true, after_help = "Example:\n  mayfly up    # everything in one process")]
    Node {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Make a new function or job from a template
    New(new::NewArgs),
    /// Build a function into a component
    Build(build::BuildArgs),
    #[command(flatten)]
    Client(Box<ClientCommand>),
    /// Container images, which this build does not have
    #[command(hide = true)]
    Image(image::ImageArgs),
    /// Compile a component: how the server starts its compiler
    #[command(hide = true, after_help = "Example:\n  mayfly up    # which starts it")]
    Compile { args: Vec<String> },
    /// Print a shell's completion script
    Completion(completion::CompletionArgs),
}

// The commands that ask a server. (A doc comment here would be taken for the program's help.)
#[derive(Subcommand, Debug)]
pub(crate) enum ClientCommand {
    /// Upload a component and run it as a function
    Deploy(deploy::DeployArgs),
    /// Rebuild and deploy on every save, and follow the logs
    Dev(dev::DevArgs),
    /// Call a function with an event
    Invoke(invoke::InvokeArgs),
    /// Show what a function wrote
    Logs(logs::LogsArgs),
    /// List objects, or show some
    Get(get::GetArgs),
    /// Create or change objects to match manifests
    Apply(apply::ApplyArgs),
    /// Delete objects
    Delete(delete::DeleteArgs),
    /// Show an object readably, with its conditions and events
    Describe(describe::DescribeArgs),
    /// Show what fields a kind has
    Explain(explain::ExplainArgs),
    /// Show what functions, nodes and pods are doing
    Top(top::TopArgs),
    /// Workflows in the Amazon States Language, and their executions
    Workflow(workflow::WorkflowArgs),
    /// Components, and what jobs read and leave
    Artifact(artifact::ArtifactArgs),
    /// Print the versions of this program and of the server
    Version(version::VersionArgs),
}

/// Parses the arguments (a wrong one exits with 2), runs the command, and shows what went wrong.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.command.run(cli.globals).unwrap_or_else(|error| failure::report(&error))
}

impl Command {
    /// Runs the command to its end.
    pub(crate) fn run(self, globals: Globals) -> anyhow::Result<ExitCode> {
        // The only error: someone installed one before us, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        match self {
            Self::Up(args) => {
                crate::roles::up::run(*args, crate::data_dir::DataDir::resolve(globals.data_dir))
            }
            Self::Server { .. } => Err(not_in_this_build("server")),
            Self::Node { .. } => Err(not_in_this_build("node")),
            Self::New(args) => new::run(args, &globals),
            Self::Build(args) => build::run(args, &globals),
            Self::Compile { args } => Ok(mayfly_runtime_wasm::compile_worker(&args)),
            Self::Completion(args) => completion::run(&args),
            Self::Image(args) => image::run(&args),
            Self::Client(command) => {
                // `dev` says what it leaves behind, so it hears Ctrl-C itself.
                if !matches!(*command, ClientCommand::Dev(_)) {
                    insist_on_interrupts()?;
                }
                client_runtime()?.block_on(command.run(globals))
            }
        }
    }
}

impl ClientCommand {
    async fn run(self, globals: Globals) -> anyhow::Result<ExitCode> {
        let session = Session::new(globals);
        let hears_interrupt = matches!(self, Self::Dev(_));
        let work = Box::pin(self.run_with(&session));
        let done = tokio::select! {
            done = work => done,
            _ = tokio::signal::ctrl_c(), if !hears_interrupt => return Ok(ExitCode::from(EXIT_INTERRUPTED)),
        };
        done.map_err(|error| session.explain(error))
    }

    async fn run_with(self, session: &Session) -> anyhow::Result<ExitCode> {
        match self {
            Self::Deploy(args) => deploy::run(args, session).await?,
            Self::Dev(args) => dev::run(args, session).await?,
            Self::Invoke(args) => return invoke::run(args, session).await,
            Self::Logs(args) => logs::run(args, session).await?,
            Self::Get(args) => get::run(args, session).await?,
            Self::Apply(args) => apply::run(args, session).await?,
            Self::Delete(args) => delete::run(args, session).await?,
            Self::Describe(args) => describe::run(args, session).await?,
            Self::Explain(args) => explain::run(args, session).await?,
            Self::Top(args) => top::run(args, session).await?,
            Self::Workflow(args) => return workflow::run(args, session).await,
            Self::Artifact(args) => artifact::run(args, session).await?,
            Self::Version(args) => version::run(args, session).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Roles of their own are in the design: who tries one hears what there is.
fn not_in_this_build(role: &str) -> anyhow::Error {
    failure::Failure::error(
        format!("mayfly {role} is not in this build: it runs everything in one process"),
        "start it with: mayfly up",
    )
}

/// Commands mostly wait: one thread drives them, blocking work goes to the pool.
fn client_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// How long a command has to end by itself after a Ctrl-C.
const INTERRUPT_PATIENCE: Duration = Duration::from_millis(250);

/// Ends the process after a Ctrl-C that the command does not hear: its thread waits for a person who types nothing, or
/// for a disk.
fn insist_on_interrupts() -> anyhow::Result<()> {
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_ends_its_help_with_an_example() {
        fn check(command: &clap::Command) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.starts_with("Example:\n"), "{} has no example", command.get_name());
            for inner in command.get_subcommands() {
                check(inner);
            }
        }
        check(&Cli::command());
    }

    #[test]
    fn global_flags_stand_before_or_after_the_command() {
        for line in [
            &["mayfly", "-n", "a", "--data-dir", "/d", "get", "functions"][..],
            &["mayfly", "get", "functions", "-n", "a", "--data-dir", "/d"],
        ] {
            let cli = Cli::try_parse_from(line).unwrap();
            assert_eq!(cli.globals.namespace.as_deref(), Some("a"));
            assert_eq!(cli.globals.data_dir, Some(PathBuf::from("/d")));
        }
    }

    #[test]
    fn help_begins_with_what_it_is_for() {
        let help = Cli::command().render_help().to_string();
        assert!(help.starts_with("Functions, workflows and Kubernetes objects in one process"), "{help}");
        let long = Cli::command().render_long_help().to_string();
        assert!(long.starts_with("Functions, workflows and Kubernetes objects in one process"), "{long}");
    }

    #[test]
    fn roles_that_are_not_there_are_told_in_words() {
        for line in [
            &["mayfly", "server"][..],
            &["mayfly", "node", "--server", "https://10.0.0.1:6443", "--token", "t"],
        ] {
            let cli = Cli::try_parse_from(line).unwrap();
            let error = cli.command.run(cli.globals).unwrap_err();
            let text = failure::text(&error);
            assert!(text.contains("not in this build") && text.contains("mayfly up"), "{text}");
        }
        assert!(!Cli::command().render_help().to_string().contains("joins a control plane"));
    }

    #[test]
    fn what_is_misspelt_is_suggested() {
        for (line, suggestion) in [
            (&["mayfly", "deplyo"][..], "deploy"),
            (&["mayfly", "logs", "x", "--folow"], "--follow"),
            (&["mayfly", "get", "fn", "-o", "jsno"], "json"),
        ] {
            let error = Cli::try_parse_from(line).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(suggestion), "{error}");
        }
    }
}
