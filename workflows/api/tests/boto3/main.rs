//! The API as AWS's own Python SDK sees it: the router on a loopback port, boto3 against it, every
//! operation at least once (`calls.py`). Wants a Python that has boto3: `MAYFLY_PYTHON`, else `python3`.

#[path = "../stand_ins/mod.rs"]
mod stand_ins;

use std::process::Stdio;
use std::sync::Arc;

use mayfly_workflows_api::router;
use mayfly_workflows_engine::timers::SystemClock;
use tokio::net::TcpListener;
use tokio::process::Command;

async fn has_boto3(python: &str) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", "import boto3"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().await.is_ok_and(|status| status.success())
}

#[expect(clippy::print_stdout, reason = "the runner reads this line from the test's output")]
fn skipped(reason: &str) {
    println!("\nSKIPPED boto3_calls_every_operation: {reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boto3_calls_every_operation() {
    let python = std::env::var("MAYFLY_PYTHON").unwrap_or_else(|_| "python3".into());
    if !has_boto3(&python).await {
        skipped(&format!("{python} has no boto3 (set MAYFLY_PYTHON to one that has)"));
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (engine, _, api) = stand_ins::engine(Some(folder.path()), Arc::new(SystemClock)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let server = tokio::spawn(async move { axum::serve(listener, router(api)).await });

    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boto3/calls.py");
    let output = Command::new(&python).args([script, &endpoint]).output().await.expect("python runs");
    server.abort();
    engine.shutdown().await;
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "37 operations called");
}
