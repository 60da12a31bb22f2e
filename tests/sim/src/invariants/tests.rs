//! Each rule fires at the event that it forbids, and not at those that lead there.

use std::{sync::Arc, time::Duration};

use mayfly_store::Key;
use serde_json::{Value, json};

use crate::{model::Step, oracle::Oracle};

/// A script of events.
struct Script {
    oracle: Oracle,
    revision: u64,
    now: Duration,
}

impl Script {
    fn new() -> Self {
        let mut script = Self { oracle: Oracle::default(), revision: 0, now: Duration::from_secs(1_000_000) };
        script.put("namespaces", "", "a", json!({"metadata": {"uid": "namespace"}}));
        script
    }

    fn put(&mut self, resource: &str, namespace: &str, name: &str, object: Value) -> &mut Self {
        self.step(Key::new(resource, namespace, name), Some(Arc::new(object)))
    }

    fn remove(&mut self, resource: &str, namespace: &str, name: &str) -> &mut Self {
        self.step(Key::new(resource, namespace, name), None)
    }

    fn step(&mut self, key: Key, new: Option<Arc<Value>>) -> &mut Self {
        self.revision += 1;
        let old = self.oracle.get(&key).cloned().map(Arc::new);
        self.oracle.check(&Step { at: self.now, revision: self.revision, key, old, new });
        self
    }

    #[track_caller]
    fn holds(&mut self) -> &mut Self {
        assert_eq!(self.oracle.violations(), [""; 0]);
        self
    }

    #[track_caller]
    fn violates(&self, rule: &str) {
        let violations = self.oracle.violations();
        assert!(violations.iter().any(|violation| violation.contains(rule)), "{rule:?} in {violations:#?}");
    }
}

fn owned(kind: &str, owner: &str, uid: &str) -> Value {
    json!({"metadata": {"uid": uid, "ownerReferences": [
        {"kind": kind, "uid": owner, "controller": true, "blockOwnerDeletion": true}]}})
}

fn bound(uid: &str, node: &str, cpu: &str) -> Value {
    json!({"metadata": {"uid": uid}, "spec": {"nodeName": node,
        "containers": [{"resources": {"requests": {"cpu": cpu}}}]}})
}

fn set(replicas: u64) -> Value {
    json!({"metadata": {"uid": "set"}, "spec": {"replicas": replicas}})
}

#[test]
fn revisions_increase() {
    let mut script = Script::new();
    script.holds().revision = 0;
    script.put("configmaps", "a", "x", json!({"metadata": {"uid": "x"}})).violates("does not increase");
}

#[test]
fn finalizers_hold_an_object() {
    let mut script = Script::new();
    let held = json!({"metadata": {"uid": "x", "finalizers": ["one", "two"], "deletionTimestamp": "now"}});
    script.put("configmaps", "a", "x", held).holds();
    script.remove("configmaps", "a", "x").violates("goes with the finalizers");
}

#[test]
fn a_namespace_goes_last_and_takes_nothing_in() {
    let mut script = Script::new();
    script.put("configmaps", "a", "x", json!({"metadata": {"uid": "x"}})).holds();
    script.put("namespaces", "", "a", json!({"metadata": {"uid": "namespace", "deletionTimestamp": "now"}}));
    script.holds().remove("namespaces", "", "a").violates("goes while configmaps/a/x is in it");

    let mut script = Script::new();
    script.put("namespaces", "", "a", json!({"metadata": {"uid": "namespace", "deletionTimestamp": "now"}}));
    script.holds().put("configmaps", "a", "x", json!({"metadata": {"uid": "x"}})).violates("being deleted");
}

#[test]
fn a_pod_is_bound_once_and_within_capacity() {
    let node = json!({"metadata": {"uid": "n"}, "status": {"allocatable": {"cpu": "1", "pods": "3"}}});
    let mut script = Script::new();
    script.put("nodes", "", "n", node.clone()).put("pods", "a", "x", bound("x", "", "600m"));
    script.put("pods", "a", "x", bound("x", "n", "600m")).holds();
    script.put("pods", "a", "x", bound("x", "m", "600m")).violates("and again to m");

    let mut script = Script::new();
    script.put("nodes", "", "n", node).put("pods", "a", "x", bound("x", "n", "600m")).holds();
    script.put("pods", "a", "y", bound("y", "n", "600m")).violates("request 1200 of 1000");
}

