//! Runs of the simulation, each in a process of its own.

use std::{
    process::{Command, Output},
    sync::atomic::{AtomicUsize, Ordering},
};

/// Seeds of every test run: few, since each takes seconds.
const SEEDS_DEFAULT: u64 = 4;
/// `MAYFLY_SIM_SEEDS=200` runs that many, `MAYFLY_SIM_SEED=17` that one.
const VARIABLE_SEEDS: &str = "MAYFLY_SIM_SEEDS";
const VARIABLE_SEED: &str = "MAYFLY_SIM_SEED";

struct Run {
    is_fine: bool,
    output: String,
}

impl Run {
    fn of(seed: u64, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mayfly-sim"));
        let Output { status, stdout, stderr } =
            command.arg(seed.to_string()).args(arguments).output().unwrap();
        let output = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(matches!(status.code(), Some(0 | 1)), "seed {seed}: {status}\n{output}");
        Self { is_fine: status.success(), output }
    }

    /// What identifies the trace.
    fn digest(&self) -> &str {
        self.output.lines().find(|line| line.starts_with("digest ")).expect("a digest")
    }

    fn violations(&self) -> &str {
        self.output.split_once("violated:\n").map_or("", |(_, violations)| violations)
    }
}

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

#[test]
fn every_rule_holds_for_every_seed() {
    let seeds: Vec<u64> = match variable(VARIABLE_SEED) {
        Some(seed) => vec![seed],
        None => (1..=variable(VARIABLE_SEEDS).unwrap_or(SEEDS_DEFAULT)).collect(),
    };
    let next = AtomicUsize::new(0);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let failed: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mut failed = Vec::new();
            while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                let run = Run::of(*seed, &[]);
                if !run.is_fine {
                    failed.push(format!(
                        "seed {seed} (replay: cargo run -p mayfly-sim -- {seed} --trace):\n{}",
                        run.output
                    ));
                }
            }
            failed
        };
        let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert!(failed.is_empty(), "{} of {} seeds fail:\n{}", failed.len(), seeds.len(), failed.join("\n"));
}

#[test]
fn a_seed_repeats_its_run() {
    let (one, again, other) = (Run::of(1, &[]), Run::of(1, &[]), Run::of(2, &[]));
    assert_eq!(one.digest(), again.digest(), "the same seed gives the same trace");
    assert_ne!(one.digest(), other.digest(), "another seed gives another one");
}

/// The rule that notices a deliberate defect, in at least one of a few seeds.
fn notices(broken: &str, rule: &str) {
    let runs: Vec<Run> = (1..=3).map(|seed| Run::of(seed, &["--broken", broken])).collect();
    let noticed = runs.iter().any(|run| run.violations().contains(rule));
    let outputs: Vec<&str> = runs.iter().map(|run| run.violations()).collect();
    assert!(noticed, "no seed shows {rule:?}: {outputs:#?}");
}

#[test]
fn a_pod_too_many_is_noticed() {
    notices("extra-pod", "pods and wants");
}

#[test]
fn a_collector_of_live_objects_is_noticed() {
    notices("eager-collector", "lives");
}

#[test]
fn a_watch_that_loses_events_is_noticed() {
    notices("silent-watch", "not as it should be");
}

#[test]
fn a_second_job_for_a_scheduled_time_is_noticed() {
    notices("double-schedule", "a second Job of one CronJob");
}

#[test]
fn a_volume_that_is_given_away_is_noticed() {
    notices("stolen-volume", "is taken from it");
}
