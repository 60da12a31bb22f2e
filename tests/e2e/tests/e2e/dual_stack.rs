//! IPv6 addresses of Services and pods: real containerd, nftables and a kernel with IPv6. Needs root.

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, skipped, test_name, wait};
use serde_json::json;

use crate::containers::{ContainerNode, containers_or_skip};

/// The reason why this host has no IPv6 for containers.
fn missing() -> Option<&'static str> {
    let disabled = std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6");
    if !disabled.is_ok_and(|text| text.trim() == "0") {
        return Some("the kernel has no IPv6");
    }
    let runs = |program: &str, arguments: &[&str]| {
        let output = std::process::Command::new(program).args(arguments).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !runs("nft", &["list", "tables"]) {
        return Some("no right to use nft");
    }
    (!runs("ip6tables", &["-t", "nat", "-L", "-n"])).then_some("no ip6tables with a nat table")
}

#[tokio::test(flavor = "multi_thread")]
async fn services_and_pods_have_addresses_of_both_families() -> Result<()> {
    containers_or_skip!();
    if let Some(reason) = missing() {
        skipped(test_name!(), reason);
        return Ok(());
    }
    let node = ContainerNode::start_with(&["--dual-stack"]).await?;
    let kubectl = &node.kubectl;
    // httpd of busybox listens on both families.
    let script = "mkdir /www; echo from web > /www/index.html; exec busybox httpd -f -p 8000 -h /www";
    let labels = json!({"app": "web"});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "labels": labels}, "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": "busybox:local", "command": ["sh", "-c", script]}]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {
            "ipFamilyPolicy": "RequireDualStack", "selector": labels,
            "ports": [{"name": "http", "port": 80, "targetPort": 8000}]}}]});
    let file = kubectl.file("web", &list)?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    node.ready("web").await?;
    let field = async |kind: &str, name: &str, path: &str| {
        let path = format!("jsonpath={{{path}}}");
        anyhow::Ok(kubectl.ok(&["get", kind, name, "-o", &path]).await?.trim().to_owned())
    };
    let pod = field("pod", "web", ".status.podIPs[1].ip").await?;
    ensure!(pod.starts_with("fd6d:6179:666c:d4"), "{pod:?}");
    let service = field("service", "web", ".spec.clusterIPs[1]").await?;
    ensure!(service.starts_with("fd6d:6179:666c:"), "{service:?}");
    let families = field("service", "web", ".spec.ipFamilies").await?;
    ensure!(families == r#"["IPv4","IPv6"]"#, "{families}");
    let slices = ["get", "endpointslices", "-l", "kubernetes.io/service-name=web", "-o"];
    wait::until("an EndpointSlice of each family", || async {
        let path = "jsonpath={range .items[*]}{.addressType}:{.endpoints[0].addresses[0]} {end}";
        let found = kubectl.ok(&[&slices[..], &[path]].concat()).await?;
        Ok((found.contains("IPv4:10.212.") && found.contains(&format!("IPv6:{pod}"))).then_some(()))
    })
    .await?;
    // From the node, at the pod's own address and at the Service's. (busybox's static wget crashes on IPv6 addresses.)
    for address in [format!("[{pod}]:8000"), format!("[{service}]:80")] {
        wait::until(&format!("the node reaches {address}"), || async {
            let url = format!("http://{address}/");
            let mut curl = tokio::process::Command::new("curl");
            let output = curl.args(["-sS", "-g", "-m", "5", &url]).output().await?;
            Ok((output.stdout == b"from web\n").then_some(()))
        })
        .await?;
    }
    let dns =
        kubectl.ok(&["-n", "kube-system", "get", "service", "kube-dns", "-o", "jsonpath={.spec.clusterIP}"]);
    let dns = dns.await?;
    let lookup = tokio::process::Command::new("/bin/busybox")
        .args(["nslookup", "-type=aaaa", "web.default.svc.cluster.local", dns.trim()])
        .output()
        .await?;
    ensure!(String::from_utf8_lossy(&lookup.stdout).contains(&service), "{lookup:?}");
    kubectl.ok(&["delete", "pod", "--all", "--grace-period=0", "--force"]).await?;
    kubectl.ok(&["delete", "service", "web"]).await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_of_one_family_refuses_two() -> Result<()> {
    let up = Up::start().await?;
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"ipFamilyPolicy": "RequireDualStack", "ports": [{"port": 80}]}});
    let refused = up.api()?.post("/api/v1/namespaces/default/services", &service).await?;
    let why = "this cluster is not configured for dual-stack services";
    ensure!(refused.status == 422 && refused.message().contains(why), "{refused:?}");
    let finished = Start::default().with(&["--network", "loopback", "--dual-stack"]).refused().await?;
    let said = finished.stderr.lines().last().context("no message")?.to_owned();
    ensure!(said.contains("--dual-stack") && said.contains("userspace"), "{said}");
    Ok(())
}
