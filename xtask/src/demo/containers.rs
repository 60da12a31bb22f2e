//! Containers on a separate server: an image from the built-in registry, a Deployment behind a Service and an
//! Ingress with TLS, an exec, a rolling update under load, a function that is half wasm and half container, a Job with
//! files. Needs root.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use anyhow::{Context, Result, ensure};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    command,
    http::Connection,
    image,
    server::{ServerProcess, wait_for},
    tools,
};
use serde_json::{Value, json};

use super::{Demo, SETTLE};

const PROGRAMS: [&str; 8] = ["kubectl", "containerd", "runc", "nft", "ip", "skopeo", "openssl", "curl"];
/// The image's name in pods, which does not depend on the registry's port.
const IMAGE: &str = "registry.mayfly.internal/demo/busybox:1";
const HOST: &str = "shop.example.com";
/// The number of calls for which a traffic split is counted.
const SPLIT_CALLS: usize = 100;

/// The reason why this machine cannot run containers.
pub(super) fn missing() -> Option<String> {
    if !tools::is_root() {
        return Some("not root".into());
    }
    let program = PROGRAMS.iter().find(|program| tools::find(program).is_none());
    program.map(|program| format!("no {program} on the PATH")).or_else(|| {
        let has_busybox = Path::new("/bin/busybox").is_file();
        (!has_busybox).then(|| "no static busybox at /bin/busybox".into())
    })
}

pub(super) fn run(scope: &Cleanup, binary: &Path, guests: &Path) -> Result<()> {
    let server =
        ServerProcess::start(scope, binary, &["--containers", "on", "--https-listen", "127.0.0.1:0"])?;
    // Containers outlive the server, so they are removed while it runs.
    let mut remove = Command::new("kubectl");
    remove.arg("--kubeconfig").arg(server.kubeconfig()).args(["delete", "--all", "--wait", "--timeout=60s"]);
    remove.arg("functions,deployments,replicasets,jobs,pods");
    scope.run_before_stop(remove);
    let demo = Demo { server: &server, guests };
    let shown = demo.containers(&scope.temporary_folder("image")?);
    shown.map_err(|error| {
        eprintln!("\nthe server's log ends:\n{}\n", server.log_tail());
        error.context("the demo of containers failed")
    })
}

/// Pods that respond with a version.
fn web(version: &str) -> Value {
    let labels = json!({"app": "web"});
    let script =
        "mkdir /www; echo \"version $VERSION\" > /www/index.html; exec busybox httpd -f -p 8000 -h /www";
    let container = json!({"name": "web", "image": IMAGE, "command": ["/bin/sh", "-c", script],
        "env": [{"name": "VERSION", "value": version}],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        // A pod keeps serving until every proxy has removed it.
        "lifecycle": {"preStop": {"sleep": {"seconds": 2}}}});
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
        "replicas": 2, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 4}}}})
}

/// An Ingress of the Service `web`, with the certificate of the Secret `shop`.
fn ingress() -> Value {
    let backend = json!({"service": {"name": "web", "port": {"number": 80}}});
    let paths = json!([{"path": "/", "pathType": "Prefix", "backend": backend}]);
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "shop"}, "spec": {
        "tls": [{"hosts": [HOST], "secretName": "shop"}],
        "rules": [{"host": HOST, "http": {"paths": paths}}]}})
}

/// A Job that counts the lines of an input and writes a file.
fn job() -> Value {
    let script = "wc -l < /mayfly/in/text > /mayfly/out/lines; mkdir -p /mayfly/out/artifacts; \
        busybox sort /mayfly/in/text > /mayfly/out/artifacts/sorted.txt";
    let inputs = json!({"parameters": {"text": "pear\napple\nplum\n"}}).to_string();
    let container = json!({"name": "count", "image": IMAGE, "command": ["/bin/sh", "-c", script]});
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "count"}, "spec": {
        "template": {"metadata": {"annotations": {"mayfly.dev/inputs": inputs}},
            "spec": {"restartPolicy": "Never", "containers": [container]}}}})
}

/// A client that sends requests without pause until it is stopped.
struct Load {
    answered: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    client: std::thread::JoinHandle<Result<()>>,
}

impl Load {
    fn start(address: SocketAddr) -> Self {
        let (answered, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let (count, is_over) = (answered.clone(), stop.clone());
        let client = std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let answer = Connection::open(address)?.get("/")?;
                ensure!(answer.status == 200, "{} {}", answer.status, answer.text());
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Self { answered, stop, client }
    }

    /// Stops the client; returns the number of responses.
    ///
    /// # Errors
    /// The first request that failed.
    fn stop(self) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        let count = self.answered.load(Ordering::Relaxed);
        let ended = self.client.join().map_err(|_| anyhow::anyhow!("the client panicked"))?;
        ended.with_context(|| format!("a request failed, after {count} successful ones"))?;
        Ok(count)
    }
}

