//! Tests of the runtime on a Slurm cluster of one node.

mod conformance;
mod harness;
mod recovery;

use std::time::Duration;

use mayfly_runtime::{ContainerFiles, ContainerState, Mount, PodUid, Runtime as _, RuntimeError};

use harness::{Harness, cluster_or_skip, exit_of, lines, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_container_runs_as_a_batch_job_with_its_files() {
    let Some(cluster) = cluster_or_skip("a_container_runs_as_a_batch_job_with_its_files") else { return };
    let test = Harness::new(&cluster).await;
    let files = cluster.shared().join("files");
    for folder in ["in", "out"] {
        std::fs::create_dir_all(files.join(folder)).unwrap();
    }
    std::fs::write(files.join("stdin"), "{\"n\":1}").unwrap();
    std::fs::write(files.join("in/word"), "hello").unwrap();
    let mount =
        |host: &str, guest: &str| Mount { host: files.join(host), guest: guest.into(), ..Mount::default() };
    let script = "cat; echo; cat $MAYFLY_IN/word; echo; echo $GREETING; echo bad >&2; echo 7 >$MAYFLY_OUT/seven; exit 3";
    let mut container = test.container("u1", script);
    container.env = vec![("GREETING".into(), "hi there".into())];
    container.files = Some(ContainerFiles {
        mounts: vec![mount("in", "/mayfly/in"), mount("out", "/mayfly/out")],
        stdin: files.join("stdin"),
        capture: files.join("capture"),
    });
    test.start(&container).await.unwrap();
    let (code, reason, message) = exit_of(&test.runtime, &container.id).await;
    assert_eq!((code, reason.as_str(), message.as_str()), (3, "Error", ""));
    let read = |name: &str| std::fs::read_to_string(files.join(name)).unwrap();
    assert_eq!(read("out/seven"), "7\n");
    assert_eq!(read("capture/stdout"), "{\"n\":1}\nhello\nhi there\n");
    assert_eq!(read("capture/stderr"), "bad\n");
    assert_eq!(
        lines(&container.log_path),
        ["stderr F bad", "stdout F hello", "stdout F hi there", "stdout F {\"n\":1}"]
    );
    assert_eq!(cluster.job_names(), ["mayfly-u1_main_0"]);
    // A repeated start has no effect.
    test.runtime.start_container(container.clone()).await.unwrap();
    assert_eq!(cluster.job_names().len(), 1);
    test.runtime.remove_sandbox(&container.id.pod).await.unwrap();
    assert!(test.runtime.sandboxes().is_empty());
    assert!(!cluster.shared().join("pods/u1").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_follows_the_program() {
    let Some(cluster) = cluster_or_skip("the_log_follows_the_program") else { return };
    let test = Harness::new(&cluster).await;
    let go_on = cluster.shared().join("go-on");
    let script = format!("echo one; while ! [ -e {} ]; do sleep 0.1; done; echo two", go_on.display());
    let container = test.container("u1", &script);
    test.start(&container).await.unwrap();
    until("the first line", || lines(&container.log_path) == ["stdout F one"]).await;
    assert!(matches!(test.state(&container.id), Some(ContainerState::Running { .. })));
    std::fs::write(&go_on, "").unwrap();
    assert_eq!(exit_of(&test.runtime, &container.id).await.0, 0);
    assert_eq!(lines(&container.log_path), ["stdout F one", "stdout F two"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_container_waits_with_slurms_reason_until_it_is_stopped() {
    let Some(cluster) = cluster_or_skip("a_queued_container_waits_with_slurms_reason_until_it_is_stopped")
    else {
        return;
    };
    let test = Harness::new(&cluster).await;
    let mut first = test.container("u1", "sleep 300");
    first.cpu_millis_max = Some(4000);
    test.start(&first).await.unwrap();
    until("it runs", || matches!(test.state(&first.id), Some(ContainerState::Running { .. }))).await;
    let mut second = test.container("u2", "echo never");
    second.cpu_millis_max = Some(3500);
    test.start(&second).await.unwrap();
    until("Slurm's reason", || {
        matches!(test.state(&second.id), Some(ContainerState::Waiting { reason, message })
            if reason == "SlurmPending" && message.contains("PENDING ("))
    })
    .await;
    test.runtime.stop_container(&second.id, Duration::from_secs(30)).await.unwrap();
    let (code, reason, message) = exit_of(&test.runtime, &second.id).await;
    assert_eq!((code, reason.as_str()), (143, "Cancelled"), "{message}");
    assert!(lines(&second.log_path).is_empty());
    // The pod of the running job is removed.
    test.runtime.remove_sandbox(&first.id.pod).await.unwrap();
    assert!(cluster.run("squeue", &["--noheader"]).trim().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_has_the_grace_period_to_end() {
    let Some(cluster) = cluster_or_skip("a_program_has_the_grace_period_to_end") else { return };
    let test = Harness::new(&cluster).await;
    let follows =
        test.container("u1", "trap 'echo asked; exit 9' TERM; echo up; while :; do sleep 0.1; done");
    let ignores = test.container("u2", "trap '' TERM; echo up; while :; do sleep 0.1; done");
    for container in [&follows, &ignores] {
        test.start(container).await.unwrap();
        until("the program is up", || lines(&container.log_path) == ["stdout F up"]).await;
    }
    test.runtime.stop_container(&follows.id, Duration::from_secs(60)).await.unwrap();
    assert_eq!(exit_of(&test.runtime, &follows.id).await.0, 9);
    assert!(lines(&follows.log_path).contains(&"stdout F asked".to_owned()));
    test.runtime.stop_container(&ignores.id, Duration::from_secs(1)).await.unwrap();
    let (code, reason, _) = exit_of(&test.runtime, &ignores.id).await;
    assert!(code > 128, "{code} {reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_needs_too_much_memory_is_reported_as_such() {
    let Some(cluster) = cluster_or_skip("a_program_that_needs_too_much_memory_is_reported_as_such") else {
        return;
    };
    let test = Harness::new(&cluster).await;
    let mut container =
        test.container("u1", "x=$(head -c 60000000 /dev/zero | tr '\\0' a); sleep 60; echo ${#x}");
    container.memory_bytes_max = Some(20 << 20);
    test.start(&container).await.unwrap();
    let (code, reason, message) = exit_of(&test.runtime, &container.id).await;
    assert_eq!((code, reason.as_str()), (137, "OOMKilled"), "{message}");
    assert!(message.contains("OUT_OF_MEMORY"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_carry_the_message_of_slurm() {
    let Some(cluster) = cluster_or_skip("refusals_carry_the_message_of_slurm") else { return };
    let test = Harness::new(&cluster).await;
    let container = test.container("u1", "true");
    test.sandbox("u1", &[("slurm.mayfly.dev/partition", "nowhere")]).await;
    let error = test.runtime.start_container(container.clone()).await.unwrap_err();
    let RuntimeError::Invalid(message) = &error else { panic!("{error:?}") };
    assert!(message.contains("Invalid partition name specified"), "{message}");
    assert!(test.state(&container.id).is_none(), "the kubelet tries again");
    let mut too_large = test.container("u2", "true");
    too_large.process.extended_resources = [("nvidia.com/gpu".into(), 1)].into();
    let error = test.start(&too_large).await.unwrap_err();
    assert!(matches!(&error, RuntimeError::Invalid(message) if message.contains("gres")), "{error:?}");
    let mut no_program = test.container("u3", "true");
    no_program.command.clear();
    let error = test.start(&no_program).await.unwrap_err();
    assert!(matches!(&error, RuntimeError::Invalid(message) if message.contains("command")), "{error:?}");
    let orphan = test.container("u4", "true");
    let error = test.runtime.start_container(orphan).await.unwrap_err();
    assert_eq!(error, RuntimeError::NoSandbox(PodUid("u4".into())));
    assert!(cluster.job_names().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn annotations_of_the_pod_choose_the_partition() {
    let Some(cluster) = cluster_or_skip("annotations_of_the_pod_choose_the_partition") else { return };
    let test = Harness::new(&cluster).await;
    let mut container = test.container("u1", "echo $SLURM_JOB_PARTITION $SLURM_CPUS_PER_TASK; pwd");
    container.process.working_dir = Some("/tmp".into());
    container.process.cpu_millis_request = 1500;
    container.process.active_deadline = Some(Duration::from_secs(50));
    test.sandbox("u1", &[("slurm.mayfly.dev/partition", "short")]).await;
    test.runtime.start_container(container.clone()).await.unwrap();
    assert_eq!(exit_of(&test.runtime, &container.id).await.0, 0);
    assert_eq!(lines(&container.log_path), ["stdout F /tmp", "stdout F short 2"]);
    let limit = cluster.run("squeue", &["--states=all", "--noheader", "--format=%l"]);
    assert_eq!(limit.trim(), "1:00");
}

/// Runs without a cluster.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_slurms_commands_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let test = Harness::without_commands(folder.path()).await;
    let container = test.container("u1", "true");
    let error = test.start(&container).await.unwrap_err();
    let RuntimeError::Internal(message) = &error else { panic!("{error:?}") };
    assert!(message.contains("cannot run") && message.contains("slurm-client"), "{message}");
    assert!(test.state(&container.id).is_none());
    // It is unknown whether a job was submitted, so the pod stays until Slurm answers.
    assert!(test.runtime.remove_sandbox(&container.id.pod).await.is_err());
    assert_eq!(test.runtime.sandboxes(), [container.id.pod]);
}
