//! Durable writes: the store alone, through the API over TLS, and etcd over gRPC.

use std::{
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    Options,
    turns::{self, Cell, Side},
};
use crate::{
    cleanup::Scope,
    server::{Server, wait_for},
    table::{Table, ms},
    tools,
    workspace::Workspace,
};

const CLIENTS: &[u32] = &[1, 64];
const ETCD_START_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let (rounds, seconds) = if options.quick { (1, 3) } else { (3, 5) };
    let examples = super::load_generators(workspace)?;
    let scope = Scope::new()?;
    let server = Server::start(&scope, &options.mayfly(workspace), &[])?;
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
    let mut table = Table::new(&["durable writes", "clients", "writes/s", "p50", "p99"]);
    for cell in &cells {
        table.row(&[
            cell.side.clone(),
            cell.clients.to_string(),
            format!("{:.0}", cell.middle("writes_per_s")),
            ms(cell.middle("p50_us") / 1e3),
            ms(cell.middle("p99_us") / 1e3),
        ]);
    }
    println!("\n{}", table.text());
    Ok(json!({"cells": cells.iter().map(Cell::json).collect::<Vec<_>>(), "notes": notes}))
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

fn api(examples: &Path, server: &Server, seconds: u32) -> Side {
    let (program, kubeconfig) = (examples.join("write_load"), server.kubeconfig());
    let command = move |clients: u32| {
        let mut command = load(&program, clients, seconds);
        command.arg("--kubeconfig").arg(&kubeconfig);
        command
    };
    Side { name: "mayfly, through the API".into(), load: Box::new(command) }
}

/// The same load, on etcd. Its own data directory on the same disk, its own defaults.
fn etcd(scope: &Scope, examples: &Path, seconds: u32) -> Result<Side> {
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
    let address = crate::http::address_of(&client)?;
    wait_for("etcd answering", ETCD_START_TIMEOUT, || {
        if let Some(how) = scope.ended(id) {
            anyhow::bail!("etcd ended: {how}");
        }
        let healthy = TcpStream::connect(address).is_ok()
            && crate::http::Connection::open(address)?
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
    Ok(Side { name: "etcd, over gRPC".into(), load: Box::new(command) })
}

fn load(program: &Path, clients: u32, seconds: u32) -> Command {
    let mut load = Command::new(program);
    load.args(["--clients", &clients.to_string(), "--seconds", &seconds.to_string()]);
    load
}
