//! The objects that the user creates.
//!
//! All workloads of a run together request less than the nodes of [`crate::cluster`] have, also while a node is lost,
//! so that every pod finds a place in the end.

use serde_json::{Value, json};

use crate::random::Random;

/// Workloads that exist at the same time.
pub const WORKLOADS_MAX: usize = 8;
pub const REPLICAS_MAX: u64 = 5;
const POD_CPU_MILLIS_MAX: u64 = 250;
/// A finalizer that nobody but the user removes.
pub const USER_FINALIZER: &str = "sim.mayfly.dev/keep";

/// Random objects, with names that are used again now and then.
pub struct Workloads<'a> {
    pub random: &'a mut Random,
    pub namespace: String,
    pub name: String,
}

impl std::fmt::Debug for Workloads<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workloads")
            .field("namespace", &self.namespace)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Workloads<'_> {
    fn pod(&mut self, restart: &str, mut annotations: Value) -> Value {
        annotations["sim.mayfly.dev/version"] = self.random.below(0..1000).to_string().into();
        json!({
            "metadata": {"labels": {"app": self.name}, "annotations": annotations},
            "spec": {
                "restartPolicy": restart,
                "terminationGracePeriodSeconds": 10,
                "containers": [{"name": "main", "image": "example.com/app:1", "resources": {"requests": {
                    "cpu": format!("{}m", self.random.below(50..POD_CPU_MILLIS_MAX)), "memory": "32Mi"}}}],
            },
        })
    }

    /// The template of pods that run until they are deleted.
    pub fn template(&mut self) -> Value {
        let seconds = |random: &mut Random, most: u64| format!("0.{}", random.below(0..most));
        let annotations = json!({
            "simulated.mayfly.dev/start-seconds": seconds(self.random, 10),
            "simulated.mayfly.dev/ready-seconds": format!("{}.{}", self.random.below(0..3), self.random.below(0..10)),
            "simulated.mayfly.dev/stop-seconds": self.random.below(0..4).to_string(),
        });
        self.pod("Always", annotations)
    }

    fn object(&self, api_version: &str, kind: &str, spec: Value) -> Value {
        json!({"apiVersion": api_version, "kind": kind,
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": {"app": self.name}},
            "spec": spec})
    }

    fn selector(&self) -> Value {
        json!({"matchLabels": {"app": self.name}})
    }

    pub fn replicas(&mut self) -> u64 {
        self.random.below(0..REPLICAS_MAX + 1)
    }

    pub fn deployment(&mut self) -> Value {
        let strategy = match self.random.below(0..4) {
            0 => json!({"type": "Recreate"}),
            1 => json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
            2 => json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 2}}),
            _ => {
                json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "50%", "maxUnavailable": "25%"}})
            }
        };
        let spec = json!({"replicas": self.replicas(), "strategy": strategy, "selector": self.selector(),
            "revisionHistoryLimit": self.random.below(1..4), "template": self.template()});
        self.object("apps/v1", "Deployment", spec)
    }

    pub fn replica_set(&mut self) -> Value {
        let spec =
            json!({"replicas": self.replicas(), "selector": self.selector(), "template": self.template()});
        self.object("apps/v1", "ReplicaSet", spec)
    }

    pub fn stateful_set(&mut self) -> Value {
        let policy = *self.random.pick(&["OrderedReady", "Parallel"]).unwrap_or(&"Parallel");
        let spec = json!({"replicas": self.replicas(), "selector": self.selector(), "serviceName": self.name,
            "podManagementPolicy": policy, "template": self.template()});
        self.object("apps/v1", "StatefulSet", spec)
    }

    pub fn daemon_set(&mut self) -> Value {
        let spec = json!({"selector": self.selector(), "template": self.template()});
        let mut set = self.object("apps/v1", "DaemonSet", spec);
        set["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "30m".into();
        set
    }

    pub fn job(&mut self) -> Value {
        let fails = self.random.chance(0.2);
        let annotations = json!({
            "simulated.mayfly.dev/run-seconds": self.random.below(1..15).to_string(),
            "simulated.mayfly.dev/exit-code": if fails { "1" } else { "0" },
        });
        let mode = *self.random.pick(&["Indexed", "NonIndexed"]).unwrap_or(&"Indexed");
        let spec = json!({"completions": self.random.below(1..7), "parallelism": self.random.below(1..5),
            "completionMode": mode, "backoffLimit": self.random.below(0..3),
            "template": self.pod("Never", annotations)});
        self.object("batch/v1", "Job", spec)
    }

    /// A CronJob whose Jobs take about as long as the pause between them.
    pub fn cron_job(&mut self) -> Value {
        let annotations = json!({
            "simulated.mayfly.dev/run-seconds": self.random.below(1..80).to_string(),
            "simulated.mayfly.dev/exit-code": if self.random.chance(0.2) { "1" } else { "0" },
        });
        let mut pod = self.pod("Never", annotations);
        // Several of its Jobs may run at a time.
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "20m".into();
        let schedule = *self.random.pick(&["* * * * *", "*/2 * * * *"]).unwrap_or(&"* * * * *");
        let policy = *self.random.pick(&["Allow", "Forbid", "Replace"]).unwrap_or(&"Allow");
        let job =
            json!({"metadata": {"labels": {"app": self.name}}, "spec": {"backoffLimit": 0, "template": pod}});
        let spec = json!({"schedule": schedule, "concurrencyPolicy": policy, "jobTemplate": job,
            "successfulJobsHistoryLimit": self.random.below(0..3), "failedJobsHistoryLimit": 1});
        self.object("batch/v1", "CronJob", spec)
    }

    pub fn service(&self) -> Value {
        self.object("v1", "Service", json!({"selector": {"app": self.name}, "ports": [{"port": 80}]}))
    }

    pub fn budget(&mut self) -> Value {
        let spec = json!({"minAvailable": self.random.below(1..4), "selector": self.selector()});
        self.object("policy/v1", "PodDisruptionBudget", spec)
    }

    /// A ConfigMap that some objects own.
    pub fn dependent(&mut self, owners: &[Value]) -> Value {
        let finalizers: &[&str] = if self.random.chance(0.2) { &[USER_FINALIZER] } else { &[] };
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {
            "namespace": self.namespace, "name": self.name, "finalizers": finalizers,
            "ownerReferences": owners}, "data": {"a": "b"}})
    }
}

/// The StorageClass of the user's volumes and claims; no provisioner serves it.
const STORAGE_CLASS: &str = "by-hand";

/// A volume that the user provides.
pub fn volume(number: u64, gib: u64) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": format!("volume-{number}")},
        "spec": {"capacity": {"storage": format!("{gib}Gi")}, "accessModes": ["ReadWriteOnce"],
            "storageClassName": STORAGE_CLASS, "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": format!("/volumes/{number}")}}})
}

pub fn claim(namespace: &str, number: u64, gib: u64) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": namespace, "name": format!("claim-{number}")},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": STORAGE_CLASS,
            "resources": {"requests": {"storage": format!("{gib}Gi")}}}})
}

/// A quota that all workloads of a run fit in, and few of its claims.
pub fn quota(namespace: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"namespace": namespace, "name": "limits"},
        "spec": {"hard": {"pods": "500", "requests.cpu": "100", "services": "50", "persistentvolumeclaims": "3",
            "count/cronjobs.batch": "50"}}})
}

/// A reference to an owner.
pub fn reference(owner: &Value, is_blocking: bool) -> Value {
    json!({"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "blockOwnerDeletion": is_blocking})
}
