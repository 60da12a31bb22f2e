//! The command line: the roles of this binary, and the commands of `mayfly-cli`.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use mayfly_cli::{
    Globals,
    data_dir::DataDir,
    failure::{self, ErrorCode, Failure},
};

/// Functions, workflows and Kubernetes objects in one process; start it with: mayfly up
#[derive(Parser, Debug)]
#[command(name = "mayfly", version, disable_help_subcommand = true, max_term_width = 110)]
#[command(after_help = "Example:
  mayfly up &
  mayfly new rust hello && cd hello && mayfly deploy
  mayfly invoke hello -d '{\"name\":\"Ada\"}'")]
struct CommandLine {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
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
    /// Compile a component; used by the server to start its compiler
    #[command(hide = true, after_help = "Example:\n  mayfly up    # which starts it")]
    Compile { args: Vec<String> },
    /// Write a container's log; used by containerd to start the log writer
    #[command(hide = true, after_help = "Example:\n  mayfly up    # whose containers start it")]
    LogShim { config: std::path::PathBuf },
    /// Run as the first process of a pod whose containers share a process namespace
    #[command(hide = true, after_help = "Example:\n  mayfly up    # which starts it for such a pod")]
    PodInit { pod: std::path::PathBuf },
    /// Serve a FlexVolume driver as a CSI driver of this node
    #[command(hide = true)]
    #[command(after_help = "Example:
  mayfly flex-bridge --driver /exec/example.com~disk/disk --node worker-1")]
    FlexBridge(crate::roles::flex_bridge::FlexBridgeArgs),
    #[command(flatten)]
    Client(mayfly_cli::Command),
}

/// Parses the arguments (a wrong one exits with 2), runs the command, and reports its error.
pub(crate) fn main() -> ExitCode {
    let line = CommandLine::parse();
    let is_json = line.globals.wants_json();
    line.run().unwrap_or_else(|error| failure::report(&error, is_json))
}

impl CommandLine {
    fn run(self) -> anyhow::Result<ExitCode> {
        // Fails only if a provider is installed already, which is fine as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        match self.command {
            Command::Up(args) => crate::roles::up::run(*args, DataDir::resolve(self.globals.data_dir)),
            Command::Server { .. } => Err(not_in_this_build("server")),
            Command::Node { .. } => Err(not_in_this_build("node")),
            Command::Compile { args } => Ok(mayfly_runtime_wasm::compile_worker(&args)),
            Command::LogShim { config } => {
                mayfly_runtime_oci::log_shim::run(&config)?;
                Ok(ExitCode::SUCCESS)
            }
            Command::PodInit { .. } => {
                mayfly_runtime_oci::pod_init::run()?;
                Ok(ExitCode::SUCCESS)
            }
            Command::FlexBridge(args) => crate::roles::flex_bridge::run(args),
            Command::Client(command) => command.run(self.globals, Self::command()),
        }
    }
}

/// The error for roles that are designed but not part of this build.
fn not_in_this_build(role: &str) -> anyhow::Error {
    Failure::error(
        ErrorCode::Unsupported,
        format!("mayfly {role} is not in this build: it runs everything in one process"),
        "start it with: mayfly up",
    )
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        CommandLine::command().debug_assert();
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
        check(&CommandLine::command());
    }

    #[test]
    fn global_flags_stand_before_or_after_the_command() {
        for line in [
            &["mayfly", "-n", "a", "--data-dir", "/d", "get", "functions"][..],
            &["mayfly", "get", "functions", "-n", "a", "--data-dir", "/d"],
        ] {
            let cli = CommandLine::try_parse_from(line).unwrap();
            assert_eq!(cli.globals.namespace.as_deref(), Some("a"));
            assert_eq!(cli.globals.data_dir, Some(PathBuf::from("/d")));
        }
    }

    #[test]
    fn help_begins_with_what_it_is_for() {
        let help = CommandLine::command().render_help().to_string();
        assert!(help.starts_with("Functions, workflows and Kubernetes objects in one process"), "{help}");
        let long = CommandLine::command().render_long_help().to_string();
        assert!(long.starts_with("Functions, workflows and Kubernetes objects in one process"), "{long}");
    }

    #[test]
    fn roles_that_are_not_there_are_told_in_words() {
        for line in [
            &["mayfly", "server"][..],
            &["mayfly", "node", "--server", "https://10.0.0.1:6443", "--token", "t"],
        ] {
            let cli = CommandLine::try_parse_from(line).unwrap();
            let error = cli.run().unwrap_err();
            let text = failure::text(&error);
            assert!(text.contains("not in this build") && text.contains("mayfly up"), "{text}");
        }
        assert!(!CommandLine::command().render_help().to_string().contains("joins a control plane"));
    }

    #[test]
    fn what_is_misspelt_is_suggested() {
        for (line, suggestion) in [
            (&["mayfly", "deplyo"][..], "deploy"),
            (&["mayfly", "logs", "x", "--folow"], "--follow"),
            (&["mayfly", "get", "fn", "-o", "jsno"], "json"),
        ] {
            let error = CommandLine::try_parse_from(line).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(suggestion), "{error}");
        }
    }
}
