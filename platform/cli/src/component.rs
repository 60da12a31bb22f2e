//! Components in files: reads them before the upload, and checks whether this host can run them.

use std::path::Path;

use bytes::Bytes;
use mayfly_runtime::component::{ComponentReport, inspect};

use super::{
    bounded_read::{self, CONTENT_BYTES_MAX},
    failure::{ErrorCode, Failure},
    guest::componentize::component_of,
};

/// Converts a core module into a component; other content is returned unchanged.
///
/// # Errors
/// A [`Failure`] that names the file, for a core module that cannot become a component.
pub(crate) fn of_content(content: Vec<u8>, path: &Path) -> anyhow::Result<Bytes> {
    let component = component_of(content).map_err(|error| {
        Failure::error(
            ErrorCode::InvalidFile,
            format!("{} is a core module that cannot be made a component: {error:#}", path.display()),
            "build it for WASI 0.1 (wasm32-wasip1), or make a component of it (wasm32-wasip2)",
        )
    })?;
    Ok(component.into())
}

/// Reads a component. Refuses a file that cannot be a function, with the reason.
pub(crate) fn read(path: &Path) -> anyhow::Result<Bytes> {
    let content = bounded_read::file(path, CONTENT_BYTES_MAX).map_err(|error| {
        Failure::error(
            ErrorCode::FileError,
            format!("cannot read {}: {error}", path.display()),
            "name a project's directory or a .wasm file",
        )
    })?;
    let content = of_content(content, path)?;
    let report = inspect(&content).map_err(|refused| {
        let todo = "deploy a component that exports wasi:http; mayfly build makes one of a project";
        Failure::error(
            ErrorCode::InvalidFile,
            format!("{} cannot be deployed: {refused}", path.display()),
            todo,
        )
    })?;
    if report.http().is_none() {
        return Err(job(path, &report));
    }
    Ok(content)
}

fn job(path: &Path, report: &ComponentReport) -> anyhow::Error {
    let worlds: Vec<_> = report.worlds.iter().map(ToString::to_string).collect();
    Failure::error(
        ErrorCode::InvalidFile,
        format!("{} is a job ({}), it answers no requests", path.display(), worlds.join(", ")),
        "a job runs to its end in a Pod or a Job: mayfly artifact push prints the image it has there",
    )
}
