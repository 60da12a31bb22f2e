//! Measures the durable writes per second of the store.
//!
//! ```text
//! cargo run --release -p mayfly-store --example write_bench -- --clients 64 --seconds 5
//! ```
//! Each client waits for its write before it makes the next one. Prints one line of JSON:
//! `{"clients", "value_bytes", "writes_per_s", "p50_us", "p99_us", "max_us", "fsyncs", "commits"}`.
#![expect(clippy::print_stdout, reason = "the report is this program's product")]

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use mayfly_store::{Config, Key, Store, Write};

struct Options {
    clients: usize,
    seconds: f64,
    value_bytes: usize,
    /// Objects each client cycles through: each is created once and updated from then on.
    objects: usize,
    dir: PathBuf,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = options(std::env::args().skip(1))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(bench(&options))
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, Box<dyn std::error::Error>> {
    let mut options =
        Options { clients: 64, seconds: 5.0, value_bytes: 1024, objects: 100, dir: std::env::temp_dir() };
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match &*flag {
            "--clients" => options.clients = value.parse()?,
            "--seconds" => options.seconds = value.parse()?,
            "--value-bytes" => options.value_bytes = value.parse()?,
            "--objects" => options.objects = value.parse()?,
            // A directory on the disk to measure; the temporary directory may be in memory.
            "--dir" => options.dir = value.into(),
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    Ok(options)
}

async fn bench(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir_in(&options.dir)?;
    let store = Store::open(Config::new(dir.path().join("objects.db")))?;
    let begin = Instant::now();
    let end = begin + Duration::from_secs_f64(options.seconds);
    let clients: Vec<_> = (0..options.clients)
        .map(|client| {
            let (objects, value) = (options.objects, vec![b'x'; options.value_bytes]);
            tokio::spawn(client_loop(store.clone(), client, objects, value.into(), end))
        })
        .collect();
    let mut latencies_us = Vec::new();
    for client in clients {
        latencies_us.extend(client.await??);
    }
    let seconds = begin.elapsed().as_secs_f64();
    let stats = store.stats();
    store.close().await;
    latencies_us.sort_unstable();
    let percentile = |p: usize| latencies_us[(latencies_us.len() - 1) * p / 100];
    println!(
        "{}",
        serde_json::json!({
            "clients": options.clients,
            "value_bytes": options.value_bytes,
            "writes_per_s": (latencies_us.len() as f64 / seconds).round(),
            "p50_us": percentile(50),
            "p99_us": percentile(99),
            "max_us": percentile(100),
            // A commit syncs the log; a checkpoint syncs the log and the data file.
            "fsyncs": stats.commits + 2 * stats.checkpoints,
            "commits": stats.commits,
        })
    );
    Ok(())
}

/// Creates and then updates objects of its own until the end; returns microseconds for each write.
async fn client_loop(
    store: Store,
    client: usize,
    objects: usize,
    value: bytes::Bytes,
    end: Instant,
) -> Result<Vec<u128>, mayfly_store::WriteError> {
    let mut latencies_us = Vec::new();
    let mut expected = vec![None; objects];
    for object in (0..objects).cycle() {
        let start = Instant::now();
        if start >= end {
            break;
        }
        let key = Key::new("pods", "default", format!("client-{client}-{object}"));
        let value = value.clone();
        let write = match expected[object] {
            None => Write::Create { key, value },
            expected => Write::Update { key, value, expected },
        };
        expected[object] = Some(store.write(write).await?.revision);
        latencies_us.push(start.elapsed().as_micros());
    }
    Ok(latencies_us)
}
