//! The real kubectl against the real server over TLS. Without kubectl on the machine these tests say so and
//! check nothing.

use std::{path::PathBuf, process::Stdio, sync::Arc};

use axum::body::Body;
use futures::StreamExt;
use jiff::Timestamp;
use mayfly_apiserver::Identity;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpListener,
    process::Command,
};
use tokio_util::sync::CancellationToken;

use crate::support::Fixture;

pub(crate) struct KubectlServer {
    pub(crate) fixture: Fixture,
    kubeconfig: PathBuf,
    stop: CancellationToken,
}

impl Drop for KubectlServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct KubectlOutput {
    ok: bool,
    out: String,
    err: String,
}

fn have_kubectl() -> bool {
    let found = std::process::Command::new("kubectl").args(["version", "--client"]).output().is_ok();
    if !found {
        eprintln!("skipped: kubectl is not installed");
    }
    found
}

impl KubectlServer {
    /// A server on a port of its own; `None` without kubectl.
    pub(crate) async fn start() -> Option<Self> {
        if !have_kubectl() {
            return None;
        }
        let identity_folder = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(identity_folder.path(), &[], Timestamp::now()).unwrap();
        let token = identity.token().to_owned();
        let fixture = Fixture::with(
            |config| config.token = token,
            |deps| {
                deps.nodes = Arc::new(|node, request| {
                    Box::pin(async move {
                        let path = request.uri().to_string();
                        let lines = format!("{node} {path}\nsecond line\n");
                        let endless = path.contains("follow=true");
                        let rest = futures::stream::unfold(endless, |endless| async move {
                            if endless {
                                std::future::pending::<()>().await
                            }
                            None::<(Result<bytes::Bytes, std::io::Error>, bool)>
                        });
                        let first = futures::stream::once(async move {
                            Ok::<_, std::io::Error>(bytes::Bytes::from(lines))
                        });
                        Ok(http::Response::new(Body::from_stream(first.chain(rest))))
                    })
                });
            },
        )
        .await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let kubeconfig = fixture.folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, identity.kubeconfig(&format!("https://{address}"))).unwrap();
        let stop = CancellationToken::new();
        let (server, tls, token) = (fixture.server.clone(), identity.tls(), stop.clone());
        tokio::spawn(async move { server.serve(listener, tls, token).await });
        Some(Self { fixture, kubeconfig, stop })
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new("kubectl");
        command
            .args(words(arguments))
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.fixture.folder.path())
            .kill_on_drop(true)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) async fn run_with(&self, arguments: &str, input: &str) -> KubectlOutput {
        let mut child = self.command(arguments).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).await.unwrap();
        drop(stdin);
        let output = child.wait_with_output().await.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        KubectlOutput { ok: output.status.success(), out: text(output.stdout), err: text(output.stderr) }
    }

    /// Runs and must succeed; returns its output.
    pub(crate) async fn ok(&self, arguments: &str) -> String {
        self.ok_with(arguments, "").await
    }

    pub(crate) async fn ok_with(&self, arguments: &str, input: &str) -> String {
        let said = self.run_with(arguments, input).await;
        assert!(said.ok, "kubectl {arguments}: {said:?}");
        said.out
    }

    pub(crate) async fn fails(&self, arguments: &str, input: &str) -> String {
        let said = self.run_with(arguments, input).await;
        assert!(!said.ok, "kubectl {arguments}: {said:?}");
        said.err
    }

    pub(crate) async fn json(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("{arguments} -o json")).await).unwrap()
    }
}

/// Splits at spaces, but not inside single quotes.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for character in text.chars() {
        match character {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty())),
            other => word.push(other),
        }
    }
    words.extend(Some(word).filter(|word| !word.is_empty()));
    words
}

