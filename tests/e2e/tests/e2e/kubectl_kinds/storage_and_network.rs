//! The rows of kinds about volumes and the network.

use serde_json::json;

use super::{Change, LABEL, Refused, Row, manifest};

pub(super) fn rows() -> Vec<Row> {
    vec![
        service(),
        endpoint_slice(),
        ingress(),
        ingress_class(),
        network_policy(),
        persistent_volume(),
        persistent_volume_claim(),
        storage_class(),
        csi_driver(),
        csi_node(),
        volume_attachment(),
        csi_storage_capacity(),
    ]
}

/// Without a selector, so that no controller writes its endpoints.
fn service() -> Row {
    let rest = json!({"spec": {"type": "NodePort", "ports": [{"name": "http", "port": 80, "protocol": "TCP",
        "targetPort": 8080}]}});
    Row {
        kind: "service",
        resource: "service",
        manifest: manifest("v1", "Service", rest),
        columns: &["NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"sessionAffinity":"ClientIP"}}"#,
            field: "{.spec.sessionAffinity}",
            becomes: "ClientIP",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"clusterIP":"127.96.99.99","clusterIPs":["127.96.99.99"]}}"#,
            edit: "'/^  clusterIP: /s/: .*/: 127.96.99.99/'",
            why: "may not change once set",
        }),
        described: "TargetPort:",
        explained: ("service.spec.clusterIP", "is the IP address of the service"),
    }
}

pub(super) fn endpoints() -> Row {
    let rest = json!({"subsets": [{"addresses": [{"ip": "10.1.2.3"}], "ports": [{"name": "http", "port": 80,
        "protocol": "TCP"}]}]});
    Row {
        kind: "endpoints",
        resource: "endpoints",
        manifest: manifest("v1", "Endpoints", rest),
        columns: &["NAME", "ENDPOINTS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"subsets":[{"addresses":[{"ip":"10.1.2.4"}],"ports":[{"name":"http","port":80,"protocol":"TCP"}]}]}"#,
            field: "{.subsets[0].addresses[0].ip}",
            becomes: "10.1.2.4",
        },
        refused: Some(Refused {
            patch: r#"{"subsets":[{"addresses":[{"ip":"no-ip"}],"ports":[{"port":80}]}]}"#,
            edit: "'s/ip: 10.1.2.4/ip: no-ip/'",
            why: "must be a valid IP address",
        }),
        described: "10.1.2.4",
        explained: ("endpoints.subsets.addresses", "IP addresses which offer the related ports"),
    }
}

fn endpoint_slice() -> Row {
    let rest = json!({"addressType": "IPv4", "endpoints": [{"addresses": ["10.9.9.9"], "conditions": {}}],
        "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]});
    Row {
        kind: "endpointslice",
        resource: "endpointslice.discovery.k8s.io",
        manifest: manifest("discovery.k8s.io/v1", "EndpointSlice", rest),
        columns: &["NAME", "ADDRESSTYPE", "PORTS", "ENDPOINTS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"ports":[{"name":"http","port":81,"protocol":"TCP"}]}"#,
            field: "{.ports[0].port}",
            becomes: "81",
        },
        refused: Some(Refused {
            patch: r#"{"addressType":"IPv6"}"#,
            edit: "'s/addressType: IPv4/addressType: IPv6/'",
            why: "field is immutable",
        }),
        described: "10.9.9.9",
        explained: (
            "endpointslice.addressType",
            "specifies the type of address carried by this EndpointSlice",
        ),
    }
}

/// Of a class that nobody serves.
fn ingress() -> Row {
    let rest = json!({"spec": {"ingressClassName": "nothing", "rules": [{"host": "a.example",
        "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": {"service": {"name": "nothing",
        "port": {"number": 80}}}}]}}]}});
    Row {
        kind: "ingress",
        resource: "ingress.networking.k8s.io",
        manifest: manifest("networking.k8s.io/v1", "Ingress", rest),
        columns: &["NAME", "CLASS", "HOSTS", "ADDRESS", "PORTS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"ingressClassName":"other"}}"#,
            field: "{.spec.ingressClassName}",
            becomes: "other",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"rules":[{"host":"A_B"}]}}"#,
            edit: "'s/host: a.example/host: A_B/'",
            why: "spec.rules[0].host: Invalid value",
        }),
        described: "a.example",
        explained: ("ingress.spec.rules", "a list of host rules used to configure the Ingress"),
    }
}

