//! Sides that take turns: the same load on each, round by round, so that a machine's moods are everyone's.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{command, table::median};

/// One side of a comparison, and the program that loads it with so many clients.
pub(super) struct Side {
    pub(super) name: String,
    pub(super) load: Box<dyn Fn(u32) -> Command>,
}

/// The figures of one side with this many clients, one for each round.
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

/// Every side with every number of clients, `rounds` times. The last line that a load prints is its figure.
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

/// Runs a load; gives its figure.
pub(super) fn figure(load: &mut Command) -> Result<Value> {
    let text = command::output(load)?;
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).with_context(|| format!("no figures in {text:?}"))
}