const MAP: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: m\n  labels: {a: b, c: d}\ndata:\n  one: '1'\n  two: '2'\n";
const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  containers:\n  - name: c\n    image: x:1\n    env:\n    - {name: A, value: '1'}\n    - {name: B, value: '2'}\n";
const SET: &str = "apiVersion: apps/v1\nkind: ReplicaSet\nmetadata:\n  name: s\nspec:\n  replicas: 1\n  selector: {matchLabels: {a: b}}\n  template:\n    metadata: {labels: {a: b}}\n    spec:\n      containers:\n      - {name: c, image: 'x:1'}\n";

fn function(body: &str) -> String {
    let digest = "0".repeat(64);
    format!(
        "apiVersion: mayfly.dev/v1\nkind: Function\nmetadata:\n  name: f\nspec:\n  source: {{component: 'sha256:{digest}'}}\n{body}"
    )
}

#[tokio::test]
async fn apply_changes_removes_and_is_quiet_the_second_time() {
    let Some(cluster) = KubectlServer::start().await else { return };
    for manifest in [MAP, POD, SET, &function("  isolation: reuse\n  env: [{name: A, value: '1'}]\n")] {
        let created = cluster.ok_with("apply -f -", manifest).await;
        assert!(created.trim().ends_with("created"), "{created}");
        let again = cluster.ok_with("apply -f -", manifest).await;
        assert!(again.trim().ends_with("unchanged"), "{again}");
    }
    let changed = MAP.replace("'2'", "'22'").replace("  one: '1'\n", "").replace("a: b, ", "");
    assert_eq!(cluster.ok_with("apply -f -", &changed).await.trim(), "configmap/m configured");
    let map = cluster.json("get configmap m").await;
    assert_eq!((&map["data"], &map["metadata"]["labels"]), (&json!({"two": "22"}), &json!({"c": "d"})));

    let changed = POD.replace("x:1", "x:2");
    assert_eq!(cluster.ok_with("apply -f -", &changed).await.trim(), "pod/p configured");
    let error = cluster.fails("apply -f -", &POD.replace("    - {name: B, value: '2'}\n", "")).await;
    assert!(error.contains("pod updates may not change fields other than"), "{error}");

    let changed = SET.replace("replicas: 1", "replicas: 3").replace("x:1", "x:9");
    cluster.ok_with("apply -f -", &changed).await;
    let set = cluster.json("get rs s").await;
    assert_eq!(
        (&set["spec"]["replicas"], &set["spec"]["template"]["spec"]["containers"][0]["image"]),
        (&json!(3), &json!("x:9"))
    );

    cluster.ok_with("apply -f -", &function("  scaling: {max: 5}\n")).await;
    let function = cluster.json("get function f").await;
    assert_eq!(
        (&function["spec"]["isolation"], &function["spec"]["scaling"]["max"], function["spec"].get("env")),
        (&json!("fresh"), &json!(5), None)
    );
}

#[tokio::test]
async fn strict_validation_names_the_field() {
    let Some(cluster) = KubectlServer::start().await else { return };
    let manifest = function("  sorce: {}\n  limits: {momory: 1Mi}\n");
    let error = cluster.fails("apply -f -", &manifest).await;
    assert!(
        error.contains(
            "strict decoding error: unknown field \"spec.limits.momory\", unknown field \"spec.sorce\""
        ),
        "{error}"
    );
    let error = cluster.fails("create --validate=strict -f -", &POD.replace("image:", "imagee:")).await;
    assert!(error.contains("unknown field \"spec.containers[0].imagee\""), "{error}");
    let said = cluster.run_with("apply --validate=warn -f -", &manifest).await;
    assert!(said.ok && said.err.contains("Warning: unknown field \"spec.sorce\""), "{said:?}");
    cluster.ok_with("apply --validate=strict -f -", &function("")).await;
    let error = cluster.fails("apply --validate=strict -f -", &manifest).await;
    assert!(error.contains("unknown field \"spec.sorce\""), "{error}");
}

