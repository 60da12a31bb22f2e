//! `mayfly image`: container images. This build runs no containers, and says so, whatever is asked.

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
    /// List the images on this node, which this build does not have
    #[command(
        visible_alias = "ls",
        after_help = "Example:\n  mayfly artifact list    # components that were uploaded"
    )]
    List {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Take an image from a registry, which this build does not do
    #[command(after_help = "Example:\n  mayfly deploy hello.wasm    # a component instead")]
    Pull {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Take an image from a file, which this build does not do
    #[command(after_help = "Example:\n  mayfly artifact push extract.wasm    # a component instead")]
    Import {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

pub(crate) fn run(args: &ImageArgs) -> anyhow::Result<ExitCode> {
    let (what, todo) = match &args.command {
        ImageCommand::List { .. } => {
            ("so it has no images", "mayfly artifact list shows those that were uploaded")
        }
        ImageCommand::Pull { .. } | ImageCommand::Import { .. } => (
            "so it takes no images",
            "mayfly deploy FILE.wasm runs one as a function, mayfly artifact push for a job",
        ),
    };
    Err(Failure::error(
        format!("this build runs no containers, {what}"),
        format!("it runs wasm components: {todo}"),
    ))
}
