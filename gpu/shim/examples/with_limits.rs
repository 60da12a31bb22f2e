//! Runs a program under the limiting library without a container, on the machine's first GPU: to measure by hand.
//!
//! ```text
//! cargo run --release -p mayfly-gpu-shim --example with_limits -- --memory-mib 8192 --core 50 python3 train.py
//! ```
//! 0 (the default) means no limit. At the end it prints the GPU time and the number of delayed launches to stderr.

use std::{
    error::Error,
    path::PathBuf,
    process::{Command, ExitCode},
};

use mayfly_gpu_proto::{DeviceLimit, LIMITS_ENV, LimitsFile, SHIM_FILE};

#[expect(clippy::print_stderr, reason = "the report is this program's product")]
fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).peekable();
    let mut limit = DeviceLimit { uuid: uuid()?, memory_bytes: 0, core_percent: 0, elastic_percent: 0 };
    while let Some(flag) = arguments.next_if(|argument| argument.to_string_lossy().starts_with("--")) {
        let value = arguments.next().ok_or("a flag needs a number")?.to_string_lossy().parse::<u32>()?;
        match &*flag.to_string_lossy() {
            "--memory-mib" => limit.memory_bytes = u64::from(value) << 20,
            "--core" => limit.core_percent = value,
            other => return Err(format!("unknown flag {other}").into()),
        }
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("limits");
    let limits = LimitsFile::create(&path, &[limit])?;
    let mut command = Command::new(arguments.next().ok_or("no program")?);
    command.args(arguments).env(LIMITS_ENV, &path).env("LD_PRELOAD", library()?);
    let status = command.status()?;
    let usage = limits.usage().remove(0);
    eprintln!("{} ns of GPU time, {} launches delayed", usage.gpu_ns, usage.throttled);
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

fn uuid() -> Result<String, Box<dyn Error>> {
    let output = Command::new("nvidia-smi").args(["--query-gpu=uuid", "--format=csv,noheader"]).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().next().ok_or("nvidia-smi lists no GPU")?.trim().to_owned())
}

/// The library that cargo built: beside the folder of examples, or in the folder of dependencies.
fn library() -> Result<PathBuf, Box<dyn Error>> {
    let executable = std::env::current_exe()?;
    let folders =
        executable.ancestors().skip(1).take(2).flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let found = folders.map(|folder| folder.join(SHIM_FILE)).find(|path| path.exists());
    Ok(found.ok_or_else(|| format!("cargo did not build {SHIM_FILE}"))?)
}
