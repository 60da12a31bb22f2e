//! `mayfly completion`: the completion scripts of shells.

use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use super::output;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly completion bash > /etc/bash_completion.d/mayfly
  mayfly completion zsh > \"${fpath[1]}/_mayfly\"
  mayfly completion fish > ~/.config/fish/completions/mayfly.fish")]
pub(crate) struct CompletionArgs {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &CompletionArgs, mut program: clap::Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "mayfly", &mut script);
    output::out(script)?;
    Ok(ExitCode::SUCCESS)
}
