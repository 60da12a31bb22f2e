//! Scenarios of upstream's node conformance that no other test covers; the full list is docs/conformance-node.md.

use std::path::Path;

use anyhow::{Result, ensure};
use mayfly_e2e::{skipped, test_name, wait};
use serde_json::{Value, json};

use crate::{
    containers::{ContainerNode, archive, containers_or_skip},
    containers_lifecycle::{extend, pod},
};

#[tokio::test(flavor = "multi_thread")]
async fn commands_and_sub_paths_take_values_from_the_environment() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let host = node.folder.path().join("host");
    std::fs::create_dir(&host)?;
    let volumes = json!({"volumes": [{"name": "h", "hostPath": {"path": host}}]});
    let container = |variable: Value, expression: &str| json!({"env": [variable], "volumeMounts": [{"name": "h", "mountPath": "/h", "subPathExpr": expression}]});
    let field = |path: &str| json!({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let says = "echo $(V) '$$(V)' > /h/file; exec sleep 1d";
    let annotated = field("metadata.annotations['folder']");
    for pod in [
        pod("named", says, container(field("metadata.name"), "logs/$(V)"), volumes.clone()),
        pod("absent", says, container(field("metadata.name"), "$(NONE)"), volumes.clone()),
        pod("outside", says, container(json!({"name": "V", "value": ".."}), "$(V)"), volumes.clone()),
        pod("absolute", says, container(json!({"name": "V", "value": "/tmp"}), "$(V)"), volumes.clone()),
        pod("late", says, container(annotated, "$(V)"), volumes.clone()),
    ] {
        node.create(&pod).await?;
    }
    // should substitute values in a volume subpath, should allow substituting values in a container's command
    node.ready("named").await?;
    let written = std::fs::read_to_string(host.join("logs/named/file"))?;
    ensure!(written == "named $(V)\n", "{written:?}");
    // should fail substituting values in a volume subpath with backticks, with absolute path
    let waiting = "{.status.containerStatuses[0].state.waiting['reason','message']}";
    for (name, why) in [
        ("absent", "missing value for NONE"),
        ("outside", "leaves its volume"),
        ("absolute", "leaves its volume"),
        ("late", "missing value for V"),
    ] {
        let is = |said: &str| said.starts_with("CreateContainerConfigError") && said.contains(why);
        node.until_field(name, waiting, is).await?;
    }
    // should verify that a failing subpath expansion can be modified during the lifecycle of a container
    node.kubectl.ok(&["annotate", "pod", "late", "folder=found"]).await?;
    node.ready("late").await?;
    ensure!(host.join("found/file").exists());
    let mut wrong = pod("wrong", says, container(field("metadata.name"), "$(V)"), volumes);
    wrong["spec"]["containers"][0]["volumeMounts"][0]["subPath"] = json!("x");
    let refused = node.kubectl.run(&["create", "-f", &node.kubectl.file("wrong", &wrong)?]).await?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("mutually exclusive"), "{refused:?}");
    node.delete_all().await
}

/// Waits until a pod has ended, and returns its phase.
async fn ended(node: &ContainerNode, name: &str) -> Result<String> {
    node.until_field(name, "{.status.phase}", |phase| phase == "Succeeded" || phase == "Failed").await
}