#[test]
fn an_owner_has_no_more_pods_than_it_wanted_lately() {
    let pod = |uid: &str| owned("ReplicaSet", "set", uid);
    let mut script = Script::new();
    script.put("replicasets.apps", "a", "set", set(2)).put("pods", "a", "x", pod("x"));
    // The controller may not have seen yet that fewer are wanted.
    script.put("replicasets.apps", "a", "set", set(1)).put("pods", "a", "y", pod("y")).holds();
    script.put("pods", "a", "z", pod("z")).violates("has 3 pods and wants 2");

    let mut script = Script::new();
    script.put("replicasets.apps", "a", "set", set(2)).put("replicasets.apps", "a", "set", set(1));
    script.put("pods", "a", "x", pod("x"));
    script.now += Duration::from_secs(3600);
    script.holds().put("pods", "a", "y", pod("y")).violates("has 2 pods and wants 1");

    let mut script = Script::new();
    script.oracle.hints.lost_creations.insert("set".into(), 1);
    script.put("replicasets.apps", "a", "set", set(1));
    script.put("pods", "a", "x", pod("x")).put("pods", "a", "y", pod("y")).holds();
}

#[test]
fn the_collector_spares_what_has_a_live_owner() {
    let mut script = Script::new();
    script.put("replicasets.apps", "a", "set", set(1));
    script.put("configmaps", "a", "x", owned("ReplicaSet", "set", "x")).holds();
    script.remove("configmaps", "a", "x").violates("whose owner replicasets.apps/a/set lives");

    let mut script = Script::new();
    script.put("configmaps", "a", "x", owned("ReplicaSet", "gone", "x"));
    script.remove("configmaps", "a", "x").holds();
}

#[test]
fn an_index_succeeds_once() {
    let pod = |uid: &str, phase: &str| {
        let mut pod = owned("Job", "job", uid);
        pod["metadata"]["annotations"] = json!({"batch.kubernetes.io/job-completion-index": "0"});
        pod["status"] = json!({"phase": phase});
        pod
    };
    let job = json!({"metadata": {"uid": "job"}, "spec": {"parallelism": 2, "completions": 2}});
    let mut script = Script::new();
    script.put("jobs.batch", "a", "job", job).put("pods", "a", "x", pod("x", "Succeeded"));
    script.put("pods", "a", "y", pod("y", "Running")).holds();
    script.put("pods", "a", "y", pod("y", "Succeeded")).violates("index 0 succeeds 2 times");
}

#[test]
fn a_rollout_keeps_its_limits_while_nothing_fails() {
    let deployment = |image: &str, generation: u64| {
        json!({"metadata": {"uid": "d", "generation": generation},
            "spec": {"replicas": 1, "template": image,
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}},
            "status": {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}})
    };
    let mut ready = owned("ReplicaSet", "set", "x");
    ready["status"] = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    let mut set = owned("Deployment", "d", "set");
    set["spec"] = json!({"replicas": 1});
    let mut script = Script::new();
    script.put("deployments.apps", "a", "d", deployment("one", 1)).put("replicasets.apps", "a", "set", set);
    script.put("pods", "a", "x", ready).put("deployments.apps", "a", "d", deployment("two", 2)).holds();
    script.remove("pods", "a", "x").violates("0 available pods, fewer than 1");
}

#[test]
fn the_end_shows_what_has_not_converged() {
    let mut script = Script::new();
    script.put("replicasets.apps", "a", "set", set(1));
    script.put("configmaps", "a", "x", owned("ReplicaSet", "gone", "x")).holds();
    let problems = script.oracle.unconverged(|_| false).join("\n");
    assert!(problems.contains("configmaps/a/x has only owners that do not exist"), "{problems}");
    assert!(problems.contains("replicasets.apps/a/set: 0 pods, 0 ready, 1 wanted"), "{problems}");
}

#[test]
fn a_cron_job_has_one_job_for_a_time() {
    let job = |uid: &str, time: &str| {
        let mut job = owned("CronJob", "cron", uid);
        job["metadata"]["annotations"] = json!({"batch.kubernetes.io/cronjob-scheduled-timestamp": time});
        job["metadata"]["creationTimestamp"] = "2030-01-01T00:02:30Z".into();
        job
    };
    let cron_job = |policy: &str, last: Value| {
        json!({"metadata": {"uid": "cron"}, "spec": {"concurrencyPolicy": policy},
            "status": {"lastScheduleTime": last}})
    };
    let (one, two, three) = ("2030-01-01T00:01:00Z", "2030-01-01T00:02:00Z", "2030-01-01T00:03:00Z");
    let with = |policy: &str| {
        let mut script = Script::new();
        script.put("cronjobs.batch", "a", "cron", cron_job(policy, Value::Null));
        script.put("jobs.batch", "a", "x", job("x", one)).holds();
        script
    };
    with("Allow").put("jobs.batch", "a", "y", job("y", two)).holds();
    with("Allow").put("jobs.batch", "a", "y", job("y", one)).violates("a second Job of one CronJob for");
    with("Allow").put("jobs.batch", "a", "y", job("y", three)).violates("before that time");
    with("Forbid").put("jobs.batch", "a", "y", job("y", two)).violates("of a CronJob that forbids this");

    let mut script = with("Allow");
    script.put("cronjobs.batch", "a", "cron", cron_job("Allow", two.into())).remove("jobs.batch", "a", "x");
    // The controller may not have seen yet that the time was used.
    script.put("jobs.batch", "a", "y", job("y", two)).holds().remove("jobs.batch", "a", "y");
    script.now += Duration::from_secs(3600);
    script.put("jobs.batch", "a", "z", job("z", two)).violates("which was used long ago");
    let mut script = with("Allow");
    script.put("cronjobs.batch", "a", "cron", cron_job("Allow", two.into())).holds();
    script.put("cronjobs.batch", "a", "cron", cron_job("Allow", one.into())).violates("back to");
}

