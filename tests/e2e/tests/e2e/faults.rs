//! Disk faults: a sync that does not end, files that are damaged while the server is stopped.

use std::{
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Start, Up, guest_or_skip, ready_replicas, skipped, test_name, wait::until};
use serde_json::{Value, json};

use crate::workflows::{call, create, ended, start};

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn config_map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "x".repeat(3000)}})
}

/// A server whose syncs of one file fail once for each creation of the file `order`. `None`, with the test reported as
/// skipped, if the fault-injecting library cannot be built.
async fn failing(test: &str, folder: &Path, file: &str) -> Result<Option<Up>> {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../platform/store/tests/failing_sync/failing_sync.c");
    let library = folder.join("failing_sync.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-ldl");
    match compiler.output() {
        Ok(output) => ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            skipped(test, &format!("no C compiler ({error})"));
            return Ok(None);
        }
    }
    let start = Start::default()
        .in_folder(&folder.join("data"))
        .environment("LD_PRELOAD", &library.to_string_lossy())
        .environment("FAIL_SYNC", &folder.join("order").to_string_lossy())
        .environment("FAIL_SYNC_OF", file);
    start.ready().await.map(Some)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sync_that_fails_stops_the_writing_and_turns_the_health_red() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let Some(up) = failing(test_name!(), folder.path(), "mayfly.db-wal").await? else { return Ok(()) };
    let api = up.api()?;
    for name in ["one", "two"] {
        ensure!(api.post(CONFIG_MAPS, &config_map(name)).await?.status == 201);
    }
    ensure!(up.admin().get("/healthz").await?.status == 200);
    std::fs::write(folder.path().join("order"), "")?;
    // The first writer, possibly a part of the server, gets the error; after that no write is acknowledged.
    for name in ["lost", "later"] {
        let told = api.post(CONFIG_MAPS, &config_map(name)).await?;
        ensure!(told.status >= 500 && told.message().contains("until the next start"), "{told:?}");
        ensure!(api.get(&format!("{CONFIG_MAPS}/{name}")).await?.status == 404);
    }
    ensure!(!folder.path().join("order").exists(), "no sync failed");
    for path in ["/healthz", "/readyz"] {
        let told = up.admin().get(path).await?;
        ensure!(told.status == 503 && told.text().contains("start Mayfly again"), "{path}: {told:?}");
        ensure!(api.get(path).await?.status == 503, "{path} of the API");
    }
    ensure!(api.get(&format!("{CONFIG_MAPS}/one")).await?.status == 200, "reading goes on");
    up.kill()?;

    let up = Start::default().in_folder(&folder.path().join("data")).ready().await?;
    let api = up.api()?;
    for (name, status) in [("one", 200), ("two", 200), ("lost", 404), ("later", 404)] {
        ensure!(api.get(&format!("{CONFIG_MAPS}/{name}")).await?.status == status, "{name}");
    }
    ensure!(up.admin().get("/healthz").await?.status == 200);
    ensure!(api.post(CONFIG_MAPS, &config_map("lost")).await?.status == 201);
    up.stop().await
}

