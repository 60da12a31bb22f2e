//! `mayfly workflow`: commands about workflows, over the Step Functions API that `mayfly up` serves.
//!
//! **Belongs here:** the commands' arguments and their output. Start reading at [`WorkflowCommand`]; [`client`] finds
//! the API and calls it, [`reference`] parses the names of workflows and executions, [`history`] assigns events to
//! states, which [`follow`] and [`show`] print. [`test`] needs no server: it runs definitions offline.
//!
//! **Does not belong here:** the semantics of a definition (the API validates it) and its execution (`workflows`).

use std::process::ExitCode;

use clap::{Args, Subcommand};
use mayfly_api::wellknown::NAMESPACE_DEFAULT;

pub(crate) mod client;
mod components;
mod definition;
mod deploy;
mod end;
mod follow;
mod history;
mod ordered;
mod reference;
mod show;
mod start;
mod test;

use super::{
    output::{self, OutputFormat},
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow deploy order.yaml
  mayfly workflow start order -d '{\"item\":\"pen\"}' --follow
  mayfly workflow list order

An execution is named by its ARN, as WORKFLOW/EXECUTION, or by its WORKFLOW alone: its newest.
In a namespace other than default (-n shop) order is the state machine shop.order; an ARN, or a
name with a dot, is taken as it is.")]
pub(crate) struct WorkflowArgs {
    /// Where the Step Functions API answers [default: MAYFLY_WORKFLOWS_URL, else as in the data directory]
    #[arg(long, global = true, value_name = "URL")]
    workflows_url: Option<String>,
    #[command(subcommand)]
    command: WorkflowCommand,
}

#[derive(Subcommand, Debug)]
enum WorkflowCommand {
    /// Create a workflow from a definition, or update it
    Deploy(deploy::WorkflowDeployArgs),
    /// Start an execution
    Start(start::StartArgs),
    /// Show a workflow or an execution readably
    Describe(show::WorkflowDescribeArgs),
    /// Show an execution's events
    History(show::HistoryArgs),
    /// List workflows, or the executions of one
    #[command(visible_alias = "ls")]
    List(show::ListArgs),
    /// Stop an execution
    Stop(end::StopArgs),
    /// Delete workflows
    #[command(visible_alias = "rm")]
    Delete(end::WorkflowDeleteArgs),
    /// Run a definition offline, with mocks and a clock that jumps
    Test(test::TestArgs),
}

pub(crate) async fn run(args: WorkflowArgs, session: &Session) -> anyhow::Result<ExitCode> {
    // Needs no server.
    let args = match args {
        WorkflowArgs { command: WorkflowCommand::Test(args), .. } => return test::run(args, session).await,
        args => args,
    };
    let namespace = namespace(session).await;
    let client = client::Client::find(args.workflows_url, namespace, session.globals())?;
    match args.command {
        WorkflowCommand::Deploy(args) => deploy::run(args, &client, session).await?,
        WorkflowCommand::Start(args) => return start::run(args, &client, session).await,
        WorkflowCommand::Describe(args) => show::describe(args, &client, session).await?,
        WorkflowCommand::History(args) => show::history(args, &client, session).await?,
        WorkflowCommand::List(args) => show::list(args, &client, session).await?,
        WorkflowCommand::Stop(args) => end::stop(args, &client).await?,
        WorkflowCommand::Delete(args) => end::delete(args, &client).await?,
        WorkflowCommand::Test(args) => return test::run(args, session).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// The namespace of the flag, otherwise that of the kubeconfig, as in other commands. The Step Functions API can also
/// be used without a kubeconfig.
async fn namespace(session: &Session) -> String {
    session.namespace().await.unwrap_or_else(|_| NAMESPACE_DEFAULT.to_owned())
}

/// [`output::result`], except that `-o name` prints `name`.
fn result(
    format: OutputFormat,
    value: &impl serde::Serialize,
    name: impl FnOnce() -> String,
    human: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    output::result(format, value, || if format == OutputFormat::Name { name() } else { human() })
}
