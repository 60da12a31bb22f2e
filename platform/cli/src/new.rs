//! `mayfly new`: a project from a template.

use std::{path::PathBuf, process::ExitCode};

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};

use super::{Globals, output};
use crate::guest::scaffold::{ProjectTemplate, new_project};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly new rust hello
  mayfly new python hello
  mayfly new rust-event greet --dir functions/greet
  mayfly new rust-job extract
  mayfly new container greet")]
pub(crate) struct NewArgs {
    /// rust answers HTTP requests, rust-event takes JSON events, rust-job is a program that ends; python, js and ts take
    /// JSON events, and so does container, an image with an HTTP server
    #[arg(value_parser = template_names())]
    template: ProjectTemplate,
    /// The function's, or job's, name
    name: String,
    /// The directory to create [default: ./NAME]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// The template names, for help and completion.
fn template_names() -> impl TypedValueParser<Value = ProjectTemplate> {
    PossibleValuesParser::new(ProjectTemplate::ALL.map(ProjectTemplate::name))
        .try_map(|name| name.parse::<ProjectTemplate>())
}

pub(crate) fn run(args: NewArgs, globals: &Globals) -> anyhow::Result<ExitCode> {
    let directory = args.dir.unwrap_or_else(|| PathBuf::from(&args.name));
    new_project(args.template, &directory, &args.name)?;
    let shown = directory.display();
    let data = serde_json::json!({"name": args.name, "template": args.template.name(), "path": directory});
    output::result(globals.output.unwrap_or_default(), &data, || {
        let next = match args.template {
            ProjectTemplate::RustJob => {
                format!(
                    "mayfly build && mayfly artifact push target/mayfly/{}.wasm, then see job.yaml",
                    args.name
                )
            }
            ProjectTemplate::Container => "sh test.sh, then see README.md".to_owned(),
            _ => "mayfly dev".to_owned(),
        };
        format!("made {shown}: a {} named {}\nnext: cd {shown} && {next}\n", args.template.makes(), args.name)
    })?;
    Ok(ExitCode::SUCCESS)
}
