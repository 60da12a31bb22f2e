//! The lifecycle of containers: probes, lifecycle hooks, sidecars, readiness gates, ephemeral containers. Each scenario
//! is one of upstream's node conformance tests, whose name is in a comment.

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{skipped, test_name, wait};
use serde_json::{Value, json};

use crate::containers::{ContainerNode, containers_or_skip};

/// A pod of one container `c` that runs a script, with further fields of the container.
pub(crate) fn pod(name: &str, script: &str, container: Value, spec: Value) -> Value {
    let mut first = json!({"name": "c", "image": "busybox:local", "command": ["sh", "-c", script]});
    extend(&mut first, container);
    // A shell as process 1 ignores SIGTERM.
    let mut all = json!({"terminationGracePeriodSeconds": 1, "containers": [first]});
    extend(&mut all, spec);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": all})
}

pub(crate) fn extend(into: &mut Value, from: Value) {
    if let (Some(into), Value::Object(from)) = (into.as_object_mut(), from) {
        into.extend(from);
    }
}

impl ContainerNode {
    pub(crate) async fn create(&self, pod: &Value) -> Result<()> {
        let name = pod["metadata"]["name"].as_str().context("no name")?;
        let file = self.kubectl.file(name, pod)?;
        self.kubectl.ok(&["create", "-f", &file]).await?;
        Ok(())
    }

    /// A field of a pod.
    pub(crate) async fn field(&self, name: &str, path: &str) -> Result<String> {
        self.kubectl.ok(&["get", "pod", name, "-o", &format!("jsonpath={path}")]).await
    }

    /// Waits until a field of a pod has the expected value.
    pub(crate) async fn until_field(
        &self,
        name: &str,
        path: &str,
        is: impl Fn(&str) -> bool,
    ) -> Result<String> {
        wait::until(&format!("{name}: {path}"), || async {
            let value = self.field(name, path).await?;
            Ok(is(&value).then_some(value))
        })
        .await
    }

    pub(crate) async fn until_restarted(&self, name: &str) -> Result<()> {
        let is_more = |text: &str| text.parse::<u32>().is_ok_and(|count| count > 0);
        self.until_field(name, "{.status.containerStatuses[0].restartCount}", is_more).await.map(drop)
    }

    pub(crate) async fn never_restarted(&self, name: &str) -> Result<()> {
        let count = self.field(name, "{.status.containerStatuses[0].restartCount}").await?;
        ensure!(count == "0", "{name} was restarted {count} times");
        Ok(())
    }

    /// Waits for an event about a pod.
    pub(crate) async fn until_event(&self, name: &str, text: &str) -> Result<()> {
        let selector = format!("involvedObject.name={name}");
        wait::until(&format!("{name}: the event {text:?}"), || async {
            let path = "jsonpath={range .items[*]}{.reason}: {.message}{\"\\n\"}{end}";
            let events =
                self.kubectl.ok(&["get", "events", "--field-selector", &selector, "-o", path]).await?;
            Ok(events.contains(text).then_some(()))
        })
        .await
    }

