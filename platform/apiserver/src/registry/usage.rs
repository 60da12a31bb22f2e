//! The usage of nodes and pods (`metrics.k8s.io`), measured for each request and not stored.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta};
use mayfly_api::quantity;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

use super::{Backing, Column, Kind, NAME, print, verb_sets};
use crate::object::Object;

const COLUMNS: &[Column] = &[
    NAME,
    Column::text("Cpu", "Cores in use, over the window."),
    Column::text("Memory", "Memory in use."),
    Column::text("Window", "The period over which the usage was measured."),
];

/// The usage of a node.
#[derive(JsonSchema, Deserialize)]
#[expect(dead_code, reason = "declares the schema, and is decoded only to validate it")]
struct NodeMetrics {
    /// The node's name and labels.
    metadata: ObjectMeta,
    /// The time of the measurement.
    timestamp: String,
    /// The time that cores were measured over, up to the timestamp.
    window: String,
    /// `cpu` and `memory` of the server's process, in which all wasm pods of the node run.
    usage: BTreeMap<String, Quantity>,
}

/// The usage of a pod's containers.
#[derive(JsonSchema, Deserialize)]
#[expect(dead_code, reason = "declares the schema, and is decoded only to validate it")]
struct PodMetrics {
    /// The pod's name and labels.
    metadata: ObjectMeta,
    /// The time of the measurement.
    timestamp: String,
    /// The time that cores were measured over, up to the timestamp.
    window: String,
    /// Each container that runs.
    containers: Vec<ContainerMetrics>,
}

/// The usage of a container.
#[derive(JsonSchema, Deserialize)]
#[expect(dead_code, reason = "declares the schema, and is decoded only to validate it")]
struct ContainerMetrics {
    name: String,
    /// `memory`: the linear memories of its instances; replicas of a revision on one node share these, and each is
    /// assigned an equal part. `cpu`: of programs that run to completion; the CPU time of requests is not counted per
    /// pod, and left out.
    usage: BTreeMap<String, Quantity>,
}

pub(super) fn kinds() -> Vec<Kind> {
    let own = |kind: Kind, cells: fn(&Object, Timestamp) -> Vec<Value>| Kind {
        group: "metrics.k8s.io",
        version: "v1beta1",
        backing: Backing::Measured,
        verbs: verb_sets::READ,
        status: false,
        generation: false,
        columns: COLUMNS,
        cells,
        ..kind
    };
    vec![
        Kind {
            namespaced: false,
            ..own(Kind::own::<NodeMetrics>("NodeMetrics", "nodes", ""), |object, _| {
                cells(object, object.at(&["usage"]).into_iter())
            })
        },
        own(Kind::own::<PodMetrics>("PodMetrics", "pods", ""), |object, _| {
            cells(object, print::items(object, &["containers"]).map(|container| &container["usage"]))
        }),
    ]
}

fn cells<'a>(object: &Object, usage: impl Iterator<Item = &'a Value>) -> Vec<Value> {
    let (mut cpu, mut memory) = (None, 0);
    for usage in usage {
        let of = |name: &str| usage[name].as_str().map(|text| Quantity(text.to_owned()));
        if let Some(millis) = of("cpu").and_then(|cores| quantity::millis(&cores).ok()) {
            cpu = Some(cpu.unwrap_or(0) + millis);
        }
        memory += of("memory").and_then(|bytes| quantity::whole(&bytes).ok()).unwrap_or(0);
    }
    vec![
        object.name().into(),
        cpu.map_or_else(|| "<unknown>".into(), |millis| format!("{millis}m").into()),
        format!("{}Ki", memory / 1024).into(),
        object.str_at(&["window"]).into(),
    ]
}