fn ingress_class() -> Row {
    let rest = json!({"spec": {"controller": "example.com/none"}});
    Row {
        kind: "ingressclass",
        resource: "ingressclass.networking.k8s.io",
        manifest: manifest("networking.k8s.io/v1", "IngressClass", rest),
        columns: &["NAME", "CONTROLLER", "PARAMETERS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"metadata":{"annotations":{"note":"patched"}}}"#,
            field: "{.metadata.annotations.note}",
            becomes: "patched",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"controller":"example.com/other"}}"#,
            edit: r#"'s/controller: .*none/controller: example.com\/other/'"#,
            why: "field is immutable",
        }),
        described: "example.com/none",
        explained: ("ingressclass.spec.controller", "refers to the name of the controller"),
    }
}

fn network_policy() -> Row {
    let rest = json!({"spec": {"podSelector": {"matchLabels": {"app": "nobody"}},
        "policyTypes": ["Ingress"]}});
    Row {
        kind: "networkpolicy",
        resource: "networkpolicy.networking.k8s.io",
        manifest: manifest("networking.k8s.io/v1", "NetworkPolicy", rest),
        columns: &["NAME", "POD-SELECTOR", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"podSelector":{"matchLabels":{"app":"noone"}}}}"#,
            field: "{.spec.podSelector.matchLabels.app}",
            becomes: "noone",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"policyTypes":["Sideways"]}}"#,
            edit: "'s/- Ingress$/- Sideways/'",
            why: r#"Unsupported value: "Sideways""#,
        }),
        described: "app=noone",
        explained: (
            "networkpolicy.spec.podSelector",
            "selects the pods to which this NetworkPolicy object applies",
        ),
    }
}

fn persistent_volume() -> Row {
    let rest = json!({"spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": "/nowhere"}, "storageClassName": "nothing"}});
    Row {
        kind: "persistentvolume",
        resource: "persistentvolume",
        manifest: manifest("v1", "PersistentVolume", rest),
        columns: &[
            "NAME",
            "CAPACITY",
            "ACCESS MODES",
            "RECLAIM POLICY",
            "STATUS",
            "CLAIM",
            "STORAGECLASS",
            "REASON",
            "AGE",
        ],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}"#,
            field: "{.spec.persistentVolumeReclaimPolicy}",
            becomes: "Delete",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"hostPath":{"path":"/elsewhere"}}}"#,
            edit: r#"'s/path: .nowhere/path: \/elsewhere/'"#,
            why: "spec.persistentvolumesource: Forbidden: spec.persistentvolumesource is immutable after creation",
        }),
        described: "HostPath (bare host directory volume)",
        explained: (
            "persistentvolume.spec.capacity",
            "description of the persistent volume's resources and capacity",
        ),
    }
}

/// Its class does not exist, so that it stays pending.
fn persistent_volume_claim() -> Row {
    let rest = json!({"spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "absent"}});
    Row {
        kind: "persistentvolumeclaim",
        resource: "persistentvolumeclaim",
        manifest: manifest("v1", "PersistentVolumeClaim", rest),
        columns: &["NAME", "STATUS", "VOLUME", "CAPACITY", "ACCESS MODES", "STORAGECLASS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"metadata":{"annotations":{"note":"patched"}}}"#,
            field: "{.metadata.annotations.note}",
            becomes: "patched",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"accessModes":["ReadOnlyMany"]}}"#,
            edit: "'s/ReadWriteOnce$/ReadOnlyMany/'",
            why: "spec is immutable after creation",
        }),
        described: "Pending",
        explained: ("persistentvolumeclaim.spec.volumeName", "binding reference to the PersistentVolume"),
    }
}

