//! The process's own log: structured lines on stderr.

use anyhow::Context as _;
use tracing_subscriber::{EnvFilter, fmt};

use crate::config::LogFormat;

/// Starts logging. Once per process.
pub(crate) fn start(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("--log {filter:?} is not a filter"))?;
    let lines = fmt::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Json => lines.json().flatten_event(true).init(),
        LogFormat::Text => lines.compact().init(),
    }
    Ok(())
}