#[test]
fn a_claim_has_one_volume_and_a_volume_one_claim() {
    let volume = |claim: &str| json!({"metadata": {"uid": "v"}, "spec": {"claimRef": {"uid": claim}}});
    let claim = |uid: &str, volume: &str| json!({"metadata": {"uid": uid}, "spec": {"volumeName": volume}});
    let mut bound = Script::new();
    bound.put("persistentvolumes", "", "v", volume("x"));
    bound.put("persistentvolumeclaims", "a", "x", claim("x", "")).put(
        "persistentvolumeclaims",
        "a",
        "x",
        claim("x", "v"),
    );
    bound
        .holds()
        .put("persistentvolumeclaims", "a", "y", claim("y", "v"))
        .violates("and to persistentvolumeclaims/a/x");
    bound.violates("which is that of the claim with uid x");

    let mut script = Script::new();
    script.put("persistentvolumes", "", "v", volume("x")).put(
        "persistentvolumeclaims",
        "a",
        "x",
        claim("x", "v"),
    );
    script.holds().put("persistentvolumes", "", "v", volume("y")).violates("is taken from it");
    let mut script = Script::new();
    script.put("persistentvolumeclaims", "a", "x", claim("x", "v")).holds();
    script.put("persistentvolumeclaims", "a", "x", claim("x", "w")).violates("bound to v and now to");
    // A reservation that no claim has accepted yet may be given up.
    let mut script = Script::new();
    script.put("persistentvolumes", "", "v", volume("x")).put(
        "persistentvolumeclaims",
        "a",
        "x",
        claim("x", ""),
    );
    script.put("persistentvolumes", "", "v", volume("")).holds();
}

#[test]
fn the_end_shows_quotas_volumes_and_cron_jobs_that_are_not_up_to_date() {
    let mut script = Script::new();
    let hard = json!({"pods": "5", "requests.cpu": "4", "services": "3"});
    let quota = |used: Value| json!({"metadata": {"uid": "q"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": used}});
    script.put("pods", "a", "p", bound("p", "", "1500m"));
    script.put(
        "resourcequotas",
        "a",
        "q",
        quota(json!({"pods": "1", "requests.cpu": "1500m", "services": "0"})),
    );
    let problems = |script: &Script| script.oracle.unconverged(|_| false).join("\n");
    assert!(!problems(&script).contains("resourcequotas"), "{}", problems(&script));
    script.put("services", "a", "s", json!({"metadata": {"uid": "s"}}));
    let expected = r#"resourcequotas/a/q: services: "0" is shown as used and "1" exists"#;
    assert!(problems(&script).contains(expected), "{}", problems(&script));

    let volume = |claim: Value| {
        json!({"metadata": {"uid": "v"}, "spec": {"claimRef": claim, "capacity": {"storage": "2Gi"}},
            "status": {"phase": "Available"}})
    };
    let claim = json!({"metadata": {"uid": "c"}, "spec": {"resources": {"requests": {"storage": "1Gi"}}},
        "status": {"phase": "Pending"}});
    script.put("persistentvolumes", "", "v", volume(Value::Null)).put(
        "persistentvolumeclaims",
        "a",
        "c",
        claim,
    );
    let found = problems(&script);
    let expected = "persistentvolumeclaims/a/c: the claim is not bound and persistentvolumes/v fits";
    assert!(found.contains(expected), "{found}");
    script.put("persistentvolumes", "", "v", volume(json!({"uid": "gone"})));
    let found = problems(&script);
    assert!(found.contains(r#"the volume is "Available" and should be Released"#), "{found}");

    let cron_job = json!({"metadata": {"uid": "cron"}, "status": {"active": [{"name": "x"}]}});
    script.put("cronjobs.batch", "a", "cron", cron_job);
    assert!(problems(&script).contains("cronjobs.batch/a/cron: 1 Jobs are active"), "{}", problems(&script));
}
