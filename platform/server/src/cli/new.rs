//! `mayfly new`: a project from a template.

use std::{path::PathBuf, process::ExitCode};

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser as _},
};

use super::{Globals, output};
use crate::guest::scaffold::{Template, new_project};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly new rust hello
  mayfly new rust-event greet --dir functions/greet")]
pub(crate) struct NewArgs {
    /// rust answers HTTP requests, rust-event takes JSON events
    #[arg(value_parser = PossibleValuesParser::new(Template::ALL.map(Template::name)).try_map(|t| t.parse::<Template>()))]
    template: Template,
    /// The function's name
    name: String,
    /// The directory to make [default: ./NAME]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(crate) fn run(args: NewArgs, globals: &Globals) -> anyhow::Result<ExitCode> {
    let directory = args.dir.unwrap_or_else(|| PathBuf::from(&args.name));
    new_project(args.template, &directory, &args.name)?;
    let shown = directory.display();
    let data = serde_json::json!({"name": args.name, "template": args.template.name(), "path": directory});
    output::result(globals.output.unwrap_or_default(), &data, || {
        format!("made {shown}: a function named {}\nnext: cd {shown} && mayfly dev\n", args.name)
    })?;
    Ok(ExitCode::SUCCESS)
}
