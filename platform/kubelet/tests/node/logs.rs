//! Reading and following logs.

use std::time::Duration;

use kube::api::DeleteParams;
use mayfly_api::k8s::api::core::v1::Pod;
use mayfly_runtime::{
    ContainerId, PodUid,
    logs::{LogWriter, Stream},
};
use serde_json::json;

use crate::harness::{KubeletHarness, is_true, phase, state};

#[tokio::test]
async fn logs_of_containers_and_functions() {
    let cluster = KubeletHarness::start().await;
    let pod = cluster.create("talk", json!({}), json!({})).await;
    let pod_uid = PodUid(pod.metadata.uid.clone().unwrap());
    cluster.until("talk", "ready", |pod| is_true(pod, "Ready")).await;
    let writer = LogWriter::start().unwrap();
    let id = ContainerId { pod: pod_uid, name: "main".into(), attempt: 0 };
    writer.sink(cluster.logs.container(&id), Stream::Stdout).write(b"one\ntwo\nthree\n");
    for (revision, line) in [("f-00001", "old\n"), ("f-00002", "new\n")] {
        cluster.revision(revision).await;
        writer.sink(cluster.logs.revision("default", "f", revision), Stream::Stdout).write(line.as_bytes());
    }
    writer.flush();
    // The informer may lag behind the API.
    let path = "/containerLogs/default/talk/main?tailLines=2";
    let read = async || Some(cluster.get(path).await).filter(|answer| answer.0 == 200);
    assert_eq!(cluster.find("it is known", read).await.1, "two\nthree\n");
    assert_eq!(cluster.get("/functionLogs/default/f").await, (200, "old\nnew\n".into()));
    assert_eq!(cluster.get("/functionLogs/default/f?revision=f-00002").await, (200, "new\n".into()));
    assert_eq!(cluster.get("/functionLogs/default/f?tailLines=1").await, (200, "new\n".into()));
    assert_eq!(cluster.get("/functionLogs/default/none").await, (200, String::new()));
    // Earlier than the earliest timestamp.
    let ever = "/functionLogs/default/f?sinceSeconds=999999999999";
    assert_eq!(cluster.get(ever).await, (200, "old\nnew\n".into()));
    assert_eq!(cluster.get("/containerLogs/default/none/main").await.0, 404);
    let (code, text) = cluster.get("/containerLogs/default/talk/main?previous=true").await;
    assert_eq!(
        (code, text.as_str()),
        (400, "previous terminated container \"main\" in pod \"talk\" not found")
    );
}

/// Replicas share a revision's instances, so a line belongs to none of them; a client that reads all logs gets it once.
#[tokio::test]
async fn a_line_of_a_revision_is_in_one_replicas_log() {
    let cluster = KubeletHarness::start().await;
    for name in ["f-a", "f-b"] {
        cluster.replica(name).await;
    }
    let writer = LogWriter::start().unwrap();
    writer.sink(cluster.logs.revision("default", "f", "f-00001"), Stream::Stdout).write(b"hello\n");
    writer.flush();
    let log = async |pod: &str, wanted: &str| {
        let path = format!("/containerLogs/default/{pod}/main");
        // The informer may lag behind the API.
        let says = async || cluster.get(&path).await == (200, wanted.to_owned());
        cluster.eventually(&format!("{pod} says {wanted:?}"), says).await;
    };
    log("f-a", "hello\n").await;
    log("f-b", "(replicas of revision f-00001 share its instances: see the log of pod f-a)\n").await;
    // When the reporting replica is removed, another one reports.
    cluster.pods().delete("f-a", &DeleteParams::default()).await.unwrap();
    log("f-b", "hello\n").await;
}

#[tokio::test]
async fn a_replica_that_does_not_tell_is_followed_until_it_does_or_goes() {
    let cluster = KubeletHarness::start().await;
    for name in ["f-a", "f-b"] {
        cluster.replica(name).await;
    }
    let writer = LogWriter::start().unwrap();
    let write = |line: &str| {
        writer.sink(cluster.logs.revision("default", "f", "f-00001"), Stream::Stdout).write(line.as_bytes());
        writer.flush();
    };
    write("one\n");
    let mut told = cluster.follow("f-a").await;
    let mut listens = cluster.follow("f-b").await;
    assert_eq!(told.line().await.unwrap(), "one\n");
    let elsewhere = "(replicas of revision f-00001 share its instances: see the log of pod f-a)\n";
    assert_eq!(listens.line().await.unwrap(), elsewhere);
    write("two\n");
    assert_eq!(told.line().await.unwrap(), "two\n");
    listens.nothing_for(Duration::from_millis(600)).await;
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    cluster.pods().delete("f-a", &now).await.unwrap();
    assert_eq!(told.line().await, None, "its pod has gone");
    // The follower gets lines written from now on; the time of the switch is not specified.
    let mut number = 0;
    let first = loop {
        write(&format!("{number}\n"));
        number += 1;
        if let Some(line) = listens.within(Duration::from_millis(100)).await {
            break line.unwrap();
        }
        assert!(number < 100, "nobody tells");
    };
    assert!(first.trim().parse::<u32>().unwrap() < number, "{first}");
    cluster.pods().delete("f-b", &now).await.unwrap();
    while listens.line().await.is_some() {}
}

