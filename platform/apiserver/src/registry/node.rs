//! Nodes.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::{AGE, Column, Kind, NAME, node_rules, print};
use crate::object::Object;

const ROLE_PREFIX: &str = "node-role.kubernetes.io/";
const ROLE_LABEL: &str = "kubernetes.io/role";

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        short_names: &["no"],
        namespaced: false,
        columns: const {
            &[
                NAME,
                Column::text("Status", "The status of the node"),
                Column::text("Roles", "The roles of the node"),
                AGE,
                Column::text("Version", "Kubelet Version reported by the node."),
                Column::text("Internal-IP", "List of addresses reachable to the node.").wide(),
                Column::text("External-IP", "List of addresses reachable to the node.").wide(),
                Column::text("OS-Image", "OS Image reported by the node.").wide(),
                Column::text("Kernel-Version", "Kernel Version reported by the node.").wide(),
                Column::text("Container-Runtime", "ContainerRuntime Version reported by the node.").wide(),
            ]
        },
        cells,
        selectable: &[("spec.unschedulable", "false")],
        // The status is kept, because a node registers itself together with its status.
        on_create: |_| {},
        defaults: |object| {
            let capacity =
                object.at(&["status", "capacity"]).filter(|capacity| capacity.is_object()).cloned();
            if let Some(capacity) = capacity
                && object.at(&["status", "allocatable"]).is_none_or(Value::is_null)
            {
                object.map_mut("status").insert("allocatable".into(), capacity);
            }
            // `podCIDR` and the first of `podCIDRs` are the same network.
            let (one, all) =
                (object.str_at(&["spec", "podCIDR"]).to_owned(), object.at(&["spec", "podCIDRs"]));
            let first = all.and_then(|list| list.get(0)?.as_str()).unwrap_or("").to_owned();
            if one.is_empty() && !first.is_empty() {
                object.map_mut("spec").insert("podCIDR".into(), first.into());
            } else if !one.is_empty() && one != first {
                object.map_mut("spec").insert("podCIDRs".into(), json!([one]));
            }
        },
        validate: node_rules::validate,
        ..Kind::built_in::<Node>("node")
    }]
}

fn cells(object: &Object, now: Timestamp) -> Vec<Value> {
    let mut status = match print::condition(object, "Ready") {
        Some(("True", _)) => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    }
    .to_owned();
    if object.at(&["spec", "unschedulable"]) == Some(&Value::Bool(true)) {
        status.push_str(",SchedulingDisabled");
    }
    let address = |kind: &str| {
        let found = print::items(object, &["status", "addresses"]).find(|a| a["type"] == kind);
        print::or_none(found.and_then(|a| a["address"].as_str()).unwrap_or(""))
    };
    let reported = |field: &str| match object.str_at(&["status", "nodeInfo", field]) {
        "" => Value::from("<unknown>"),
        text => text.into(),
    };
    vec![
        object.name().into(),
        status.into(),
        print::or_none(&roles(object).join(",")),
        print::age(object, now),
        object.str_at(&["status", "nodeInfo", "kubeletVersion"]).into(),
        address("InternalIP"),
        address("ExternalIP"),
        reported("osImage"),
        reported("kernelVersion"),
        reported("containerRuntimeVersion"),
    ]
}

fn roles(object: &Object) -> Vec<&str> {
    let labels = object.at(&["metadata", "labels"]).and_then(Value::as_object).into_iter().flatten();
    let mut roles: Vec<&str> = labels
        .filter_map(|(key, value)| match key.strip_prefix(ROLE_PREFIX) {
            Some(role) if !role.is_empty() => Some(role),
            None if key == ROLE_LABEL => value.as_str().filter(|role| !role.is_empty()),
            _ => None,
        })
        .collect();
    roles.sort_unstable();
    roles
}
