//! Containers on two machines: two network namespaces with a link between them. Needs root, containerd and nftables.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, skipped, test_name, wait};
use serde_json::json;
use tokio::process::Command;

use crate::containers::{NodeFolder, archive, containers_or_skip};

/// The addresses of the two machines.
const ADDRESSES: [&str; 2] = ["10.99.0.1", "10.99.0.2"];

/// Two network namespaces with a link; removed on drop.
struct LinkedNamespaces([String; 2]);

impl LinkedNamespaces {
    fn create() -> Result<Self> {
        let id = std::process::id();
        let names = Self([format!("mf{id}a"), format!("mf{id}b")]);
        let [first, second] = &names.0;
        for name in &names.0 {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        ip(&[
            "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second,
        ])?;
        for (name, address) in names.0.iter().zip(ADDRESSES) {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", "eth0"])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
        }
        Ok(names)
    }
}

impl Drop for LinkedNamespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = std::process::Command::new("ip").args(arguments).output().context("cannot run ip")?;
    ensure!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The output of a program in a namespace, with the server's kubeconfig.
async fn run(namespace: &str, server: &Up, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/var/run/netns/{namespace}")).args(arguments).stdin(Stdio::null());
    let output = command.env("KUBECONFIG", server.kubeconfig()).kill_on_drop(true).output().await?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments:?}: {said}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A pod on each node that answers with the name of its node, and a Service of both.
fn web() -> serde_json::Value {
    let script = "mkdir /www; echo from $NODE > /www/index.html; exec busybox httpd -f -p 8000 -h /www";
    let labels = json!({"app": "web"});
    let node = json!({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}});
    let container =
        json!({"name": "c", "image": "busybox:local", "env": [node], "command": ["sh", "-c", script]});
    let set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "web"}, "spec": {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}}});
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {
        "selector": labels, "ports": [{"port": 80, "targetPort": 8000}]}});
    json!({"apiVersion": "v1", "kind": "List", "items": [set, service]})
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_two_machines_reach_each_other_and_their_services() -> Result<()> {
    containers_or_skip!();
    // Dropped in the reverse order: the processes end before their namespaces are removed.
    let namespaces = LinkedNamespaces::create()?;
    let [first, second] = &namespaces.0;
    let folders = [NodeFolder::new()?, NodeFolder::new()?];
    let flags = ["--containers", "on", "--agent-listen", "0.0.0.0:0"];
    let server = Start::server_at(ADDRESSES[0]).inside(first).in_folder(&folders[0].path().join("d"));
    let server =
        server.with(&flags).with(&["--api-listen", "0.0.0.0:0", "--node-name", "first"]).ready().await?;
    let node = Start::node_at(&server, ADDRESSES[0], "second", ADDRESSES[1]).inside(second);
    let node = node.in_folder(&folders[1].path().join("d")).with(&flags).ready().await?;

    let archive = archive(folders[0].path(), "busybox:local", &["/bin/sh"])?;
    let (archive, binary) = (archive.to_string_lossy(), mayfly_e2e::binary()?);
    let binary = binary.to_string_lossy();
    for name in ["first", "second"] {
        let import = [&*binary, "image", "import", "--node", name, &*archive];
        wait::until("the node takes an image", || async { run(first, &server, &import).await.map(Some) })
            .await?;
    }
    let manifest = folders[0].path().join("web.json");
    std::fs::write(&manifest, web().to_string())?;
    run(first, &server, &["kubectl", "apply", "-f", &manifest.to_string_lossy()]).await?;
    // Not `rollout status`: it is content with the pods of the nodes that were ready when the set was created.
    let ready = ["kubectl", "get", "daemonset/web", "-o", "jsonpath={.status.numberReady}"];
    wait::until("a pod is ready on each node", || async {
        Ok((run(first, &server, &ready).await? == "2").then_some(()))
    })
    .await?;

    // Each pod reaches both through the Service, by the address of the name.
    let pods = run(first, &server, &["kubectl", "get", "pods", "-o", "name"]).await?;
    assert_eq!(pods.lines().count(), 2);
    for pod in pods.lines() {
        let lookup = ["kubectl", "exec", pod, "--", "busybox", "nslookup", "web.default.svc.cluster.local"];
        let found =
            wait::until("the name is known", || async { run(first, &server, &lookup).await.map(Some) });
        let found = found.await?;
        let address =
            found.lines().rev().find_map(|line| line.strip_prefix("Address: ")).context(found.clone())?;
        let script =
            format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 5 {address} 80 | busybox tail -n 1");
        for expected in ["from first", "from second"] {
            let fetch = ["kubectl", "exec", pod, "--", "sh", "-c", &script];
            wait::until(&format!("{pod} reaches the pod {expected}"), || async {
                Ok(run(first, &server, &fetch).await?.contains(expected).then_some(()))
            })
            .await?;
        }
    }
    run(first, &server, &["kubectl", "delete", "daemonset/web", "service/web", "--timeout=60s"]).await?;
    wait::until("the pods are gone", || async {
        Ok(run(first, &server, &["kubectl", "get", "pods", "-o", "name"]).await?.is_empty().then_some(()))
    })
    .await?;
    node.stop().await?;
    server.stop().await
}
