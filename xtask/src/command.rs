//! Running other programs, and saying which.

use std::{
    ffi::OsStr,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// The cargo that started this program, for another package. The variables that cargo sets for this package must not
/// reach it: build scripts of some crates read them, and run again when they differ.
pub(crate) fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cargo = Command::new(&program);
    forget_own_package(&mut cargo);
    // The compiler that guests are built with may have come to /usr/bin: cargo's own must be found first.
    let own = Path::new(&program).parent().filter(|folder| folder.join("rustc").is_file());
    if let (Some(own), Some(path)) = (own, std::env::var_os("PATH")) {
        let folders = std::iter::once(own.to_owned()).chain(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(folders) {
            cargo.env("PATH", path);
        }
    }
    cargo
}

/// Takes away what `cargo run` says about the package that it runs.
pub(crate) fn forget_own_package(command: &mut Command) {
    const OWN: &[&str] =
        &["CARGO_MANIFEST_", "CARGO_PKG_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_", "OUT_DIR"];
    for (name, _) in std::env::vars_os() {
        if OWN.iter().any(|own| name.as_encoded_bytes().starts_with(own.as_bytes())) {
            command.env_remove(&name);
        }
    }
}

/// Shows the command, runs it on our own terminal, and fails when it does.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", command_line(command));
    let status = command.status().with_context(|| format!("cannot run {}", command_line(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", command_line(command));
    }
    Ok(())
}

/// Runs quietly; what it printed is in the error when it fails.
pub(crate) fn quietly(command: &mut Command) -> Result<()> {
    output(command).map(|_| ())
}

/// Runs quietly and gives its stdout; what it printed is in the error when it fails.
pub(crate) fn output(command: &mut Command) -> Result<String> {
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

/// Whether a program can be run; `arguments` should do nothing (`--version`).
pub(crate) fn works(program: impl AsRef<OsStr>, arguments: &[&str]) -> bool {
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The command as one would type it.
pub(crate) fn command_line(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    std::iter::once(name)
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// The end of a text, for messages.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
