//! Jobs survive the end of Mayfly's process and of Slurm's controller.

use std::{fs, path::Path};

use mayfly_runtime::{ContainerId, ContainerState, Runtime as _, RuntimeError};
use mayfly_slurm_cluster::SlurmCluster;

use crate::harness::{Harness, cluster_or_skip, exit_of, lines, until};

/// A program that prints a line, waits for a file, and prints another line.
fn waiting_script(go_on: &Path) -> String {
    format!("echo one; while ! [ -e {} ]; do sleep 0.1; done; echo two", go_on.display())
}

/// Removes the job's id from a container's record, as if the process was killed between `sbatch` and its record.
fn forget_job(cluster: &SlurmCluster, id: &ContainerId) {
    let path = cluster.shared().join(format!("pods/{}/{}_{}/record.json", id.pod, id.name, id.attempt));
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert!(record["job"].is_u64(), "{record}");
    (record["job"], record["started"]) = (serde_json::Value::Null, serde_json::Value::Null);
    fs::write(&path, record.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_takes_running_jobs_over() {
    let Some(cluster) = cluster_or_skip("another_process_takes_running_jobs_over") else { return };
    let go_on = cluster.shared().join("go-on");
    let test = Harness::new(&cluster).await;
    let running = test.container("u1", &waiting_script(&go_on));
    let ending = test.container("u2", "echo over; exit 4");
    test.start(&running).await.unwrap();
    until("the first line", || lines(&running.log_path) == ["stdout F one"]).await;
    test.start(&ending).await.unwrap();
    drop(test);
    until("the other job has ended", || {
        !cluster.run("squeue", &["--noheader", "--format=%j"]).contains("u2")
    })
    .await;
    let test = Harness::new(&cluster).await;
    let mut pods = test.runtime.sandboxes();
    pods.sort();
    assert_eq!(pods, [running.id.pod.clone(), ending.id.pod.clone()]);
    assert!(matches!(test.state(&running.id), Some(ContainerState::Running { .. })));
    assert_eq!(exit_of(&test.runtime, &ending.id).await.0, 4);
    assert_eq!(lines(&ending.log_path), ["stdout F over"]);
    // The kubelet repeats the start.
    test.start(&running).await.unwrap();
    fs::write(&go_on, "").unwrap();
    assert_eq!(exit_of(&test.runtime, &running.id).await.0, 0);
    assert_eq!(lines(&running.log_path), ["stdout F one", "stdout F two"]);
    assert_eq!(cluster.job_names().len(), 2);
    // A recorded end needs no query of Slurm.
    drop(test);
    let test = Harness::without_commands(&cluster.shared()).await;
    assert!(matches!(test.state(&running.id), Some(ContainerState::Exited { exit_code: 0, .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_id_was_not_recorded_is_not_submitted_again() {
    let Some(cluster) = cluster_or_skip("a_job_whose_id_was_not_recorded_is_not_submitted_again") else {
        return;
    };
    let go_on = cluster.shared().join("go-on");
    let test = Harness::new(&cluster).await;
    let mut running = test.container("u1", &waiting_script(&go_on));
    running.cpu_millis_max = Some(4000);
    // The job waits for the first one, so no file in its directory names it.
    let mut queued = test.container("u2", "echo ran");
    queued.cpu_millis_max = Some(4000);
    test.start(&running).await.unwrap();
    until("the first line", || lines(&running.log_path) == ["stdout F one"]).await;
    test.start(&queued).await.unwrap();
    drop(test);
    for id in [&running.id, &queued.id] {
        forget_job(&cluster, id);
    }
    let test = Harness::new(&cluster).await;
    assert!(test.state(&queued.id).is_none(), "the kubelet starts it again");
    for container in [&running, &queued] {
        test.start(container).await.unwrap();
    }
    fs::write(&go_on, "").unwrap();
    for container in [&running, &queued] {
        assert_eq!(exit_of(&test.runtime, &container.id).await.0, 0);
    }
    assert_eq!(lines(&queued.log_path), ["stdout F ran"]);
    assert_eq!(cluster.job_names().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_job_was_not_recorded_leaves_none_behind() {
    let Some(cluster) = cluster_or_skip("a_pod_whose_job_was_not_recorded_leaves_none_behind") else {
        return;
    };
    let test = Harness::new(&cluster).await;
    let container = test.container("u1", "sleep 300");
    test.start(&container).await.unwrap();
    drop(test);
    forget_job(&cluster, &container.id);
    let test = Harness::new(&cluster).await;
    test.runtime.remove_sandbox(&container.id.pod).await.unwrap();
    until("the queue is empty", || cluster.run("squeue", &["--noheader"]).trim().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_second_submission_runs_nothing() {
    let Some(cluster) = cluster_or_skip("a_late_second_submission_runs_nothing") else { return };
    let go_on = cluster.shared().join("go-on");
    let test = Harness::new(&cluster).await;
    let container = test.container("u1", &waiting_script(&go_on));
    test.start(&container).await.unwrap();
    until("the first line", || lines(&container.log_path) == ["stdout F one"]).await;
    let folder = cluster.shared().join("pods/u1/main_0");
    let text = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
    // A submission of an `sbatch` whose answer was never read.
    let submitted = cluster.run(
        "sbatch",
        &[
            "--parsable",
            "--job-name=mayfly-u1_main_0",
            "--mem=100M",
            "--open-mode=append",
            &format!("--output={}", text(folder.join("stdout"))),
            &format!("--error={}", text(folder.join("stderr"))),
            &text(folder.join("script")),
        ],
    );
    let second = submitted.trim();
    assert!(second.parse::<u64>().is_ok(), "{submitted:?}");
    until("the second job has ended", || {
        !cluster.run("squeue", &["--noheader", "--format=%A"]).lines().any(|id| id.trim() == second)
    })
    .await;
    assert!(matches!(test.state(&container.id), Some(ContainerState::Running { .. })));
    fs::write(&go_on, "").unwrap();
    assert_eq!(exit_of(&test.runtime, &container.id).await.0, 0);
    let log = lines(&container.log_path);
    assert_eq!(log.iter().filter(|line| line.starts_with("stdout")).count(), 2, "{log:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_outlive_the_controller() {
    let Some(mut cluster) = cluster_or_skip("jobs_outlive_the_controller") else { return };
    let go_on = cluster.shared().join("go-on");
    let test = Harness::new(&cluster).await;
    let running = test.container("u1", &waiting_script(&go_on));
    test.start(&running).await.unwrap();
    until("the first line", || lines(&running.log_path) == ["stdout F one"]).await;
    cluster.stop_controller();
    let late = test.container("u2", "echo late");
    let error = test.start(&late).await.unwrap_err();
    assert!(matches!(&error, RuntimeError::Internal(message) if message.contains("sbatch")), "{error:?}");
    assert!(matches!(test.state(&running.id), Some(ContainerState::Running { .. })), "it is not lost");
    fs::write(&go_on, "").unwrap();
    cluster.start_controller();
    test.start(&late).await.unwrap();
    assert_eq!(exit_of(&test.runtime, &late.id).await.0, 0);
    assert_eq!(exit_of(&test.runtime, &running.id).await.0, 0);
    let names = cluster.job_names();
    assert_eq!(names.iter().filter(|name| name.contains("u2")).count(), 1, "{names:?}");
}
