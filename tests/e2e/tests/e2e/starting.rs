//! Failed starts, each with a message that says what to do; settings; an interrupt; and a full disk.

use std::{path::Path, process::Stdio};

use anyhow::{Context, Result, ensure};
use http::Method;
use mayfly_e2e::{
    Api, ApiAnswer, Start, Up, digest_of, full, skipped, test_name,
    wait::{self, until},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::{net::TcpListener, process::Command};

const LISTEN_FLAGS: [&str; 4] = ["--api-listen", "--http-listen", "--workflows-listen", "--admin-listen"];

/// A server's command, not yet started, for cases that [`Start`] does not support.
fn server(data: &Path) -> Result<Command> {
    let mut server = Command::new(mayfly_e2e::binary()?);
    server.arg("up").arg("--data-dir").arg(data).stdin(Stdio::null()).kill_on_drop(true);
    for flag in LISTEN_FLAGS {
        server.args([flag, "127.0.0.1:0"]);
    }
    Ok(server)
}

/// Uploads content under its digest.
async fn put(api: &Api, content: Vec<u8>) -> Result<ApiAnswer> {
    let path = format!("/artifacts/{}", digest_of(&content));
    api.call(Method::PUT, &path, "application/wasm", full(content)).await
}

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
    // The node of the first server may not be registered yet.
    until("the first one answers with its node", async || {
        let nodes = up.cli().ok(&["get", "nodes", "--output", "name"]).await?;
        Ok((!nodes.is_empty()).then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_is_taken_is_named_with_the_way_out() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0").await?;
    let address = taken.local_addr()?.to_string();
    for flag in LISTEN_FLAGS {
        let refused = Start::default().with(&[flag, &address]).refused().await?;
        ensure!(refused.code.is_some_and(|code| code != 0), "{refused:?}");
        let todo = format!("stop what uses it, or choose another one (port 0: any) with {flag}");
        for said in [&format!("cannot listen on {address}"), &todo] {
            ensure!(refused.stderr.contains(said), "{flag}: {said:?} is not in {refused:?}");
        }
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
    // The log of the start is next to the data directory, which therefore needs its own parent.
    let data = file.join("data");
    let output = server(&data)?.output().await?;
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

/// For each setting, a flag overrides the environment, which overrides the file.
#[tokio::test(flavor = "multi_thread")]
async fn flags_environment_and_config_file_are_read_in_their_order() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("mayfly.toml");
    std::fs::write(&file, "node-name = \"from-file\"\nartifact-limit = \"1Mi\"\n")?;
    let config = file.to_string_lossy().into_owned();
    let from_file: &[&str] = &["--config", &config];
    let none: &[(&str, &str)] = &[];
    let node = ("MAYFLY_NODE_NAME", "from-environment");
    let limit = ("MAYFLY_ARTIFACT_LIMIT", "512Ki");
    let flags: &[&str] = &["--config", &config, "--node-name", "from-flag", "--artifact-limit", "64Ki"];
    for (flags, environment, node, limit_bytes) in [
        (from_file, none, "from-file", 1 << 20),
        (from_file, &[node][..], "from-environment", 1 << 20),
        (from_file, &[limit][..], "from-file", 512 << 10),
        (flags, &[node, limit][..], "from-flag", 64 << 10),
    ] {
        let start =
            environment.iter().fold(Start::default(), |start, (name, value)| start.environment(name, value));
        let up = start.with(flags).ready().await?;
        until("the node is there under its name", async || {
            let nodes = up.cli().ok(&["get", "nodes", "--output", "name"]).await?;
            Ok(nodes.trim().ends_with(&format!("/{node}")).then_some(()))
        })
        .await?;
        let api = up.api()?;
        // Content of this size is accepted and checked: it is not a component.
        let told = put(&api, vec![0; limit_bytes]).await?;
        ensure!(told.status == 422, "{limit_bytes} bytes: {told:?}");
        let told = put(&api, vec![0; limit_bytes + 1]).await?;
        let larger = format!("larger than the {limit_bytes} bytes allowed");
        ensure!(
            told.status == 413 && told.message().contains(&larger),
            "{limit_bytes} bytes, and one: {told:?}"
        );
    }
    let wrong = Start::default().with(&["--config", "/nowhere.toml"]).refused().await?;
    ensure!(wrong.stderr.contains("/nowhere.toml"), "{wrong:?}");
    Ok(())
}

/// SIGINT, as Ctrl-C sends it.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_ends_it_in_order() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let mut server = server(&data)?;
    let server =
        server.args(["--log-format", "json"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let id = server.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)).context("no process")?;
    let ended = tokio::spawn(server.wait_with_output());
    until("it is ready", async || Ok(data.join("endpoints.json").exists().then_some(()))).await?;
    kill_process(id, Signal::INT)?;
    let output = tokio::time::timeout(wait::PATIENCE, ended).await.context("it goes on")???;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(0), "{:?}: {said}", output.status);
    ensure!(said.contains("stopping; send the signal again to stop at once"), "{said}");
    ensure!(said.contains("\"stopped\"") && !said.contains("panicked"), "{said}");
    ensure!(!data.join("endpoints.json").exists(), "it says that it is still there");
    // Nothing is left that would prevent another start.
    Start::default().in_folder(&data).ready().await?.stop().await
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
    ensure!(told.status == 507 && told.message().contains(DISK_FULL), "{told:?}");
    // Reads still work, and all acknowledged objects exist.
    for name in &kept {
        ensure!(api.get(&format!("{maps}/{name}")).await?.status == 200, "{name} is lost");
    }
    // A valid component with its digest, for which there is no space.
    let component = component_of_bytes(SMALL_DISK_BYTES)?;
    let told = put(&api, component.clone()).await?;
    ensure!(told.status == 507 && told.message().contains(DISK_FULL), "{told:?}");
    let list = api.get("/artifacts").await?;
    ensure!(list.status == 200 && list.body["items"] == Value::Array(Vec::new()), "{list:?}");
    let data = up.data().to_path_buf();
    up.kill()?;
    // With free space, the server starts without loss of data.
    small.grow()?;
    let up = Start::default().in_folder(&data).ready().await?;
    let api = up.api()?;
    for name in &kept {
        ensure!(api.get(&format!("{maps}/{name}")).await?.status == 200, "{name} is lost after the restart");
    }
    let late = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}, "data": {}});
    ensure!(api.post(maps, &late).await?.status == 201);
    let taken = put(&api, component).await?;
    ensure!(taken.status == 201, "{taken:?}");
    drop(up);
    Ok(())
}

