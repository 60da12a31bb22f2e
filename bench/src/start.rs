//! The time from the start of the process until it is ready, and its idle memory.

use std::time::Duration;

use anyhow::Result;
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    http::Connection,
    server::ServerProcess,
    table::{Table, median, mib, ms, percentile},
    workspace::Workspace,
};
use serde_json::{Value, json};

use super::Options;

/// The pause between readiness and the reading of memory: allocations of the start are released by then.
const IDLE: Duration = Duration::from_secs(2);

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let runs = if options.quick { 5 } else { 20 };
    let scope = Cleanup::new()?;
    let mut ready = Vec::new();
    let mut resident = Vec::new();
    for _ in 0..runs {
        let server = ServerProcess::start(&scope, &options.mayfly(workspace), &[])?;
        ready.push(server.ready_after.as_secs_f64() * 1e3);
        let answer = Connection::open(server.admin)?.get("/readyz")?;
        anyhow::ensure!(
            answer.status == 200,
            "/readyz answered {} after endpoints.json was there",
            answer.status
        );
        std::thread::sleep(IDLE);
        resident.push(server.resident_bytes()? as f64);
        server.stop(&scope);
    }
    let mut table = Table::new(&["mayfly up, new data directory", "median", "worst"]);
    table.row(&["process start to ready".into(), ms(median(&mut ready)), ms(percentile(&mut ready, 100.0))]);
    table.row(&["resident, idle".into(), mib(median(&mut resident)), mib(percentile(&mut resident, 100.0))]);
    println!("\n{}", table.text());
    Ok(json!({"runs": runs, "readyMs": ready, "residentBytes": resident}))
}
