//! A node with a simulated runtime against the real API server, in one process.

use std::{sync::Arc, time::Duration};

use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Node, Pod},
};
use mayfly_runtime::{ContainerId, PodUid, Runtime as _, simulated::SimulatedRuntime};
use serde_json::json;

mod devices;
mod ending;
mod gpus;
mod harness;
mod jobs;
mod joined;
mod log_sockets;
mod logs;
mod proxy;
mod remote;
mod streams;
mod withdrawal;

use harness::{KubeletHarness, is_true, phase, state};

#[tokio::test]
async fn a_node_registers_and_renews_its_lease() {
    let cluster = KubeletHarness::start().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "kube-node-lease");
    let lease = cluster.find("there is a lease", async || leases.get_opt("n1").await.unwrap()).await;
    assert_eq!(lease.spec.unwrap().holder_identity.as_deref(), Some("n1"));
    let node = nodes.get("n1").await.unwrap();
    assert_eq!(node.metadata.labels.unwrap()["runtime.mayfly.dev/wasm"], "true");
    let status = node.status.unwrap();
    assert!(status.conditions.unwrap().iter().any(|c| c.type_ == "Ready" && c.status == "True"));
    assert_eq!(status.allocatable.unwrap()["pods"].0, "10k");
}

#[tokio::test]
async fn a_node_gets_its_labels_loses_old_ones_and_keeps_those_of_others() {
    let cluster = KubeletHarness::stopped().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let old = json!({"gpu": "old", "count": "1", "mine": "kept", "own.a": "old", "own.b": "old", "my.own.c": "kept"});
    let old = json!({"metadata": {"name": "n1", "labels": old}});
    nodes.create(&Default::default(), &serde_json::from_value(old).unwrap()).await.unwrap();
    let new = |text: &str| Some(text.to_owned());
    let labels = [("gpu", None), ("never", None), ("count", new("4")), ("own.a", new("new"))];
    cluster.run_labelled(labels.map(|(name, value)| (name.to_owned(), value)).into());
    let labels = cluster.find("the node has its labels", async || {
        let labels = nodes.get("n1").await.unwrap().metadata.labels.unwrap();
        labels.contains_key("kubernetes.io/hostname").then_some(labels)
    });
    let labels = labels.await;
    let of = |name: &str| labels.get(name).map(String::as_str);
    assert_eq!(["gpu", "never", "count", "mine"].map(of), [None, None, Some("4"), Some("kept")]);
    assert_eq!(["own.a", "own.b", "my.own.c"].map(of), [Some("new"), None, Some("kept")]);
}

#[tokio::test]
async fn a_pod_runs_is_ready_and_goes_when_deleted() {
    let cluster = KubeletHarness::start().await;
    cluster.create("web", json!({}), json!({})).await;
    let pod = cluster.until("web", "ready", |pod| is_true(pod, "Ready")).await;
    assert_eq!(phase(&pod), "Running");
    let status = pod.status.clone().unwrap();
    let address: std::net::Ipv4Addr = status.pod_ip.unwrap().parse().unwrap();
    assert!((64..96).contains(&address.octets()[1]) && address.is_loopback(), "{address}");
    assert_eq!(status.host_ip.as_deref(), Some("127.0.0.1"));
    let uid = PodUid(pod.metadata.uid.clone().unwrap());
    assert_eq!(cluster.runtime.sandboxes(), [uid]);
    cluster.pods().delete("web", &DeleteParams::default()).await.unwrap();
    cluster.gone("web").await;
    assert!(cluster.runtime.sandboxes().is_empty());
}

