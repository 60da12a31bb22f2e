//! The rows of kinds about access, limits and the API itself.

use serde_json::json;

use super::{Change, LABEL, Refused, Row, manifest};

pub(super) fn rows() -> Vec<Row> {
    vec![
        service_account(),
        limit_range(),
        resource_quota(),
        role(),
        role_binding(),
        cluster_role(),
        cluster_role_binding(),
        priority_class(),
        runtime_class(),
        validating_webhook_configuration(),
        validating_admission_policy(),
        flow_schema(),
        priority_level(),
    ]
}

fn service_account() -> Row {
    let rest = json!({});
    Row {
        kind: "serviceaccount",
        resource: "serviceaccount",
        manifest: manifest("v1", "ServiceAccount", rest),
        columns: &["NAME", "SECRETS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"imagePullSecrets":[{"name":"patched"}]}"#,
            field: "{.imagePullSecrets[0].name}",
            becomes: "patched",
        },
        refused: None,
        described: "Image pull secrets:",
        explained: ("serviceaccount.secrets", "list of the secrets in the same namespace"),
    }
}

fn limit_range() -> Row {
    let rest = json!({"spec": {"limits": [{"type": "PersistentVolumeClaim", "max": {"storage": "9Ti"}}]}});
    Row {
        kind: "limitrange",
        resource: "limitrange",
        manifest: manifest("v1", "LimitRange", rest),
        columns: &["NAME", "CREATED AT"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"limits":[{"type":"PersistentVolumeClaim","max":{"storage":"8Ti"}}]}}"#,
            field: "{.spec.limits[0].max.storage}",
            becomes: "8Ti",
        },
        refused: None,
        described: "8Ti",
        explained: ("limitrange.spec.limits.max", "Max usage constraints on this kind by resource name"),
    }
}

fn resource_quota() -> Row {
    let rest = json!({"spec": {"hard": {"count/samples.example.com": "5"}}});
    Row {
        kind: "resourcequota",
        resource: "resourcequota",
        manifest: manifest("v1", "ResourceQuota", rest),
        columns: &["NAME", "AGE", "REQUEST", "LIMIT"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"hard":{"count/samples.example.com":"6"}}}"#,
            field: r#"{.spec.hard.count/samples\.example\.com}"#,
            becomes: "6",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"scopes":["BestEffort"]}}"#,
            edit: r#"'/^spec:/a\  scopes: [BestEffort]'"#,
            why: "field is immutable",
        }),
        described: "count/samples.example.com",
        explained: ("resourcequota.spec.hard", "set of desired hard limits for each named resource"),
    }
}

fn role() -> Row {
    let rest = json!({"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]});
    Row {
        kind: "role",
        resource: "role.rbac.authorization.k8s.io",
        manifest: manifest("rbac.authorization.k8s.io/v1", "Role", rest),
        columns: &["NAME", "CREATED AT"],
        edit: LABEL,
        patch: Change {
            how: r#"{"rules":[{"apiGroups":[""],"resources":["pods"],"verbs":["list"]}]}"#,
            field: "{.rules[0].verbs[0]}",
            becomes: "list",
        },
        refused: Some(Refused {
            patch: r#"{"rules":[{"apiGroups":[""],"resources":["pods"],"verbs":[]}]}"#,
            edit: "'s/^  - list$//;s/verbs:$/verbs: []/'",
            why: "verbs must contain at least one value",
        }),
        described: "[list]",
        explained: ("role.rules", "Rules holds all the PolicyRules for this Role"),
    }
}

fn role_binding() -> Row {
    let rest = json!({"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role",
        "name": "sample"}, "subjects": [{"kind": "User", "name": "u",
        "apiGroup": "rbac.authorization.k8s.io"}]});
    Row {
        kind: "rolebinding",
        resource: "rolebinding.rbac.authorization.k8s.io",
        manifest: manifest("rbac.authorization.k8s.io/v1", "RoleBinding", rest),
        columns: &["NAME", "ROLE", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"subjects":[{"kind":"User","name":"v","apiGroup":"rbac.authorization.k8s.io"}]}"#,
            field: "{.subjects[0].name}",
            becomes: "v",
        },
        refused: Some(Refused {
            patch: r#"{"roleRef":{"name":"other"}}"#,
            edit: "'/^roleRef:/,/^subjects:/s/name: sample/name: other/'",
            why: "cannot change roleRef",
        }),
        described: "User",
        explained: ("rolebinding.roleRef", "can reference a Role in the current namespace"),
    }
}

