//! Measures the overhead of the limiting library and the accuracy of its shares on the simulated driver, or with
//! `MAYFLY_TEST_GPU=real` on the machine's first GPU. Needs a C compiler.
//!
//! ```text
//! cargo run --release -p mayfly-gpu-shim --example gpu_bench -- --seconds 2 --rounds 5
//! ```
//! Programs with and without the library alternate in each round; costs are medians over the rounds, of CPU time, and
//! on a real GPU of elapsed time, since its driver waits for the GPU in launches. Prints one line of JSON: `{"real",
//! "shares": [{"percent", "loop", "got"}], "together": [{"percent", "loop", "got"}], "costs": [{"what", "withoutNs",
//! "memoryNs", "quotaNs"}]}`.
#![expect(clippy::print_stdout, reason = "the report is this program's product")]

use std::{
    error::Error,
    process::{Command, Stdio},
    sync::atomic::Ordering::Relaxed,
};

use serde_json::{Value, json};

#[path = "../tests/support/container.rs"]
mod container;
use container::{LimitedContainer, is_real, text_of};

struct Options {
    seconds: f64,
    rounds: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options(std::env::args().skip(1))?;
    let figures = json!({
        "real": is_real(),
        "shares": shares(&options)?,
        "together": together(&options)?,
        "costs": costs(&options)?,
    });
    println!("{figures}");
    Ok(())
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, Box<dyn Error>> {
    let mut options = Options { seconds: 2.0, rounds: 5 };
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match &*flag {
            "--seconds" => options.seconds = value.parse()?,
            "--rounds" => options.rounds = value.parse()?,
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    Ok(options)
}

/// A container that may use `core_percent` of the first GPU (0: all), and this much of its memory (0: all).
fn container(memory_bytes: u64, core_percent: u32) -> Result<LimitedContainer, Box<dyn Error>> {
    LimitedContainer::new("gpu_bench", memory_bytes, core_percent).ok_or_else(|| "there is no gcc".into())
}

/// One container at a time, in a loop of launches that waits for each kernel, and in one that never waits.
fn shares(options: &Options) -> Result<Vec<Value>, Box<dyn Error>> {
    let milliseconds = format!("{:.0}", options.seconds * 1e3);
    let mut shares = Vec::new();
    for percent in [10, 25, 50, 75, 90] {
        for (name, kind) in [
            ("sync", ["spin", "work_1ms"]),
            ("async", ["spin", "work_200us"]),
            ("graph", ["graph", "work_500us"]),
        ] {
            let container = container(0, percent)?;
            let batch = if name == "sync" { "1" } else { "0" };
            let text = container.run(&["address", kind[0], kind[1], &milliseconds, batch]);
            shares.push(json!({"percent": percent, "loop": name, "got": container.share(&text)}));
        }
    }
    Ok(shares)
}

/// Two containers on one GPU. A loop that waits for each kernel also waits for those of the other container, and so
/// may request less than its share; one that never waits always has a kernel ready.
fn together(options: &Options) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut shares = Vec::new();
    for (name, kernel, kernel_ns, batch) in
        [("sync", "work_1ms", 1e6, "1"), ("async", "work_200us", 2e5, "0")]
    {
        for (percent, got) in pair(options, kernel, kernel_ns, batch)? {
            shares.push(json!({"percent": percent, "loop": name, "got": got}));
        }
    }
    Ok(shares)
}

/// The shares of two containers of 30 and 70 % that launch this kernel at the same time.
fn pair(
    options: &Options,
    kernel: &str,
    kernel_ns: f64,
    batch: &str,
) -> Result<Vec<(u32, f64)>, Box<dyn Error>> {
    let milliseconds = format!("{:.0}", options.seconds * 1e3);
    let containers = [(30, container(0, 30)?), (70, container(0, 70)?)];
    // As the host does while both are active.
    containers.iter().for_each(|(_, one)| one.limits.region().devices()[0].contended.store(1, Relaxed));
    let mut programs = Vec::new();
    for (percent, one) in &containers {
        let mut command = one.command(&["address", "spin", kernel, &milliseconds, batch]);
        containers[0].1.lend_gpus(&mut command);
        programs.push((*percent, command.stdout(Stdio::piped()).spawn()?));
    }
    let mut shares = Vec::new();
    for (percent, program) in programs {
        let output = program.wait_with_output()?;
        let text = String::from_utf8(output.stdout)?;
        let mut numbers = text.split_whitespace().map(str::parse::<f64>);
        let (Some(launches), Some(ns)) = (numbers.next().transpose()?, numbers.next().transpose()?) else {
            return Err(format!("no figures in {text:?}").into());
        };
        shares.push((percent, launches * kernel_ns * 100.0 / ns));
    }
    Ok(shares)
}

/// A program whose cost is measured.
struct Cost {
    what: &'static str,
    arguments: [&'static str; 5],
}

/// Kernels of zero duration, so that only the call is measured.
const COSTS: [Cost; 4] = [
    Cost { what: "launch", arguments: ["address", "launches", "work_0us", "200000", "0"] },
    Cost {
        what: "launch, synchronised each time",
        arguments: ["address", "launches", "work_0us", "100000", "1"],
    },
    Cost {
        what: "launch of a graph of four kernels",
        arguments: ["address", "launches", "work_0us", "200000", "-1"],
    },
    Cost {
        what: "allocate and free physical memory",
        arguments: ["address", "allocations", "create", "2097152", "100000"],
    },
];

/// Loops in which a real GPU is the bottleneck, so that only the work that the library adds to it is seen.
const REAL_COSTS: [Cost; 2] = [
    Cost { what: "kernel of 5 µs", arguments: ["address", "launches", "work_5us", "40000", "0"] },
    Cost { what: "kernel of 20 µs", arguments: ["address", "launches", "work_20us", "20000", "0"] },
];

/// Without the library, with only a memory limit, and with a quota of time in addition.
fn costs(options: &Options) -> Result<Vec<Value>, Box<dyn Error>> {
    let (memory, quota) = (container(1 << 30, 0)?, container(1 << 30, 99)?);
    quota.lend_idle_time();
    let mut costs = Vec::new();
    let real = REAL_COSTS.iter().filter(|_| is_real());
    for Cost { what, arguments } in COSTS.iter().chain(real) {
        let mut rounds: [Vec<f64>; 3] = Default::default();
        for _ in 0..options.rounds {
            let sides: [Command; 3] =
                [memory.unlimited(arguments), memory.command(arguments), quota.command(arguments)];
            for (mut side, round) in sides.into_iter().zip(&mut rounds) {
                let text = text_of(&mut side);
                let cost = text.split_whitespace().nth(usize::from(is_real())).unwrap_or_default();
                round.push(cost.parse().map_err(|_| format!("no figures in {text:?}"))?);
            }
        }
        let [without, memory, quota] = rounds.map(|mut round| median(&mut round));
        costs.push(json!({"what": what, "withoutNs": without, "memoryNs": memory, "quotaNs": quota}));
    }
    Ok(costs)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