#[tokio::test]
async fn a_function_without_a_source_is_told_how_it_gets_one() {
    let Some(cluster) = KubectlServer::start().await else { return };
    let manifest =
        "apiVersion: mayfly.dev/v1\nkind: Function\nmetadata:\n  name: f\nspec:\n  isolation: fresh\n";
    for apply in ["apply -f -", "apply --server-side -f -"] {
        let error = cluster.fails(apply, manifest).await;
        assert!(error.contains("spec.source: Required value: "), "{apply}: {error}");
        assert!(error.contains("mayfly deploy"), "{apply}: {error}");
    }
}

#[tokio::test]
async fn get_prints_tables() {
    let Some(cluster) = KubectlServer::start().await else { return };
    for manifest in [MAP, POD, SET, &function("")] {
        cluster.ok_with("apply -f -", manifest).await;
    }
    let header =
        |text: &str| text.lines().next().unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    for (arguments, expected) in [
        ("get pods", "NAME READY STATUS RESTARTS AGE"),
        ("get pods -o wide", "NAME READY STATUS RESTARTS AGE IP NODE NOMINATED NODE READINESS GATES"),
        ("get rs -o wide", "NAME DESIRED CURRENT READY AGE CONTAINERS IMAGES SELECTOR"),
        ("get ns", "NAME STATUS AGE"),
        ("get cm", "NAME DATA AGE"),
        ("get fn", "NAME URL LATEST READY REPLICAS AGE"),
        ("get pods -A", "NAMESPACE NAME READY STATUS RESTARTS AGE"),
        ("get pods --show-labels", "NAME READY STATUS RESTARTS AGE LABELS"),
    ] {
        let out = cluster.ok(arguments).await;
        assert_eq!(header(&out).join(" "), expected, "{arguments}: {out}");
    }
    let out = cluster.ok("get pod p").await;
    assert!(out.lines().nth(1).unwrap().starts_with("p      0/1     Pending   0"), "{out}");
    let all = cluster.ok("get all").await;
    assert!(
        all.contains("pod/p") && all.contains("replicaset.apps/s") && all.contains("function.mayfly.dev/f"),
        "{all}"
    );
    assert!(
        cluster.ok("get functions,revisions,replicasets,pods,nodes").await.contains("function.mayfly.dev/f")
    );
    assert_eq!(cluster.ok("get pods -o name -l app=none").await, "");
    assert_eq!(cluster.ok("get pod p -o jsonpath={.spec.containers[0].image}").await, "x:1");
    assert_eq!(cluster.ok("get cm --sort-by=.metadata.name -o name").await, "configmap/m\n");
    assert!(cluster.ok("get cm --sort-by=.metadata.name").await.contains("m      2"));
    assert!(cluster.ok("get fn f -o yaml").await.contains("kind: Function"));
    let error = cluster.fails("get pod absent", "").await;
    assert_eq!(error.trim(), "Error from server (NotFound): pods \"absent\" not found");
    let error = cluster.fails("get widgets", "").await;
    assert!(error.contains("the server doesn't have a resource type \"widgets\""), "{error}");
    assert!(cluster.ok("get --raw /api/v1/namespaces/default/pods/p").await.contains("\"name\":\"p\""));
    assert_eq!(cluster.ok("get --raw /healthz").await.trim(), "ok");
    assert!(cluster.ok("version").await.contains("Server Version: v1.33.0"));
}