impl Demo<'_> {
    fn containers(&self, folder: &Path) -> Result<()> {
        self.image(folder)?;
        let service = self.deployment(folder)?;
        self.names(service)?;
        self.ingress(folder)?;
        self.rolling_update(service)?;
        self.half_and_half()?;
        self.files_of_a_job(folder)
    }

    /// Prints a kubectl command, runs it and prints its output.
    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let words = arguments.iter().map(|word| match word.rsplit('/').next() {
            Some(file) if word.starts_with('/') => file.to_owned(),
            _ if word.contains(' ') => format!("'{word}'"),
            _ => (*word).to_owned(),
        });
        self.say(&format!("$ kubectl {}", words.collect::<Vec<_>>().join(" ")));
        let printed = self.server.kubectl(arguments)?;
        self.say(&printed);
        Ok(printed)
    }

    fn create(&self, folder: &Path, name: &str, object: &Value) -> Result<()> {
        let file = folder.join(format!("{name}.json"));
        fs::write(&file, object.to_string()).context("cannot write a manifest")?;
        self.kubectl(&["apply", "-f", &file.to_string_lossy()]).map(|_| ())
    }

    fn image(&self, folder: &Path) -> Result<()> {
        self.title("An image into the registry that is built in");
        let archive = image::busybox(folder, "demo/busybox:1")?;
        let to = format!("docker://{}/demo/busybox:1", self.server.admin);
        self.say(&format!("$ skopeo copy --dest-tls-verify=false docker-archive:image.tar {to}"));
        let from = format!("docker-archive:{}", archive.display());
        command::quietly(Command::new("skopeo").args(["copy", "--dest-tls-verify=false", &from, &to]))
    }

    /// The address of the Deployment's Service.
    fn deployment(&self, folder: &Path) -> Result<SocketAddr> {
        self.title("A Deployment of containers behind a Service");
        self.create(folder, "web", &web("1"))?;
        self.kubectl(&["rollout", "status", "deployment/web", "--timeout=60s"])?;
        self.kubectl(&["exec", "deployment/web", "--", "/bin/sh", "-c", "echo $HOSTNAME says $VERSION"])?;
        self.kubectl(&["expose", "deployment", "web", "--port=80", "--target-port=8000", "--type=NodePort"])?;
        let service: Value =
            serde_json::from_str(&self.server.kubectl(&["get", "service", "web", "-o", "json"])?)?;
        let ip = service["spec"]["clusterIP"].as_str().context("the Service has no address")?;
        let port =
            service["spec"]["ports"][0]["nodePort"].as_u64().context("the Service has no node port")?;
        // Node ports do not work on loopback addresses; this is the node's address on the bridge of its pods.
        let routes = self.server.kubectl(&["exec", "deployment/web", "--", "busybox", "ip", "route"])?;
        let node = routes.split("via ").nth(1).and_then(|rest| rest.split(' ').next());
        let node = node.with_context(|| format!("a pod has no default route: {routes}"))?;
        for url in [format!("{ip}:80"), format!("{node}:{port}")] {
            let answer = wait_for("the Service's answer", SETTLE, || {
                let answer = Connection::open(url.parse()?).and_then(|mut connection| connection.get("/"));
                Ok(answer.ok().filter(|answer| answer.status == 200))
            })?;
            self.say(&format!("$ curl http://{url}/  →  {}", answer.text().trim()));
        }
        Ok(format!("{ip}:80").parse()?)
    }

    fn names(&self, service: SocketAddr) -> Result<()> {
        self.title("The Service by its name, from a container and from a function of wasm");
        let fetch = ["exec", "deployment/web", "--", "wget", "-qO-", "http://web.default.svc.cluster.local/"];
        let printed = self.kubectl(&fetch)?;
        ensure!(printed.starts_with("version 1"), "the container got {printed:?} from {service}");
        self.deploy("proxy", &["--egress", "http://web.default"])?;
        let path = "/fn/default/proxy/?url=http://web.default/";
        let answer = self.connect()?.get(path)?;
        self.say(&format!(
            "$ curl http://{}{path}  →  {} {}",
            self.server.http,
            answer.status,
            answer.text()
        ));
        ensure!(answer.text().contains("version 1"), "the function got {}", answer.text());
        Ok(())
    }

    fn ingress(&self, folder: &Path) -> Result<()> {
        self.title("An Ingress with TLS");
        let (key, certificate) = (folder.join("tls.key"), folder.join("tls.crt"));
        let mut openssl = Command::new("openssl");
        openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        openssl.args(["-days", "1", "-subj", &format!("/CN={HOST}"), "-addext"]);
        openssl
            .arg(format!("subjectAltName=DNS:{HOST}"))
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&certificate);
        command::quietly(&mut openssl)?;
        let flags = [format!("--cert={}", certificate.display()), format!("--key={}", key.display())];
        self.say("$ kubectl create secret tls shop --cert=tls.crt --key=tls.key");
        self.server.kubectl(&["create", "secret", "tls", "shop", &flags[0], &flags[1]])?;
        self.create(folder, "shop", &ingress())?;
        let https = self.server.https.context("the server has no address for HTTPS")?;
        let (url, resolve) =
            (format!("https://{HOST}:{}/", https.port()), format!("{HOST}:{}:{}", https.port(), https.ip()));
        let body = wait_for("the Ingress", SETTLE, || {
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--noproxy", "*", "--resolve", &resolve]);
            Ok(command::output(curl.arg("--cacert").arg(&certificate).arg(&url)).ok())
        })?;
        self.say(&format!("$ curl --cacert tls.crt {url}  →  {}", body.trim()));
        Ok(())
    }

    fn rolling_update(&self, service: SocketAddr) -> Result<()> {
        self.title("A rolling update under load");
        let load = Load::start(service);
        self.kubectl(&["set", "env", "deployment/web", "VERSION=2"])?;
        self.kubectl(&["rollout", "status", "deployment/web", "--timeout=120s"])?;
        wait_for("the removal of the pods of version 1", SETTLE, || {
            let pods = self.server.kubectl(&["get", "pods", "-l", "app=web", "-o", "name"])?;
            Ok((pods.lines().count() == 2).then_some(()))
        })?;
        let answered = load.stop()?;
        self.say(&format!("{answered} requests during the update, none failed"));
        Ok(())
    }

    fn half_and_half(&self) -> Result<()> {
        self.title("A function, half of wasm and half a container");
        self.deploy("greet", &[])?;
        let script = "mkdir -p /www/cgi-bin; printf '#!/bin/sh\\nprintf \"content-type: application/json\\\\n\\\\n\"; \
            echo \"{\\\\\"message\\\\\": \\\\\"hello from a container\\\\\"}\"' > /www/cgi-bin/index.cgi; \
            busybox chmod +x /www/cgi-bin/index.cgi; exec busybox httpd -f -p \"$PORT\" -h /www";
        let program = ["--command", "/bin/sh", "--arg", "-c", "--arg", script];
        let container = ["deploy", "--image", IMAGE, "--name", "greet", "--port", "8081", "--timeout", "5s"];
        self.say(&format!("$ mayfly {} …", container.join(" ")));
        self.server.cli(&[&container[..], &program].concat())?;
        let traffic = json!({"spec": {"traffic": [
            {"revision": "greet-00001", "percent": 50}, {"revision": "greet-00002", "percent": 50}]}});
        self.kubectl(&["patch", "function", "greet", "--type=merge", "-p", &traffic.to_string()])?;
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        wait_for("both revisions answering", SETTLE, || {
            counts.clear();
            let mut connection = self.connect()?;
            for _ in 0..SPLIT_CALLS {
                let headers = [("content-type", "application/json")];
                let answer = connection.call("POST", "/fn/default/greet/", &headers, br#"{"name":"Ada"}"#)?;
                ensure!(answer.status == 200, "greet answered {}: {}", answer.status, answer.text());
                *counts.entry(answer.text().trim().to_owned()).or_default() += 1;
            }
            Ok((counts.len() == 2).then_some(()))
        })?;
        for (answer, count) in &counts {
            self.say(&format!("{count:>4} × {answer}"));
        }
        Ok(())
    }

    fn files_of_a_job(&self, folder: &Path) -> Result<()> {
        self.title("A Job of a container, with files in and out");
        self.create(folder, "count", &job())?;
        self.kubectl(&["wait", "--for=condition=complete", "job/count", "--timeout=60s"])?;
        let outputs = wait_for("the Job's outcome", SETTLE, || {
            let job: Value =
                serde_json::from_str(&self.server.kubectl(&["get", "job", "count", "-o", "json"])?)?;
            let outcomes = job["metadata"]["annotations"]["mayfly.dev/outcomes"].as_str();
            Ok(outcomes.map(serde_json::from_str::<Value>).transpose()?.map(|all| all[0]["outputs"].clone()))
        })?;
        let digest = outputs["artifacts"][0].as_str().context("the Job left no artifact")?;
        let sorted = self.show(&["artifact", "get", digest])?;
        ensure!(sorted == "apple\npear\nplum\n", "the Job sorted {sorted:?}");
        Ok(())
    }
}
