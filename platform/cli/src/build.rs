//! `mayfly build`: builds a component from a project.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::{
    Globals,
    failure::{CodeContext, ErrorCode},
    format, output,
};
use crate::guest::{
    build::{self, BuiltComponent},
    limits::{BuildLimits, BuildTimeout},
    project::Project,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly build
  mayfly build handler.py
  mayfly build --workspace examples --out target/guests")]
pub(crate) struct BuildArgs {
    /// The project: a folder, or a script with a handler
    #[arg(default_value = ".", value_name = "DIR|SCRIPT[:HANDLER]", conflicts_with = "workspace")]
    directory: PathBuf,
    /// Build every package of a cargo workspace instead
    #[arg(long, value_name = "DIR", requires = "out")]
    workspace: Option<PathBuf>,
    /// Where the components of a workspace go
    #[arg(long, value_name = "DIR", requires = "workspace")]
    out: Option<PathBuf>,
    /// Without optimisation: faster to build, slower to run
    #[arg(long)]
    debug: bool,
    #[command(flatten)]
    timeout: BuildTimeout,
}

/// The result of a build.
#[derive(Serialize)]
struct Built<'a> {
    name: &'a str,
    path: &'a Path,
    bytes: u64,
    toolchain: &'a str,
}

pub(crate) fn run(args: BuildArgs, globals: &Globals) -> anyhow::Result<ExitCode> {
    let built = match (&args.workspace, &args.out) {
        (Some(workspace), Some(out)) => build::build_workspace(workspace, out, !args.debug, &mut say),
        _ => build::build(&args.directory, !args.debug, &args.timeout.into(), &mut say).map(|one| vec![one]),
    };
    let built = built.context(CodeContext(ErrorCode::BuildFailed))?;
    let list: Vec<_> = built.iter().map(as_data).collect();
    let format = globals.output.unwrap_or_default();
    match list.as_slice() {
        [one] if args.workspace.is_none() => output::result(format, one, || lines(&built))?,
        _ => output::result(format, &list, || lines(&built))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn as_data(built: &BuiltComponent) -> Built<'_> {
    let BuiltComponent { name, path, bytes, toolchain } = built;
    Built { name, path, bytes: *bytes, toolchain }
}

/// Only the paths go to stdout, for scripts; the sizes go to stderr.
fn lines(built: &[BuiltComponent]) -> String {
    for BuiltComponent { name, bytes, .. } in built {
        output::note(format_args!("built {name}: {}", format::bytes(*bytes)));
    }
    built.iter().map(|built| format!("{}\n", built.path.display())).collect()
}

fn say(line: &str) {
    output::note(line);
}

/// A project that was built for a deployment.
pub(crate) struct BuiltProject {
    pub(crate) name: String,
    pub(crate) component: PathBuf,
    /// The Function from the project's manifest, without a source.
    pub(crate) manifest: Value,
    /// The file that contains it.
    pub(crate) place: String,
}

/// Builds the project in a directory. Blocks.
pub(crate) fn project(directory: &Path, limits: &BuildLimits) -> anyhow::Result<BuiltProject> {
    let built =
        build::build(directory, true, limits, &mut say).context(CodeContext(ErrorCode::BuildFailed))?;
    let Project { manifest, place, .. } = Project::load(directory)?;
    Ok(BuiltProject { name: built.name, component: built.path, manifest, place })
}