/// The API's message about a full disk, with the remedy.
const DISK_FULL: &str = "the server's disk is full: nothing was written; free some space";

/// A program (wasi:cli/run) that a meaningless custom section makes larger than this many bytes (the Component
/// Model's `Binary.md`: 0, the length of the rest as LEB128, a name, any bytes).
fn component_of_bytes(bytes: usize) -> Result<Vec<u8>> {
    const NAME: &[u8] = b"\x07padding";
    let mut component = wat::parse_str(
        r#"(component
            (core module $m (func (export "run") (result i32) i32.const 0))
            (core instance $i (instantiate $m))
            (func $run (result (result)) (canon lift (core func $i "run")))
            (instance $program (export "run" (func $run)))
            (export "wasi:cli/run@0.2.0" (instance $program)))"#,
    )?;
    component.push(0);
    let mut length = NAME.len() + bytes;
    while length >= 0x80 {
        component.push(u8::try_from(length & 0x7f)? | 0x80);
        length >>= 7;
    }
    component.push(u8::try_from(length)?);
    component.extend_from_slice(NAME);
    component.resize(component.len() + bytes, 0);
    Ok(component)
}

const SMALL_DISK_BYTES: usize = 24 << 20;

/// A disk of few megabytes; unmounted when dropped.
struct SmallDisk {
    path: std::path::PathBuf,
}

impl SmallDisk {
    fn mount(folder: &Path) -> Option<Self> {
        let path = folder.join("disk");
        std::fs::create_dir(&path).ok()?;
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={SMALL_DISK_BYTES}"), "mayfly-e2e"]).arg(&path);
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
