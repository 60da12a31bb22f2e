//! `mayfly image`: container images. This build runs no containers, and says so.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::failure::Failure;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly image list")]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    command: ImageCommand,
}

#[derive(Subcommand, Debug)]
enum ImageCommand {
    /// List the images on this node
    #[command(after_help = "Example:
  mayfly image list")]
    List,
}

pub(crate) fn run(args: &ImageArgs) -> anyhow::Result<ExitCode> {
    let ImageCommand::List = args.command;
    Err(Failure::error(
        "this build runs no containers, so it has no images",
        "it runs wasm components: mayfly artifact list shows those that were uploaded",
    ))
}
