//! Services and DNS names from containers, functions and the host, with real containerd and nftables. Needs root.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use hyper_util::rt::TokioIo;
use mayfly_e2e::{full, skipped, test_name, wait};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::containers::{ContainerNode, archive, containers_or_skip};

/// The reason why this machine has no kernel rules or no client.
fn missing_program() -> Option<String> {
    let nft = ["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft"];
    let needed: [(&str, &[&str]); 2] = [("nft", &nft), ("curl", &["/usr/bin/curl"])];
    let missing = needed.iter().find(|(_, files)| !files.iter().any(|file| Path::new(file).is_file()));
    missing.map(|(name, _)| format!("no {name}"))
}

/// A pod with the host's programs: curl uses the system resolver (a static busybox cannot).
async fn client(node: &ContainerNode) -> Result<()> {
    let folders = ["/usr", "/lib64"].into_iter().filter(|folder| Path::new(folder).is_dir());
    let mounts = folders.chain(["/lib"]).map(|folder| {
        let host = if folder == "/lib" { "/usr/lib" } else { folder };
        (
            json!({"name": folder.trim_start_matches('/'), "mountPath": folder, "readOnly": true}),
            json!({"name": folder.trim_start_matches('/'), "hostPath": {"path": host}}),
        )
    });
    let (mounts, volumes): (Vec<_>, Vec<_>) = mounts.unzip();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "client"}, "spec": {
        "containers": [{"name": "c", "image": "busybox:local", "command": ["sleep", "1d"], "volumeMounts": mounts}],
        "volumes": volumes}});
    let file = node.kubectl.file("client", &pod)?;
    node.kubectl.ok(&["create", "-f", &file]).await?;
    node.ready("client").await
}

/// The output of curl in a pod.
async fn fetched(node: &ContainerNode, pod: &str, url: &str) -> Result<String> {
    let command = format!("/usr/bin/curl -sS -m 30 {url} 2>&1");
    Ok(node.kubectl.run(&["exec", pod, "--", "sh", "-c", &command]).await?.stdout)
}

/// Fetches a URL on the host; returns the body.
async fn fetched_on_host(url: &str) -> Result<String> {
    let output = tokio::process::Command::new("/usr/bin/curl").args(["-sS", "-m", "5", url]).output().await?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

async fn until_text(what: &str, look: impl AsyncFn() -> Result<String>, expected: &str) -> Result<()> {
    wait::until(what, || async { Ok((look().await? == expected).then_some(())) }).await
}

/// A Deployment of two pods that respond with a text, and its Service with a node port.
async fn web(node: &ContainerNode) -> Result<(String, u16)> {
    let script = "mkdir /www; echo from web > /www/index.html; exec busybox httpd -f -p 8000 -h /www";
    let labels = json!({"app": "web"});
    let container = json!({"name": "c", "image": "busybox:local", "command": ["sh", "-c", script],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
            "replicas": 2, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {
            "type": "NodePort", "selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": 8000}]}}]});
    let file = node.kubectl.file("web", &list)?;
    node.kubectl.ok(&["apply", "-f", &file]).await?;
    node.kubectl.ok(&["rollout", "status", "deployment/web", "--timeout=60s"]).await?;
    let path = "jsonpath={.spec.clusterIP} {.spec.ports[0].nodePort}";
    let addresses = node.kubectl.ok(&["get", "service", "web", "-o", path]).await?;
    let (ip, port) = addresses.trim().split_once(' ').context("no addresses")?;
    Ok((ip.to_owned(), port.parse()?))
}

