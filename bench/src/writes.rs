//! Durable writes: the store alone, through the API over TLS, and etcd over gRPC.

use std::{
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    server::{ServerProcess, wait_for},
    table::{Table, median, ms},
    tools,
    workspace::Workspace,
};
use serde_json::{Value, json};

use super::{
    Options,
    turns::{self, Cell, Side},
};

const CLIENTS: &[u32] = &[1, 64];
const ETCD_START_TIMEOUT: Duration = Duration::from_secs(30);
const ETCD: &str = "etcd, over gRPC";
/// Filesystems in memory: a sync costs nothing, and nothing is durable.
const IN_MEMORY: &[&str] = &["tmpfs", "ramfs"];

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let (rounds, seconds) = if options.quick { (1, 3) } else { (3, 5) };
    let filesystem = disk()?;
    let examples = super::load_generators(workspace)?;
    let scope = Cleanup::new()?;
    let server = ServerProcess::start(&scope, &options.mayfly(workspace), &[])?;
    let mut writers = vec![store(&examples, seconds), api(&examples, &server, seconds)];
    let mut notes = Vec::new();
    match etcd(&scope, &examples, seconds) {
        Ok(etcd) => writers.push(etcd),
        Err(error) => {
            println!("bench: SKIPPED etcd: {error:#}");
            notes.push(format!("no etcd: {error:#}"));
        }
    }
    let cells = turns::take(&writers, CLIENTS, rounds)?;
    server.stop(&scope);
    let mut table = Table::new(&["durable writes", "clients", "writes/s", "p50", "p99", "beside etcd"]);
    let mut besides = Vec::new();
    for cell in &cells {
        let beside = Beside::etcd(cell, &cells);
        table.row(&[
            cell.side.clone(),
            cell.clients.to_string(),
            format!("{:.0}", cell.middle("writes_per_s")),
            ms(cell.middle("p50_us") / 1e3),
            ms(cell.middle("p99_us") / 1e3),
            beside.as_ref().map(|beside| format!("{:.2} ×", beside.median)).unwrap_or_default(),
        ]);
        besides.extend(beside);
    }
    println!("\n{}", table.text());
    for beside in &besides {
        println!("  {}", beside.text());
    }
    Ok(json!({
        "filesystem": filesystem,
        "cells": cells.iter().map(Cell::json).collect::<Vec<_>>(),
        "besideEtcd": besides.iter().map(Beside::json).collect::<Vec<_>>(),
        "notes": notes,
    }))
}

/// The ratio of one system's writes to etcd's with the same number of clients.
struct Beside {
    side: String,
    clients: u32,
    /// The ratio of each turn, in which the machine's load was the same for both.
    turns: Vec<f64>,
    median: f64,
}

impl Beside {
    /// `None` for etcd itself, and if etcd was not measured.
    fn etcd(cell: &Cell, cells: &[Cell]) -> Option<Self> {
        let etcd = cells.iter().find(|other| other.side == ETCD && other.clients == cell.clients)?;
        if cell.side == ETCD {
            return None;
        }
        let turns = ratios(&rates(cell), &rates(etcd));
        let median = median(&mut turns.clone());
        Some(Self { side: cell.side.clone(), clients: cell.clients, turns, median })
    }

    fn text(&self) -> String {
        let turns: Vec<String> = self.turns.iter().map(|ratio| format!("{ratio:.2}")).collect();
        let Self { side, clients, median, .. } = self;
        format!(
            "{side}, {clients} client(s), beside etcd turn by turn: {}; median {median:.2}",
            turns.join(", ")
        )
    }

    fn json(&self) -> Value {
        json!({"side": self.side, "clients": self.clients, "turns": self.turns, "median": self.median})
    }
}

/// The writes per second of each turn, in order.
fn rates(cell: &Cell) -> Vec<f64> {
    let figures = cell.json();
    let turns = figures["runs"].as_array().into_iter().flatten();
    turns.map(|figure| figure["writes_per_s"].as_f64().unwrap_or(f64::NAN)).collect()
}

fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect()
}

/// The filesystem that all sides write to. One in memory is an error, because the writes would not be durable.
fn disk() -> Result<String> {
    let folder = std::env::temp_dir();
    let place = folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?;
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let kind = filesystem_of(&mounts, &place).unwrap_or("unknown").to_owned();
    if IN_MEMORY.contains(&&*kind) {
        bail!(
            "{} is in memory ({kind}), where no write is durable: set TMPDIR to a folder on a disk",
            place.display()
        );
    }
    Ok(kind)
}

