//! Runs the same load on several systems in turns, round by round, so that changes in the machine's load affect all of
//! them.

use std::process::Command;

use anyhow::{Context, Result};
use mayfly_xtask_harness::{command, table::median};
use serde_json::{Value, json};

/// One system of a comparison, and the program that loads it with a number of clients.
pub(super) struct Side {
    pub(super) name: String,
    pub(super) load: Box<dyn Fn(u32) -> Command>,
}

/// The results of one system with a number of clients, one for each round.
pub(super) struct Cell {
    pub(super) side: String,
    pub(super) clients: u32,
    figures: Vec<Value>,
}

impl Cell {
    /// The median of a field over the rounds.
    pub(super) fn middle(&self, field: &str) -> f64 {
        median(&mut self.figures.iter().filter_map(|figure| figure[field].as_f64()).collect::<Vec<_>>())
    }

    pub(super) fn json(&self) -> Value {
        json!({"side": self.side, "clients": self.clients, "runs": self.figures})
    }
}

/// Runs every system with every number of clients, `rounds` times. The last line of a load's output is its result.
pub(super) fn take(sides: &[Side], clients: &[u32], rounds: usize) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for clients in clients {
        for side in sides {
            cells.push(Cell { side: side.name.clone(), clients: *clients, figures: Vec::new() });
        }
    }
    for round in 1..=rounds {
        println!("  round {round} of {rounds}");
        for (at, cell) in cells.iter_mut().enumerate() {
            let side = &sides[at % sides.len()];
            cell.figures.push(figure(&mut (side.load)(cell.clients))?);
        }
    }
    Ok(cells)
}

/// Runs a load; returns its result.
pub(super) fn figure(load: &mut Command) -> Result<Value> {
    let text = command::output(load)?;
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).with_context(|| format!("no figures in {text:?}"))
}