fn storage_class() -> Row {
    let rest = json!({"provisioner": "example.com/none"});
    Row {
        kind: "storageclass",
        resource: "storageclass.storage.k8s.io",
        manifest: manifest("storage.k8s.io/v1", "StorageClass", rest),
        columns: &[
            "NAME",
            "PROVISIONER",
            "RECLAIMPOLICY",
            "VOLUMEBINDINGMODE",
            "ALLOWVOLUMEEXPANSION",
            "AGE",
        ],
        edit: LABEL,
        patch: Change {
            how: r#"{"allowVolumeExpansion":true}"#,
            field: "{.allowVolumeExpansion}",
            becomes: "true",
        },
        refused: Some(Refused {
            patch: r#"{"provisioner":"example.com/other"}"#,
            edit: r#"'s/provisioner: .*none/provisioner: example.com\/other/'"#,
            why: "updates to provisioner are forbidden",
        }),
        described: "example.com/none",
        explained: ("storageclass.reclaimPolicy", "reclaimPolicy controls the reclaimPolicy"),
    }
}

fn csi_driver() -> Row {
    let rest = json!({"spec": {"podInfoOnMount": false}});
    Row {
        kind: "csidriver",
        resource: "csidriver.storage.k8s.io",
        manifest: manifest("storage.k8s.io/v1", "CSIDriver", rest),
        columns: &[
            "NAME",
            "ATTACHREQUIRED",
            "PODINFOONMOUNT",
            "STORAGECAPACITY",
            "TOKENREQUESTS",
            "REQUIRESREPUBLISH",
            "MODES",
            "AGE",
        ],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"storageCapacity":true}}"#,
            field: "{.spec.storageCapacity}",
            becomes: "true",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"attachRequired":false}}"#,
            edit: "'s/attachRequired: true/attachRequired: false/'",
            why: "field is immutable",
        }),
        described: "Attach Required:",
        explained: (
            "csidriver.spec.attachRequired",
            "indicates this CSI volume driver requires an attach operation",
        ),
    }
}

fn csi_node() -> Row {
    let rest = json!({"spec": {"drivers": [{"name": "d.example.com", "nodeID": "n1"}]}});
    Row {
        kind: "csinode",
        resource: "csinode.storage.k8s.io",
        manifest: manifest("storage.k8s.io/v1", "CSINode", rest),
        columns: &["NAME", "DRIVERS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"metadata":{"annotations":{"note":"patched"}}}"#,
            field: "{.metadata.annotations.note}",
            becomes: "patched",
        },
        refused: None,
        described: "d.example.com",
        explained: ("csinode.spec.drivers", "a list of information of all CSI Drivers existing on a node"),
    }
}

/// Of an attacher that nobody runs.
fn volume_attachment() -> Row {
    let rest = json!({"spec": {"attacher": "d.example.com", "nodeName": "nothing",
        "source": {"persistentVolumeName": "nothing"}}});
    Row {
        kind: "volumeattachment",
        resource: "volumeattachment.storage.k8s.io",
        manifest: manifest("storage.k8s.io/v1", "VolumeAttachment", rest),
        columns: &["NAME", "ATTACHER", "PV", "NODE", "ATTACHED", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"metadata":{"annotations":{"note":"patched"}}}"#,
            field: "{.metadata.annotations.note}",
            becomes: "patched",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"nodeName":"other"}}"#,
            edit: "'s/nodeName: nothing/nodeName: other/'",
            why: "field is immutable",
        }),
        described: "d.example.com",
        explained: ("volumeattachment.spec.attacher", "indicates the name of the volume driver"),
    }
}

fn csi_storage_capacity() -> Row {
    let rest = json!({"storageClassName": "nothing", "capacity": "10Gi"});
    Row {
        kind: "csistoragecapacity",
        resource: "csistoragecapacity.storage.k8s.io",
        manifest: manifest("storage.k8s.io/v1", "CSIStorageCapacity", rest),
        columns: &["NAME", "STORAGECLASSNAME", "CAPACITY", "AGE"],
        edit: LABEL,
        patch: Change { how: r#"{"capacity":"9Gi"}"#, field: "{.capacity}", becomes: "9Gi" },
        refused: Some(Refused {
            patch: r#"{"storageClassName":"other"}"#,
            edit: "'s/storageClassName: nothing/storageClassName: other/'",
            why: "field is immutable",
        }),
        described: "9Gi",
        explained: ("csistoragecapacity.capacity", "reported by the CSI driver"),
    }
}
