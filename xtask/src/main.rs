//! The entry point for all development tasks: `cargo xtask …`.
//!
//! What belongs here: checking the code, running all tests and the demo, and the list of the tasks. Each task reports
//! what it does, what it could not do, and the consequences.
//!
//! What does not belong here: the benchmarks, which are in `bench`; what they share with the demo, such as the building
//! of guests and the installation of tools, which is in `xtask/harness`; anything the product does itself. No heavy
//! dependencies: this must start quickly on a clean clone.
//! Start reading at [`TASKS`], then the module of the task.
#![expect(clippy::print_stdout, reason = "the output of a task is its result")]

mod clients;
mod demo;
mod floors;
mod guests;
mod lint;
mod suite;

use std::process::ExitCode;

use anyhow::{Result, bail};
use mayfly_bench as bench;
use mayfly_xtask_harness::tools;

struct Task {
    name: &'static str,
    about: &'static str,
    help: &'static str,
    run: fn(&[String]) -> Result<()>,
    /// Whether the task builds Mayfly.
    builds: bool,
}

const TASKS: &[Task] = &[
    Task {
        name: "demo",
        about: "the main use case from start to end, in a temporary directory",
        help: demo::HELP,
        run: demo::run,
        builds: true,
    },
    Task {
        name: "test",
        about: "all tests, with a summary",
        help: suite::HELP,
        run: suite::run,
        builds: true,
    },
    Task {
        name: "lint",
        about: "fmt, clippy, floors, deny and the project's own checks",
        help: lint::HELP,
        run: lint::run,
        builds: true,
    },
    Task {
        name: "floors",
        about: "who may depend on whom",
        help: floors::HELP,
        run: floors::run,
        builds: false,
    },
    Task {
        name: "guests",
        about: "build the examples as components",
        help: guests::HELP,
        run: guests::run,
        builds: false,
    },
    Task {
        name: "bench",
        about: "benchmarks, next to comparable systems",
        help: bench::HELP,
        run: bench::run,
        builds: true,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<()> {
    let Some((name, rest)) = arguments.split_first() else {
        print_overview();
        bail!("the name of a task is missing");
    };
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        print_overview();
        return Ok(());
    }
    let Some(task) = TASKS.iter().find(|task| task.name == name) else {
        print_overview();
        bail!("unknown task {name:?}");
    };
    if rest.iter().any(|argument| argument == "--help" || argument == "-h") {
        println!("cargo xtask {}: {}\n\n{}", task.name, task.about, task.help);
        return Ok(());
    }
    if task.builds {
        tools::ensure_make()?;
    }
    (task.run)(rest)
}

fn print_overview() {
    println!("cargo xtask TASK [--help]\n");
    for task in TASKS {
        println!("  {:<8} {}", task.name, task.about);
    }
}
