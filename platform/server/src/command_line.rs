//! The command line: the roles of this binary, and the commands of `mayfly-cli`.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use mayfly_cli::{Globals, data_dir::DataDir, failure};

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
    /// Start everything in this process, as `mayfly up`, and let other machines join
    #[command(after_help = "Example:
  mayfly server --data-dir /var/lib/mayfly --node-ip 10.0.0.1
  mayfly node --server https://10.0.0.1:6443 --token \"$(cat join-token)\"    # on another machine")]
    Server(Box<crate::config::ServerArgs>),
    /// Start a node that joins a server: it runs pods and functions of the server's cluster
    #[command(after_help = "Example:
  MAYFLY_TOKEN=$(cat join-token) mayfly node --server https://10.0.0.1:6443")]
    Node(Box<crate::config::JoinArgs>),
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
            Command::Up(args) => {
                crate::roles::up::run(args.resolve()?, DataDir::resolve(self.globals.data_dir))
            }
            Command::Server(args) => {
                crate::roles::up::run(args.resolve()?, DataDir::resolve(self.globals.data_dir))
            }
            Command::Node(args) => {
                crate::roles::joined::run(args.resolve()?, DataDir::resolve(self.globals.data_dir))
            }
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
    fn a_node_without_a_server_is_refused() {
        let cli = CommandLine::try_parse_from(["mayfly", "node", "--token", "t"]).unwrap();
        let text = failure::text(&cli.run().unwrap_err());
        assert!(text.contains("--server is missing"), "{text}");
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
