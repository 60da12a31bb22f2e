//! Runs one seed of the simulation.
//!
//! Usage: `mayfly-sim SEED [--trace] [--broken
//! extra-pod|eager-collector|silent-watch|double-schedule|stolen-volume]`. Prints the digest of the run's trace; where a
//! rule is violated also the violations, the last lines of the trace, and exits with 1. `RUST_LOG` shows the platform's
//! own log.

#![expect(clippy::print_stdout, reason = "the result of the run is this program's product")]

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use mayfly_sim::run::{SimulationOptions, run};

fn main() -> ExitCode {
    match options().and_then(run) {
        Ok(report) => {
            println!("digest {} {:016x}", report.digest.lines, report.digest.hash);
            println!("virtual time {:.0} s", report.virtual_time.as_secs_f64());
            if report.violations.is_empty() {
                return ExitCode::SUCCESS;
            }
            println!("last steps:");
            report.last_lines.iter().for_each(|line| println!("  {line}"));
            println!("violated:");
            report.violations.iter().for_each(|violation| println!("  {violation}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("mayfly-sim: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn options() -> Result<SimulationOptions> {
    if std::env::var_os("RUST_LOG").is_some() {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    }
    let mut options = SimulationOptions { seed: 0, broken: None, is_trace_printed: false };
    let mut seed = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--trace" => options.is_trace_printed = true,
            "--broken" => {
                let name = arguments.next().context("--broken needs a name")?;
                options.broken = Some(name.parse().map_err(anyhow::Error::msg)?);
            }
            number => seed = Some(number.parse().with_context(|| format!("{number:?} is no seed"))?),
        }
    }
    match seed {
        Some(seed) => options.seed = seed,
        None => bail!("usage: mayfly-sim SEED [--trace] [--broken NAME]"),
    }
    Ok(options)
}