#[tokio::test]
async fn jobs_end_and_crashes_come_back_with_a_pause() {
    let cluster = KubeletHarness::start().await;
    let exits = |code: &str| json!({"simulated.mayfly.dev/exit-code": code});
    cluster.create("done", json!({"restartPolicy": "Never"}), exits("0")).await;
    cluster.create("failed", json!({"restartPolicy": "Never"}), exits("3")).await;
    cluster.create("crash", json!({}), exits("1")).await;
    let done = cluster.until("done", "over", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(state(&done)[0]["state"]["terminated"]["reason"], "Completed");
    let failed = cluster.until("failed", "over", |pod| phase(pod) == "Failed").await;
    assert_eq!(state(&failed)[0]["state"]["terminated"]["exitCode"], 3);
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    let crash = cluster.until("crash", "backing off", waiting).await;
    assert_eq!(phase(&crash), "Running");
    assert_eq!(state(&crash)[0]["restartCount"], 2, "the first restart is at once");
    assert_eq!(state(&crash)[0]["lastState"]["terminated"]["exitCode"], 1);
    let title = format!("crash_default({})", crash.metadata.uid.clone().unwrap());
    assert_eq!(
        state(&crash)[0]["state"]["waiting"]["message"],
        format!("back-off 10s restarting failed container=main pod={title}")
    );
    let backing_off = cluster.event("crash", "BackOff").await;
    assert_eq!(backing_off.type_.as_deref(), Some("Warning"));
    assert_eq!(
        backing_off.message.as_deref(),
        Some(format!("Back-off restarting failed container main in pod {title}").as_str())
    );
    assert_eq!(backing_off.count, Some(1), "the first restart has no pause");
    let uid = PodUid(done.metadata.uid.unwrap());
    assert!(!cluster.runtime.sandboxes().contains(&uid), "what is over holds nothing");
}

#[tokio::test]
async fn a_container_whose_process_does_not_start_ends_as_upstream() {
    let cluster = KubeletHarness::start().await;
    let why = "exec: \"/nonexistent\": stat /nonexistent: no such file or directory: unknown";
    let error = json!({"simulated.mayfly.dev/process-error": why});
    cluster.create("never", json!({"restartPolicy": "Never"}), error.clone()).await;
    cluster.create("always", json!({}), error).await;
    let never = cluster.until("never", "over", |pod| phase(pod) == "Failed").await;
    let ended = &state(&never)[0]["state"]["terminated"];
    assert_eq!(
        (&ended["reason"], &ended["exitCode"], &ended["message"]),
        (&json!("StartError"), &json!(128), &json!(why))
    );
    assert_eq!(state(&never)[0]["restartCount"], 0);
    assert_eq!(cluster.event("never", "Failed").await.message, Some(format!("Error: {why}")));
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    let always = cluster.until("always", "backing off", waiting).await;
    assert_eq!(phase(&always), "Running");
    assert_eq!(state(&always)[0]["restartCount"], 2, "the first restart is at once");
    assert_eq!(state(&always)[0]["lastState"]["terminated"]["reason"], "StartError");
    assert!(!is_true(&always, "Ready"));
}

#[tokio::test]
async fn a_pod_with_a_forbidden_kernel_parameter_fails() {
    let cluster = KubeletHarness::start().await;
    let setting = |name: &str| json!({"securityContext": {"sysctls": [{"name": name, "value": "1"}]}});
    cluster.create("safe", setting("net/ipv4/tcp_syncookies"), json!({})).await;
    let pod = cluster.create("unsafe", setting("net/ipv4/ip_forward"), json!({})).await;
    let failed = cluster.until("unsafe", "over", |pod| phase(pod) == "Failed").await.status.unwrap();
    assert_eq!(failed.reason.as_deref(), Some("SysctlForbidden"));
    let why = "forbidden sysctl: \"net.ipv4.ip_forward\" not allowlisted";
    assert_eq!(failed.message, Some(format!("Pod was rejected: {why}")));
    assert_eq!(cluster.event("unsafe", "SysctlForbidden").await.message.as_deref(), Some(why));
    cluster.until("safe", "ready", |pod| is_true(pod, "Ready")).await;
    let uid = PodUid(pod.metadata.uid.unwrap());
    assert!(!cluster.runtime.sandboxes().contains(&uid), "nothing of it is made");
}

#[tokio::test]
async fn a_volume_that_cannot_be_made_is_an_event_and_is_made_once_its_source_is_there() {
    let cluster = KubeletHarness::stopped().await;
    let folder = tempfile::tempdir().unwrap();
    cluster.run_volumes(folder.path());
    let spec = json!({
        "volumes": [{"name": "v", "configMap": {"name": "settings"}}],
        "containers": [{"name": "main", "image": "x", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]});
    cluster.create("late", spec, json!({})).await;
    let why = "MountVolume.SetUp failed for volume \"v\" : configmap \"settings\" not found";
    assert_eq!(cluster.event("late", "FailedMount").await.message.as_deref(), Some(why));
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["message"] == why;
    let late = cluster.until("late", "waiting", waiting).await;
    assert_eq!(state(&late)[0]["state"]["waiting"]["reason"], "ContainerCreating");
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "default");
    let map = json!({"metadata": {"name": "settings"}, "data": {"color": "blue"}});
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    cluster.until("late", "ready", |pod| is_true(pod, "Ready")).await;
}

#[tokio::test]
async fn a_container_is_replaced_when_its_image_changes() {
    let cluster = KubeletHarness::start().await;
    cluster.create("web", json!({"restartPolicy": "Never"}), json!({})).await;
    cluster.until("web", "ready", |pod| is_true(pod, "Ready")).await;
    let image = json!({"spec": {"containers": [{"name": "main", "image": "y"}]}});
    cluster.pods().patch("web", &PatchParams::default(), &Patch::Strategic(image)).await.unwrap();
    let has_new = |pod: &Pod| state(pod)[0]["image"] == "y" && is_true(pod, "Ready");
    let pod = cluster.until("web", "replaced", has_new).await;
    assert_eq!(
        (state(&pod)[0]["restartCount"].as_i64(), state(&pod)[0]["imageID"].as_str()),
        (Some(1), Some("y"))
    );
    let killing = cluster.event("web", "Killing").await;
    let expected = "Container main definition changed, will be restarted";
    assert_eq!(killing.message.as_deref(), Some(expected));
}

#[tokio::test]
async fn init_containers_run_first_and_one_after_the_other() {
    let cluster = KubeletHarness::start().await;
    let init = json!({"initContainers": [{"name": "one", "image": "x"}, {"name": "two", "image": "x"}]});
    let pod = cluster.create("init", init, json!({})).await;
    let uid = PodUid(pod.metadata.uid.clone().unwrap());
    for name in ["one", "two"] {
        let running = |pod: &Pod| {
            let statuses = pod.status.clone().unwrap_or_default().init_container_statuses.unwrap_or_default();
            statuses.iter().any(|s| s.name == name && s.state.clone().unwrap_or_default().running.is_some())
        };
        let pod = cluster.until("init", name, running).await;
        assert_eq!(state(&pod)[0]["state"]["waiting"]["reason"], "PodInitializing");
        cluster.runtime.exit(&ContainerId { pod: uid.clone(), name: name.into(), attempt: 0 }, 0);
    }
    cluster.until("init", "ready", |pod| is_true(pod, "Ready") && is_true(pod, "Initialized")).await;
}

#[tokio::test]
async fn what_is_missing_is_named_and_waited_for() {
    let cluster = KubeletHarness::start().await;
    let env =
        json!([{"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "mode"}}}]);
    cluster
        .create("needy", json!({"containers": [{"name": "main", "image": "x", "env": env}]}), json!({}))
        .await;
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "CreateContainerConfigError";
    let pod = cluster.until("needy", "waiting", waiting).await;
    let message = state(&pod)[0]["state"]["waiting"]["message"].clone();
    assert_eq!(message, "configmap default/settings not found (env MODE)");
    let maps: Api<mayfly_api::k8s::api::core::v1::ConfigMap> =
        Api::namespaced(cluster.client.clone(), "default");
    let map =
        serde_json::from_value(json!({"metadata": {"name": "settings"}, "data": {"mode": "fast"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    cluster.until("needy", "ready", |pod| is_true(pod, "Ready")).await;

    cluster.create("foreign", json!({"runtimeClassName": "gvisor"}), json!({})).await;
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["message"].is_string();
    let pod = cluster.until("foreign", "waiting", waiting).await;
    assert!(
        state(&pod)[0]["state"]["waiting"]["message"].as_str().unwrap().contains("no runtime for \"gvisor\"")
    );
}

#[tokio::test]
async fn a_deadline_ends_a_pod() {
    let cluster = KubeletHarness::start().await;
    cluster.create("late", json!({"activeDeadlineSeconds": 1}), json!({})).await;
    let pod = cluster.until("late", "over", |pod| phase(pod) == "Failed").await;
    assert_eq!(pod.status.unwrap().reason.as_deref(), Some("DeadlineExceeded"));
    let ended = cluster.event(pod.metadata.name.as_deref().unwrap(), "DeadlineExceeded").await;
    assert_eq!(ended.type_.as_deref(), Some("Normal"), "as upstream");
}

#[tokio::test]
async fn a_replaced_pod_is_another_pod() {
    let cluster = KubeletHarness::start().await;
    let first = cluster.create("web", json!({}), json!({})).await;
    cluster.until("web", "ready", |pod| is_true(pod, "Ready")).await;
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    cluster.pods().delete("web", &now).await.unwrap();
    let second = cluster.create("web", json!({}), json!({})).await;
    assert_ne!(first.metadata.uid, second.metadata.uid);
    cluster.until("web", "ready", |pod| is_true(pod, "Ready")).await;
    assert_eq!(cluster.runtime.sandboxes(), [PodUid(second.metadata.uid.unwrap())]);
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    cluster.pods().patch("web", &PatchParams::default(), &patch).await.unwrap();
    cluster.until("web", "still ready", |pod| is_true(pod, "Ready")).await;
}

#[tokio::test]
async fn a_node_takes_back_what_others_say_of_it() {
    let cluster = KubeletHarness::start().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let ready = |node: &Node| {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        conditions.into_iter().flatten().any(|known| known.type_ == "Ready" && known.status == "True")
    };
    let is_ready = async || nodes.get_opt("n1").await.unwrap().is_some_and(|node| ready(&node));
    let until_ready = async || cluster.eventually("the node is ready", is_ready).await;
    until_ready().await;
    let silent = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(silent)).await.unwrap();
    until_ready().await;
    // Conditions that the node does not know stay.
    let foreign = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"},
        {"type": "KernelDeadlock", "status": "False", "reason": "KernelHasNoDeadlock"}]}});
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(foreign)).await.unwrap();
    until_ready().await;
    let conditions = nodes.get("n1").await.unwrap().status.unwrap().conditions.unwrap();
    assert!(conditions.iter().any(|known| known.type_ == "KernelDeadlock"), "{conditions:?}");
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
    until_ready().await;
}

#[tokio::test]
async fn a_missing_source_is_seen_as_soon_as_it_is_there() {
    let cluster = KubeletHarness::start().await;
    let env = json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "a"}}}]);
    cluster
        .create("waits", json!({"containers": [{"name": "main", "image": "x", "env": env}]}), json!({}))
        .await;
    // Three attempts by timer alone: the pause before the next is four seconds.
    let third = async || cluster.event("waits", "Failed").await.count >= Some(3);
    cluster.eventually("it was tried three times", third).await;
    let maps: Api<mayfly_api::k8s::api::core::v1::ConfigMap> =
        Api::namespaced(cluster.client.clone(), "default");
    let map = serde_json::from_value(json!({"metadata": {"name": "settings"}, "data": {"a": "1"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    let pod = cluster.until("waits", "running", |pod| phase(pod) == "Running").await;
    // By the node's own timestamps, so that the delay of this test's checks does not matter.
    let failed = cluster.event("waits", "Failed").await;
    let pause_secs = 1 << (failed.count.unwrap() - 1);
    let status = pod.status.unwrap().container_statuses.unwrap().remove(0);
    let started = status.state.unwrap().running.unwrap().started_at.unwrap().0;
    let rested_secs = started.duration_since(failed.last_timestamp.unwrap().0).as_secs();
    // Both times have a resolution of one second.
    assert!(rested_secs < pause_secs - 1, "it rested {rested_secs} s of {pause_secs} s");
}

#[tokio::test]
async fn sandboxes_without_a_pod_are_removed() {
    let cluster = KubeletHarness::stopped().await;
    let stranger = mayfly_runtime::SandboxSpec {
        uid: PodUid("stranger".into()),
        pod: mayfly_api::ObjectKey::new("default", "stranger"),
        labels: Default::default(),
        annotations: Default::default(),
        address: None,
        host: Default::default(),
    };
    cluster.runtime.create_sandbox(stranger).await.unwrap();
    cluster.run();
    cluster.eventually("it is removed", async || cluster.runtime.sandboxes().is_empty()).await;
}

/// The time that [`Stuck`] needs to kill a container.
const KILL_TIME: Duration = Duration::from_millis(100);

/// A runtime whose starts never end, and whose stops take the whole grace period.
struct Stuck(SimulatedRuntime);

#[async_trait::async_trait]
impl mayfly_runtime::Runtime for Stuck {
    fn class(&self) -> &str {
        "stuck"
    }
    async fn create_sandbox(
        &self,
        sandbox: mayfly_runtime::SandboxSpec,
    ) -> Result<mayfly_runtime::SandboxStatus, mayfly_runtime::RuntimeError> {
        self.0.create_sandbox(sandbox).await
    }
    async fn start_container(
        &self,
        spec: mayfly_runtime::ContainerSpec,
    ) -> Result<(), mayfly_runtime::RuntimeError> {
        if spec.image == "never-starts" {
            std::future::pending::<()>().await;
        }
        self.0.start_container(spec).await
    }
    async fn stop_container(
        &self,
        id: &ContainerId,
        grace: Duration,
    ) -> Result<(), mayfly_runtime::RuntimeError> {
        tokio::time::sleep(grace + KILL_TIME).await;
        self.0.stop_container(id, grace).await
    }
    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), mayfly_runtime::RuntimeError> {
        self.0.remove_sandbox(uid).await
    }
    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, mayfly_runtime::ContainerState)> {
        self.0.containers(uid)
    }
    fn sandboxes(&self) -> Vec<PodUid> {
        self.0.sandboxes()
    }
    fn usage(&self) -> Vec<(ContainerId, mayfly_runtime::Usage)> {
        self.0.usage()
    }
    fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.0.changes()
    }
}