/// The type of the filesystem of a path, from lines of `device folder type options`: that of the innermost mount point
/// above the path, and of several mounts on one folder the last.
fn filesystem_of<'m>(mounts: &'m str, path: &Path) -> Option<&'m str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (folder, kind) = (fields.next()?, fields.next()?);
        path.starts_with(folder).then_some((folder.len(), kind))
    });
    mounts.max_by_key(|(length, _)| *length).map(|(_, kind)| kind)
}

fn store(examples: &Path, seconds: u32) -> Side {
    let program = examples.join("write_bench");
    let command = move |clients: u32| {
        let mut command = Command::new(&program);
        command.args(["--clients", &clients.to_string(), "--seconds", &seconds.to_string()]);
        command
    };
    Side { name: "mayfly, store alone".into(), load: Box::new(command) }
}

fn api(examples: &Path, server: &ServerProcess, seconds: u32) -> Side {
    let (program, kubeconfig) = (examples.join("write_load"), server.kubeconfig());
    let command = move |clients: u32| {
        let mut command = load(&program, clients, seconds);
        command.arg("--kubeconfig").arg(&kubeconfig);
        command
    };
    Side { name: "mayfly, through the API".into(), load: Box::new(command) }
}

/// The same load on etcd, with its data directory on the same disk and its default settings.
fn etcd(scope: &Cleanup, examples: &Path, seconds: u32) -> Result<Side> {
    if tools::find("etcd").is_none() {
        anyhow::ensure!(
            tools::can_use_apt(),
            "etcd is not on the PATH, and without root and apt it cannot be installed"
        );
        tools::apt_install(&["etcd-server"])?;
    }
    let free =
        || -> Result<String> { Ok(format!("http://{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?)) };
    let (client, peer) = (free()?, free()?);
    let mut etcd = Command::new("etcd");
    etcd.arg("--data-dir").arg(scope.temporary_folder("etcd")?);
    etcd.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    etcd.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    etcd.args(["--initial-cluster", &format!("default={peer}")]);
    let id = scope.spawn(etcd.stdout(Stdio::null()).stderr(Stdio::null()))?;
    let address = mayfly_xtask_harness::http::address_of(&client)?;
    wait_for("etcd answering", ETCD_START_TIMEOUT, || {
        if let Some(how) = scope.ended(id) {
            anyhow::bail!("etcd ended: {how}");
        }
        let healthy = TcpStream::connect(address).is_ok()
            && mayfly_xtask_harness::http::Connection::open(address)?
                .get("/health")
                .is_ok_and(|answer| answer.text().contains("true"));
        Ok(healthy.then_some(()))
    })?;
    let program = examples.join("write_load");
    let command = move |clients: u32| {
        let mut command = load(&program, clients, seconds);
        command.args(["--etcd", &client]);
        command
    };
    Ok(Side { name: ETCD.into(), load: Box::new(command) })
}

fn load(program: &Path, clients: u32, seconds: u32) -> Command {
    let mut load = Command::new(program);
    load.args(["--clients", &clients.to_string(), "--seconds", &seconds.to_string()]);
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_compare_measurements_of_the_same_round() {
        let turns = ratios(&[300.0, 200.0, 100.0], &[100.0, 200.0, 200.0]);
        assert_eq!(turns, [3.0, 1.0, 0.5]);
        let median = median(&mut turns.clone());
        let beside = Beside { side: "mayfly".into(), clients: 64, turns, median };
        let text = "mayfly, 64 client(s), beside etcd turn by turn: 3.00, 1.00, 0.50; median 1.00";
        assert_eq!(beside.text(), text);
    }

    #[test]
    fn a_path_is_on_the_innermost_filesystem() {
        let mounts = "/dev/vda / ext4 rw 0 0\nproc /proc proc rw 0 0\ntmpfs /tmp tmpfs rw,size=1g 0 0\n\
                      /dev/vdb /tmp/disk xfs rw 0 0\ntmpfs /tmp/disk tmpfs rw 0 0\n";
        for (path, kind) in [
            ("/home/somebody", Some("ext4")),
            ("/tmp", Some("tmpfs")),
            ("/tmp/mayfly", Some("tmpfs")),
            // A name with the same prefix.
            ("/tmpfile", Some("ext4")),
            ("/tmp/disk/mayfly", Some("tmpfs")),
            ("nowhere", None),
        ] {
            assert_eq!(filesystem_of(mounts, Path::new(path)), kind, "{path}");
        }
    }
}