    pub(crate) async fn delete_all(self) -> Result<()> {
        self.kubectl.ok(&["delete", "pod", "--all", "--grace-period=0", "--force"]).await?;
        self.leaves_nothing().await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_decide_about_restarts_and_readiness() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let cat = json!({"exec": {"command": ["cat", "/tmp-health"]}, "periodSeconds": 1, "failureThreshold": 1});
    let get =
        json!({"httpGet": {"path": "/healthz", "port": "web"}, "periodSeconds": 1, "failureThreshold": 1});
    let socket = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 2, "initialDelaySeconds": 1});
    let serve = "mkdir /www; echo ok > /www/healthz; busybox httpd -p 8080 -h /www; ";
    let ports = json!([{"name": "web", "containerPort": 8080}]);
    for pod in [
        // should be restarted with a exec "cat /tmp/health" liveness probe
        pod(
            "exec",
            "echo ok > /tmp-health; sleep 2; busybox rm /tmp-health; exec sleep 1d",
            json!({"livenessProbe": cat}),
            json!({}),
        ),
        // should be restarted with a /healthz http liveness probe
        pod(
            "http",
            &format!("{serve} sleep 2; busybox rm /www/healthz; exec sleep 1d"),
            json!({"livenessProbe": get, "ports": ports}),
            json!({}),
        ),
        // should *not* be restarted with a tcp:8080 liveness probe
        pod(
            "tcp",
            &format!("{serve} exec sleep 1d"),
            json!({"livenessProbe": socket, "readinessProbe": get, "ports": ports}),
            json!({}),
        ),
        // should be restarted by liveness probe after startup probe enables it
        pod(
            "startup",
            "sleep 2; echo ok > /tmp-started; exec sleep 1d",
            json!({"livenessProbe": cat, "startupProbe": {"exec": {"command": ["cat", "/tmp-started"]}, "periodSeconds": 1,
                "failureThreshold": 60}}),
            json!({}),
        ),
        // with readiness probe that fails should never be ready and never restart
        pod(
            "unready",
            "exec sleep 1d",
            json!({"readinessProbe": {"exec": {"command": ["test", "a", "=", "b"]}, "periodSeconds": 1}}),
            json!({}),
        ),
        // should mark readiness on pods to false when the command takes longer than the timeout
        pod(
            "hung",
            "exec sleep 1d",
            json!({"readinessProbe": {"exec": {"command": ["sleep", "2d"]}, "periodSeconds": 1,
            "failureThreshold": 1}}),
            json!({}),
        ),
    ] {
        node.create(&pod).await?;
    }
    node.ready("tcp").await?;
    node.until_event("exec", "Unhealthy: Liveness probe failed: cat: can't open '/tmp-health'").await?;
    node.until_event("exec", "Killing: Container c failed liveness probe, will be restarted").await?;
    node.until_restarted("exec").await?;
    node.until_event("http", "Unhealthy: Liveness probe failed: HTTP probe failed with statuscode: 404")
        .await?;
    node.until_restarted("http").await?;
    node.until_event("startup", "Unhealthy: Startup probe failed").await?;
    node.until_event("startup", "Unhealthy: Liveness probe failed").await?;
    node.until_restarted("startup").await?;
    node.until_event("unready", "Unhealthy: Readiness probe failed").await?;
    node.until_event("hung", "timed out").await?;
    // A hung probe is killed; at most the next one runs.
    let sleeping = node.exec("hung", "busybox ps | busybox grep -c '[s]leep 2d' || true").await?;
    ensure!(sleeping.trim().parse::<u32>()? <= 2, "{sleeping}");
    for name in ["unready", "hung"] {
        let ready = node.field(name, "{.status.conditions[?(@.type=='Ready')].status}").await?;
        ensure!(ready == "False", "{name} is ready: {ready}");
        node.never_restarted(name).await?;
    }
    node.never_restarted("tcp").await?;
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_run_after_the_start_and_before_the_end() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let host = node.folder.path().join("host");
    std::fs::create_dir(&host)?;
    let volumes =
        json!({"volumes": [{"name": "h", "hostPath": {"path": host}}], "terminationGracePeriodSeconds": 20});
    let mounts = json!([{"name": "h", "mountPath": "/h"}]);
    let hook = |script: &str| json!({"exec": {"command": ["sh", "-c", script]}});
    let trap = "trap 'echo term >> /h/log; exit 0' TERM; while true; do sleep 0.1; done";
    // should execute poststart exec hook properly, should execute prestop exec hook properly
    let lifecycle = json!({"postStart": hook("echo post >> /h/log"), "preStop": hook("echo pre >> /h/log")});
    node.create(&pod("hooks", trap, json!({"lifecycle": lifecycle, "volumeMounts": mounts}), volumes))
        .await?;
    // A container whose postStart hook fails is killed and starts again.
    let lifecycle = json!({"postStart": hook("echo broken; exit 3")});
    node.create(&pod("broken", "exec sleep 1d", json!({"lifecycle": lifecycle}), json!({}))).await?;
    // A preStop hook that takes longer than the grace period does not delay the end.
    let lifecycle = json!({"preStop": {"sleep": {"seconds": 3600}}});
    let grace = json!({"terminationGracePeriodSeconds": 5});
    node.create(&pod("slow", "exec sleep 1d", json!({"lifecycle": lifecycle}), grace)).await?;
    node.ready("hooks").await?;
    node.ready("slow").await?;
    let text = std::fs::read_to_string(host.join("log"))?;
    ensure!(text == "post\n", "ready before its hook: {text:?}");
    node.until_event(
        "broken",
        "FailedPostStartHook: PostStartHook failed: command 'sh -c echo broken; exit 3' exited with 3",
    )
    .await?;
    node.until_restarted("broken").await?;
    node.kubectl.ok(&["delete", "pod", "hooks", "slow"]).await?;
    let text = std::fs::read_to_string(host.join("log"))?;
    ensure!(text == "post\npre\nterm\n", "{text:?}");
    node.until_event("slow", "FailedPreStopHook: PreStopHook failed").await?;
    node.until_event("hooks", "Killing: Stopping container c").await?;
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn sidecars_start_first_restart_and_end_last() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let host = node.folder.path().join("host");
    std::fs::create_dir(&host)?;
    let mounts = json!([{"name": "h", "mountPath": "/h"}]);
    let runs = |name: &str| {
        format!(
            "echo {name}+ >> /h/log; trap 'echo {name}- >> /h/log; exit 0' TERM; while true; do sleep 0.1; done"
        )
    };
    let container = |name: &str, script: String, more: Value| {
        let mut container = json!({"name": name, "image": "busybox:local", "command": ["sh", "-c", script],
            "volumeMounts": mounts});
        extend(&mut container, more);
        container
    };
    let started =
        json!({"exec": {"command": ["test", "-f", "/h/go"]}, "periodSeconds": 1, "failureThreshold": 100});
    // should start and stop sidecars in order, should hold back on the startup probe of a sidecar
    let inits = json!([
        container("s1", runs("s1"), json!({"restartPolicy": "Always", "startupProbe": started})),
        container("i", "echo i >> /h/log".into(), json!({})),
        container("s2", runs("s2"), json!({"restartPolicy": "Always"}))
    ]);
    let spec = json!({"initContainers": inits, "terminationGracePeriodSeconds": 20,
        "containers": [container("c", runs("c"), json!({}))],
        "volumes": [{"name": "h", "hostPath": {"path": host}}]});
    node.create(&pod("order", "", json!({}), spec)).await?;
    node.until_event("order", "Unhealthy: Startup probe failed").await?;
    let text = std::fs::read_to_string(host.join("log"))?;
    ensure!(text == "s1+\n", "started behind a sidecar that has not started: {text:?}");
    std::fs::write(host.join("go"), "")?;
    node.ready("order").await?;
    let waited = || std::fs::read_to_string(host.join("log")).unwrap_or_default();
    wait::until("all run", || async { Ok(waited().contains("\nc+").then_some(())) }).await?;
    ensure!(waited() == "s1+\ni\ns2+\nc+\n", "{:?}", waited());
    // A sidecar that ends starts again, and nothing else does.
    node.kubectl.ok(&["exec", "order", "-c", "s2", "--", "sh", "-c", "kill 1"]).await?;
    node.until_field("order", "{.status.initContainerStatuses[2].restartCount}", |count| count == "1")
        .await?;
    node.never_restarted("order").await?;
    node.ready("order").await?;
    wait::until("it runs again", || async { Ok(waited().ends_with("s2-\ns2+\n").then_some(())) }).await?;
    node.kubectl.ok(&["delete", "pod", "order"]).await?;
    ensure!(waited() == "s1+\ni\ns2+\nc+\ns2-\ns2+\nc-\ns2-\ns1-\n", "{:?}", waited());
    // A pod ends with its application containers.
    let sidecar = json!([{"name": "s", "image": "busybox:local", "command": ["sleep", "1d"], "restartPolicy": "Always"}]);
    let spec = json!({"restartPolicy": "Never", "initContainers": sidecar});
    node.create(&pod("done", "exit 0", json!({}), spec)).await?;
    node.until_field("done", "{.status.phase}", |phase| phase == "Succeeded").await?;
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn gates_and_debuggers() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    // should support pod readiness gates
    let gates = json!({"readinessGates": [{"conditionType": "example.org/checked"}]});
    node.create(&pod("gated", "exec sleep 1d", json!({}), gates)).await?;
    let condition = |kind: &str| format!("{{.status.conditions[?(@.type=='{kind}')].status}}");
    node.until_field("gated", &condition("ContainersReady"), |status| status == "True").await?;
    ensure!(node.field("gated", &condition("Ready")).await? == "False");
    let patch =
        json!({"status": {"conditions": [{"type": "example.org/checked", "status": "True"}]}}).to_string();
    node.kubectl.ok(&["patch", "pod", "gated", "--subresource=status", "-p", &patch]).await?;
    node.ready("gated").await?;
    // will start an ephemeral container in an existing pod
    node.run("b").await?;
    let script = "echo looking; busybox ps; exec sleep 1d";
    node.kubectl
        .ok(&[
            "debug",
            "b",
            "--image=busybox:local",
            "--target=b",
            "-c",
            "debugger",
            "--",
            "sh",
            "-c",
            script,
        ])
        .await?;
    let state = "{.status.ephemeralContainerStatuses[0].state.running.startedAt}";
    node.until_field("b", state, |started| !started.is_empty()).await?;
    wait::until("the debugger sees the processes of its target", || async {
        let log = node.kubectl.ok(&["logs", "b", "-c", "debugger"]).await?;
        // The first process is the target's.
        let first = log.lines().find(|line| line.trim_start().starts_with("1 ")).unwrap_or_default();
        Ok(first.ends_with("sleep 1d").then_some(()))
    })
    .await?;
    ensure!(node.kubectl.ok(&["exec", "b", "-c", "debugger", "--", "echo", "inside"]).await? == "inside\n");
    node.never_restarted("b").await?;
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_tokens_and_conditions_of_the_node() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let profile = |profile: Value| json!({"securityContext": {"seccompProfile": profile}});
    let folder = node.folder.path().join("d/containers/seccomp");
    std::fs::create_dir_all(&folder)?;
    let own = json!({"defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]});
    std::fs::write(folder.join("no-mkdir.json"), own.to_string())?;
    // should support seccomp unconfined, default and localhost profiles on the container
    for (name, seccomp) in [
        ("unconfined", json!({"type": "Unconfined"})),
        ("default", json!({"type": "RuntimeDefault"})),
        ("localhost", json!({"type": "Localhost", "localhostProfile": "no-mkdir.json"})),
        ("missing", json!({"type": "Localhost", "localhostProfile": "none.json"})),
    ] {
        node.create(&pod(name, "exec sleep 1d", profile(seccomp), json!({}))).await?;
    }
    for (name, mode) in [("unconfined", "0"), ("default", "2"), ("localhost", "2")] {
        node.ready(name).await?;
        let said = node.exec(name, "busybox grep Seccomp: /proc/1/status").await?;
        ensure!(said.trim().ends_with(mode), "{name}: {said}");
    }
    let denied = node.exec("localhost", "mkdir /x 2>&1 || true").await?;
    ensure!(denied.contains("not permitted"), "{denied}");
    ensure!(node.exec("default", "mkdir /x && echo made").await? == "made\n");
    node.until_event("missing", "cannot read the seccomp profile").await?;
    // should mount an API token into pods
    let token = "/var/run/secrets/kubernetes.io/serviceaccount";
    let said =
        node.exec("unconfined", &format!("cat {token}/namespace; echo; wc -c < {token}/token")).await?;
    let (namespace, size) = said.split_once('\n').context("two lines")?;
    ensure!(namespace == "default" && size.trim().parse::<usize>()? > 100, "{said}");
    let issued = node.exec("unconfined", &format!("cat {token}/token")).await?;
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": issued}});
    let file = node.kubectl.file("review", &review)?;
    let reviewed =
        node.kubectl.ok(&["create", "-f", &file, "-o", "jsonpath={.status.user.username}"]).await?;
    ensure!(reviewed == "system:serviceaccount:default:default", "{reviewed:?}");
    // should be created as a static pod if its file exists, and be removed with it
    let manifest = pod("fixed", "exec sleep 1d", json!({}), json!({}));
    let folder = node.folder.path().join("d/containers/static-pods");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("fixed.yaml"), manifest.to_string())?;
    let mirror = wait::until("the static pod is there", || async {
        let names = node.kubectl.ok(&["get", "pods", "-o", "jsonpath={.items[*].metadata.name}"]).await?;
        Ok(names.split(' ').find(|name| name.starts_with("fixed-")).map(str::to_owned))
    })
    .await?;
    node.ready(&mirror).await?;
    std::fs::remove_file(folder.join("fixed.yaml"))?;
    node.kubectl.ok(&["wait", "--for=delete", &format!("pod/{mirror}"), "--timeout=60s"]).await?;
    // The node's conditions are measured.
    let path = "jsonpath={range .items[0].status.conditions[*]}{.type}={.reason} {end}";
    let conditions = node.kubectl.ok(&["get", "nodes", "-o", path]).await?;
    ensure!(
        conditions.contains("MemoryPressure=KubeletHas") && conditions.contains("Ready=KubeletReady"),
        "{conditions}"
    );
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_of_a_pod_may_share_their_processes() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let container = |name: &str, seconds: &str| json!({"name": name, "image": "busybox:local", "command": ["sleep", seconds]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {
        "shareProcessNamespace": true, "terminationGracePeriodSeconds": 0,
        "containers": [container("a", "11111"), container("b", "22222")]}});
    node.kubectl.ok(&["create", "-f", &node.kubectl.file("pod", &pod)?]).await?;
    node.ready("p").await?;
    let seen = node.exec("p", "busybox ps -o pid,args").await?;
    ensure!(seen.contains("sleep 11111") && seen.contains("sleep 22222"), "{seen}");
    let first = seen.lines().find(|line| line.split_whitespace().next() == Some("1"));
    ensure!(first.is_some_and(|line| line.contains("pod-init")), "{seen}");
    // Only a container's own processes end with it; orphans are adopted by the pod's first process.
    let line = seen.lines().find(|line| line.contains("sleep 22222"));
    let other = line.and_then(|line| line.split_whitespace().next()).context("the process has no number")?;
    node.exec("p", &format!("(busybox sleep 33333 > /dev/null 2>&1 &); kill {other}")).await?;
    wait::until("the other container was started again", || async {
        let path = "jsonpath={.status.containerStatuses[?(@.name=='b')].restartCount}";
        Ok((node.kubectl.ok(&["get", "pod", "p", "-o", path]).await? == "1").then_some(()))
    })
    .await?;
    let seen = node.exec("p", "busybox ps -o pid,ppid,args").await?;
    let orphan = seen.lines().find(|line| line.contains("sleep 33333"));
    ensure!(orphan.and_then(|line| line.split_whitespace().nth(1)) == Some("1"), "{seen}");
    // The processes outlive the server, and end with the pod.
    let node = node.restart().await?;
    node.ready("p").await?;
    let seen = node.exec("p", "busybox ps -o args").await?;
    ensure!(seen.contains("sleep 11111") && seen.contains("sleep 22222"), "{seen}");
    node.kubectl.ok(&["delete", "pod", "p", "--timeout=50s"]).await?;
    node.leaves_nothing().await
}
