//! Storing the outputs of jobs.

use std::fs;

use mayfly_api::job_io::{ANNOTATION_INPUTS, ANNOTATION_OUTPUTS, Collected, Outputs};
use mayfly_artifacts::Artifacts;
use mayfly_kubelet::JobFiles;
use mayfly_runtime::{ContainerId, PodUid};
use serde_json::json;

use crate::harness::{KubeletHarness, phase};

#[tokio::test]
async fn what_a_job_left_is_taken_in_once_it_can_be_stored() {
    let cluster = KubeletHarness::stopped().await;
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("artifacts");
    let artifacts = Artifacts::open(&store).unwrap();
    cluster.run_jobs(JobFiles::new(artifacts.clone(), folder.path().join("jobs")));
    let never = json!({"restartPolicy": "Never"});
    let pod = cluster.create("job", never, json!({ANNOTATION_INPUTS: "{}"})).await;
    cluster.until("job", "running", |pod| phase(pod) == "Running").await;
    let uid = pod.metadata.uid.unwrap();
    fs::write(folder.path().join("jobs").join(&uid).join("out/answer"), "42").unwrap();

    // The store is unusable for a while.
    let (contents, away) = (store.join("sha256"), store.join("away"));
    fs::rename(&contents, &away).unwrap();
    cluster.runtime.exit(&ContainerId { pod: PodUid(uid), name: "main".into(), attempt: 0 }, 0);
    cluster.event("job", "FailedCollect").await;
    let pod = cluster.pods().get("job").await.unwrap();
    assert_eq!(phase(&pod), "Running", "a final phase would say that its outputs are complete");
    fs::rename(&away, &contents).unwrap();

    let pod = cluster.until("job", "over", |pod| phase(pod) == "Succeeded").await;
    let collected = &pod.metadata.annotations.unwrap()[ANNOTATION_OUTPUTS];
    let collected: Collected = serde_json::from_str(collected).unwrap();
    let outputs = fs::read(artifacts.path(&collected.document).unwrap()).unwrap();
    let outputs: Outputs = serde_json::from_slice(&outputs).unwrap();
    assert_eq!((outputs.exit_code, &outputs.parameters["answer"]), (0, &json!(42)));
}
