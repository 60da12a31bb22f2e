//! Very many requests at once: every connection is open before the first request is sent.

use std::{
    net::SocketAddr,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::http::Connection;

/// Connections are shared out over this many threads.
const THREADS: usize = 4;

#[derive(Default)]
pub(super) struct Burst {
    pub(super) answered: usize,
    /// Each kind of failure once, with its count.
    pub(super) failures: Vec<(String, usize)>,
    /// From the first request to the last answer.
    pub(super) took: Duration,
}

impl Burst {
    pub(super) fn failed(&self) -> usize {
        self.failures.iter().map(|(_, count)| count).sum()
    }

    pub(super) fn json(&self) -> Value {
        let failures: serde_json::Map<String, Value> =
            self.failures.iter().map(|(what, count)| (what.clone(), json!(count))).collect();
        json!({"answered": self.answered, "failures": failures, "seconds": self.took.as_secs_f64()})
    }

    fn note(&mut self, failure: String) {
        match self.failures.iter_mut().find(|(what, _)| *what == failure) {
            Some((_, count)) => *count += 1,
            None => self.failures.push((failure, 1)),
        }
    }
}

/// Opens all connections, then sends all requests, then reads all answers.
pub(super) fn run(address: SocketAddr, path: &str, requests: usize) -> Result<Burst> {
    let open = Barrier::new(THREADS);
    let parts = thread::scope(|scope| {
        let share = |at: usize| requests / THREADS + usize::from(at < requests % THREADS);
        let threads: Vec<_> = (0..THREADS)
            .map(|at| {
                let open = &open;
                scope.spawn(move || part(address, path, share(at), open))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let mut total = Burst::default();
    for part in parts {
        let part = part.ok().context("a thread of the burst panicked")?;
        total.answered += part.answered;
        total.took = total.took.max(part.took);
        for (what, count) in part.failures {
            (0..count).for_each(|_| total.note(what.clone()));
        }
    }
    Ok(total)
}

fn part(address: SocketAddr, path: &str, requests: usize, open: &Barrier) -> Burst {
    let mut burst = Burst::default();
    let mut connections = Vec::with_capacity(requests);
    for _ in 0..requests {
        match Connection::open(address) {
            Ok(connection) => connections.push(connection),
            Err(error) => burst.note(format!("{error:#}")),
        }
    }
    open.wait();
    let started = Instant::now();
    let mut waiting = Vec::with_capacity(connections.len());
    for mut connection in connections {
        match connection.send("GET", path, &[], &[]) {
            Ok(()) => waiting.push(connection),
            Err(error) => burst.note(format!("{error:#}")),
        }
    }
    for mut connection in waiting {
        match connection.receive() {
            Ok(answer) if answer.status == 200 => burst.answered += 1,
            Ok(answer) => burst.note(format!("status {}", answer.status)),
            Err(error) => burst.note(format!("{error:#}")),
        }
    }
    burst.took = started.elapsed();
    burst
}
