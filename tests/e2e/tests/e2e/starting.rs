//! Starts that must be refused, each with a sentence that says what to do; and a disk that is full.

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Start, Up, full, skipped, test_name, wait::until};
use serde_json::json;
use tokio::net::TcpListener;

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_on_the_same_data_is_refused_and_the_first_goes_on() -> Result<()> {
    let up = Up::start().await?;
    let refused = Start::default().in_folder(up.data()).refused().await?;
    ensure!(refused.code.is_some_and(|code| code != 0), "{refused:?}");
    let data = up.data().to_string_lossy().into_owned();
    ensure!(refused.stderr.contains(&data), "{refused:?}");
    ensure!(refused.stderr.contains("another") || refused.stderr.contains("in use"), "{refused:?}");
    ensure!(up.api()?.get("/readyz").await?.status == 200);
    ensure!(up.data().join("endpoints.json").exists(), "the second one removed the first one's endpoints");
    // The first one's node may still be registering.
    until("the first one answers with its node", async || {
        let nodes = up.cli().ok(&["get", "nodes", "--output", "name"]).await?;
        Ok((!nodes.is_empty()).then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_is_taken_is_named() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0").await?;
    let address = taken.local_addr()?.to_string();
    for flag in ["--api-listen", "--http-listen", "--workflows-listen", "--admin-listen"] {
        let refused = Start::default().with(&[flag, &address]).refused().await?;
        ensure!(refused.code.is_some_and(|code| code != 0), "{refused:?}");
        ensure!(refused.stderr.contains(&address), "{flag}: {refused:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_database_is_told_and_left_as_it_is() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let up = Start::default().in_folder(&data).ready().await?;
    up.stop().await?;
    let database = data.join("mayfly.db");
    let mut content = std::fs::read(&database).context("the database is not where the design says")?;
    let middle = content.len() / 3;
    content[..100].fill(0x5a);
    content[middle..].fill(0x5a);
    std::fs::write(&database, &content)?;
    let refused = Start::default().in_folder(&data).refused().await?;
    ensure!(refused.code.is_some_and(|code| code != 0), "{refused:?}");
    ensure!(refused.stderr.contains("mayfly.db"), "{refused:?}");
    ensure!(!refused.stderr.contains("panicked"), "{refused:?}");
    ensure!(std::fs::read(&database)? == content, "the damaged file was changed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_directory_that_cannot_be_made_is_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("file");
    std::fs::write(&file, "not a folder")?;
    // The log of the start lies beside the data directory: that must be a place of its own.
    let data = file.join("data");
    let mut up = tokio::process::Command::new(mayfly_e2e::binary()?);
    up.args([
        "up",
        "--api-listen",
        "127.0.0.1:0",
        "--http-listen",
        "127.0.0.1:0",
        "--workflows-listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    let output = up.arg("--data-dir").arg(&data).output().await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains(&*data.to_string_lossy()), "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kubeconfig_is_for_its_owner_alone() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let up = Up::start().await?;
    let mode = std::fs::metadata(up.kubeconfig())?.permissions().mode() & 0o777;
    assert_eq!(mode, 0o600, "{mode:o}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn environment_and_config_file_are_read_in_their_order() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("mayfly.toml");
    std::fs::write(&file, "node-name = \"from-file\"\nartifact-limit = \"1Mi\"\n")?;
    let config = file.to_string_lossy().into_owned();
    let start = Start::default().environment("MAYFLY_NODE_NAME", "from-environment");
    let up = start.with(&["--config", &config]).ready().await?;
    until("the node is there under its name", async || {
        let nodes = up.cli().ok(&["get", "nodes", "--output", "name"]).await?;
        Ok(nodes.contains("from-environment").then_some(()))
    })
    .await?;
    let wrong = Start::default().with(&["--config", "/nowhere.toml"]).refused().await?;
    ensure!(wrong.stderr.contains("/nowhere.toml"), "{wrong:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_and_survived() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let Some(small) = SmallDisk::mount(folder.path()) else {
        skipped(test_name!(), "needs root and a kernel that mounts tmpfs, for a disk that is full soon");
        return Ok(());
    };
    let up = Start::default().in_folder(&small.path.join("data")).ready().await?;
    let api = up.api()?;
    let maps = "/api/v1/namespaces/default/configmaps";
    let mut kept = Vec::new();
    let told = loop {
        let name = format!("large-{}", kept.len());
        let data = json!({"a": "x".repeat(500_000)});
        let object =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data});
        let answer = api.post(maps, &object).await?;
        match answer.status {
            201 => kept.push(name),
            _ => break answer,
        }
        ensure!(kept.len() < 500, "the disk never got full");
    };
    ensure!(matches!(told.status, 500 | 503 | 507), "{told:?}");
    ensure!(told.message().to_lowercase().contains("disk") || told.message().contains("space"), "{told:?}");
    // Reading goes on, everything acknowledged is there.
    for name in &kept {
        ensure!(api.get(&format!("{maps}/{name}")).await?.status == 200, "{name} is lost");
    }
    let upload = api
        .call(
            http::Method::PUT,
            &format!("/artifacts/{}", mayfly_e2e::digest_of(b"x")),
            "application/wasm",
            full(vec![0; 8 << 20]),
        )
        .await?;
    ensure!(upload.status >= 400, "{upload:?}");
    let data = up.data().to_path_buf();
    up.kill()?;
    // With room again, it starts and has lost nothing.
    small.grow()?;
    let up = Start::default().in_folder(&data).ready().await?;
    let api = up.api()?;
    for name in &kept {
        ensure!(api.get(&format!("{maps}/{name}")).await?.status == 200, "{name} is lost after the restart");
    }
    let late = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}, "data": {}});
    ensure!(api.post(maps, &late).await?.status == 201);
    drop(up);
    Ok(())
}

/// A disk of few megabytes; unmounted when dropped.
struct SmallDisk {
    path: std::path::PathBuf,
}

impl SmallDisk {
    fn mount(folder: &std::path::Path) -> Option<Self> {
        let path = folder.join("disk");
        std::fs::create_dir(&path).ok()?;
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=24m", "mayfly-e2e"]).arg(&path);
        mount.output().is_ok_and(|output| output.status.success()).then_some(Self { path })
    }

    fn grow(&self) -> Result<()> {
        let mut mount = std::process::Command::new("mount");
        let output = mount.args(["-o", "remount,size=256m"]).arg(&self.path).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.path).output();
    }
}
