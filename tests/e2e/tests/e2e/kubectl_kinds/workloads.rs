//! The rows of kinds that run pods. None of their objects has a pod.

use serde_json::json;

use super::{Change, LABEL, Refused, Row, manifest};

pub(super) fn rows() -> Vec<Row> {
    vec![
        replication_controller(),
        pod_template(),
        deployment(),
        stateful_set(),
        daemon_set(),
        controller_revision(),
        cron_job(),
        job(),
        horizontal_pod_autoscaler(),
        pod_disruption_budget(),
    ]
}

fn replication_controller() -> Row {
    let rest = json!({"spec": {"replicas": 0, "selector": {"app": "sample-rc"},
        "template": {"metadata": {"labels": {"app": "sample-rc"}}, "spec": {"containers": [{"name": "main",
        "image": "sample:1"}]}}}});
    Row {
        kind: "replicationcontroller",
        resource: "replicationcontroller",
        manifest: manifest("v1", "ReplicationController", rest),
        columns: &["NAME", "DESIRED", "CURRENT", "READY", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"template":{"spec":{"containers":[{"name":"main","image":"sample:2"}]}}}}"#,
            field: "{.spec.template.spec.containers[0].image}",
            becomes: "sample:2",
        },
        refused: None,
        described: "0 current / 0 desired",
        explained: ("replicationcontroller.spec.replicas", "the number of desired replicas"),
    }
}

fn pod_template() -> Row {
    let rest = json!({"template": {"metadata": {"labels": {"app": "sample"}},
        "spec": {"containers": [{"name": "main", "image": "sample:1"}]}}});
    Row {
        kind: "podtemplate",
        resource: "podtemplate",
        manifest: manifest("v1", "PodTemplate", rest),
        columns: &["NAME", "CONTAINERS", "IMAGES", "POD LABELS"],
        edit: LABEL,
        patch: Change {
            how: r#"{"template":{"spec":{"containers":[{"name":"main","image":"sample:2"}]}}}"#,
            field: "{.template.spec.containers[0].image}",
            becomes: "sample:2",
        },
        refused: None,
        described: "sample:2",
        explained: ("podtemplate.template", "defines the pods that will be created from this pod template"),
    }
}

fn deployment() -> Row {
    let rest = json!({"spec": {"replicas": 0, "selector": {"matchLabels": {"app": "sample-deployment"}},
        "template": {"metadata": {"labels": {"app": "sample-deployment"}},
        "spec": {"containers": [{"name": "main", "image": "sample:1"}]}}}});
    Row {
        kind: "deployment",
        resource: "deployment.apps",
        manifest: manifest("apps/v1", "Deployment", rest),
        columns: &["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"template":{"spec":{"containers":[{"name":"main","image":"sample:2"}]}}}}"#,
            field: "{.spec.template.spec.containers[0].image}",
            becomes: "sample:2",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"selector":{"matchLabels":{"app":"other"}},"template":{"metadata":{"labels":{"app":"other"}}}}}"#,
            edit: "'s/app: sample-deployment/app: other/'",
            why: "field is immutable",
        }),
        described: "0 desired | 0 updated | 0 total",
        explained: ("deployment.spec.paused", "Indicates that the deployment is paused"),
    }
}

fn stateful_set() -> Row {
    let rest = json!({"spec": {"replicas": 0, "serviceName": "sample",
        "selector": {"matchLabels": {"app": "sample-set"}},
        "template": {"metadata": {"labels": {"app": "sample-set"}}, "spec": {"containers": [{"name": "main",
        "image": "sample:1"}]}}}});
    Row {
        kind: "statefulset",
        resource: "statefulset.apps",
        manifest: manifest("apps/v1", "StatefulSet", rest),
        columns: &["NAME", "READY", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"template":{"spec":{"containers":[{"name":"main","image":"sample:2"}]}}}}"#,
            field: "{.spec.template.spec.containers[0].image}",
            becomes: "sample:2",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"serviceName":"other"}}"#,
            edit: "'s/serviceName: sample$/serviceName: other/'",
            why: "updates to statefulset spec for fields other than",
        }),
        described: "0 desired | 0 total",
        explained: ("statefulset.spec.serviceName", "the name of the service that governs this StatefulSet"),
    }
}

/// No node matches its selector.
fn daemon_set() -> Row {
    let rest = json!({"spec": {"selector": {"matchLabels": {"app": "sample-daemon"}},
        "template": {"metadata": {"labels": {"app": "sample-daemon"}},
        "spec": {"nodeSelector": {"sample": "nowhere"}, "containers": [{"name": "main",
        "image": "sample:1"}]}}}});
    Row {
        kind: "daemonset",
        resource: "daemonset.apps",
        manifest: manifest("apps/v1", "DaemonSet", rest),
        columns: &["NAME", "DESIRED", "CURRENT", "READY", "UP-TO-DATE", "AVAILABLE", "NODE SELECTOR", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"template":{"spec":{"containers":[{"name":"main","image":"sample:2"}]}}}}"#,
            field: "{.spec.template.spec.containers[0].image}",
            becomes: "sample:2",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"selector":{"matchLabels":{"app":"other"}},"template":{"metadata":{"labels":{"app":"other"}}}}}"#,
            edit: "'s/app: sample-daemon/app: other/'",
            why: "field is immutable",
        }),
        described: "sample=nowhere",
        explained: ("daemonset.spec.updateStrategy", "An update strategy to replace existing DaemonSet pods"),
    }
}