fn cluster_role() -> Row {
    let rest = json!({"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]});
    Row {
        kind: "clusterrole",
        resource: "clusterrole.rbac.authorization.k8s.io",
        manifest: manifest("rbac.authorization.k8s.io/v1", "ClusterRole", rest),
        columns: &["NAME", "CREATED AT"],
        edit: LABEL,
        patch: Change {
            how: r#"{"rules":[{"apiGroups":[""],"resources":["pods"],"verbs":["list"]}]}"#,
            field: "{.rules[0].verbs[0]}",
            becomes: "list",
        },
        refused: None,
        described: "[list]",
        explained: ("clusterrole.aggregationRule", "describes how to build the Rules for this ClusterRole"),
    }
}

fn cluster_role_binding() -> Row {
    let rest = json!({"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
        "name": "sample"}, "subjects": [{"kind": "User", "name": "u",
        "apiGroup": "rbac.authorization.k8s.io"}]});
    Row {
        kind: "clusterrolebinding",
        resource: "clusterrolebinding.rbac.authorization.k8s.io",
        manifest: manifest("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", rest),
        columns: &["NAME", "ROLE", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"subjects":[{"kind":"User","name":"v","apiGroup":"rbac.authorization.k8s.io"}]}"#,
            field: "{.subjects[0].name}",
            becomes: "v",
        },
        refused: Some(Refused {
            patch: r#"{"roleRef":{"name":"other"}}"#,
            edit: "'/^roleRef:/,/^subjects:/s/name: sample/name: other/'",
            why: "cannot change roleRef",
        }),
        described: "User",
        explained: ("clusterrolebinding.subjects", "holds references to the objects the role applies to"),
    }
}

fn priority_class() -> Row {
    let rest = json!({"value": 1000});
    Row {
        kind: "priorityclass",
        resource: "priorityclass.scheduling.k8s.io",
        manifest: manifest("scheduling.k8s.io/v1", "PriorityClass", rest),
        columns: &["NAME", "VALUE", "GLOBAL-DEFAULT", "AGE"],
        edit: LABEL,
        patch: Change { how: r#"{"description":"patched"}"#, field: "{.description}", becomes: "patched" },
        refused: Some(Refused {
            patch: r#"{"value":2000}"#,
            edit: "'s/value: 1000/value: 2000/'",
            why: "may not be changed in an update",
        }),
        described: "patched",
        explained: ("priorityclass.value", "represents the integer value of this priority class"),
    }
}

fn runtime_class() -> Row {
    let rest = json!({"handler": "sample"});
    Row {
        kind: "runtimeclass",
        resource: "runtimeclass.node.k8s.io",
        manifest: manifest("node.k8s.io/v1", "RuntimeClass", rest),
        columns: &["NAME", "HANDLER", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"metadata":{"annotations":{"note":"patched"}}}"#,
            field: "{.metadata.annotations.note}",
            becomes: "patched",
        },
        refused: Some(Refused {
            patch: r#"{"handler":"other"}"#,
            edit: "'s/handler: sample/handler: other/'",
            why: "field is immutable",
        }),
        described: "Handler",
        explained: ("runtimeclass.handler", "specifies the underlying runtime and configuration"),
    }
}