/// A failed disk does not stop functions: loading a component needs no write.
#[tokio::test(flavor = "multi_thread")]
async fn functions_answer_warm_and_asleep_when_nothing_can_be_written() -> Result<()> {
    guest_or_skip!("hello");
    guest_or_skip!("counter");
    let folder = tempfile::tempdir()?;
    let Some(up) = failing(test_name!(), folder.path(), "mayfly.db-wal").await? else { return Ok(()) };
    let (api, http) = (up.api()?, up.http());
    up.deploy("hello", "warm", &["--min", "1"]).await?;
    up.wait_until_function("warm", "has a replica", |function| ready_replicas(function) == 1).await?;
    let warm = http.get("/fn/default/warm/").await?;
    ensure!(warm.status == 200, "{warm:?}");
    up.deploy("counter", "asleep", &["--idle-after", "1s"]).await?;
    until("it has a replica", async || {
        // Called in each attempt, so that it does not become idle before its replica is observed.
        ensure!(http.get("/fn/default/asleep/").await?.status == 200);
        let function = api.get("/apis/mayfly.dev/v1/namespaces/default/functions/asleep").await?.body;
        Ok((ready_replicas(&function) == 1).then_some(()))
    })
    .await?;
    up.wait_until_function("asleep", "sleeps", |function| ready_replicas(function) == 0).await?;

    std::fs::write(folder.path().join("order"), "")?;
    let told = api.post(CONFIG_MAPS, &config_map("lost")).await?;
    ensure!(told.status >= 500 && told.message().contains("until the next start"), "{told:?}");
    ensure!(!folder.path().join("order").exists(), "no sync failed");
    ensure!(up.admin().get("/readyz").await?.status == 503);
    let answer = http.get("/fn/default/warm/").await?;
    ensure!(answer.status == 200 && answer.text() == "Hello from Mayfly!\n", "{answer:?}");
    ensure!(answer.header("mayfly-cold").is_empty(), "it was warm: {answer:?}");
    let answer = http.get("/fn/default/asleep/").await?;
    ensure!(answer.status == 200 && answer.text() == "1\n", "{answer:?}");
    ensure!(answer.header("mayfly-cold") == "true", "it did not sleep: {answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sync_of_the_journal_that_fails_is_made_good() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let Some(up) = failing(test_name!(), folder.path(), "workflows.db-wal").await? else { return Ok(()) };
    let two_steps = json!({"StartAt": "A", "States": {
        "A": {"Type": "Pass", "Next": "B"}, "B": {"Type": "Wait", "SecondsPath": "$.n", "End": true}}});
    let machine = create(&up, "two-steps", "STANDARD", two_steps).await?;
    // Waits until the sync has failed, so that the next start gets the error.
    let before = start(&up, &machine, json!({"n": 10})).await?;
    std::fs::write(folder.path().join("order"), "")?;
    let met = start(&up, &machine, json!({"n": 2})).await?;
    ensure!(!folder.path().join("order").exists(), "no sync failed");
    let after = start(&up, &machine, json!({"n": 3})).await?;
    for execution in [&before, &met, &after] {
        ensure!(ended(&up, execution).await?["status"] == "SUCCEEDED");
    }
    up.kill()?;
    let up = Start::default().in_folder(&folder.path().join("data")).ready().await?;
    for (execution, input) in [(before, r#"{"n":10}"#), (met, r#"{"n":2}"#), (after, r#"{"n":3}"#)] {
        let told = call(&up, "DescribeExecution", json!({"executionArn": execution})).await?;
        ensure!(told["status"] == "SUCCEEDED" && told["input"] == input, "{told}");
    }
    up.stop().await
}

/// A small disk mounted at a folder, unmounted on drop. `None` if mounting is not permitted.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(folder: &Path) -> Result<Option<Self>> {
        std::fs::create_dir_all(folder)?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"]).arg(folder);
        let mounted = mount.output().is_ok_and(|output| output.status.success());
        Ok(mounted.then(|| Self(folder.to_path_buf())))
    }

    /// Fills the remaining space; returns the file that uses it.
    fn fill(&self) -> Result<PathBuf> {
        use std::io::Write as _;
        let path = self.0.join("ballast");
        let mut file = std::fs::File::create(&path)?;
        for bytes in [1 << 20, 4096] {
            let block = vec![1; bytes];
            while file.write_all(&block).is_ok() {}
        }
        Ok(path)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_and_over_when_there_is_room() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let Some(disk) = SmallDisk::mount(&data)? else {
        skipped(test_name!(), "mounting a small disk is not allowed");
        return Ok(());
    };
    let up = Start::default().in_folder(&data).ready().await?;
    let api = up.api()?;
    let pass = json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}});
    let machine = create(&up, "pass", "STANDARD", pass.clone()).await?;
    let acknowledged = start(&up, &machine, json!({"n": 1})).await?;
    ensure!(up.admin().get("/readyz").await?.status == 200);

    let ballast = disk.fill()?;
    // Each request gets a response that permits a retry; none waits for free space.
    let input = json!({"text": "x".repeat(100_000)});
    for _ in 0..3 {
        let told = start(&up, &machine, input.clone()).await.err().context("a start was acknowledged")?;
        let told = told.to_string();
        ensure!(told.starts_with("ServiceUnavailable") && told.contains("full"), "{told}");
    }
    let told = up.admin().get("/readyz").await?;
    ensure!(told.status == 503 && told.text().contains("full"), "{told:?}");
    let larger = json!({"StartAt": "A", "States": {
        "A": {"Type": "Pass", "Comment": "x".repeat(200_000), "End": true}}});
    let told = create(&up, "larger", "STANDARD", larger).await.err().context("it was created")?.to_string();
    ensure!(told.starts_with("ServiceUnavailable") && told.contains("disk full"), "{told}");
    let told = api.post(CONFIG_MAPS, &config_map("refused")).await?;
    ensure!(told.status == 507 && told.message().contains("full"), "{told:?}");
    ensure!(api.get("/readyz").await?.status == 503, "the API's readiness");
    ensure!(up.admin().get("/healthz").await?.status == 200, "a new start would not help");

    std::fs::remove_file(ballast)?;
    until("it is ready again", async || Ok((up.admin().get("/readyz").await?.status == 200).then_some(())))
        .await?;
    ensure!(api.post(CONFIG_MAPS, &config_map("taken")).await?.status == 201);
    let later = start(&up, &machine, input).await?;
    for execution in [&acknowledged, &later] {
        ensure!(ended(&up, execution).await?["status"] == "SUCCEEDED");
    }
    up.stop().await
}