#[tokio::test]
async fn watching_and_waiting() {
    let Some(cluster) = KubectlServer::start().await else { return };
    let mut watch = cluster.command("get cm -w -o name").spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let waits = cluster.command("get cm --watch-only -o name").spawn().unwrap();
    drop(waits);
    cluster.ok_with("apply -f -", MAP).await;
    let line = tokio::time::timeout(std::time::Duration::from_secs(20), lines.next_line()).await;
    assert_eq!(line.unwrap().unwrap().unwrap(), "configmap/m");
    cluster.ok_with("apply -f -", &function("")).await;
    let error = cluster.fails("wait --for=condition=Ready --timeout=1s fn/f", "").await;
    assert!(error.contains("timed out waiting for the condition"), "{error}");
    let waiting = cluster.ok("wait --for=condition=Ready --timeout=20s fn/f");
    let marking = async {
        let condition = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Ok", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        cluster.ok(&format!("patch fn f --subresource=status --type=merge -p '{condition}'")).await
    };
    let (waited, _) = tokio::join!(waiting, marking);
    assert_eq!(waited.trim(), "function.mayfly.dev/f condition met");
    cluster.ok("wait --for=jsonpath={.status.conditions[0].status}=True fn/f --timeout=20s").await;
    let gone = cluster.ok("wait --for=delete cm/m --timeout=20s");
    let (_, deleted) = tokio::join!(gone, cluster.ok("delete cm m"));
    assert_eq!(deleted.trim(), "configmap \"m\" deleted");
    watch.kill().await.unwrap();
}

#[tokio::test]
async fn all_ways_to_change() {
    let Some(cluster) = KubectlServer::start().await else { return };
    for manifest in [MAP, POD, SET, &function("")] {
        cluster.ok_with("create -f -", manifest).await;
    }
    let error = cluster.fails("create -f -", MAP).await;
    assert!(
        error.contains("Error from server (AlreadyExists)")
            && error.contains("configmaps \"m\" already exists"),
        "{error}"
    );
    cluster.ok("create configmap n --from-literal=a=b").await;
    cluster.ok("create secret generic s --from-literal=a=b").await;
    cluster.ok("create namespace other").await;
    cluster.ok("run r --image=x:1").await;
    cluster.ok("label cm m x=y").await;
    cluster.ok("label fn f x=y").await;
    cluster.ok("annotate pod p note=hello").await;
    cluster.ok("label cm m x-").await;
    cluster.ok("patch pod p -p '{\"spec\":{\"containers\":[{\"name\":\"c\",\"image\":\"x:3\"}]}}'").await;
    cluster.ok("patch cm m --type=merge -p '{\"data\":{\"two\":null}}'").await;
    cluster
        .ok("patch cm m --type=json -p '[{\"op\":\"add\",\"path\":\"/data/three\",\"value\":\"3\"}]'")
        .await;
    cluster.ok("patch fn f --type=merge -p '{\"spec\":{\"isolation\":\"reuse\"}}'").await;
    cluster.ok("scale rs s --replicas=4").await;
    cluster.ok("set image pod/p c=x:4").await;
    let map = cluster.json("get cm m").await;
    assert_eq!(
        (&map["data"], map["metadata"]["labels"].get("x")),
        (&json!({"one": "1", "three": "3"}), None)
    );
    let pod = cluster.json("get pod p").await;
    assert_eq!(
        (&pod["spec"]["containers"][0]["image"], &pod["metadata"]["annotations"]["note"]),
        (&json!("x:4"), &json!("hello"))
    );
    assert_eq!(cluster.json("get rs s").await["spec"]["replicas"], 4);
    cluster.ok_with("replace -f -", &MAP.replace("'1'", "'replaced'")).await;
    assert_eq!(cluster.json("get cm m").await["data"]["one"], "replaced");

    let editor = cluster.fixture.folder.path().join("editor");
    std::fs::write(
        &editor,
        "#!/bin/sh\nsed -i s/replaced/edited/\\;s/isolation..reuse/isolation:\\ fresh/ \"$1\"\n",
    )
    .unwrap();
    std::os::unix::fs::PermissionsExt::set_mode(
        &mut std::fs::metadata(&editor).unwrap().permissions(),
        0o755,
    );
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&editor, mode).unwrap();
    for what in ["cm/m", "fn/f"] {
        let output =
            cluster.command(&format!("edit {what}")).env("KUBE_EDITOR", &editor).output().await.unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    assert_eq!(cluster.json("get cm m").await["data"]["one"], "edited");
    assert_eq!(cluster.json("get fn f").await["spec"]["isolation"], "fresh");

    let said = cluster.run_with("diff -f -", &MAP.replace("'2'", "'different'")).await;
    assert!(!said.ok && said.out.contains("+  two: different"), "{said:?}");
    let dry = cluster.ok_with("apply --dry-run=server -f -", &MAP.replace("name: m", "name: dry")).await;
    assert!(dry.contains("created (server dry run)"), "{dry}");
    assert!(cluster.fails("get cm dry", "").await.contains("not found"));
}

