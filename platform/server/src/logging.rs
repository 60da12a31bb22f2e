//! The log of the process: structured lines on stderr.

use std::io::IsTerminal as _;

use anyhow::Context as _;
use tracing_subscriber::{EnvFilter, fmt};

use crate::config::LogFormat;

/// Starts logging. Once per process.
pub(crate) fn start(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("--log {filter:?} is not a filter"))?;
    // A line that cannot be written is lost. (By default the failure is reported to the same full disk or closed pipe,
    // which panics.)
    let lines = fmt::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    match format {
        LogFormat::Json => lines.json().flatten_event(true).init(),
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).compact().init(),
    }
    Ok(())
}
