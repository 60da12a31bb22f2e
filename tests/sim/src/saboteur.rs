//! Deliberate breakage, to see that the rules notice it.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};

use crate::{
    model::{controller, is_active, list, number, owners, text, uid},
    run::Broken,
    simulation_state::SimulationState,
    user::UserClient,
};

/// Waits for a chance to do the damage, does it, and looks for another.
pub async fn run(broken: Broken, simulation: Arc<SimulationState>, user: UserClient) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        match broken {
            Broken::ExtraPod => extra_pod(&simulation, &user).await,
            Broken::EagerCollector => collect_live(&simulation, &user).await,
            Broken::DoubleSchedule => double_schedule(&simulation, &user).await,
            Broken::StolenVolume => steal_volume(&simulation, &user).await,
            Broken::SilentWatch => return,
        }
    }
}

/// Creates a pod more than a ReplicaSet wants, as a controller that counts wrongly does.
async fn extra_pod(simulation: &SimulationState, user: &UserClient) {
    let twin = {
        let oracle = simulation.oracle.lock();
        let full = oracle.model.of("replicasets.apps").find(|(_, set)| {
            let pods = oracle.model.controlled("pods", uid(set)).filter(|(_, pod)| is_active(pod)).count();
            pods > 0 && i64::try_from(pods) == Ok(number(set, "/spec/replicas", 1))
        });
        let pod = full.and_then(|(_, set)| oracle.model.controlled("pods", uid(set)).next());
        pod.map(|(_, pod)| pod.clone())
    };
    let Some(twin) = twin else { return };
    let owner = controller(&twin).cloned().unwrap_or_default();
    let mut spec = twin["spec"].clone();
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("nodeName");
    }
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "spec": spec, "metadata": {
        "namespace": twin["metadata"]["namespace"], "generateName": "extra-",
        "labels": twin["metadata"]["labels"], "ownerReferences": [owner]}});
    // A refusal is no damage; there will be another chance.
    let _ = user.create(&pod).await;
}

/// Deletes an object whose owner lives, as a collector does that takes its copy for the truth.
async fn collect_live(simulation: &SimulationState, user: &UserClient) {
    let dependent = {
        let oracle = simulation.oracle.lock();
        let lives = |owner: &Value| {
            let owner = oracle.model.by_uid(owner["uid"].as_str().unwrap_or(""));
            owner.is_some_and(|(_, owner)| !crate::model::is_terminating(owner))
        };
        let dependents = oracle.model.of("configmaps");
        let mut owned = dependents.filter(|(_, object)| owners(object).iter().any(lives));
        owned.find(|(_, object)| list(object, "/metadata/finalizers").is_empty()).map(|(key, _)| key.clone())
    };
    if let Some(key) = dependent {
        let _ = user.delete(&key, "Background", None).await;
    }
}

/// Creates another Job for a scheduled time, as a controller does that forgets what it has done.
async fn double_schedule(simulation: &SimulationState, user: &UserClient) {
    let twin = {
        let oracle = simulation.oracle.lock();
        let mut jobs = oracle.model.of("jobs.batch").map(|(_, job)| job);
        jobs.find_map(|job| {
            let owner = controller(job).filter(|owner| text(owner, "/kind") == "CronJob")?;
            let (_, cron_job) = oracle.model.by_uid(text(owner, "/uid"))?;
            let metadata = json!({"namespace": job["metadata"]["namespace"], "generateName": "again-",
                "annotations": job["metadata"]["annotations"], "ownerReferences": [owner]});
            let spec = &cron_job["spec"]["jobTemplate"]["spec"];
            Some(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}))
        })
    };
    if let Some(twin) = twin {
        let _ = user.create(&twin).await;
    }
}

/// Reserves the volume of a bound claim for another one.
async fn steal_volume(simulation: &SimulationState, user: &UserClient) {
    let bound = {
        let oracle = simulation.oracle.lock();
        let mut volumes = oracle.model.of("persistentvolumes");
        let bound = volumes.find(|(key, volume)| {
            let claim = oracle.model.by_uid(text(volume, "/spec/claimRef/uid"));
            claim.is_some_and(|(_, claim)| text(claim, "/spec/volumeName") == &*key.name)
        });
        bound.map(|(key, _)| key.clone())
    };
    if let Some(key) = bound {
        let thief = json!({"name": "thief", "uid": "00000000-0000-0000-0000-000000000000"});
        let _ = user.patch(&key, &json!({"spec": {"claimRef": thief}})).await;
    }
}