/// Its rules match no kind.
fn validating_webhook_configuration() -> Row {
    let rest = json!({"webhooks": [{"name": "a.example.com", "sideEffects": "None",
        "admissionReviewVersions": ["v1"], "clientConfig": {"url": "https://127.0.0.1:1/"}}]});
    Row {
        kind: "validatingwebhookconfiguration",
        resource: "validatingwebhookconfiguration.admissionregistration.k8s.io",
        manifest: manifest("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", rest),
        columns: &["NAME", "WEBHOOKS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"webhooks":[{"name":"a.example.com","timeoutSeconds":3}]}"#,
            field: "{.webhooks[0].timeoutSeconds}",
            becomes: "3",
        },
        refused: Some(Refused {
            patch: r#"{"webhooks":[{"name":"a.example.com","timeoutSeconds":31}]}"#,
            edit: "'s/timeoutSeconds: 3$/timeoutSeconds: 31/'",
            why: "must be between 1 and 30 seconds",
        }),
        described: "a.example.com",
        explained: (
            "validatingwebhookconfiguration.webhooks.failurePolicy",
            "defines how unrecognized errors",
        ),
    }
}

/// It matches no kind.
fn validating_admission_policy() -> Row {
    let rest = json!({"spec": {"matchConstraints": {"resourceRules": [{"apiGroups": ["nothing.example.com"],
        "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["nothing"], "scope": "*"}]},
        "validations": [{"expression": "true"}]}});
    Row {
        kind: "validatingadmissionpolicy",
        resource: "validatingadmissionpolicy.admissionregistration.k8s.io",
        manifest: manifest("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", rest),
        columns: &["NAME", "VALIDATIONS", "PARAMKIND", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"failurePolicy":"Ignore"}}"#,
            field: "{.spec.failurePolicy}",
            becomes: "Ignore",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"failurePolicy":"Perhaps"}}"#,
            edit: "'s/failurePolicy: Ignore/failurePolicy: Perhaps/'",
            why: r#"Unsupported value: "Perhaps""#,
        }),
        described: "Ignore",
        explained: ("validatingadmissionpolicy.spec.validations", "Validations contain CEL expressions"),
    }
}

fn flow_schema() -> Row {
    let rest = json!({"spec": {"priorityLevelConfiguration": {"name": "nothing"}}});
    Row {
        kind: "flowschema",
        resource: "flowschema.flowcontrol.apiserver.k8s.io",
        manifest: manifest("flowcontrol.apiserver.k8s.io/v1", "FlowSchema", rest),
        columns: &["NAME", "PRIORITYLEVEL", "MATCHINGPRECEDENCE", "DISTINGUISHERMETHOD", "AGE", "MISSINGPL"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"matchingPrecedence":7000}}"#,
            field: "{.spec.matchingPrecedence}",
            becomes: "7000",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"matchingPrecedence":1}}"#,
            edit: "'s/matchingPrecedence: 7000/matchingPrecedence: 1/'",
            why: "only the schema named 'exempt' may have matchingPrecedence 1",
        }),
        described: "7000",
        explained: ("flowschema.spec.matchingPrecedence", "is used to choose among the FlowSchemas"),
    }
}

fn priority_level() -> Row {
    let rest = json!({"spec": {"type": "Limited", "limited": {"limitResponse": {"type": "Reject"}}}});
    Row {
        kind: "prioritylevelconfiguration",
        resource: "prioritylevelconfiguration.flowcontrol.apiserver.k8s.io",
        manifest: manifest("flowcontrol.apiserver.k8s.io/v1", "PriorityLevelConfiguration", rest),
        columns: &[
            "NAME",
            "TYPE",
            "NOMINALCONCURRENCYSHARES",
            "QUEUES",
            "HANDSIZE",
            "QUEUELENGTHLIMIT",
            "AGE",
        ],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"limited":{"lendablePercent":7}}}"#,
            field: "{.spec.limited.lendablePercent}",
            becomes: "7",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"limited":{"lendablePercent":107}}}"#,
            edit: "'s/lendablePercent: 7$/lendablePercent: 107/'",
            why: "must be between 0 and 100, inclusive",
        }),
        described: "Reject",
        explained: (
            "prioritylevelconfiguration.spec.type",
            "indicates whether this priority level is subject to limitation",
        ),
    }
}
