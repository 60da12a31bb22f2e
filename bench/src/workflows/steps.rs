//! Durable steps compared with Restate: throughput and latency, and what a step costs in disk and memory.

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use mayfly_xtask_harness::{
    command,
    server::{ServerProcess, resident_bytes},
    table::{Table, mib, ms},
    tools,
};
use serde_json::{Map, Value, json};

use super::{Bench, CLIENTS, INPUT, create, task};
use crate::{
    restate::Restate,
    turns::{self, Cell, Side},
};

/// The number of steps, and the name of the workflow with as many.
const STEPS: &[(usize, &str)] = &[(1, "one"), (3, "three"), (9, "nine")];
/// The number of clients at which the cost of a step is measured.
const COST_CLIENTS: u32 = 64;
const COST_STEPS: (usize, &str) = (3, "three");

impl Bench<'_> {
    /// Workflows with a number of steps, from start to end, compared with Restate.
    pub(super) fn steps(&self) -> Result<Value> {
        println!("\nDurable steps, from the start to the end of a workflow");
        let server = self.start()?;
        let mut notes = Vec::new();
        let peer = match Restate::start(self.scope) {
            Ok(peer) => Some(peer),
            Err(error) => {
                println!("bench: SKIPPED Restate: {error:#}");
                notes.push(format!("no Restate: {error:#}"));
                None
            }
        };
        let (rounds, seconds) = if self.quick { (1, "2") } else { (3, "5") };
        let mut all = Vec::new();
        for (count, name) in STEPS {
            println!(" {count} step(s)");
            let machine = create(server.workflows, name, "STANDARD", &steps_of(*count))?;
            let sides = self.sides(&server, peer.as_ref(), &machine, name, seconds);
            let cells = turns::take(&sides, CLIENTS, rounds)?;
            print_steps(*count, &cells);
            all.push(json!({"steps": count, "cells": cells.iter().map(Cell::json).collect::<Vec<_>>()}));
        }
        let costs = self.costs(&server, peer.as_ref())?;
        let version = peer.as_ref().map(|peer| peer.version.clone());
        if let Some(peer) = peer {
            peer.stop(self.scope);
        }
        server.stop(self.scope);
        Ok(json!({"peer": version, "workflows": all, "costs": costs, "notes": notes}))
    }

    fn sides(
        &self,
        server: &ServerProcess,
        peer: Option<&Restate>,
        machine: &str,
        handler: &str,
        seconds: &'static str,
    ) -> Vec<Side> {
        let (loads, address, machine) = (self.loads.clone(), server.workflows, machine.to_owned());
        let ours = load_of(loads.clone(), machine, "--mayfly", address, seconds);
        let mut sides = vec![Side { name: "mayfly".into(), load: ours }];
        if let Some(peer) = peer {
            let theirs = load_of(loads, format!("steps/{handler}"), "--restate", peer.ingress, seconds);
            sides.push(Side { name: "restate".into(), load: theirs });
        }
        sides
    }

    /// The cost of a step in disk and memory, for each system.
    fn costs(&self, server: &ServerProcess, peer: Option<&Restate>) -> Result<Value> {
        let (count, name) = COST_STEPS;
        let machine = create(server.workflows, "cost", "STANDARD", &steps_of(count))?;
        let mut sides = vec![("mayfly", server.id(), machine, "--mayfly", server.workflows)];
        if let Some(peer) = peer {
            sides.push(("restate", peer.id, format!("steps/{name}"), "--restate", peer.ingress));
        }
        let title = format!("{count} steps, {COST_CLIENTS} clients");
        let mut table = Table::new(&[&title, "bytes/step", "fsyncs/step", "resident after"]);
        let mut figures = Vec::new();
        for (side, id, machine, way, address) in sides {
            let before = written_bytes(id)?;
            let syncs = Syncs::start(id);
            let figure =
                turns::figure(self.load(COST_CLIENTS, &machine, way, address).args(["--seconds", "5"]))?;
            let syncs = syncs.and_then(Syncs::stop);
            let bytes = written_bytes(id)? - before;
            let steps = figure["finished"].as_f64().unwrap_or(f64::NAN) * count as f64;
            let resident = resident_bytes(id)?;
            table.row(&[
                side.to_owned(),
                format!("{:.0}", bytes as f64 / steps),
                syncs.map_or("not known".to_owned(), |syncs| format!("{:.3}", syncs as f64 / steps)),
                mib(resident as f64),
            ]);
            figures.push(json!({
                "side": side, "steps": steps, "writtenBytes": bytes, "fsyncs": syncs, "residentBytes": resident,
            }));
        }
        println!("\n{}", table.text());
        Ok(Value::Array(figures))
    }
}

