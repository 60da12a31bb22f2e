//! Many executions whose timers are due in the same second: how late each execution ends.

use std::{
    net::SocketAddr,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use mayfly_xtask_harness::table::{Table, ms};
use serde_json::{Value, json};

use super::{Bench, call, create};

/// Executions that wait for the same instant.
const EXECUTIONS: usize = 100_000;
/// The same with `--quick`.
const EXECUTIONS_QUICK: usize = 20_000;
/// The time for starting all executions: about 2,500 starts per second on a slow machine.
const START_RATE: usize = 2_500;
/// The timeout for the end of the last execution after the timers were due.
const END_PATIENCE: Duration = Duration::from_secs(120);
const PAGE: usize = 1_000;

impl Bench<'_> {
    /// The lateness of each execution: its `stopDate` minus the timestamp of its Wait.
    pub(super) fn timers(&self) -> Result<Value> {
        let executions = if self.quick { EXECUTIONS_QUICK } else { EXECUTIONS };
        println!("\n{executions} timers due in one second");
        let server = self.start()?;
        let due = unix_now()? + (executions / START_RATE) as u64 + 5;
        let timestamp = format!("{{% $fromMillis({due}000) %}}");
        let wait = json!({"Type": "Wait", "Timestamp": timestamp, "End": true});
        let definition = json!({"QueryLanguage": "JSONata", "StartAt": "W", "States": {"W": wait}});
        let machine = create(server.workflows, "timers", "STANDARD", &definition)?;
        let mut load = self.load(64, &machine, "--start-only", server.workflows);
        super::turns::figure(load.args(["--count", &executions.to_string()]))?;
        let spare = i128::from(due) - i128::from(unix_now()?);
        ensure!(spare > 0, "the last execution was started {} s after the timers were due", -spare);
        let latenesses = latenesses(server.workflows, &machine, executions, due)?;
        server.stop(self.scope);

        let at = |percent: usize| latenesses[(latenesses.len() - 1) * percent / 100];
        let mut table = Table::new(&["executions", "p50", "p99", "last"]);
        let row = [at(50), at(99), at(100)];
        table.row(&[executions.to_string(), ms(row[0]), ms(row[1]), ms(row[2])]);
        println!("\n{}", table.text());
        Ok(json!({"executions": executions, "p50Ms": row[0], "p99Ms": row[1], "lastMs": row[2]}))
    }
}

/// Waits until all have ended; returns the milliseconds between `due` and each execution's end, in ascending order.
fn latenesses(address: SocketAddr, machine: &str, executions: usize, due: u64) -> Result<Vec<f64>> {
    let deadline = Instant::now() + Duration::from_secs(due.saturating_sub(unix_now()?)) + END_PATIENCE;
    std::thread::sleep(Duration::from_secs(due.saturating_sub(unix_now()?) + 1));
    loop {
        let running = list(address, machine, json!({"statusFilter": "RUNNING", "maxResults": 1}))?;
        if running["executions"].as_array().is_some_and(Vec::is_empty) {
            break;
        }
        ensure!(
            Instant::now() < deadline,
            "executions are running {END_PATIENCE:?} after their timers were due"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    let mut latenesses = Vec::with_capacity(executions);
    let mut next = Value::Null;
    loop {
        let mut page = json!({"maxResults": PAGE});
        if next.is_string() {
            page["nextToken"] = next;
        }
        let answer = list(address, machine, page)?;
        for execution in answer["executions"].as_array().context("no executions")? {
            let stopped = execution["stopDate"].as_f64().context("an execution has no stopDate")?;
            latenesses.push((stopped - due as f64) * 1e3);
        }
        next = answer["nextToken"].clone();
        if next.is_null() {
            break;
        }
    }
    ensure!(latenesses.len() == executions, "{} of {executions} executions are listed", latenesses.len());
    latenesses.sort_by(f64::total_cmp);
    Ok(latenesses)
}

fn list(address: SocketAddr, machine: &str, mut params: Value) -> Result<Value> {
    params["stateMachineArn"] = machine.into();
    call(address, "ListExecutions", &params)
}

#[expect(clippy::disallowed_methods, reason = "a Wait's Timestamp is compared with the wall clock")]
fn unix_now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}