/// A NetworkPolicy blocks a pod's access to a Service until it is changed; the node itself has access.
async fn policies(node: &ContainerNode, service_ip: &str) -> Result<()> {
    let url = format!("http://{service_ip}/");
    let policy = |ingress: serde_json::Value| {
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "web"},
            "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": ingress}})
    };
    let closed = node.kubectl.file("closed", &policy(json!([])))?;
    node.kubectl.ok(&["apply", "-f", &closed]).await?;
    wait::until("the policy keeps the client out", || async {
        let command = format!("/usr/bin/curl -sS -m 3 {url} 2>&1");
        let text = node.kubectl.run(&["exec", "client", "--", "sh", "-c", &command]).await?.stdout;
        Ok(text.contains("timed out").then_some(()))
    })
    .await?;
    ensure!(fetched_on_host(&url).await? == "from web\n", "the node reaches its pods");
    let ingress = json!([{"from": [{"podSelector": {}}], "ports": [{"port": 8000}]}]);
    let open = node.kubectl.file("open", &policy(ingress))?;
    node.kubectl.ok(&["apply", "-f", &open]).await?;
    until_text("the policy lets the client in", async || fetched(node, "client", &url).await, "from web\n")
        .await?;
    node.kubectl.ok(&["delete", "networkpolicy", "web"]).await?;
    wait::until("the policy's rules are gone", || async {
        Ok(node.tables().iter().all(|table| !table.ends_with("-policy")).then_some(()))
    })
    .await
}

