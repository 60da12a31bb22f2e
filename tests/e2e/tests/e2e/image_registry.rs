//! The server's own registry: images and components are pushed to it, and pods and functions pull from it.

use anyhow::{Context as _, Result, ensure};
use http::{Method, StatusCode, header};
use mayfly_e2e::{Up, digest_of, full, guest_or_skip, is_ready, skipped, test_name, wait};
use serde_json::{Value, json};

use crate::containers::{ContainerNode, containers_or_skip};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The host name with which pods and functions pull from it.
const NAME: &str = "registry.mayfly.internal";

/// Pushes an artifact of one layer with the requests of oras and wkg; returns the manifest's digest.
async fn push_component(up: &Up, repository: &str, tag: &str, component: &[u8]) -> Result<String> {
    let admin = up.admin();
    let config = b"{}";
    for content in [&config[..], component] {
        let begun = admin
            .call(admin.request(Method::POST, &format!("/v2/{repository}/blobs/uploads/")), full(vec![]))
            .await?;
        ensure!(begun.status == StatusCode::ACCEPTED, "{}", begun.text());
        let path = format!("{}?digest={}", begun.header("location"), digest_of(content));
        let put = admin.call(admin.request(Method::PUT, &path), full(content.to_vec())).await?;
        ensure!(put.status == StatusCode::CREATED, "{}", put.text());
    }
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
        "config": {"mediaType": "application/vnd.wasm.config.v0+json", "digest": digest_of(config), "size": 2},
        "layers": [{"mediaType": "application/wasm", "digest": digest_of(component), "size": component.len()}]});
    let text = manifest.to_string();
    let request = admin
        .request(Method::PUT, &format!("/v2/{repository}/manifests/{tag}"))
        .header(header::CONTENT_TYPE, MANIFEST);
    let put = admin.call(request, full(text.clone())).await?;
    ensure!(put.status == StatusCode::CREATED, "{}", put.text());
    Ok(digest_of(text.as_bytes()))
}

fn function(name: &str, reference: &str) -> Value {
    json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": name},
        "spec": {"source": {"oci": reference}}})
}

#[tokio::test]
async fn a_function_comes_from_the_registry() -> Result<()> {
    let component = std::fs::read(guest_or_skip!("hello"))?;
    let up = Up::start().await?;
    let reference = format!("{NAME}/team/hello:1");
    up.cli().apply(&function("pulled", &reference)).await?;
    // It waits for its source, and reports it.
    wait::until("the function says what it lacks", || async {
        let found = up.cli().get("functions", "pulled").await?;
        let ready = found["status"]["conditions"][0].clone();
        let told = ready["reason"] == "SourceUnavailable"
            && ready["message"].as_str().is_some_and(|text| text.contains("not found"));
        Ok(told.then_some(()))
    })
    .await?;
    push_component(&up, "team/hello", "1", &component).await?;
    wait::until("the function is ready", || async {
        Ok(is_ready(&up.cli().get("functions", "pulled").await?).then_some(()))
    })
    .await?;
    let answer = up.http().get("/fn/default/pulled/").await?;
    ensure!(answer.status == StatusCode::OK, "{}", answer.text());
    let revision = up.cli().get("revisions", "pulled-00001").await?;
    let source = &revision["spec"]["source"];
    ensure!(
        source["oci"] == reference.as_str() && source["component"] == digest_of(&component).as_str(),
        "{source}"
    );
    let deployed = up.cli().ok(&["deploy", "--oci", &reference, "--name", "second"]).await?;
    ensure!(deployed.contains("function second is ready"), "{deployed}");
    let answer = up.http().get("/fn/default/second/").await?;
    ensure!(answer.status == StatusCode::OK, "{}", answer.text());
    // A moved tag does not create a revision by itself.
    ensure!(
        up.cli().run(&["get", "revisions", "pulled-00002"]).await?.code != Some(0),
        "there is a second one"
    );
    Ok(())
}

#[tokio::test]
async fn a_pod_comes_from_the_registry() -> Result<()> {
    containers_or_skip!();
    if !std::path::Path::new("/usr/bin/skopeo").is_file() {
        skipped(test_name!(), "no skopeo");
        return Ok(());
    }
    let node = ContainerNode::start().await?;
    let admin = node.kubectl.up.address("admin");
    let archive = &node.archive;
    let policy = node.folder.path().join("policy.json");
    std::fs::write(&policy, r#"{"default": [{"type": "insecureAcceptAnything"}]}"#)?;
    let skopeo = async |arguments: &[&str]| -> Result<String> {
        let output = tokio::process::Command::new("/usr/bin/skopeo")
            .arg("--policy")
            .arg(&policy)
            .args(arguments)
            .env("TMPDIR", node.folder.path())
            .output()
            .await?;
        ensure!(output.status.success(), "skopeo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    };
    let from = format!("docker-archive:{}", archive.display());
    let to = format!("docker://{admin}/team/busybox:1");
    skopeo(&["copy", "--dest-tls-verify=false", &from, &to]).await?;
    let seen = skopeo(&["inspect", "--tls-verify=false", &to]).await?;
    let seen: Value = serde_json::from_str(&seen).context("skopeo inspect")?;
    ensure!(seen["RepoTags"] == json!(["1"]), "{seen}");

    let image = format!("--image={NAME}/team/busybox:1");
    node.kubectl.ok(&["run", "pulled", &image, "--", "sh", "-c", "echo started; exec sleep 1d"]).await?;
    node.ready("pulled").await?;
    ensure!(node.exec("pulled", "echo inside").await?.contains("inside"), "exec");
    let events = node.kubectl.ok(&["get", "events", "-o", "jsonpath={.items[*].message}"]).await?;
    for expected in ["Pulling image", "Successfully pulled image"] {
        ensure!(events.contains(expected), "{expected:?} is not in {events}");
    }
    let listed = node.kubectl.up.cli().ok(&["image", "list"]).await?;
    ensure!(listed.contains(&format!("{NAME}/team/busybox:1")), "{listed}");
    // The same with the address that docker would use; and a missing image.
    let again = node.kubectl.up.cli().ok(&["image", "pull", &format!("{admin}/team/busybox:1")]).await?;
    ensure!(again.contains("pulled"), "{again}");
    node.kubectl.ok(&["run", "absent", &format!("--image={NAME}/team/none:1")]).await?;
    wait::until("the pod says that its image is missing", || async {
        let reason = "jsonpath={.status.containerStatuses[0].state.waiting.reason}";
        let reason = node.kubectl.ok(&["get", "pod", "absent", "-o", reason]).await?;
        Ok((reason == "ErrImagePull" || reason == "ImagePullBackOff").then_some(()))
    })
    .await?;
    node.kubectl.ok(&["run", "never", "--image=localhost:1/none:1", "--image-pull-policy=Never"]).await?;
    wait::until("the pod says that its image may not be pulled", || async {
        let reason = "jsonpath={.status.containerStatuses[0].state.waiting.reason}";
        Ok((node.kubectl.ok(&["get", "pod", "never", "-o", reason]).await? == "ErrImageNeverPull")
            .then_some(()))
    })
    .await?;
    wait::until("the node lists the image", || async {
        let images = node.kubectl.ok(&["get", "nodes", "-o", "jsonpath={.items[0].status.images}"]).await?;
        Ok(images.contains("team/busybox").then_some(()))
    })
    .await?;
    node.kubectl.ok(&["delete", "pod", "pulled", "absent", "never", "--now"]).await?;
    node.leaves_nothing().await
}