#[tokio::test]
async fn describe_delete_and_the_rest() {
    let Some(cluster) = KubectlServer::start().await else { return };
    for manifest in [MAP, POD, SET, &function("")] {
        cluster.ok_with("apply -f -", manifest).await;
    }
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    cluster.ok_with("create -f -", &node.to_string()).await;
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e", "namespace": "default"}, "type": "Normal", "reason": "Tested",
        "message": "an event for the test", "involvedObject": {"kind": "Function", "name": "f", "namespace": "default", "apiVersion": "mayfly.dev/v1",
        "uid": cluster.json("get fn f").await["metadata"]["uid"]}});
    cluster.ok_with("create -f -", &event.to_string()).await;
    for (what, expected) in [
        ("fn f", "Tested"),
        ("pod p", "Image:"),
        ("rs s", "Replicas:"),
        ("cm m", "two:"),
        ("ns default", "Active"),
        ("node n", "Unschedulable"),
    ] {
        let out = cluster.ok(&format!("describe {what}")).await;
        assert!(out.contains(expected), "describe {what}: {out}");
    }
    assert!(cluster.ok("events").await.contains("an event for the test"));
    assert!(cluster.ok("get events").await.contains("function/f"));
    let resources = cluster.ok("api-resources").await;
    assert!(resources.contains("functions") && resources.contains("mayfly.dev/v1"), "{resources}");
    assert!(cluster.ok("api-versions").await.lines().any(|line| line == "mayfly.dev/v1"));
    let out = cluster.ok("explain function.spec.limits").await;
    assert!(out.contains("memory") && out.contains("Memory of one instance"), "{out}");
    let out = cluster.ok("explain pod.spec.containers.image").await;
    assert!(out.contains("Container image name"), "{out}");
    assert!(cluster.ok("explain rs --recursive").await.contains("minReadySeconds"));
    assert_eq!(cluster.ok("auth can-i create pods").await.trim(), "yes");
    assert!(cluster.ok("auth whoami").await.contains("mayfly-admin"));
    assert!(cluster.ok("auth can-i --list").await.contains("[*]"));
    cluster.ok("cordon n").await;
    assert!(cluster.ok("get node n").await.contains("Ready,SchedulingDisabled"));
    cluster.ok("uncordon n").await;
    cluster.ok("taint node n k=v:NoSchedule").await;
    assert_eq!(cluster.json("get node n").await["spec"]["taints"][0]["key"], "k");

    assert_eq!(
        cluster.ok("delete rs s --cascade=orphan --wait=false").await.trim(),
        "replicaset.apps \"s\" deleted"
    );
    assert_eq!(cluster.json("get rs s").await["metadata"]["finalizers"], json!(["orphan"]));
    cluster.ok("patch rs s --type=merge -p '{\"metadata\":{\"finalizers\":null}}'").await;
    assert!(cluster.fails("get rs s", "").await.contains("not found"));
    cluster.ok("delete pod p --wait=true").await;
    cluster.ok("delete fn --all").await;
    cluster.ok("delete cm m --ignore-not-found --now").await;
    assert!(cluster.fails("delete cm m", "").await.contains("configmaps \"m\" not found"));
    cluster.ok("create ns gone").await;
    cluster.ok_with("apply -n gone -f -", MAP).await;
    assert_eq!(cluster.ok("delete ns gone").await.trim(), "namespace \"gone\" deleted");
    assert!(cluster.fails("get ns gone", "").await.contains("not found"));
}