/// Damage within a write-ahead log, which SQLite alone would treat as the end of the log.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_log_is_refused_and_left_as_it_is() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let up = Start::default().in_folder(&data).ready().await?;
    let api = up.api()?;
    for n in 0..20 {
        ensure!(api.post(CONFIG_MAPS, &config_map(&format!("map-{n}"))).await?.status == 201);
    }
    let pass = json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}});
    let machine = create(&up, "pass", "STANDARD", pass).await?;
    for _ in 0..5 {
        let execution = start(&up, &machine, json!({})).await?;
        ended(&up, &execution).await?;
    }
    up.kill()?;
    // In the order in which they are opened: a failed start checkpoints the databases that it opened before.
    for database in ["mayfly.db", "workflows/catalog.db", "workflows/workflows.db"] {
        let database = data.join(database).to_string_lossy().into_owned();
        let log = PathBuf::from(format!("{database}-wal"));
        let whole = std::fs::read(&log).with_context(|| log.display().to_string())?;
        let file = std::fs::OpenOptions::new().write(true).open(&log)?;
        file.write_all_at(&[0x5a; 8], whole.len() as u64 / 2)?;
        let damaged = std::fs::read(&log)?;
        let refused = Start::default().in_folder(&data).refused().await?;
        ensure!(refused.code.is_some_and(|code| code != 0), "{refused:?}");
        let told = format!("{database} is damaged (its write-ahead log had ");
        ensure!(refused.stderr.contains(&told) && refused.stderr.contains("backup"), "{refused:?}");
        ensure!(std::fs::read(&log)? == damaged, "{} was changed", log.display());
        std::fs::write(&log, whole)?;
    }
    // After the repair no data is missing.
    let up = Start::default().in_folder(&data).ready().await?;
    let maps = up.api()?.get(CONFIG_MAPS).await?;
    let count = maps.body["items"].as_array().map_or(0, Vec::len);
    ensure!(count >= 20, "{count} of 20");
    up.stop().await
}