/// A pod without restarts.
fn once(name: &str, script: &str, container: Value, spec: Value) -> Value {
    let mut pod = pod(name, script, container, spec);
    pod["spec"]["restartPolicy"] = json!("Never");
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_is_of_fields_objects_and_other_variables() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    node.kubectl.ok(&["create", "configmap", "settings", "--from-literal=color=blue"]).await?;
    node.kubectl.ok(&["create", "secret", "generic", "keys", "--from-literal=key=pw"]).await?;
    let field =
        |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let amount = |name: &str, resource: &str| json!({"name": name, "valueFrom": {"resourceFieldRef": {"resource": resource}}});
    let env = json!([
        field("NAME", "metadata.name"), field("NAMESPACE", "metadata.namespace"), field("UID", "metadata.uid"),
        field("IP", "status.podIP"), field("HOST", "status.hostIP"),
        amount("CPU", "limits.cpu"), amount("RAM", "requests.memory"),
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
        {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "none", "key": "key", "optional": true}}},
        {"name": "BOTH", "value": "$(COLOR)-$(KEY)"}]);
    let more = json!({"env": env, "envFrom": [{"prefix": "S_", "configMapRef": {"name": "settings"}},
            {"secretRef": {"name": "keys"}}],
        "resources": {"limits": {"cpu": "2"}, "requests": {"memory": "32Mi", "cpu": "10m"}}});
    node.create(&pod("env", "exec sleep 1d", more, json!({}))).await?;
    node.ready("env").await?;
    let said = node
        .exec(
            "env",
            "echo $NAME $NAMESPACE $UID $IP $HOST; echo $CPU $RAM $BOTH $S_color $key ${ABSENT-none}",
        )
        .await?;
    let [uid, ip, host] = ["{.metadata.uid}", "{.status.podIP}", "{.status.hostIP}"];
    let (uid, ip, host) =
        (node.field("env", uid).await?, node.field("env", ip).await?, node.field("env", host).await?);
    let expected = format!("env default {uid} {ip} {host}\n2 33554432 blue-pw blue pw none\n");
    ensure!(said == expected, "{said:?}, expected {expected:?}");
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_names_the_services_that_are_there() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let service = |name: &str, spec: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec});
    let ports = json!([{"name": "web", "port": 8765, "targetPort": 8080}, {"name": "dns", "port": 53, "protocol": "UDP"}]);
    for (name, spec) in [
        ("foo-service", json!({"ports": ports})),
        ("headless", json!({"clusterIP": "None", "ports": [{"port": 80}]})),
    ] {
        node.kubectl.ok(&["create", "-f", &node.kubectl.file(name, &service(name, spec))?]).await?;
    }
    let ip = |name: &str| {
        let arguments = ["get", "service", name, "-o", "jsonpath={.spec.clusterIP}"].map(str::to_owned);
        let kubectl = &node.kubectl;
        async move { kubectl.ok(&arguments.each_ref().map(String::as_str)).await }
    };
    let (foo, api) = (ip("foo-service").await?, ip("kubernetes").await?);
    let own = json!({"env": [{"name": "FOO_SERVICE_SERVICE_PORT_WEB", "value": "own"},
        {"name": "URL", "value": "http://$(FOO_SERVICE_SERVICE_HOST):$(FOO_SERVICE_SERVICE_PORT)"}]});
    let says = "echo $(KUBERNETES_SERVICE_HOST) > /said; exec sleep 1d";
    node.create(&pod("linked", says, own.clone(), json!({}))).await?;
    node.create(&pod("unlinked", says, own, json!({"enableServiceLinks": false}))).await?;
    let script =
        "cat /said; busybox env | busybox grep -E '^(FOO|HEADLESS|KUBERNETES_SERVICE|URL)' | busybox sort";
    let of_the_api = format!(
        "KUBERNETES_SERVICE_HOST={api}\nKUBERNETES_SERVICE_PORT=443\nKUBERNETES_SERVICE_PORT_HTTPS=443\n"
    );
    node.ready("linked").await?;
    let said = node.exec("linked", script).await?;
    let expected = format!(
        "{api}\nFOO_SERVICE_PORT=tcp://{foo}:8765\nFOO_SERVICE_PORT_53_UDP=udp://{foo}:53\nFOO_SERVICE_PORT_53_UDP_ADDR={foo}\n\
         FOO_SERVICE_PORT_53_UDP_PORT=53\nFOO_SERVICE_PORT_53_UDP_PROTO=udp\nFOO_SERVICE_PORT_8765_TCP=tcp://{foo}:8765\n\
         FOO_SERVICE_PORT_8765_TCP_ADDR={foo}\nFOO_SERVICE_PORT_8765_TCP_PORT=8765\nFOO_SERVICE_PORT_8765_TCP_PROTO=tcp\n\
         FOO_SERVICE_SERVICE_HOST={foo}\nFOO_SERVICE_SERVICE_PORT=8765\nFOO_SERVICE_SERVICE_PORT_DNS=53\n\
         FOO_SERVICE_SERVICE_PORT_WEB=own\n{of_the_api}URL=http://{foo}:8765\n"
    );
    ensure!(said == expected, "{said}, expected {expected}");
    node.ready("unlinked").await?;
    let said = node.exec("unlinked", script).await?;
    let unknown = "http://$(FOO_SERVICE_SERVICE_HOST):$(FOO_SERVICE_SERVICE_PORT)";
    let expected = format!("{api}\nFOO_SERVICE_SERVICE_PORT_WEB=own\n{of_the_api}URL={unknown}\n");
    ensure!(said == expected, "{said}, expected {expected}");
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_image_says_what_runs_unless_the_container_does() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let archive = archive(node.folder.path(), "says:local", &["echo", "default"])?;
    node.kubectl.up.cli().ok(&["image", "import", &archive.to_string_lossy()]).await?;
    for (name, own, expected) in [
        ("blank", json!({}), "default\n"),
        ("args", json!({"args": ["echo", "args"]}), "args\n"),
        ("command", json!({"command": ["echo", "command"]}), "command\n"),
        ("both", json!({"command": ["echo"], "args": ["both"]}), "both\n"),
    ] {
        let mut pod = once(name, "", json!({"image": "says:local"}), json!({}));
        let container = &mut pod["spec"]["containers"][0];
        container.as_object_mut().map(|fields| fields.remove("command"));
        extend(container, own);
        node.create(&pod).await?;
        ensure!(ended(&node, name).await? == "Succeeded", "{name}");
        let said = node.kubectl.ok(&["logs", name]).await?;
        ensure!(said == expected, "{name}: {said:?}");
    }
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn init_containers_decide_whether_the_others_start() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let init = |name: &str, script: &str| json!({"name": name, "image": "busybox:local", "command": ["sh", "-c", script]});
    let inits = |last: &str| json!({"initContainers": [init("i1", "true"), init("i2", last)]});
    // should invoke init containers on a RestartNever pod, on a RestartAlways pod
    node.create(&once("never", "exit 0", json!({}), inits("true"))).await?;
    node.create(&pod("always", "exec sleep 1d", json!({}), inits("true"))).await?;
    // should not start app containers if init containers fail on a RestartAlways pod
    node.create(&pod("again", "exec sleep 1d", json!({}), inits("exit 1"))).await?;
    // should not start app containers and fail the pod if init containers fail on a RestartNever pod
    node.create(&once("failed", "exec sleep 1d", json!({}), inits("exit 1"))).await?;
    ensure!(ended(&node, "never").await? == "Succeeded");
    node.ready("always").await?;
    let codes = "{.status.initContainerStatuses[*].state.terminated.exitCode}";
    for name in ["never", "always"] {
        ensure!(node.field(name, codes).await? == "0 0", "{name}");
        let done = "{.status.conditions[?(@.type=='Initialized')].status}";
        ensure!(node.field(name, done).await? == "True", "{name}");
    }
    ensure!(ended(&node, "failed").await? == "Failed");
    let restarts = "{.status.initContainerStatuses[1].restartCount}";
    node.until_field("again", restarts, |count| count.parse::<u32>().is_ok_and(|count| count > 1)).await?;
    ensure!(node.field("again", "{.status.phase}").await? == "Pending");
    for name in ["again", "failed"] {
        let started =
            node.field(name, "{.status.containerStatuses[0].state['running','terminated']}").await?;
        ensure!(started.is_empty(), "{name}: {started}");
        ensure!(
            node.field(name, "{.status.initContainerStatuses[0].state.terminated.exitCode}").await? == "0"
        );
    }
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn users_and_rights_are_those_of_the_security_context() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let secured = |context: Value| json!({"securityContext": context});
    for (name, context) in [
        ("nobody", json!({"runAsUser": 65534})),
        ("root", json!({"runAsUser": 0})),
        ("explicit", json!({"runAsNonRoot": true, "runAsUser": 1234})),
        ("fixed", json!({"readOnlyRootFilesystem": true})),
        ("open", json!({"readOnlyRootFilesystem": false})),
        ("plain", json!({"privileged": false})),
        ("mighty", json!({"privileged": true})),
        ("confined", json!({"allowPrivilegeEscalation": false, "runAsUser": 1000})),
        ("free", json!({"allowPrivilegeEscalation": true, "runAsUser": 1000})),
        ("refused", json!({"runAsNonRoot": true, "runAsUser": 0})),
        ("unnamed", json!({"runAsNonRoot": true})),
    ] {
        node.create(&pod(name, "exec sleep 1d", secured(context), json!({}))).await?;
    }
    let privileges = "busybox grep NoNewPrivs /proc/1/status";
    let link = "busybox ip link add dummy1 type bridge && echo made || echo denied";
    for (name, script, expected) in [
        ("nobody", "id -u", "65534"),
        ("root", "id -u", "0"),
        ("explicit", "id -u", "1234"),
        ("fixed", "echo x 2> /dev/null > /x && echo made || echo denied", "denied"),
        ("open", "echo x > /x && echo made || echo denied", "made"),
        ("plain", link, "denied"),
        ("mighty", link, "made"),
        ("confined", privileges, "NoNewPrivs:\t1"),
        ("free", privileges, "NoNewPrivs:\t0"),
    ] {
        node.ready(name).await?;
        let said = node.exec(name, script).await?;
        ensure!(said.trim() == expected, "{name}: {said:?}");
    }
    let waiting = "{.status.containerStatuses[0].state.waiting.reason}";
    for name in ["refused", "unnamed"] {
        node.until_field(name, waiting, |reason| reason.starts_with("CreateContainer")).await?;
    }
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_policies_decide_about_another_start() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let policy = |policy: &str| json!({"restartPolicy": policy});
    node.create(&pod("always", "exit 0", json!({}), policy("Always"))).await?;
    node.create(&pod("failing", "exit 1", json!({}), policy("OnFailure"))).await?;
    node.create(&pod("done", "exit 0", json!({}), policy("OnFailure"))).await?;
    node.create(&pod("never", "exit 1", json!({}), policy("Never"))).await?;
    let limited = json!({"activeDeadlineSeconds": 600, "terminationGracePeriodSeconds": 1});
    node.create(&pod("short", "exec sleep 1d", json!({}), limited)).await?;
    let count = "{.status.containerStatuses[0].restartCount}";
    for name in ["always", "failing"] {
        node.until_field(name, count, |count| count.parse::<u32>().is_ok_and(|count| count > 1)).await?;
        ensure!(node.field(name, "{.status.phase}").await? == "Running", "{name}");
    }
    ensure!(ended(&node, "done").await? == "Succeeded");
    ensure!(ended(&node, "never").await? == "Failed");
    let reason = "{.status.containerStatuses[0].state.terminated['reason','exitCode']}";
    ensure!(
        node.field("never", reason).await? == "Error 1" && node.field("done", reason).await? == "Completed 0"
    );
    for name in ["done", "never"] {
        node.never_restarted(name).await?;
    }
    // should allow activeDeadlineSeconds to be updated
    node.ready("short").await?;
    let patch = json!({"spec": {"activeDeadlineSeconds": 1}}).to_string();
    node.kubectl.ok(&["patch", "pod", "short", "-p", &patch]).await?;
    node.until_field("short", "{.status.reason}", |reason| reason == "DeadlineExceeded").await?;
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_have_modes_parts_and_are_shared() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    node.kubectl
        .ok(&["create", "configmap", "settings", "--from-literal=color=blue", "--from-literal=size=9"])
        .await?;
    node.kubectl.ok(&["create", "secret", "generic", "keys", "--from-literal=key=pw"]).await?;
    let labels = json!({"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}});
    let volumes = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "settings", "configMap": {"name": "settings", "defaultMode": 0o400,
            "items": [{"key": "color", "path": "a/b/color"}, {"key": "size", "path": "size", "mode": 0o640}]}},
        {"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o440}},
        {"name": "absent", "configMap": {"name": "none", "optional": true}},
        {"name": "downward", "downwardAPI": {"items": [labels]}}]);
    let mounts = json!([
        {"name": "disk", "mountPath": "/disk"}, {"name": "memory", "mountPath": "/memory"},
        {"name": "settings", "mountPath": "/settings"}, {"name": "keys", "mountPath": "/keys"},
        {"name": "absent", "mountPath": "/absent"}, {"name": "downward", "mountPath": "/downward"},
        {"name": "settings", "mountPath": "/etc/color", "subPath": "a/b/color"}]);
    let container = |name: &str| {
        json!({"name": name, "image": "busybox:local",
        "command": ["sh", "-c", "exec sleep 1d"], "volumeMounts": mounts})
    };
    let spec = json!({"containers": [container("c"), container("other")], "volumes": volumes});
    let mut both = pod("v", "", json!({}), spec);
    both["metadata"]["labels"] = json!({"app": "one"});
    node.create(&both).await?;
    node.ready("v").await?;
    let modes = "for file in /disk /memory /settings/a/b/color /settings/size /keys/key; do busybox stat -L -c %a $file; done";
    let said = node.exec("v", modes).await?;
    ensure!(said == "777\n777\n400\n640\n440\n", "{said:?}");
    let said = node.exec("v", "cat /settings/a/b/color /etc/color /keys/key; ls /absent; busybox grep -c ' /memory tmpfs' /proc/mounts").await?;
    ensure!(said == "bluebluepw1\n", "{said:?}");
    // pod should support shared volumes between containers
    node.exec("v", "echo shared > /disk/file").await?;
    let read = node.kubectl.ok(&["exec", "v", "-c", "other", "--", "cat", "/disk/file"]).await?;
    ensure!(read == "shared\n", "{read:?}");
    // should update labels on modification
    node.kubectl.ok(&["label", "pod", "v", "app=two", "--overwrite"]).await?;
    wait::until("the new label is in the file", || async {
        Ok((node.exec("v", "cat /downward/labels").await? == "app=\"two\"").then_some(()))
    })
    .await?;
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_names_and_kernel_parameters_are_the_pods() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    // should write entries to /etc/hosts, should support sysctls, should provide DNS for the cluster
    let spec = json!({"hostname": "db", "hostAliases": [{"ip": "10.9.8.7", "hostnames": ["foo.local", "bar.local"]}],
        "securityContext": {"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]},
        "dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.9.8.6"], "searches": ["my.search"]}});
    node.create(&pod("own", "exec sleep 1d", json!({}), spec)).await?;
    // should be created with the host's network, where the node's hosts are the pod's
    node.create(&pod("host", "exec sleep 1d", json!({}), json!({"hostNetwork": true}))).await?;
    node.ready("own").await?;
    node.ready("host").await?;
    let said = node
        .exec("own", "hostname; cat /etc/hosts /etc/resolv.conf /proc/sys/kernel/shm_rmid_forced")
        .await?;
    for expected in [
        "db\n",
        "# Kubernetes-managed hosts file.",
        "10.9.8.7\tfoo.local\tbar.local",
        "nameserver 10.9.8.6",
        "search my.search",
    ] {
        ensure!(said.contains(expected), "{expected:?} is not in {said}");
    }
    ensure!(said.ends_with("\n1\n"), "{said}");
    let hosts = node.exec("host", "cat /etc/hosts").await?;
    ensure!(hosts == std::fs::read_to_string("/etc/hosts")?, "{hosts}");
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_chosen_by_lines_time_and_run() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    node.create(&pod(
        "l",
        "for n in 1 2 3; do echo line $n; done; test -f /again || { sleep 2; exit 1; }",
        json!({}),
        json!({}),
    ))
    .await?;
    node.until_restarted("l").await?;
    let logs = async |more: &[&str]| {
        let arguments: Vec<&str> = ["logs", "l"].iter().chain(more).copied().collect();
        node.kubectl.ok(&arguments).await
    };
    wait::until("the second run has written", || async {
        Ok((logs(&[]).await?.lines().count() == 3).then_some(()))
    })
    .await?;
    ensure!(logs(&["--tail=1"]).await? == "line 3\n");
    ensure!(logs(&["--previous"]).await? == "line 1\nline 2\nline 3\n");
    ensure!(logs(&["--limit-bytes=4"]).await? == "line");
    let stamped = logs(&["--timestamps", "--tail=1"]).await?;
    ensure!(stamped.starts_with("20") && stamped.ends_with("Z line 3\n"), "{stamped:?}");
    ensure!(logs(&["--since-time=2100-01-01T00:00:00Z"]).await?.is_empty());
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_may_be_requests_to_another_pod() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let serve =
        "mkdir /www; echo ok > /www/after; echo ok > /www/before; exec busybox httpd -f -vv -p 8080 -h /www";
    let probe = json!({"readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1}});
    node.create(&pod("target", serve, probe, json!({}))).await?;
    node.ready("target").await?;
    let host = node.field("target", "{.status.podIP}").await?;
    let get = |path: &str| json!({"httpGet": {"host": host, "port": 8080, "path": path}});
    // should execute poststart http hook properly, should execute prestop http hook properly
    let lifecycle = json!({"lifecycle": {"postStart": get("/after"), "preStop": get("/before")}});
    node.create(&pod("hooked", "exec sleep 1d", lifecycle, json!({}))).await?;
    node.ready("hooked").await?;
    let log = async || node.kubectl.ok(&["logs", "target"]).await;
    ensure!(log().await?.contains("/after") && !log().await?.contains("/before"), "{}", log().await?);
    node.kubectl.ok(&["delete", "pod", "hooked"]).await?;
    wait::until("the hook was called", || async { Ok(log().await?.contains("/before").then_some(())) })
        .await?;
    node.delete_all().await
}

/// The tests in the list of scenarios, as pairs of file and function.
fn named_tests(text: &str) -> Vec<(String, String)> {
    let rows = text.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.split('|').nth(2));
    let parts = rows.flat_map(|row| row.split(';')).filter_map(|part| {
        let (file, tests) = part.trim().strip_prefix('`')?.split_once("`, ")?;
        Some(tests.split(", ").map(|test| (file.to_owned(), test.trim().to_owned())).collect::<Vec<_>>())
    });
    parts.flatten().collect()
}

#[test]
fn every_scenario_of_the_list_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let list = std::fs::read_to_string(root.join("docs/conformance-node.md")).unwrap();
    let named = named_tests(&list);
    assert!(named.len() > 60, "{named:?}");
    for (file, test) in named {
        let folder = if file.contains('/') { root.clone() } else { root.join("tests/e2e/tests/e2e") };
        let source = std::fs::read_to_string(folder.join(&file)).unwrap_or_default();
        assert!(source.contains(&format!("fn {test}(")), "there is no {test} in {file}");
    }
    // Each row has a test, or the reason why there is none.
    let rows = list.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| scenario"));
    for row in rows {
        let shown = row.split('|').nth(2).unwrap_or_default();
        assert!(shown.contains("`, ") || shown.contains("not shown"), "{row}");
    }
    assert_eq!(
        named_tests("| x | `a.rs`, one, two; `b/c.rs`, three |\n| y | not shown |"),
        [("a.rs", "one"), ("a.rs", "two"), ("b/c.rs", "three")].map(|(a, b)| (a.to_owned(), b.to_owned()))
    );
}