fn controller_revision() -> Row {
    let rest = json!({"revision": 3, "data": {"spec": "a"}});
    Row {
        kind: "controllerrevision",
        resource: "controllerrevision.apps",
        manifest: manifest("apps/v1", "ControllerRevision", rest),
        columns: &["NAME", "CONTROLLER", "REVISION", "AGE"],
        edit: LABEL,
        patch: Change { how: r#"{"revision":4}"#, field: "{.revision}", becomes: "4" },
        refused: Some(Refused {
            patch: r#"{"data":{"spec":"b"}}"#,
            edit: "'s/^  spec: a$/  spec: b/'",
            why: "field is immutable",
        }),
        described: "4",
        explained: ("controllerrevision.revision", "the revision of the state represented by Data"),
    }
}

fn cron_job() -> Row {
    let rest = json!({"spec": {"schedule": "0 0 1 1 *", "suspend": true, "timeZone": "Europe/Berlin",
        "jobTemplate": {"spec": {"template": {"spec": {"restartPolicy": "Never",
        "containers": [{"name": "main", "image": "sample:1"}]}}}}}});
    Row {
        kind: "cronjob",
        resource: "cronjob.batch",
        manifest: manifest("batch/v1", "CronJob", rest),
        columns: &["NAME", "SCHEDULE", "TIMEZONE", "SUSPEND", "ACTIVE", "LAST SCHEDULE", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"timeZone":"Asia/Tokyo"}}"#,
            field: "{.spec.timeZone}",
            becomes: "Asia/Tokyo",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"schedule":"never"}}"#,
            edit: "'s/schedule: 0 0 1 1/schedule: never/'",
            why: "spec.schedule: Invalid value",
        }),
        described: "0 0 1 1 *",
        explained: ("cronjob.spec.timeZone", "The time zone name for the given schedule"),
    }
}

fn job() -> Row {
    let rest = json!({"spec": {"suspend": true, "template": {"spec": {"restartPolicy": "Never",
        "containers": [{"name": "main", "image": "sample:1"}]}}}});
    Row {
        kind: "job",
        resource: "job.batch",
        manifest: manifest("batch/v1", "Job", rest),
        columns: &["NAME", "STATUS", "COMPLETIONS", "DURATION", "AGE"],
        edit: LABEL,
        patch: Change { how: r#"{"spec":{"parallelism":3}}"#, field: "{.spec.parallelism}", becomes: "3" },
        refused: Some(Refused {
            patch: r#"{"spec":{"completionMode":"Indexed"}}"#,
            edit: "'s/completionMode: NonIndexed/completionMode: Indexed/'",
            why: "field is immutable",
        }),
        described: "Suspend:",
        explained: ("job.spec.backoffLimit", "the number of retries before marking this job failed"),
    }
}

/// Its target does not exist.
fn horizontal_pod_autoscaler() -> Row {
    let rest = json!({"spec": {"minReplicas": 1, "maxReplicas": 3,
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "nothing"},
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization",
        "averageUtilization": 50}}}]}});
    Row {
        kind: "horizontalpodautoscaler",
        resource: "horizontalpodautoscaler.autoscaling",
        manifest: manifest("autoscaling/v2", "HorizontalPodAutoscaler", rest),
        columns: &["NAME", "REFERENCE", "TARGETS", "MINPODS", "MAXPODS", "REPLICAS", "AGE"],
        edit: LABEL,
        patch: Change { how: r#"{"spec":{"maxReplicas":9}}"#, field: "{.spec.maxReplicas}", becomes: "9" },
        refused: Some(Refused {
            patch: r#"{"spec":{"maxReplicas":0}}"#,
            edit: "'s/maxReplicas: 9/maxReplicas: 0/'",
            why: "must be greater than 0",
        }),
        described: "Deployment/nothing",
        explained: ("hpa.spec.maxReplicas", "the upper limit for the number of replicas"),
    }
}

/// The selector of a budget is replaced by each patch, so that apply never finds it unchanged.
fn pod_disruption_budget() -> Row {
    let rest = json!({"spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "nobody"}}}});
    Row {
        kind: "poddisruptionbudget",
        resource: "poddisruptionbudget.policy",
        manifest: manifest("policy/v1", "PodDisruptionBudget", rest),
        columns: &["NAME", "MIN AVAILABLE", "MAX UNAVAILABLE", "ALLOWED DISRUPTIONS", "AGE"],
        edit: LABEL,
        patch: Change { how: r#"{"spec":{"minAvailable":2}}"#, field: "{.spec.minAvailable}", becomes: "2" },
        refused: Some(Refused {
            patch: r#"{"spec":{"maxUnavailable":1}}"#,
            edit: r#"'s/minAvailable: 2/&\n  maxUnavailable: 1/'"#,
            why: "minAvailable and maxUnavailable cannot be both set",
        }),
        described: "Min available:",
        explained: ("pdb.spec.minAvailable", "An eviction is allowed if at least"),
    }
}