/// Between containers and components the policies of both sides count, though the kernel sees neither of the pods of
/// components nor which function connects.
async fn policies_of_components(node: &ContainerNode) -> Result<()> {
    let up = &node.kubectl.up;
    let image = format!("component.mayfly.dev/sha256@{}", up.upload("hello").await?);
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "component", "labels": {"app": "component"}}, "spec": {
            "runtimeClassName": "wasm", "containers": [{"name": "c", "image": image, "ports": [{"containerPort": 8080}]}]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "component"}, "spec": {
            "selector": {"app": "component"}, "ports": [{"port": 80, "targetPort": 8080}]}}]});
    node.kubectl.ok(&["apply", "-f", &node.kubectl.file("component", &list)?]).await?;
    let ip = node.kubectl.ok(&["get", "service", "component", "-o", "jsonpath={.spec.clusterIP}"]).await?;
    let url = format!("http://{ip}/");
    let expected = wait::until("the component answers the host", || async {
        Ok(Some(fetched_on_host(&url).await?).filter(|text| !text.is_empty()))
    })
    .await?;
    let answers = |what| until_text(what, async || fetched(node, "client", &url).await, &expected);
    answers("the component answers a container").await?;
    let policy = |app: &str, ingress: serde_json::Value| {
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": app},
            "spec": {"podSelector": {"matchLabels": {"app": app}}, "ingress": ingress}})
    };
    let closed = node.kubectl.file("component-closed", &policy("component", json!([])))?;
    node.kubectl.ok(&["apply", "-f", &closed]).await?;
    wait::until("the policy keeps the container out", || async {
        let text = fetched(node, "client", &url).await?;
        Ok((text.contains("Empty reply") || text.contains("reset by peer")).then_some(()))
    })
    .await?;
    ensure!(fetched_on_host(&url).await? == expected, "the node reaches its pods");
    let open = policy("component", json!([{"from": [{"podSelector": {}}], "ports": [{"port": 8080}]}]));
    node.kubectl.ok(&["apply", "-f", &node.kubectl.file("component-open", &open)?]).await?;
    answers("the policy lets the container in").await?;
    node.kubectl.ok(&["delete", "networkpolicy", "component"]).await?;

    // From a function to containers.
    let called = || async { up.http().get("/fn/default/proxy/?url=http://web.default/").await };
    let other = json!([{"from": [{"podSelector": {"matchLabels": {"app": "component"}}}]}]);
    node.kubectl.ok(&["apply", "-f", &node.kubectl.file("web-closed", &policy("web", other))?]).await?;
    wait::until("the policy keeps the function out", || async {
        let answer = called().await?;
        Ok((answer.status == 502 && answer.text().contains("Denied")).then_some(()))
    })
    .await?;
    let function = json!([{"from": [{"podSelector": {"matchLabels": {"mayfly.dev/function": "proxy"}}}],
        "ports": [{"port": 8000}]}]);
    node.kubectl.ok(&["apply", "-f", &node.kubectl.file("web-open", &policy("web", function))?]).await?;
    until_text("the policy lets the function in", async || Ok(called().await?.text()), "from web\n").await?;
    node.kubectl.ok(&["delete", "networkpolicy", "web"]).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn services_and_names_are_reached_from_everywhere() -> Result<()> {
    containers_or_skip!();
    if let Some(reason) = missing_program() {
        skipped(test_name!(), &reason);
        return Ok(());
    }
    let has_guests = ["hello", "proxy"].iter().all(|name| mayfly_e2e::guest(name).is_ok());
    let node = ContainerNode::start().await?;
    let up = &node.kubectl.up;
    if has_guests {
        up.deploy("hello", "hello", &[]).await?;
        up.deploy(
            "proxy",
            "proxy",
            &["--egress", "http://web.default", "--egress", "http://web.default.svc.cluster.local"],
        )
        .await?;
    }
    // Functions alone change nothing on the host.
    ensure!(node.tables().is_empty(), "{:?}", node.tables());

    let (ip, node_port) = web(&node).await?;
    ensure!(node.tables().len() == 2, "one table for each family: {:?}", node.tables());
    client(&node).await?;

    // The host: cluster IP, node port on an address of the node, name.
    until_text(
        "the cluster IP answers on the host",
        async || fetched_on_host(&format!("http://{ip}/")).await,
        "from web\n",
    )
    .await?;
    let bridge = std::fs::read(node.folder.path().join("d/containers/network/bridge.json"))?;
    let range = serde_json::from_slice::<serde_json::Value>(&bridge)?["range"]
        .as_str()
        .context("no range")?
        .to_owned();
    let gateway = range.replace(".0/24", ".1");
    until_text(
        "the node port answers",
        async || fetched_on_host(&format!("http://{gateway}:{node_port}/")).await,
        "from web\n",
    )
    .await?;
    let dns = node
        .kubectl
        .ok(&["-n", "kube-system", "get", "service", "kube-dns", "-o", "jsonpath={.spec.clusterIP}"])
        .await?;
    let lookup = tokio::process::Command::new("/bin/busybox")
        .args(["nslookup", "web.default.svc.cluster.local", &dns])
        .output()
        .await?;
    ensure!(String::from_utf8_lossy(&lookup.stdout).contains(&ip), "{lookup:?}");

    // A container: cluster IP, names with and without the search list, node port.
    let urls = [
        ip.clone(),
        "web".into(),
        "web.default".into(),
        "web.default.svc.cluster.local".into(),
        format!("{gateway}:{node_port}"),
    ];
    for host in urls {
        let text = fetched(&node, "client", &format!("http://{host}/")).await?;
        ensure!(text == "from web\n", "{host}: {text:?}");
    }
    let resolv = node.exec("client", "cat /etc/resolv.conf").await?;
    ensure!(resolv.starts_with(&format!("nameserver {dns}\nsearch default.svc.cluster.local ")), "{resolv}");
    // A name without a Service does not resolve.
    let text = fetched(&node, "client", "http://nothing.default/").await?;
    ensure!(text.contains("Could not resolve host"), "{text:?}");

    policies(&node, &ip).await?;
    if has_guests {
        policies_of_components(&node).await?;
        // A function, by name: listed destinations only.
        for name in ["web.default", "web.default.svc.cluster.local"] {
            let answer = up.http().get(&format!("/fn/default/proxy/?url=http://{name}/")).await?;
            ensure!(answer.status == 200 && answer.text() == "from web\n", "{name}: {answer:?}");
        }
        // A Service over a function, which has no replica yet: from a container, from the host, and by its short name.
        let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "greeting"},
            "spec": {"selector": {"mayfly.dev/function": "hello"}, "ports": [{"name": "http", "port": 80}]}});
        let file = node.kubectl.file("greeting", &service)?;
        node.kubectl.ok(&["apply", "-f", &file]).await?;
        let expected = up.http().get("/fn/default/hello").await?.text();
        until_text(
            "a container reaches the function",
            async || fetched(&node, "client", "http://greeting/").await,
            &expected,
        )
        .await?;
        let ip = node.kubectl.ok(&["get", "service", "greeting", "-o", "jsonpath={.spec.clusterIP}"]).await?;
        let text = fetched_on_host(&format!("http://{ip}/")).await?;
        ensure!(text == expected, "{text:?}");
        let denied = up.http().get(&format!("/fn/default/proxy/?url=http://{ip}/")).await?;
        ensure!(denied.status == 502, "{denied:?}");
    }
    // A container function answers its first request from zero, also through its Service.
    let script = "mkdir /www; echo from an image > /www/index.html; exec busybox httpd -f -p 8080 -h /www";
    let archive = archive(node.folder.path(), "web:local", &["/bin/sh", "-c", script])?;
    up.cli().ok(&["image", "import", &archive.to_string_lossy()]).await?;
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": "image"}, "spec": {
            "source": {"image": "web:local"}, "limits": {"timeout": "60s"}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "image"}, "spec": {
            "selector": {"mayfly.dev/function": "image"}, "ports": [{"port": 80}]}}]});
    let file = node.kubectl.file("image", &list)?;
    node.kubectl.ok(&["apply", "-f", &file]).await?;
    until_text(
        "the image answers from zero",
        async || fetched(&node, "client", "http://image/").await,
        "from an image\n",
    )
    .await?;
    node.kubectl.ok(&["delete", "function", "image", "--cascade=foreground"]).await?;
    node.kubectl.ok(&["delete", "deployment/web", "service/web", "--cascade=foreground"]).await?;
    node.kubectl.ok(&["delete", "pod", "--all", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}

/// A pod that upgrades a connection, and then echoes.
async fn changes_the_protocol(node: &ContainerNode) -> Result<()> {
    let script = "while read -r line; do [ ${#line} -le 1 ] && break; done; \
         printf 'HTTP/1.1 101 Switching Protocols\\r\\nConnection: upgrade\\r\\nUpgrade: echo\\r\\n\\r\\n'; \
         exec busybox cat";
    let command = ["busybox", "nc", "-ll", "-p", "9000", "-e", "sh", "-c", script];
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "echo"}, "spec": {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "busybox:local", "command": command}]}});
    node.kubectl.ok(&["create", "-f", &node.kubectl.file("echo", &pod)?]).await?;
    node.ready("echo").await?;
    let api = node.kubectl.up.api()?;
    let mut response = wait::until("the pod changes the protocol", || async {
        let request = api.request(http::Method::GET, "/api/v1/namespaces/default/pods/echo:9000/proxy/");
        let request = request.header("connection", "upgrade").header("upgrade", "echo").body(full(""))?;
        let response = api.connect().await?.send_request(request).await?;
        ensure!(response.status() == 101, "{response:?}");
        Ok(Some(response))
    })
    .await?;
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut response).await?);
    for text in ["ping\n", "again\n"] {
        stream.write_all(text.as_bytes()).await?;
        let mut read = vec![0; text.len()];
        tokio::time::timeout(wait::PATIENCE, stream.read_exact(&mut read)).await??;
        ensure!(read == text.as_bytes(), "{read:?}");
    }
    drop(stream);
    node.kubectl.ok(&["delete", "pod", "echo", "--timeout=50s"]).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_pass_through_the_api_to_pods_and_services() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    web(&node).await?;
    let raw = async |path: &str| {
        node.kubectl.run(&["get", "--raw", &format!("/api/v1/namespaces/default/{path}")]).await
    };
    let pods = node.kubectl.ok(&["get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.name}"]);
    let pods = pods.await?;
    let pod = pods.split(' ').next().context("no pod")?;
    let to_pod = format!("pods/http:{pod}:8000/proxy/index.html");
    for path in
        ["services/web:80/proxy/", "services/web:http/proxy/index.html?a=b", "services/web:80/proxy", &to_pod]
    {
        let answer = raw(path).await?;
        ensure!(answer.stdout == "from web\n", "{path}: {answer:?}");
    }
    for (path, words) in [
        ("services/web:80/proxy/absent", "could not find the requested resource"),
        ("services/web:81/proxy/", "no service port"),
        ("services/absent/proxy/", "services \"absent\" not found"),
        (&*format!("pods/{pod}:9/proxy/"), "error trying to reach service"),
        (&*format!("pods/ftp:{pod}:8000/proxy/"), "invalid pod request"),
    ] {
        let answer = raw(path).await?;
        ensure!(answer.code != Some(0) && answer.stderr.contains(words), "{path}: {answer:?}");
    }
    changes_the_protocol(&node).await?;
    node.kubectl.ok(&["scale", "deployment", "web", "--replicas=0"]).await?;
    wait::until("no endpoint is left", || async {
        let answer = raw("services/web:80/proxy/").await?;
        Ok(answer.stderr.contains("no endpoints available for service").then_some(()))
    })
    .await?;
    node.kubectl.ok(&["delete", "service,deployment", "web"]).await?;
    node.leaves_nothing().await
}