#[tokio::test]
async fn logs_are_streamed_and_hung_up() {
    let Some(cluster) = KubectlServer::start().await else { return };
    cluster.ok_with("apply -f -", POD).await;
    assert_eq!(cluster.ok("logs p").await, "", "without a node there is no log, and no error, as upstream");
    let client = cluster.fixture.client();
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    let request = http::Request::post("/api/v1/namespaces/default/pods/p/binding")
        .body(serde_json::to_vec(&binding).unwrap());
    client.request::<Value>(request.unwrap()).await.unwrap();
    let out = cluster.ok("logs p --tail=5 --timestamps").await;
    assert_eq!(out, "n /containerLogs/default/p/c?tailLines=5&timestamps=true\nsecond line\n");
    let error = cluster.fails("logs p -c nothing", "").await;
    assert!(error.contains("container nothing is not valid for pod p"), "{error}");

    let mut follow = cluster.command("logs p -f").spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    assert_eq!(lines.next_line().await.unwrap().unwrap(), "n /containerLogs/default/p/c?follow=true");
    follow.kill().await.unwrap();
}

#[tokio::test]
async fn server_side_apply_knows_who_owns_what() {
    let Some(cluster) = KubectlServer::start().await else { return };
    let applied = cluster.ok_with("apply --server-side -f -", MAP).await;
    assert_eq!(applied.trim(), "configmap/m serverside-applied");
    cluster.ok_with("apply --server-side --field-manager=other -f -", &MAP.replace("  two: '2'\n", "")).await;
    let error =
        cluster.fails("apply --server-side --field-manager=other -f -", &MAP.replace("'2'", "'other'")).await;
    assert!(error.contains("Apply failed with 1 conflict: conflict with \"kubectl\": .data.two"), "{error}");
    cluster
        .ok_with(
            "apply --server-side --force-conflicts --field-manager=other -f -",
            &MAP.replace("'2'", "'other'"),
        )
        .await;
    cluster.ok_with("apply --server-side -f -", &MAP.replace("  two: '2'\n", "").replace("a: b, ", "")).await;
    let map = cluster.json("get cm m").await;
    assert_eq!(
        (&map["data"], &map["metadata"]["labels"]),
        (&json!({"one": "1", "two": "other"}), &json!({"a": "b", "c": "d"}))
    );
    let managers = cluster.json("get cm m --show-managed-fields").await;
    let names: Vec<_> = managers["metadata"]["managedFields"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["manager"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names.len(), 2, "{managers}");

    for manifest in [SET, &function("  env: [{name: A, value: '1'}]\n"), POD] {
        cluster.ok_with("apply -f -", manifest).await;
        let over = cluster
            .ok_with("apply --server-side -f -", &manifest.replace("x:1", "x:2").replace("'1'}]", "'2'}]"))
            .await;
        assert!(
            over.trim().ends_with("serverside-applied"),
            "from client-side to server-side without a conflict: {over}"
        );
    }
    assert_eq!(cluster.json("get fn f").await["spec"]["env"][0]["value"], "2");
    assert_eq!(cluster.json("get pod p").await["spec"]["containers"][0]["image"], "x:2");
    let error = cluster.fails("apply --server-side -f -", &function("  sorce: {}\n")).await;
    assert!(error.contains("unknown field \"spec.sorce\""), "{error}");
    let said = cluster.run_with("diff --server-side -f -", &SET.replace("replicas: 1", "replicas: 7")).await;
    assert!(!said.ok && said.out.contains("+  replicas: 7"), "{said:?}");
    let created = cluster.ok_with("apply --server-side -f -", &POD.replace("name: p", "name: fresh")).await;
    assert_eq!(created.trim(), "pod/fresh serverside-applied");
}
