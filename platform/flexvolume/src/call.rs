//! One call of a FlexVolume driver: its process, its output, its timeout. (Protocol: upstream
//! `pkg/volume/flexvolume/driver-call.go`.)
//!
//! Unlike upstream, stderr is kept apart from the answer: noise there does no harm and is shown with a failure.

use std::{path::Path, process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
};

/// The number of bytes of each output that are read: answers are short.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;
/// The number of characters of an output that are shown in an error.
const OUTPUT_SHOWN: usize = 500;
/// The time for which outputs are read after the driver's end: a background process of the driver may keep them open.
const OUTPUT_REST: Duration = Duration::from_secs(1);

/// A driver's output; its last line is the result.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(crate) struct DriverAnswer {
    pub(crate) status: String,
    pub(crate) message: String,
    pub(crate) device: String,
    pub(crate) capabilities: DriverCapabilities,
}

/// A driver's capabilities, from its answer to `init`; upstream's values for missing ones.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct DriverCapabilities {
    /// Whether volumes are attached to the node and their devices mounted, before they are mounted for pods.
    pub attach: bool,
    /// Whether the caller changes the group of mounted volumes.
    #[serde(rename = "fsGroup")]
    pub fs_group: bool,
    /// Whether the file system of an expanded volume is expanded by a call of its own.
    #[serde(rename = "requiresFSResize")]
    pub requires_fs_resize: bool,
}

impl Default for DriverCapabilities {
    fn default() -> Self {
        Self { attach: true, fs_group: true, requires_fs_resize: true }
    }
}

/// The reason why a volume is not mounted or unmounted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FlexError {
    #[error("{driver} {call} is not supported by the driver")]
    NotSupported { driver: String, call: String },
    #[error("{driver} {call} failed: {why}")]
    Failed { driver: String, call: String, why: String },
    #[error("{driver} {call} did not end within {} s", .limit.as_secs())]
    TimedOut { driver: String, call: String, limit: Duration },
    #[error("FlexVolume driver {driver} cannot be run: {why}")]
    NoDriver { driver: String, why: String },
    #[error("FlexVolume: {0}")]
    Node(String),
}

/// Runs `program call arguments…` and reads its answer.
pub(crate) async fn call(
    driver: &str,
    program: &Path,
    call: &str,
    arguments: &[&str],
    limit: Duration,
) -> Result<DriverAnswer, FlexError> {
    let no_driver = |why: std::io::Error| FlexError::NoDriver { driver: driver.into(), why: why.to_string() };
    let mut command = Command::new(program);
    command.arg(call).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Started in its own process group, so that a hanging driver is killed with everything it started.
    let mut child = command.process_group(0).kill_on_drop(true).spawn().map_err(no_driver)?;
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let stdout = tokio::spawn(read(stdout));
    let stderr = tokio::spawn(read(stderr));
    let ended = tokio::time::timeout(limit, child.wait()).await;
    let Ok(status) = ended else {
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait().await;
        return Err(FlexError::TimedOut { driver: driver.into(), call: call.into(), limit });
    };
    let status = status.map_err(no_driver)?;
    let (stdout, stderr) = tokio::join!(rest(stdout), rest(stderr));
    parse_result(driver, call, status.code(), &stdout, &stderr)
}

async fn read(output: Option<impl AsyncRead + Unpin>) -> String {
    let mut text = Vec::new();
    if let Some(mut output) = output {
        // Bytes read before an error are used.
        let _ = (&mut output).take(OUTPUT_BYTES_MAX).read_to_end(&mut text).await;
        // The rest is discarded, so that the driver does not block.
        let _ = tokio::io::copy(&mut output, &mut tokio::io::sink()).await;
    }
    String::from_utf8_lossy(&text).into_owned()
}

async fn rest(mut reading: tokio::task::JoinHandle<String>) -> String {
    match tokio::time::timeout(OUTPUT_REST, &mut reading).await {
        Ok(read) => read.unwrap_or_default(),
        Err(_) => {
            reading.abort();
            String::new()
        }
    }
}

/// Interprets the exit code and the outputs.
fn parse_result(
    driver: &str,
    call: &str,
    code: Option<i32>,
    stdout: &str,
    stderr: &str,
) -> Result<DriverAnswer, FlexError> {
    let failed = |why: String| {
        let noise = match stderr.trim() {
            "" => String::new(),
            text => format!(" (stderr: {})", shown(text)),
        };
        FlexError::Failed { driver: driver.into(), call: call.into(), why: why + &noise }
    };
    let answer = serde_json::from_str::<DriverAnswer>(stdout.trim());
    let answer = answer.map_err(|error| {
        let code = code.map_or_else(|| "a signal".to_owned(), |code| format!("code {code}"));
        failed(format!(
            "it ended with {code}, and its answer {:?} is not understood: {error}",
            shown(stdout.trim())
        ))
    })?;
    match (answer.status.as_str(), code) {
        ("Success", Some(0)) => Ok(answer),
        ("Success", _) => Err(failed("it answered Success and did not end with code 0".into())),
        ("Not supported", _) => Err(FlexError::NotSupported { driver: driver.into(), call: call.into() }),
        ("Failure", _) => Err(failed(answer.message)),
        (status, _) => {
            Err(failed(format!("its status {status:?} is none of Success, Failure and Not supported")))
        }
    }
}

fn shown(text: &str) -> String {
    text.chars().take(OUTPUT_SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_judged_with_the_exit_code() {
        let judged = |code, stdout: &str, stderr: &str| parse_result("a/b", "mount", code, stdout, stderr);
        let good = judged(Some(0), "{\"status\": \"Success\", \"device\": \"/dev/x\"}\n", "noise").unwrap();
        assert_eq!((good.device.as_str(), good.capabilities.attach), ("/dev/x", true));
        let answer =
            judged(Some(0), r#"{"status": "Success", "capabilities": {"attach": false}}"#, "").unwrap();
        assert_eq!(
            answer.capabilities,
            DriverCapabilities { attach: false, ..DriverCapabilities::default() }
        );
        let answer =
            judged(Some(0), r#"{"status": "Success", "capabilities": {"requiresFSResize": false}}"#, "")
                .unwrap();
        assert!(!answer.capabilities.requires_fs_resize && answer.capabilities.attach);
        for (code, stdout, expected) in [
            (Some(1), r#"{"status": "Failure", "message": "no disk"}"#, "failed: no disk (stderr: noise)"),
            (Some(1), r#"{"status": "Not supported"}"#, "is not supported"),
            (Some(1), r#"{"status": "Success"}"#, "did not end with code 0"),
            (Some(0), "done", "is not understood"),
            (Some(0), "", "is not understood"),
            (None, "", "ended with a signal"),
            (Some(0), r#"{"status": "Perhaps"}"#, "\"Perhaps\" is none of"),
        ] {
            let error = judged(code, stdout, "noise\n").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
