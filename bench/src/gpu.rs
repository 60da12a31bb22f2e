//! The limiting library for containers that share a GPU: the accuracy of shares of time, and the overhead of a launch
//! and of an allocation. On simulated GPUs, or with `MAYFLY_TEST_GPU=real` on the machine's first one.

use std::process::Command;

use anyhow::{Context as _, Result};
use mayfly_xtask_harness::{
    command::{self, cargo},
    table::Table,
    workspace::Workspace,
};
use serde_json::Value;

use super::{Options, turns};

/// The duration of a realistic kernel, to which the overhead of a launch is related.
const KERNEL_US: f64 = 20.0;

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let mut build = cargo();
    build.args(["build", "--release", "-p", "mayfly-gpu-shim", "--example", "gpu_bench"]);
    command::run(build.current_dir(&workspace.root))?;
    let (seconds, rounds) = if options.quick { ("1", "3") } else { ("4", "9") };
    let mut bench = Command::new(workspace.target.join("release/examples/gpu_bench"));
    let figures = turns::figure(bench.args(["--seconds", seconds, "--rounds", rounds]))?;
    println!("\n{}\n{}\n{}", shares(&figures)?, together(&figures)?, costs(&figures)?);
    Ok(figures)
}

fn rows<'f>(figures: &'f Value, part: &str) -> Result<&'f [Value]> {
    figures[part].as_array().map(Vec::as_slice).with_context(|| format!("no {part} in {figures}"))
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or(f64::NAN)
}

/// A row for each share, a column for each kind of loop.
fn shares(figures: &Value) -> Result<String> {
    let head = ["share of GPU time", "waits for each kernel", "never waits", "graphs"];
    Ok(by_share(rows(figures, "shares")?, &head, &["sync", "async", "graph"]))
}

fn together(figures: &Value) -> Result<String> {
    let head = ["two containers on one GPU", "wait for each kernel", "never wait"];
    Ok(by_share(rows(figures, "together")?, &head, &["sync", "async"]))
}

/// `kinds`: the loops of the columns.
fn by_share(rows: &[Value], head: &[&str], kinds: &[&str]) -> String {
    let mut table = Table::new(head);
    let mut percents: Vec<f64> = rows.iter().map(|row| number(row, "percent")).collect();
    percents.sort_by(f64::total_cmp);
    percents.dedup();
    for percent in percents {
        let got = |kind: &&str| {
            let found = rows.iter().find(|row| number(row, "percent") == percent && row["loop"] == **kind);
            found.map_or_else(String::new, |row| format!("{:.1} %", number(row, "got")))
        };
        let cells: Vec<String> =
            std::iter::once(format!("{percent} %")).chain(kinds.iter().map(got)).collect();
        table.row(&cells);
    }
    table.text()
}

fn costs(figures: &Value) -> Result<String> {
    let beside = format!("quota, of a kernel of {KERNEL_US} µs");
    // A real driver waits for the GPU in launches, so that processor time says little.
    let time = if figures["real"] == true { "time of a call" } else { "processor time of a call" };
    let head = [time, "without", "memory limit", "and quota", &*beside];
    let mut table = Table::new(&head);
    for row in rows(figures, "costs")? {
        let [without, memory, quota] = ["withoutNs", "memoryNs", "quotaNs"].map(|field| number(row, field));
        let what = row["what"].as_str().unwrap_or_default();
        let is_launch = what.starts_with("launch");
        let of_kernel = (quota - without) / (KERNEL_US * 1e3) * 100.0;
        table.row(&[
            what.to_owned(),
            format!("{without:.0} ns"),
            format!("+{:.0} ns", memory - without),
            format!("+{:.0} ns", quota - without),
            if is_launch { format!("{of_kernel:.2} %") } else { String::new() },
        ]);
    }
    Ok(table.text())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_laid_out_by_share_and_by_call() {
        let figures = json!({
            "shares": [
                {"percent": 10, "loop": "sync", "got": 10.14}, {"percent": 10, "loop": "async", "got": 9.9},
                {"percent": 25, "loop": "sync", "got": 25.0}],
            "together": [
                {"percent": 30, "loop": "sync", "got": 30.4}, {"percent": 70, "loop": "sync", "got": 64.7},
                {"percent": 30, "loop": "async", "got": 30.1}, {"percent": 70, "loop": "async", "got": 70.2}],
            "costs": [{"what": "launch", "withoutNs": 100.0, "memoryNs": 110.0, "quotaNs": 300.0}],
        });
        let shares = shares(&figures).unwrap();
        assert!(
            shares.contains("10.1 %") && shares.contains("9.9 %") && shares.lines().count() == 4,
            "{shares}"
        );
        let costs = costs(&figures).unwrap();
        assert!(costs.contains("+200 ns") && costs.contains("1.00 %"), "{costs}");
        let together = together(&figures).unwrap();
        let rows: Vec<_> = together.lines().filter(|line| line.contains(" %")).collect();
        assert_eq!(rows.len(), 2, "{together}");
        assert!(rows[0].contains("30.4 %") && rows[0].contains("30.1 %"), "{together}");
        assert!(rows[1].contains("64.7 %") && rows[1].contains("70.2 %"), "{together}");
        assert!(super::together(&json!({})).is_err());
    }
}
