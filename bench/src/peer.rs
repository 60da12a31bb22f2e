//! The peer: `wasmtime serve`, of the same wasmtime release series that Mayfly embeds.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    command,
    http::Connection,
    server::wait_for,
    table::{median, ms, percentile},
    tools,
};

const VERSION: &str = "^48";
/// The features that `serve` needs for full speed. Hooks for profiling and debugging, which cost time in each call, are
/// excluded, so that the build does not slow down the peer.
const FEATURES: &str = "run,serve,compile,component-model,component-model-async,pooling-allocator,\
                        parallel-compilation,threads,gc,gc-drc,gc-null,addr2line,demangle,logging";
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Builds it if it is missing.
pub(super) fn ensure() -> Result<PathBuf> {
    // Another release series would be another peer.
    let found = tools::find("wasmtime").filter(|found| {
        command::output(Command::new(found).arg("--version"))
            .is_ok_and(|said| said.starts_with("wasmtime 48."))
    });
    if let Some(found) = found {
        return Ok(found);
    }
    println!(
        "building wasmtime {VERSION} into {} (once; about a quarter of an hour)",
        tools::folder()?.display()
    );
    tools::cargo_install(
        "wasmtime-cli",
        &["--version", VERSION, "--no-default-features", "--features", FEATURES],
    )?;
    tools::find("wasmtime").context("cargo installed wasmtime-cli, but wasmtime is missing")
}

pub(super) fn version(wasmtime: &Path) -> String {
    command::output(Command::new(wasmtime).arg("--version")).unwrap_or_default().trim().to_owned()
}

pub(super) struct PeerServer {
    pub(super) id: u32,
    pub(super) address: SocketAddr,
}

/// Starts `wasmtime serve` with pooling; `reuse` is the number of requests that an instance may answer.
pub(super) fn start(
    scope: &Cleanup,
    wasmtime: &Path,
    component: &Path,
    reuse: Option<u32>,
) -> Result<PeerServer> {
    let address = free_address()?;
    let id = scope.spawn(&mut serve(wasmtime, component, address, reuse))?;
    wait_for("wasmtime serve answering", START_TIMEOUT, || {
        if let Some(how) = scope.ended(id) {
            anyhow::bail!("wasmtime serve ended: {how}");
        }
        Ok(TcpStream::connect(address).is_ok().then_some(()))
    })?;
    Ok(PeerServer { id, address })
}

fn serve(wasmtime: &Path, component: &Path, address: SocketAddr, reuse: Option<u32>) -> Command {
    let mut serve = Command::new(wasmtime);
    serve.args(["serve", "-S", "cli=y", "-O", "pooling-allocator=y", "--addr", &address.to_string()]);
    if let Some(reuse) = reuse {
        serve.args(["--max-instance-reuse-count", &reuse.to_string()]);
    }
    serve.arg(component).stdout(Stdio::null()).stderr(Stdio::null());
    serve
}

/// The duration of a first request to the peer, from the start of its process to the response, in milliseconds. The
/// component is already compiled.
pub(super) fn cold_starts(
    scope: &Cleanup,
    wasmtime: &Path,
    component: &Path,
    runs: usize,
) -> Result<Vec<f64>> {
    let folder = scope.temporary_folder("peer")?;
    let compiled = folder.join("component.cwasm");
    let mut compile = Command::new(wasmtime);
    compile.arg("compile").arg(component).arg("-o").arg(&compiled);
    command::quietly(&mut compile)?;
    let mut times = Vec::new();
    for _ in 0..runs {
        let address = free_address()?;
        let mut serve = serve(wasmtime, &compiled, address, None);
        serve.arg("--allow-precompiled");
        let started = Instant::now();
        let id = scope.spawn(&mut serve)?;
        let mut connection = loop {
            match Connection::open(address) {
                Ok(connection) => break connection,
                Err(error) if started.elapsed() > START_TIMEOUT || scope.ended(id).is_some() => {
                    return Err(error);
                }
                Err(_) => std::thread::sleep(Duration::from_micros(100)),
            }
        };
        let answer = connection.get("/")?;
        anyhow::ensure!(answer.status == 200, "the peer answered {}", answer.status);
        times.push(started.elapsed().as_secs_f64() * 1e3);
        scope.stop(id);
    }
    println!(
        "  wasmtime serve, process start to answer: p50 {}, p99 {}, slowest {}",
        ms(median(&mut times)),
        ms(percentile(&mut times, 99.0)),
        ms(percentile(&mut times, 100.0))
    );
    Ok(times)
}

/// The peer does not support port 0.
pub(super) fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr()?)
}
