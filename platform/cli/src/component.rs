//! Checks a component before it is uploaded: whether this host can run it as a function.

use std::path::Path;

use bytes::Bytes;
use mayfly_runtime::component::{ComponentReport, inspect};

use super::failure::Failure;

/// Reads a component. Refuses a file that cannot be a function, with the reason.
pub(crate) fn read(path: &Path) -> anyhow::Result<Bytes> {
    let content = std::fs::read(path).map_err(|error| {
        Failure::error(
            format!("cannot read {}: {error}", path.display()),
            "name a project's directory or a .wasm file",
        )
    })?;
    let report = inspect(&content).map_err(|refused| {
        let todo = "deploy a component that exports wasi:http; mayfly build makes one of a project";
        Failure::error(format!("{} cannot be deployed: {refused}", path.display()), todo)
    })?;
    if report.http().is_none() {
        return Err(job(path, &report));
    }
    Ok(content.into())
}

fn job(path: &Path, report: &ComponentReport) -> anyhow::Error {
    let worlds: Vec<_> = report.worlds.iter().map(ToString::to_string).collect();
    Failure::error(
        format!("{} is a job ({}), it answers no requests", path.display(), worlds.join(", ")),
        "a job runs to its end in a Pod or a Job: mayfly artifact push prints the image it has there",
    )
}
