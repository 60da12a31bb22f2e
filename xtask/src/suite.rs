//! Runs all tests, and counts skipped ones as skipped.
//!
//! A test that cannot run on this machine prints `SKIPPED <name>: <reason>` on a separate line and returns. Those lines
//! are parsed from the output, listed in the report and counted as skipped.

mod count;

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::{
    command::{self, cargo},
    guests, tools,
    workspace::Workspace,
};

use self::count::{CargoTestOutput, TestCount};
use crate::clients;

pub(crate) const HELP: &str = "\
Builds the guests and the binary, then runs the tests of every crate, the end-to-end tests, the
documentation's tests and the SDK's on the host. Installs what it misses, or says what it could not.

  cargo xtask test [--filter TEXT]      only tests whose name contains TEXT

With cargo-nextest on the machine, that runs them; cargo itself otherwise. Ends with a line
`N passed, N failed, N skipped`; tests that skipped themselves are named above it, with the reason.";

pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let filter = match arguments {
        [] => None,
        [flag, filter] if flag == "--filter" => Some(filter.as_str()),
        _ => bail!("test takes --filter TEXT, not {arguments:?}"),
    };
    let workspace = Workspace::locate()?;
    let mut count = TestCount::default();
    if tools::find("kubectl").is_none() {
        println!(
            "test: kubectl is not on the PATH: its tests will be skipped (they need 1.32; Debian's package is older)"
        );
    }
    if let Err(error) = phase("guests", || guests::build(&workspace).map(|_| ())) {
        println!("test: no guests: {error:#}");
        println!("test: tests that call functions will be skipped");
    }
    let mut environment = environment(&workspace)?;
    match clients::install() {
        Ok(clients) => {
            environment.push(("MAYFLY_PYTHON", clients.python.into()));
            environment.push(("MAYFLY_AWS", clients.aws.into()));
        }
        Err(error) => {
            println!("test: the clients from PyPI could not be installed: {error:#}");
            println!("test: tests that use them take what is on the PATH, or will be skipped");
        }
    }
    phase("crates and end to end", || crates(&workspace, filter, &environment, &mut count))?;
    phase("documentation", || {
        let mut doc = cargo();
        doc.args(["test", "--workspace", "--doc"]).current_dir(&workspace.root);
        cargo_test(doc, filter, &mut count)
    })?;
    let sdk = workspace.root.join("sdk/rust/Cargo.toml");
    if sdk.exists() {
        phase("sdk", || {
            let mut sdk_tests = cargo();
            sdk_tests.args(["test", "--workspace", "--manifest-path"]).arg(&sdk);
            sdk_tests.arg("--target-dir").arg(workspace.target.join("sdk"));
            cargo_test(sdk_tests, filter, &mut count)
        })?;
    }
    report(&count)
}

/// Prints the name of a phase, runs it, and prints its duration.
fn phase(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("\n== {name}");
    let started = Instant::now();
    let outcome = work();
    println!("== {name}: {} s", started.elapsed().as_secs());
    outcome
}

fn environment(workspace: &Workspace) -> Result<Vec<(&'static str, std::ffi::OsString)>> {
    Ok(vec![
        // The binary from the build of the tests: it differs from a released one in tokio's test clock, and a build
        // without it would be a second build of almost everything.
        ("MAYFLY_BIN", workspace.mayfly("debug").into()),
        ("MAYFLY_GUESTS", workspace.guests().into()),
        ("PATH", tools::search_path()?),
        // A failed test's message, without pages of stack frames.
        ("RUST_BACKTRACE", "0".into()),
    ])
}

fn crates(
    workspace: &Workspace,
    filter: Option<&str>,
    environment: &[(&'static str, std::ffi::OsString)],
    count: &mut TestCount,
) -> Result<()> {
    let mut tests = cargo();
    tests.envs(environment.iter().cloned()).current_dir(&workspace.root);
    if !command::works("cargo-nextest", &["--version"]) {
        println!(
            "test: cargo-nextest is not here: cargo runs the tests (cargo install cargo-nextest is nicer)"
        );
        tests.args(["test", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast"]);
        return cargo_test(tests, filter, count);
    }
    // The path is below the workspace, independent of cargo's target directory.
    let junit = workspace.root.join("target/nextest/xtask/junit.xml");
    let _ = std::fs::remove_file(&junit);
    tests.args([
        "nextest",
        "run",
        "--workspace",
        "--profile",
        "xtask",
        "--no-tests",
        "pass",
        "--config-file",
    ]);
    tests.arg(workspace.root.join("xtask/nextest.toml")).args(filter);
    let outcome = command::run(&mut tests);
    match std::fs::read_to_string(&junit) {
        Ok(text) => count.add_junit(&text),
        // Without a report nothing ran; a filter without matching tests is not a failure.
        Err(_) if filter.is_some() && outcome.is_ok() => Ok(()),
        Err(error) => {
            outcome.context("the tests did not run")?;
            bail!("the tests ran, but wrote no report at {}: {error}", junit.display())
        }
    }
}

/// Runs `cargo test` and counts; hides the output of passing tests, except skip messages.
fn cargo_test(mut tests: Command, filter: Option<&str>, count: &mut TestCount) -> Result<()> {
    tests.args(["--", "--show-output"]).args(filter).stdout(Stdio::piped()).stdin(Stdio::null());
    println!("$ {}", command::command_line(&tests));
    let mut running = tests.spawn().context("cannot run cargo")?;
    let stdout = running.stdout.take().context("no output")?;
    let mut output = CargoTestOutput::default();
    for line in BufReader::new(stdout).lines() {
        if let Some(shown) = output.take(&line?) {
            println!("{shown}");
        }
    }
    let status = running.wait()?;
    let failed = output.count.failed;
    count.add(output.count);
    if !status.success() && failed == 0 {
        bail!("`{}` failed before its tests ran ({status})", command::command_line(&tests));
    }
    Ok(())
}

fn report(count: &TestCount) -> Result<()> {
    println!();
    for skipped in &count.skips {
        println!("SKIPPED {skipped}");
    }
    for failure in &count.failures {
        println!("FAILED {failure}");
    }
    println!("{} passed, {} failed, {} skipped", count.passed, count.failed, count.skips.len());
    if count.failed > 0 {
        bail!("{} test(s) failed", count.failed);
    }
    if count.passed == 0 {
        bail!("no test ran");
    }
    Ok(())
}