fn load_of(
    loads: PathBuf,
    machine: String,
    way: &'static str,
    address: SocketAddr,
    seconds: &'static str,
) -> Box<dyn Fn(u32) -> Command> {
    Box::new(move |clients| {
        let mut load = Command::new(&loads);
        load.args(["--clients", &clients.to_string(), "--seconds", seconds, "--machine", &machine]);
        load.args(["--input", INPUT, way, &address.to_string()]);
        load
    })
}

fn print_steps(count: usize, cells: &[Cell]) {
    let title = format!("{count} step(s)");
    let head =
        [&*title, "mayfly/s", "restate/s", "ratio", "mayfly p50", "restate p50", "mayfly p99", "restate p99"];
    let mut table = Table::new(&head);
    for clients in CLIENTS {
        let of = |side: &str| cells.iter().find(|cell| cell.side == side && cell.clients == *clients);
        let figure = |side: &str, field: &str| of(side).map_or(f64::NAN, |cell| cell.middle(field));
        let (ours, theirs) = (figure("mayfly", "per_s"), figure("restate", "per_s"));
        let mut row = vec![
            format!("{clients} client(s)"),
            format!("{ours:.0}"),
            format!("{theirs:.0}"),
            format!("{:.2} ×", ours / theirs),
        ];
        for field in ["p50_us", "p99_us"] {
            row.extend(["mayfly", "restate"].map(|side| ms(figure(side, field) / 1e3)));
        }
        table.row(&row);
    }
    println!("\n{}", table.text());
}

/// A workflow with this number of calls of the function, each with the response of the previous one.
fn steps_of(count: usize) -> Value {
    let mut states = Map::new();
    for at in 1..=count {
        let mut state = task(json!({"name.$": if at == 1 { "$.name" } else { "$.message" }}), at == count);
        if at < count {
            state["Next"] = format!("S{}", at + 1).into();
        }
        states.insert(format!("S{at}"), state);
    }
    json!({"StartAt": "S1", "States": states})
}

/// Bytes that a process has written to disks.
fn written_bytes(id: u32) -> Result<u64> {
    let path = format!("/proc/{id}/io");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    line.context("no write_bytes")?.trim().parse().context("write_bytes is not a number")
}

/// Counts a process's fsyncs with `perf`, if it is installed and permitted.
struct Syncs(Child);

impl Syncs {
    const EVENTS: &'static str = "syscalls:sys_enter_fsync,syscalls:sys_enter_fdatasync";

    fn start(id: u32) -> Option<Self> {
        let perf = tools::find("perf")?;
        let mut stat = Command::new(perf);
        stat.args(["stat", "-x", ",", "-e", Self::EVENTS, "-p", &id.to_string()]);
        stat.stdin(Stdio::null()).stdout(Stdio::null());
        stat.stderr(Stdio::piped()).spawn().ok().map(Self)
    }

    /// The count since the start; `None` if perf failed.
    fn stop(self) -> Option<u64> {
        command::quietly(Command::new("kill").args(["-INT", &self.0.id().to_string()])).ok()?;
        let said = self.0.wait_with_output().ok()?;
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        let counts: Option<Vec<u64>> = text
            .lines()
            .filter(|line| line.contains("sys_enter_f"))
            .map(|line| line.split(',').next()?.trim().parse().ok())
            .collect();
        counts.filter(|counts| !counts.is_empty()).map(|counts| counts.iter().sum())
    }
}
