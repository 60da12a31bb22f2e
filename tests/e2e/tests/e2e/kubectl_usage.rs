//! kubectl on running workloads: usage, scale, and reasons why a pod does not run.

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{function, guest_or_skip, wait};
use serde_json::{Value, json};

use crate::kubectl::{Kubectl, kubectl_or_skip};

/// A Job of one program.
fn job(name: &str, component: &str, args: &[&str], spec: Value) -> Value {
    let container = json!({"name": "main", "image": component, "args": args});
    let mut job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": {"metadata": {"labels": {"job": name}},
            "spec": {"runtimeClassName": "wasm", "restartPolicy": "Never", "containers": [container]}}}});
    if let (Some(job), Value::Object(spec)) = (job["spec"].as_object_mut(), spec) {
        job.extend(spec);
    }
    job
}

async fn until_listed(kubectl: &Kubectl, arguments: &[&str], holds: impl Fn(&str) -> bool) -> Result<String> {
    wait::until(&format!("kubectl {arguments:?}"), || async {
        let finished = kubectl.run(arguments).await?;
        let told = finished.stdout + &finished.stderr;
        ensure!(holds(&told), "{told}");
        Ok(Some(told))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn top_shows_what_nodes_and_pods_use() -> Result<()> {
    guest_or_skip!("hello");
    guest_or_skip!("bad-job");
    let kubectl = kubectl_or_skip!();
    let nodes = kubectl.ok(&["top", "nodes", "--no-headers"]).await?;
    let node = nodes.split_whitespace().next().context("no node")?;
    ensure!(kubectl.ok(&["get", "nodes", "-o", "name"]).await?.trim() == format!("node/{node}"), "{nodes}");
    let memory = nodes.split_whitespace().nth(3).and_then(|text| text.strip_suffix("Mi")).context("Mi")?;
    ensure!((5..2000).contains(&memory.parse::<u64>()?), "this process's: {nodes}");
    ensure!(kubectl.run(&["top", "pods"]).await?.stderr.contains("No resources found"));

    let component = kubectl.up.upload("hello").await?;
    let spec = json!({"isolation": "reuse", "scaling": {"min": 1}});
    kubectl.up.apply_function("hello", &component, spec).await?;
    let component = kubectl.up.upload("bad-job").await?;
    let file = kubectl.file("job.json", &job("naps", &component, &["sleep", "3600"], json!({})))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl
        .ok(&["wait", "--for=jsonpath={.status.phase}=Running", "pod", "-l", "job=naps", "--timeout=60s"])
        .await?;
    kubectl
        .ok(&["wait", "--for=condition=Ready", "pod", "-l", "mayfly.dev/function=hello", "--timeout=60s"])
        .await?;
    ensure!(kubectl.up.http().get("/fn/default/hello/").await?.status == 200);
    for selector in ["mayfly.dev/function=hello", "job=naps"] {
        let top = kubectl.ok(&["top", "pods", "-l", selector, "--no-headers", "--containers"]).await?;
        ensure!(top.lines().count() == 1 && top.trim().ends_with("Mi"), "{top}");
        // The idle instance uses memory; an instance becomes idle shortly after its response.
        let used = "jsonpath={.items[0].containers[0].usage.memory}";
        until_listed(&kubectl, &["get", "pods.metrics.k8s.io", "-l", selector, "-o", used], |told| {
            told.strip_suffix("Ki").and_then(|text| text.parse().ok()).is_some_and(|used: u64| used >= 64)
        })
        .await?;
    }
    // Unknown values are absent: processor time is measured for programs, not for requests.
    for (selector, counted) in [("job=naps", true), ("mayfly.dev/function=hello", false)] {
        let cpu = "jsonpath={.items[0].containers[0].usage.cpu}";
        let cpu = kubectl.ok(&["get", "pods.metrics.k8s.io", "-l", selector, "-o", cpu]).await?;
        ensure!(cpu.ends_with('n') == counted, "{selector}: {cpu:?}");
    }
    let all = kubectl.ok(&["top", "pods", "-A", "--sum"]).await?;
    ensure!(all.lines().count() == 5, "a head, two pods, a line, a sum: {all}");
    let one =
        kubectl.ok(&["get", "pods", "-l", "job=naps", "-o", "jsonpath={.items[0].metadata.name}"]).await?;
    ensure!(kubectl.ok(&["top", "pod", &one]).await?.contains(&one));
    let none = kubectl.run(&["top", "pod", "nobody"]).await?;
    ensure!(none.code == Some(1) && none.stderr.contains("not found"), "{none:?}");
    let table = kubectl.ok(&["get", "nodes.metrics.k8s.io"]).await?;
    ensure!(table.starts_with("NAME") && table.contains("WINDOW"), "{table}");
    // Kinds of the same name still refer to the core group.
    ensure!(kubectl.ok(&["get", "pods"]).await?.contains("STATUS"));
    ensure!(kubectl.ok(&["api-resources"]).await?.contains("PodMetrics"));
    for refused in
        [["delete", "pods.metrics.k8s.io", one.as_str()], ["get", "pods.metrics.k8s.io", "--watch-only"]]
    {
        let refused = kubectl.run(&refused).await?;
        ensure!(refused.stderr.contains("does not allow this method"), "{refused:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_that_is_scaled_says_what_to_set() -> Result<()> {
    guest_or_skip!("hello");
    let kubectl = kubectl_or_skip!();
    let component = kubectl.up.upload("hello").await?;
    kubectl.up.apply_function("hello", &component, json!({})).await?;
    let refused = kubectl.run(&["scale", "function/hello", "--replicas=3"]).await?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("spec.scaling.min"), "{refused:?}");
    let missing = kubectl.run(&["scale", "function/none", "--replicas=3"]).await?;
    ensure!(missing.stderr.contains("\"none\" not found"), "{missing:?}");
    // The remedy of the message works.
    let spec = r#"{"spec":{"scaling":{"min":1,"max":10}}}"#;
    kubectl.ok(&["patch", "function", "hello", "--type", "merge", "-p", spec]).await?;
    let replicas = "jsonpath={.status.readyReplicas}";
    until_listed(&kubectl, &["get", "function", "hello", "-o", replicas], |told| told == "1").await?;
    // A ReplicaSet has a scale subresource, as upstream.
    let set = kubectl.ok(&["get", "replicasets", "-o", "jsonpath={.items[-1:].metadata.name}"]).await?;
    let scaled = kubectl.ok(&["scale", &format!("replicaset/{set}"), "--replicas=2"]).await?;
    ensure!(scaled.contains("scaled"), "{scaled}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_its_component_says_so_everywhere_and_goes_on_with_it() -> Result<()> {
    let guest_file = guest_or_skip!("bad-job");
    let kubectl = kubectl_or_skip!();
    let component = mayfly_e2e::digest_of(&std::fs::read(guest_file)?);
    let nowhere = format!("sha256:{}", "0".repeat(64));
    for (name, image, spec) in [
        ("early", component.as_str(), json!({})),
        ("never", nowhere.as_str(), json!({"activeDeadlineSeconds": 4})),
        ("misnamed", "nginx:latest", json!({})),
    ] {
        let file = kubectl.file(&format!("{name}.json"), &job(name, image, &["sleep", "0"], spec))?;
        kubectl.ok(&["apply", "-f", &file]).await?;
    }
    for (name, status, words) in [
        ("early", "ImagePullBackOff", "mayfly artifact push"),
        ("misnamed", "InvalidImageName", "sha256:<64 hexadecimal digits>"),
    ] {
        let selector = format!("job={name}");
        until_listed(&kubectl, &["get", "pods", "-l", &selector], |told| told.contains(status)).await?;
        let described = until_listed(&kubectl, &["describe", "job", name], |told| {
            told.contains("PodNotStarting") && told.contains(status)
        })
        .await?;
        ensure!(described.contains(words), "{described}");
    }
    kubectl.ok(&["wait", "--for=condition=Failed", "job/never", "--timeout=60s"]).await?;
    let reason = "jsonpath={.status.conditions[?(@.type=='Failed')].reason}";
    ensure!(kubectl.ok(&["get", "job", "never", "-o", reason]).await? == "DeadlineExceeded");
    until_listed(&kubectl, &["get", "pods", "-l", "job=never"], |told| told.contains("No resources")).await?;
    kubectl.up.upload("bad-job").await?;
    kubectl.ok(&["wait", "--for=condition=Complete", "job/early", "--timeout=60s"]).await?;
    Ok(())
}

/// A client that waits for readiness gets a response.
#[tokio::test(flavor = "multi_thread")]
async fn ready_means_that_requests_go_there() -> Result<()> {
    guest_or_skip!("env");
    let kubectl = kubectl_or_skip!();
    let component = kubectl.up.upload("env").await?;
    for round in 0..8 {
        let value = round.to_string();
        let spec = json!({"env": [{"name": "ROUND", "value": value}]});
        let file = kubectl.file("function.json", &function("env", &component, spec))?;
        kubectl.ok(&["apply", "-f", &file]).await?;
        kubectl.ok(&["wait", "--for=condition=Ready", "function/env", "--timeout=60s"]).await?;
        let answer = kubectl.up.http().get("/fn/default/env/").await?;
        ensure!(answer.json()?["ROUND"] == value, "{round}: {answer:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_is_shown_before_it_is_made() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let cli = kubectl.up.cli();
    kubectl.ok(&["create", "namespace", "shop"]).await?;
    let file = kubectl.file(
        "web.json",
        &json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "web"}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"runtimeClassName": "wasm",
                    "nodeSelector": {"no": "node"}, "containers": [{"name": "c", "image": "none"}]}}}}),
    )?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    until_listed(&kubectl, &["get", "pods", "-n", "shop"], |told| told.matches("Pending").count() == 2)
        .await?;
    let tree = cli.ok(&["delete", "deployment", "web", "-n", "shop", "--preview"]).await?;
    let lines: Vec<&str> = tree.lines().collect();
    ensure!(lines.first() == Some(&"deployment.apps/web"), "{tree}");
    ensure!(
        lines[1].starts_with("└─ replicaset.apps/web-") && lines[2].starts_with("   ├─ pod/web-"),
        "{tree}"
    );
    ensure!(lines.last() == Some(&"4 objects would be deleted"), "{tree}");
    let whole: Value =
        serde_json::from_str(&cli.ok(&["delete", "namespace", "shop", "--preview", "-o", "json"]).await?)?;
    let deleted = whole["deleted"].as_array().context("deleted")?;
    ensure!(deleted.iter().any(|object| object["kind"] == "ServiceAccount"), "{whole}");
    ensure!(deleted.iter().filter(|object| object["kind"] == "Pod").count() == 2, "{whole}");
    let told = cli.fails(&["delete", "deployment", "absent", "--preview"]).await?;
    ensure!(told.contains("not found"), "{told}");
    ensure!(kubectl.ok(&["get", "deployment", "-n", "shop", "-o", "name"]).await?.contains("web"));
    Ok(())
}
