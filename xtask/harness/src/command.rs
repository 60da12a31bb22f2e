//! Runs other programs, and prints their command lines.

use std::{
    ffi::OsStr,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// The cargo that started this program, for another package. The variables that cargo sets for this package are
/// removed: build scripts of some crates depend on them, and would run again.
pub fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cargo = Command::new(&program);
    forget_own_package(&mut cargo);
    // A compiler that was installed for building guests may be in /usr/bin: cargo's own must be found first.
    let own = Path::new(&program).parent().filter(|folder| folder.join("rustc").is_file());
    if let (Some(own), Some(path)) = (own, std::env::var_os("PATH")) {
        let folders = std::iter::once(own.to_owned()).chain(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(folders) {
            cargo.env("PATH", path);
        }
    }
    cargo
}

/// Removes the variables with which `cargo run` describes its package.
pub fn forget_own_package(command: &mut Command) {
    const OWN: &[&str] =
        &["CARGO_MANIFEST_", "CARGO_PKG_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_", "OUT_DIR"];
    for (name, _) in std::env::vars_os() {
        if OWN.iter().any(|own| name.as_encoded_bytes().starts_with(own.as_bytes())) {
            command.env_remove(&name);
        }
    }
}

/// Prints the command, runs it on this terminal, and fails if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", command_line(command));
    let status = command.status().with_context(|| format!("cannot run {}", command_line(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", command_line(command));
    }
    Ok(())
}

/// Runs the command without output; the error contains its output.
pub fn quietly(command: &mut Command) -> Result<()> {
    output(command).map(|_| ())
}

/// Runs the command and returns its stdout; the error contains its output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", command_line(command)))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let said = format!("{}{}", stdout, stderr);
        bail!("`{}` failed ({}):\n{}", command_line(command), output.status, last_lines(&said, 40));
    }
    Ok(stdout)
}

/// Whether a program can be run; `arguments` should have no effect (`--version`).
pub fn works(program: impl AsRef<OsStr>, arguments: &[&str]) -> bool {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The command line as typed in a shell.
pub fn command_line(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    std::iter::once(name)
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// The last lines of a text, for messages.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
