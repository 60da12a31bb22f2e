//! The real kubectl with the supported kinds.

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use mayfly_e2e::{CliOutput, Up, guest_or_skip, skipped, wait};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

/// kubectl with the server's kubeconfig and a separate home directory for its caches.
pub(crate) struct Kubectl {
    pub(crate) up: Up,
    home: tempfile::TempDir,
}

/// A server and kubectl; `None` without kubectl.
pub(crate) async fn kubectl(test: &str) -> Result<Option<Kubectl>> {
    let found = std::process::Command::new("kubectl").args(["version", "--client"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        skipped(test, "no kubectl on the PATH");
        return Ok(None);
    }
    Ok(Some(Kubectl { up: Up::start().await?, home: tempfile::tempdir()? }))
}

macro_rules! kubectl_or_skip {
    () => {
        match $crate::kubectl::kubectl(mayfly_e2e::test_name!()).await? {
            Some(kubectl) => kubectl,
            None => return Ok(()),
        }
    };
}
pub(super) use kubectl_or_skip;

impl Kubectl {
    /// kubectl for a running server.
    pub(crate) fn of(up: Up) -> Result<Self> {
        Ok(Self { up, home: tempfile::tempdir()? })
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.arg("--kubeconfig").arg(self.up.kubeconfig()).args(arguments);
        command.env("HOME", self.home.path()).env_remove("KUBECONFIG").kill_on_drop(true);
        command
    }

    pub(crate) async fn run(&self, arguments: &[&str]) -> Result<CliOutput> {
        finished(self.command(arguments)).await
    }

    /// Edits an object, with a sed script without spaces as the editor.
    pub(crate) async fn edit(&self, kind: &str, name: &str, script: &str) -> Result<CliOutput> {
        let mut edit = self.command(&["edit", kind, name]);
        // kubectl stores a rejected edit in a file, which is removed with the folder.
        edit.env("KUBE_EDITOR", format!("sed -i {script}")).env("TMPDIR", self.home.path());
        finished(edit).await
    }

    /// Starts a command that runs until it is stopped.
    pub(crate) fn start(&self, arguments: &[&str]) -> Result<Running> {
        let mut process = self.command(arguments).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(process.stdout.take().context("no stdout")?).lines();
        Ok(Running { _process: process, lines })
    }

    pub(crate) async fn ok(&self, arguments: &[&str]) -> Result<String> {
        let finished = self.run(arguments).await?;
        ensure!(finished.code == Some(0), "kubectl {arguments:?}: {finished:?}");
        Ok(finished.stdout)
    }

    /// Writes a manifest and returns its path.
    pub(crate) fn file(&self, name: &str, manifest: &serde_json::Value) -> Result<String> {
        let file = self.home.path().join(name);
        std::fs::write(&file, manifest.to_string())?;
        Ok(file.to_string_lossy().into_owned())
    }
}

/// The timeout of a command, longer than its own, so that its final output is shown.
const PATIENCE: Duration = Duration::from_secs(wait::PATIENCE.as_secs() + 15);

async fn finished(mut command: Command) -> Result<CliOutput> {
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    let output = output.with_context(|| format!("{:?} did not end", command.as_std()))??;
    Ok(CliOutput {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// A kubectl that watches or follows, killed on drop.
pub(crate) struct Running {
    _process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// Reads until a line fulfils a condition.
    pub(crate) async fn line(&mut self, what: &str, holds: impl Fn(&str) -> bool) -> Result<()> {
        let mut others = Vec::new();
        let reading = async {
            while let Some(line) = self.lines.next_line().await? {
                if holds(&line) {
                    return Ok(());
                }
                others.push(line);
            }
            bail!("kubectl ended")
        };
        let found = tokio::time::timeout(wait::PATIENCE, reading).await;
        found
            .unwrap_or_else(|late| Err(late.into()))
            .with_context(|| format!("no line {what}, but {others:?}"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn discovery_lists_and_explains_the_kinds() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let listed = kubectl.ok(&["api-resources", "-o", "name"]).await?;
    for kind in [
        "namespaces",
        "nodes",
        "pods",
        "replicasets.apps",
        "configmaps",
        "secrets",
        "events",
        "jobs.batch",
        "leases.coordination.k8s.io",
        "functions.mayfly.dev",
        "revisions.mayfly.dev",
        "workflows.mayfly.dev",
        "executions.mayfly.dev",
    ] {
        ensure!(listed.lines().any(|line| line == kind), "{kind} is not in\n{listed}");
    }
    let explained = kubectl.ok(&["explain", "function.spec.scaling"]).await?;
    ensure!(explained.contains("idleAfter") && explained.contains("KIND:"), "{explained}");
    kubectl.ok(&["explain", "pod.spec.containers"]).await?;
    ensure!(kubectl.ok(&["version"]).await?.contains("Server Version"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kind_that_is_not_here_is_said_to_be_none() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    for (api, kind) in [("apps/v1", "Replicant"), ("example.com/v1", "Widget")] {
        let object = json!({"apiVersion": api, "kind": kind, "metadata": {"name": "a"}, "spec": {}});
        let file = kubectl.file("unknown.json", &object)?;
        let refused = kubectl.run(&["apply", "-f", &file]).await?;
        let told = format!("no matches for kind \"{kind}\" in version \"{api}\"");
        ensure!(refused.code == Some(1) && refused.stderr.contains(&told), "{refused:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_and_what_it_is_made_of_are_shown() -> Result<()> {
    guest_or_skip!("hello");
    let kubectl = kubectl_or_skip!();
    kubectl.up.deploy("hello", "hello", &["--min", "1"]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", "function/hello", "--timeout=60s"]).await?;
    kubectl.up.wait_until_function("hello", "runs", |f| mayfly_e2e::ready_replicas(f) == 1).await?;
    let all = kubectl.ok(&["get", "functions,revisions,replicasets,pods,nodes", "-o", "wide"]).await?;
    for part in [
        "function.mayfly.dev/hello",
        "hello-00001",
        "replicaset.apps/",
        "pod/hello-00001",
        "node/",
        "Running",
    ] {
        ensure!(all.contains(part), "{part} is not in\n{all}");
    }
    let described = kubectl.ok(&["describe", "function", "hello"]).await?;
    ensure!(described.contains("Ready") && described.contains("Events"), "{described}");
    let pod = kubectl.ok(&["get", "pods", "-o", "name"]).await?;
    let described = kubectl.ok(&["describe", pod.trim()]).await?;
    ensure!(described.contains("wasm") && described.contains("Node:"), "{described}");
    kubectl.ok(&["describe", "node"]).await?;
    let yaml = kubectl.ok(&["get", "function", "hello", "-o", "yaml"]).await?;
    ensure!(yaml.contains("sha256:"), "{yaml}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_applied_changed_patched_and_deleted() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let map = |colour: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"colour": colour}});
    let file = kubectl.file("map.json", &map("blue"))?;
    ensure!(kubectl.ok(&["apply", "-f", &file]).await?.contains("created"));
    ensure!(kubectl.ok(&["apply", "-f", &file]).await?.contains("unchanged"));
    kubectl.file("map.json", &map("green"))?;
    let diff = kubectl.run(&["diff", "-f", &file]).await?;
    // Exit code 1 is a difference; a higher one is an error.
    ensure!(diff.code == Some(1), "{diff:?}");
    for line in ["-  colour: blue", "+  colour: green"] {
        ensure!(diff.stdout.lines().any(|shown| shown == line), "{line} is not in\n{}", diff.stdout);
    }
    ensure!(kubectl.ok(&["apply", "-f", &file]).await?.contains("configured"));
    let colour = || kubectl.ok(&["get", "configmap", "settings", "-o", "jsonpath={.data.colour}"]);
    assert_eq!(colour().await?, "green");
    for (kind, patch) in [
        ("merge", r#"{"data":{"colour":"red"}}"#),
        ("json", r#"[{"op":"replace","path":"/data/colour","value":"red"}]"#),
        ("strategic", r#"{"data":{"colour":"red"}}"#),
    ] {
        kubectl.ok(&["apply", "-f", &file]).await?;
        kubectl.ok(&["patch", "configmap", "settings", "--type", kind, "-p", patch]).await?;
        assert_eq!(colour().await?, "red", "{kind}");
    }
    kubectl.ok(&["label", "configmap", "settings", "team=blue"]).await?;
    ensure!(kubectl.ok(&["get", "configmaps", "-l", "team=blue", "-o", "name"]).await?.contains("settings"));
    kubectl.ok(&["apply", "--server-side", "--force-conflicts", "-f", &file]).await?;
    kubectl.ok(&["delete", "configmap", "settings"]).await?;
    let gone = kubectl.run(&["get", "configmap", "settings"]).await?;
    ensure!(gone.code == Some(1) && gone.stderr.contains("NotFound"), "{gone:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_is_applied_edited_and_deleted_with_all_it_made() -> Result<()> {
    guest_or_skip!("hello");
    let kubectl = kubectl_or_skip!();
    let component = kubectl.up.upload("hello").await?;
    let manifest = mayfly_e2e::function("hello", &component, json!({"env": [{"name": "A", "value": "1"}]}));
    let file = kubectl.file("function.json", &manifest)?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", "function/hello", "--timeout=60s"]).await?;
    ensure!(kubectl.up.http().get("/fn/default/hello/").await?.status == 200);
    // An editor that changes a value.
    let editor = kubectl.home.path().join("editor");
    std::fs::write(&editor, "#!/bin/sh\nsed -i 's/value: \"1\"/value: \"2\"/' \"$1\"\n")?;
    std::fs::set_permissions(&editor, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let mut edit = kubectl.command(&["edit", "function", "hello"]);
    let edited = edit.env("KUBE_EDITOR", &editor).output().await?;
    ensure!(edited.status.success(), "{edited:?}");
    kubectl
        .up
        .wait_until_function("hello", "has a second revision", |function| {
            function["status"]["latestReadyRevision"] == "hello-00002"
        })
        .await?;
    kubectl.ok(&["delete", "function", "hello"]).await?;
    wait::until("everything of it is gone", || async {
        let left = kubectl.ok(&["get", "revisions,replicasets,pods", "-o", "name"]).await?;
        Ok(left.trim().is_empty().then_some(()))
    })
    .await
}

/// The file has no source: `mayfly deploy` sets it, and an apply does not change fields that it never had.
#[tokio::test(flavor = "multi_thread")]
async fn a_projects_manifest_is_applied_once_it_is_deployed() -> Result<()> {
    // The toolchain that built the examples builds this.
    guest_or_skip!("hello");
    let kubectl = kubectl_or_skip!();
    let folder = tempfile::tempdir()?;
    let project = folder.path().join("first");
    let mayfly = async |line: &[&str], at: &Path| -> Result<()> {
        let ran = kubectl.up.cli().command(line)?.current_dir(at).output().await?;
        ensure!(ran.status.success(), "{line:?}: {ran:?}");
        Ok(())
    };
    mayfly(&["new", "rust", "first"], folder.path()).await?;
    let manifest = project.join("function.yaml");
    let file = manifest.to_string_lossy().into_owned();
    let refused = kubectl.run(&["apply", "-f", &file]).await?;
    ensure!(refused.code == Some(1), "{refused:?}");
    for words in ["spec.source: Required value", "mayfly deploy"] {
        ensure!(refused.stderr.contains(words), "{words} is not in {refused:?}");
    }

    mayfly(&["deploy"], &project).await?;
    let get = async |path: &str| kubectl.ok(&["get", "function", "first", "-o", path]).await;
    let source = "jsonpath={.spec.source}";
    let deployed = get(source).await?;
    ensure!(deployed.contains("sha256:"), "{deployed}");
    let applied = kubectl.ok(&["apply", "-f", &file]).await?;
    ensure!(applied.trim() == "function.mayfly.dev/first configured", "{applied}");
    let again = kubectl.ok(&["apply", "-f", &file]).await?;
    ensure!(again.trim() == "function.mayfly.dev/first unchanged", "{again}");
    // Now kubectl has the last applied configuration, and could consider a field removed.
    let text = std::fs::read_to_string(&manifest)?;
    ensure!(text.contains("timeout: 30s"), "{text}");
    std::fs::write(&manifest, text.replace("timeout: 30s", "timeout: 20s"))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", "function/first", "--timeout=60s"]).await?;
    assert_eq!(get("jsonpath={.spec.limits.timeout}").await?, "20s");
    assert_eq!(get(source).await?, deployed);
    let answer = kubectl.up.http().get("/fn/default/first/").await?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_of_a_functions_pod_are_shown() -> Result<()> {
    guest_or_skip!("logger");
    let kubectl = kubectl_or_skip!();
    kubectl.up.deploy("logger", "logger", &["--min", "1"]).await?;
    kubectl.up.wait_until_function("logger", "runs", |f| mayfly_e2e::ready_replicas(f) == 1).await?;
    kubectl.up.http().get("/fn/default/logger/?lines=3").await?;
    let pod = kubectl.ok(&["get", "pods", "-o", "name"]).await?;
    wait::until("the pod's log has the lines", || async {
        let log = kubectl.ok(&["logs", pod.trim(), "--tail", "50"]).await?;
        Ok(log.contains("plain line 3 on stdout").then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_functions_pod_is_followed() -> Result<()> {
    guest_or_skip!("logger");
    let kubectl = kubectl_or_skip!();
    kubectl.up.deploy("logger", "logger", &["--min", "1"]).await?;
    kubectl.up.wait_until_function("logger", "runs", |f| mayfly_e2e::ready_replicas(f) == 1).await?;
    let pod = kubectl.ok(&["get", "pods", "-o", "name"]).await?;
    let http = kubectl.up.http();
    http.get("/fn/default/logger/?lines=1").await?;
    let mut log = kubectl.start(&["logs", pod.trim(), "--follow"])?;
    log.line("of the call before", |line| line == "plain line 1 on stdout").await?;
    // The function exists now, so one call suffices.
    http.get("/fn/default/logger/?lines=7").await?;
    log.line("of the call after", |line| line == "plain line 7 on stdout").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_runs_to_its_end_in_a_pod() -> Result<()> {
    guest_or_skip!("job");
    let kubectl = kubectl_or_skip!();
    let digest = kubectl.up.upload("job").await?;
    for (name, code, phase) in [("good", "0", "Succeeded"), ("bad", "3", "Failed")] {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "runtimeClassName": "wasm", "restartPolicy": "Never",
                "containers": [{
                    "name": "job",
                    "image": format!("component.mayfly.dev/sha256@{digest}"),
                    "args": ["one", "two"],
                    "env": [{"name": "EXIT_CODE", "value": code}],
                }],
            },
        });
        kubectl.ok(&["apply", "-f", &kubectl.file("pod.json", &pod)?]).await?;
        let condition = format!("--for=jsonpath={{.status.phase}}={phase}");
        kubectl.ok(&["wait", &condition, &format!("pod/{name}"), "--timeout=60s"]).await?;
        let log = kubectl.ok(&["logs", name]).await?;
        ensure!(
            log.contains("argument one") && log.contains(&format!("environment EXIT_CODE={code}")),
            "{log}"
        );
        let path = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}";
        let exit_code = kubectl.ok(&["get", "pod", name, "-o", path]).await?;
        // WASI 0.2's exit reports only success or failure.
        assert_eq!(exit_code == "0", code == "0", "{exit_code}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_sees_changes() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let mut watch = kubectl.start(&["get", "configmaps", "--watch", "-o", "name"])?;
    kubectl.ok(&["create", "configmap", "seen", "--from-literal=a=b"]).await?;
    watch.line("of what was made", |line| line == "configmap/seen").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_goes_with_everything_in_it() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    kubectl.ok(&["create", "namespace", "team"]).await?;
    kubectl.ok(&["create", "configmap", "settings", "-n", "team", "--from-literal=a=b"]).await?;
    kubectl.ok(&["delete", "namespace", "team", "--timeout=60s"]).await?;
    let gone = kubectl.run(&["get", "namespace", "team"]).await?;
    ensure!(gone.stderr.contains("NotFound"), "{gone:?}");
    let refused = kubectl.run(&["create", "configmap", "late", "-n", "team"]).await?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("team"), "{refused:?}");
    Ok(())
}