#[tokio::test]
async fn a_followed_log_ends_with_its_container() {
    let cluster = KubeletHarness::start().await;
    let pod = cluster.create("once", json!({"restartPolicy": "Never"}), json!({})).await;
    cluster.until("once", "ready", |pod| is_true(pod, "Ready")).await;
    let id = ContainerId { pod: PodUid(pod.metadata.uid.clone().unwrap()), name: "main".into(), attempt: 0 };
    let writer = LogWriter::start().unwrap();
    let write = |line: &str| {
        writer.sink(cluster.logs.container(&id), Stream::Stdout).write(line.as_bytes());
        writer.flush();
    };
    write("one\n");
    let mut log = cluster.follow("once").await;
    assert_eq!(log.line().await.unwrap(), "one\n");
    log.nothing_for(Duration::from_millis(600)).await;
    write("last\n");
    cluster.runtime.exit(&id, 0);
    assert_eq!(log.line().await.unwrap(), "last\n");
    assert_eq!(log.line().await, None);
    cluster.until("once", "done", |pod| phase(pod) == "Succeeded").await;
    let mut again = cluster.follow("once").await;
    assert_eq!(again.line().await.unwrap(), "one\n");
    assert_eq!(again.line().await.unwrap(), "last\n");
    assert_eq!(again.line().await, None);
}

#[tokio::test]
async fn the_previous_log_is_the_one_of_the_run_that_crashed() {
    let cluster = KubeletHarness::start().await;
    let exits = json!({"simulated.mayfly.dev/exit-code": "1"});
    let pod = cluster.create("crash", json!({}), exits).await;
    let uid = PodUid(pod.metadata.uid.unwrap());
    let log =
        |attempt| cluster.logs.container(&ContainerId { pod: uid.clone(), name: "main".into(), attempt });
    let writer = LogWriter::start().unwrap();
    for attempt in 0..2 {
        writer.sink(log(attempt), Stream::Stdout).write(format!("run {attempt}\n").as_bytes());
    }
    writer.flush();
    let waiting = |pod: &Pod| state(pod)[0]["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    cluster.until("crash", "backing off", waiting).await;
    for query in ["", "?previous=true"] {
        let path = format!("/containerLogs/default/crash/main{query}");
        // The informer may lag behind the API.
        let says = async || cluster.get(&path).await == (200, "run 1\n".into());
        cluster.eventually("the last run's log is shown", says).await;
    }
    // The third run starts after ten seconds; then the first run's log is removed, and the second's stays.
    cluster.eventually("the oldest log has gone", async || !log(0).exists()).await;
    assert!(log(1).exists());
}

/// The pod was deleted while the node was down.
#[tokio::test]
async fn a_pods_log_goes_even_when_nobody_saw_the_pod_go() {
    let cluster = KubeletHarness::stopped().await;
    let kept = cluster.create("kept", json!({}), json!({})).await.metadata.uid.unwrap();
    let known = cluster.informers.of::<Pod>();
    cluster.eventually("the pod is known", async || known.list().len() == 1).await;
    let writer = LogWriter::start().unwrap();
    let log = |uid: &str| {
        cluster.logs.container(&ContainerId { pod: PodUid(uid.into()), name: "main".into(), attempt: 0 })
    };
    // Enough logs that a sweep which wrongly removes the kept one has done so before the last of them.
    let gone: Vec<String> = (0..8).map(|n| format!("{n}-gone")).collect();
    for uid in gone.iter().chain([&kept]) {
        writer.sink(log(uid), Stream::Stdout).write(b"line\n");
    }
    writer.flush();
    cluster.run();
    cluster.eventually("the logs are swept", async || gone.iter().all(|uid| !log(uid).exists())).await;
    cluster.until("kept", "ready", |pod| is_true(pod, "Ready")).await;
    assert_eq!(cluster.follow("kept").await.line().await.unwrap(), "line\n");
}

/// A function that is created again reuses revision names: it must not show lines of the old one.
#[tokio::test]
async fn a_revisions_log_goes_with_it() {
    let cluster = KubeletHarness::stopped().await;
    let writer = LogWriter::start().unwrap();
    let write = |revision: &str, line: &str| {
        writer.sink(cluster.logs.revision("default", "f", revision), Stream::Stdout).write(line.as_bytes());
        writer.flush();
    };
    let exists = |revision: &str| cluster.logs.revision("default", "f", revision).exists();
    cluster.revision("f-00002").await;
    for revision in ["f-00001", "f-00002"] {
        write(revision, &format!("{revision}\n"));
    }
    // Nothing is shown of a removed revision, although its file still exists.
    assert_eq!(cluster.get("/functionLogs/default/f").await, (200, "f-00002\n".into()));
    // The revision was deleted while the node was down.
    cluster.run();
    cluster.eventually("the log is swept", async || !exists("f-00001")).await;
    let mut log = cluster.follow_function("f").await;
    assert_eq!(log.line().await.unwrap(), "f-00002\n");
    cluster.revision("f-00003").await;
    write("f-00003", "three\n");
    assert_eq!(log.line().await.unwrap(), "three\n");
    cluster.revisions().delete("f-00002", &DeleteParams::default()).await.unwrap();
    cluster.eventually("its log is removed", async || !exists("f-00002")).await;
    // Created again, the revision starts with an empty log, even if the old file was still open.
    cluster.revision("f-00002").await;
    write("f-00002", "again\n");
    assert_eq!(cluster.get("/functionLogs/default/f?revision=f-00002").await, (200, "again\n".into()));
    assert!(exists("f-00003"));
}