#[tokio::test]
async fn deletion_does_not_wait_for_a_start_and_can_be_hurried() {
    let cluster = KubeletHarness::stopped().await;
    cluster.run_with(Arc::new(Stuck(SimulatedRuntime::new("stuck"))));
    let spec = |image: &str| {
        json!({"runtimeClassName": "stuck", "terminationGracePeriodSeconds": 3600,
        "containers": [{"name": "main", "image": image}]})
    };
    cluster.create("starting", spec("never-starts"), json!({})).await;
    let creating = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "ContainerCreating";
    cluster.until("starting", "being created", creating).await;
    cluster.pods().delete("starting", &DeleteParams::default()).await.unwrap();
    cluster.gone("starting").await;

    cluster.create("stopping", spec("x"), json!({})).await;
    cluster.until("stopping", "running", |pod| phase(pod) == "Running").await;
    cluster.pods().delete("stopping", &DeleteParams::default()).await.unwrap();
    let pod = cluster.pods().get("stopping").await.unwrap();
    assert_eq!(pod.metadata.deletion_grace_period_seconds, Some(3600));
    cluster.pods().delete("stopping", &DeleteParams::default().grace_period(1)).await.unwrap();
    cluster.gone("stopping").await;
}

#[tokio::test]
async fn a_pod_that_is_deleted_by_force_while_it_ends_is_killed() {
    let cluster = KubeletHarness::stopped().await;
    let runtime = Arc::new(Stuck(SimulatedRuntime::new("stuck")));
    cluster.run_with(runtime.clone());
    let spec = json!({"runtimeClassName": "stuck", "terminationGracePeriodSeconds": 3600,
        "containers": [{"name": "main", "image": "x"}]});
    cluster.create("stopping", spec, json!({})).await;
    cluster.until("stopping", "running", |pod| phase(pod) == "Running").await;
    cluster.pods().delete("stopping", &DeleteParams::default()).await.unwrap();
    cluster.event("stopping", "Killing").await;
    // The object goes at once, the container only when the kill has ended.
    cluster.pods().delete("stopping", &DeleteParams::default().grace_period(0)).await.unwrap();
    cluster.eventually("its sandbox is removed", async || runtime.sandboxes().is_empty()).await;
}
