//! The controller of job queues against the real API.

use crate::support::{ControllersHarness, key, until};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use mayfly_api::{JobQueue, ObjectKey, k8s::api::batch::v1::Job};
use mayfly_informer::Informer;
use serde_json::{Value, json};

const MODEL: &str = "nvidia.com/gpu.product";

fn job(name: &str, selector: Value) -> Value {
    json!({"metadata": {"name": name, "labels": {"mayfly.dev/queue": "models"}}, "spec": {"template": {"spec": {
        "restartPolicy": "Never", "nodeSelector": selector, "containers": [{"name": "c", "image": "x",
            "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}}})
}

/// The node selector of a Job that was started; `None`: it waits.
fn selected(jobs: &Informer<Job>, name: &str) -> Option<Value> {
    let spec = jobs.get(&key(name))?.spec.clone()?;
    let is_started = spec.suspend == Some(false);
    is_started.then(|| json!(spec.template.spec.and_then(|pod| pod.node_selector)))
}

#[tokio::test]
async fn jobs_of_a_queue_are_placed_in_flavors_within_their_quotas() {
    let cluster = ControllersHarness::quiet().await;
    cluster.run_controllers();
    let flavor =
        |model: &str| json!({"name": model, "nodeLabels": {MODEL: model}, "quota": {"nvidia.com/gpu": 1}});
    let queue = json!({"metadata": {"name": "models"}, "spec": {"quota": {"nvidia.com/gpu": 8},
        "flavors": [flavor("a"), flavor("b")]}, "apiVersion": "mayfly.dev/v1", "kind": "JobQueue"});
    let queue: JobQueue = serde_json::from_value(queue).unwrap();
    let queues: Api<JobQueue> = Api::all(cluster.client.clone());
    queues.create(&PostParams::default(), &queue).await.unwrap();
    let (jobs, queues) = (cluster.informers.of::<Job>(), cluster.informers.of::<JobQueue>());
    cluster.create::<Job>(job("one", json!({"disk": "ssd"}))).await;
    until(&jobs, "one starts", || selected(&jobs, "one").is_some()).await;
    assert_eq!(selected(&jobs, "one"), Some(json!({"disk": "ssd", MODEL: "a"})));
    cluster.create::<Job>(job("two", json!({}))).await;
    until(&jobs, "two starts", || selected(&jobs, "two").is_some()).await;
    assert_eq!(selected(&jobs, "two"), Some(json!({MODEL: "b"})));
    cluster.create::<Job>(job("three", json!({MODEL: "b"}))).await;
    let status = || json!(queues.get(&ObjectKey::cluster("models")).and_then(|queue| queue.status.clone()));
    let used = |name: &str, gpus: &str| json!({"name": name, "used": {"nvidia.com/gpu": gpus}});
    let full = || {
        let status = status();
        status["waiting"] == 1 && status["flavors"] == json!([used("a", "1"), used("b", "1")])
    };
    until(&queues, "both flavors are full", full).await;
    let waits = "default/three needs 1 of nvidia.com/gpu, and 0 of 1 in the quota of flavor b are free";
    assert_eq!(status()["head"], waits);
    assert_eq!(selected(&jobs, "three"), None);
    // Room in the flavor that the Job excludes does not start it.
    cluster.api::<Job>().delete("one", &DeleteParams::background()).await.unwrap();
    let freed = || status()["flavors"] == json!([used("a", "0"), used("b", "1")]);
    until(&queues, "the flavor is free", freed).await;
    assert_eq!(selected(&jobs, "three"), None);
    cluster.api::<Job>().delete("two", &DeleteParams::background()).await.unwrap();
    until(&jobs, "three starts", || selected(&jobs, "three").is_some()).await;
    let events: Api<mayfly_api::k8s::api::core::v1::Event> = cluster.api();
    let of_three = || async {
        let all = events.list(&Default::default()).await.unwrap().items;
        let own = all.into_iter().filter(|event| event.involved_object.name.as_deref() == Some("three"));
        own.filter(|event| event.reason.as_deref() == Some("QueueStarted")).find_map(|event| event.message)
    };
    let told = tokio::time::timeout(std::time::Duration::from_secs(20), async {
        loop {
            if let Some(message) = of_three().await {
                return message;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    });
    assert_eq!(told.await.unwrap(), "Queue models has room for the job in flavor b");
}
