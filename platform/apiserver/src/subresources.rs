//! Subresources that are no part of the object: scale and binding.

use serde_json::{Value, json};

use crate::{
    decode::Decoded,
    object::{Object, map_at},
    registry::{AGE, Column, Kind, NAME, print::since, registry, selector_text},
    server::ServerState,
    status::ApiError,
    verbs::{self, ObjectUpdate, Part, WriteOutcome, WriteRequest},
};

/// The `Scale` of an object.
pub(crate) fn scale_of(kind: &Kind, object: &Object) -> Value {
    let meta = ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"];
    let meta: serde_json::Map<String, Value> = meta
        .iter()
        .filter_map(|key| Some(((*key).to_owned(), object.at(&["metadata", key])?.clone())))
        .collect();
    let (spec_path, status_path) = match kind.definition.and_then(|definition| definition.scale.as_ref()) {
        Some(scale) => (segments(&scale.spec_replicas), segments(&scale.status_replicas)),
        None => (vec!["spec", "replicas"], vec!["status", "replicas"]),
    };
    let number = |path: &[&str]| object.at(path).and_then(Value::as_i64).unwrap_or(0);
    let selector = match kind.definition.and_then(|definition| definition.scale.as_ref()) {
        Some(scale) => {
            let path = scale.selector.as_deref().map(segments);
            path.map_or(String::new(), |path| object.str_at(&path).to_owned())
        }
        // The selector of a ReplicationController is a map of labels.
        None if kind.plural == "replicationcontrollers" => {
            let selector = json!({"matchLabels": object.at(&["spec", "selector"])});
            selector_text(Some(&selector))
        }
        None => selector_text(object.at(&["spec", "selector"])),
    };
    // Upstream's Go type leaves out zero.
    let spec = match number(&spec_path) {
        0 => json!({}),
        replicas => json!({"replicas": replicas}),
    };
    json!({
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": meta,
        "spec": spec,
        "status": {
            "replicas": number(&status_path),
            "selector": selector,
        },
    })
}

/// The `Scale` of an object, as an [`Object`].
pub(crate) fn scale_object(kind: &Kind, object: &Object) -> Object {
    match scale_of(kind, object) {
        Value::Object(map) => Object(map),
        _ => Object::default(),
    }
}

/// Sets an object's desired replicas from a scale.
pub(crate) fn take_replicas(kind: &Kind, object: &mut Object, scale: Object) -> Result<(), ApiError> {
    let replicas = replicas_of(&Value::Object(scale.0), object.name())?;
    set_replicas(kind, object, replicas.unwrap_or(0));
    Ok(())
}

/// The columns of a scale's table (upstream's printer of `Scale`).
const SCALE_COLUMNS: [Column; 4] = [
    Column { format: "", ..NAME },
    Column {
        name: "Desired",
        kind: "integer",
        format: "",
        description: "replicas is the desired number of instances for the scaled object.",
        priority: 0,
    },
    Column {
        name: "Available",
        kind: "integer",
        format: "",
        description: "replicas is the actual number of observed instances of the scaled object.",
        priority: 0,
    },
    AGE,
];

/// A scale as a table.
pub(crate) fn scale_table(scale: &Value, now: jiff::Timestamp) -> Value {
    let metadata = &scale["metadata"];
    let created = metadata["creationTimestamp"].as_str().unwrap_or("");
    let number = |part: &str| scale[part]["replicas"].as_i64().unwrap_or(0);
    let cells = json!([metadata["name"], number("spec"), number("status"), since(created, now)]);
    let partial =
        json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata});
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": metadata["resourceVersion"]},
        "columnDefinitions": SCALE_COLUMNS.iter().map(Column::to_value).collect::<Vec<_>>(),
        "rows": [{"cells": cells, "object": partial}],
    })
}

/// The error about the scale of an object that does not exist. Custom kinds and StatefulSets have that of the
/// object.
pub(crate) fn scale_not_found(kind: &Kind, name: &str) -> ApiError {
    if kind.custom || kind.plural == "statefulsets" {
        return ApiError::not_found(kind, name);
    }
    let group = if kind.group.is_empty() { "autoscaling" } else { kind.group };
    ApiError::resource_not_found(group, &format!("{}/scale", kind.plural), name)
}

fn segments(path: &[String]) -> Vec<&str> {
    path.iter().map(String::as_str).collect()
}

/// Sets the desired replicas at the kind's field.
fn set_replicas(kind: &Kind, object: &mut Object, replicas: i32) {
    let path = match kind.definition.and_then(|definition| definition.scale.as_ref()) {
        Some(scale) => segments(&scale.spec_replicas),
        None => vec!["spec", "replicas"],
    };
    let Some((last, parents)) = path.split_last() else { return };
    let map = parents.iter().fold(&mut object.0, |map, name| map_at(map, name));
    map.insert((*last).to_owned(), replicas.into());
}

/// The replicas in a scale, if it names any.
fn replicas_of(scale: &Value, name: &str) -> Result<Option<i32>, ApiError> {
    let replicas = match &scale["spec"]["replicas"] {
        Value::Null => return Ok(None),
        value => value.as_i64().and_then(|number| i32::try_from(number).ok()).ok_or_else(|| {
            ApiError::bad_request(format!(
                "Scale in version \"v1\" cannot be handled as a Scale: spec.replicas: {value} is not a 32-bit integer"
            ))
        })?,
    };
    if replicas < 0 {
        let detail = "must be greater than or equal to 0";
        let error = mayfly_api::validation::FieldError::invalid("spec.replicas", replicas, detail);
        return Err(ApiError::invalid_named("autoscaling", "Scale", name, &[error]));
    }
    Ok(Some(replicas))
}

/// The error for the scale of a Function. `scaling.min` is not a scale: it is a lower bound, above which the traffic
/// decides.
pub(crate) fn scale_managed_by_gateway(name: &str) -> ApiError {
    let mut error = ApiError::method_not_allowed();
    error.message = format!(
        "the replicas of function {name:?} follow its traffic, between spec.scaling.min and spec.scaling.max: set \
         those instead, for instance with: kubectl patch function {name} --type merge -p \
         '{{\"spec\":{{\"scaling\":{{\"min\":1,\"max\":10}}}}}}'"
    );
    error
}

impl ServerState {
    /// Writes a scale: `change` computes the new one from the current one.
    pub(crate) async fn change_scale(
        &self,
        request: &WriteRequest,
        name: &str,
        change: impl Fn(Value) -> Result<Value, ApiError> + Send + Sync,
    ) -> Result<WriteOutcome, ApiError> {
        self.change(request, name, Part::Scale, |current| {
            let scale = change(scale_of(request.kind, current))?;
            let replicas = replicas_of(&scale, name)?.unwrap_or(0);
            let mut object = current.clone();
            if let Some(version) =
                scale["metadata"]["resourceVersion"].as_str().filter(|text| !text.is_empty())
            {
                object.meta_mut().insert("resourceVersion".into(), version.into());
            }
            set_replicas(request.kind, &mut object, replicas);
            Ok(ObjectUpdate::new(object))
        })
        .await
    }

    /// Server-side apply of a scale: the manager becomes the owner of the replicas, as a field of the object, under
    /// the subresource's name.
    pub(crate) async fn apply_scale(
        &self,
        request: &WriteRequest,
        name: &str,
        scale: Decoded,
        force: bool,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        let given = &scale.value;
        for (field, wanted) in [("apiVersion", "autoscaling/v1"), ("kind", "Scale")] {
            if given[field] != wanted {
                let found = given[field].as_str().unwrap_or("");
                let message =
                    format!("the {field} in the data ({found}) does not match the expected one ({wanted})");
                return Err(ApiError::bad_request(message));
            }
        }
        let mut object = Object::default();
        object.0.insert("apiVersion".into(), kind.api_version().into());
        object.0.insert("kind".into(), kind.kind.into());
        for field in ["name", "uid", "resourceVersion"] {
            if let Some(text) = given["metadata"][field].as_str() {
                object.meta_mut().insert(field.into(), text.into());
            }
        }
        if let Some(replicas) = replicas_of(given, name)? {
            set_replicas(kind, &mut object, replicas);
        }
        let value = Value::Object(object.0);
        let applied = Decoded { value, duplicates: scale.duplicates, numbers: Vec::new() };
        self.apply(request, name, Part::Scale, applied, force).await
    }

    /// `pods/x/binding`: sets the node (upstream: `pkg/registry/core/pod/storage`, `setPodHostAndAnnotations`).
    pub(crate) async fn bind(
        &self,
        request: &WriteRequest,
        name: &str,
        binding: &Value,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        let node = binding["target"]["name"].as_str().unwrap_or("");
        if node.is_empty() {
            // As upstream, a server error (500), although the client is at fault.
            return Err(ApiError::without_reason("target.name: Required value"));
        }
        let target = binding["target"]["kind"].as_str().unwrap_or("");
        if !matches!(target, "" | "Node") {
            return Err(ApiError::bad_request(format!("a pod is bound to a Node, not to a {target}")));
        }
        let conflict = |why: String| ApiError::conflict(kind, name, &why);
        self.change(request, name, Part::Binding, |current| {
            let uid = binding["metadata"]["uid"].as_str().unwrap_or("");
            if !uid.is_empty() && uid != current.uid() {
                return Err(conflict(format!(
                    "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                    current.uid()
                )));
            }
            if current.is_terminating() {
                return Err(conflict(format!("pod {name} is being deleted, cannot be assigned to a host")));
            }
            let before = current.str_at(&["spec", "nodeName"]);
            if !before.is_empty() {
                return Err(conflict(format!("pod {name} is already assigned to node {before:?}")));
            }
            if current
                .at(&["spec", "schedulingGates"])
                .and_then(Value::as_array)
                .is_some_and(|gates| !gates.is_empty())
            {
                return Err(conflict(format!("pod {name} has non-empty .spec.schedulingGates")));
            }
            let mut object = current.clone();
            object.map_mut("spec").insert("nodeName".into(), node.into());
            for map in ["labels", "annotations"] {
                let added = binding["metadata"][map].as_object().cloned().unwrap_or_default();
                if !added.is_empty() {
                    map_at(object.meta_mut(), map).extend(added);
                }
            }
            scheduled(&mut object, request.now);
            // Metadata of a binding are checked like those of a pod.
            verbs::check(kind, &mut object)?;
            let errors = crate::meta::validate(&object, Some(current), kind);
            if !errors.is_empty() {
                return Err(ApiError::invalid(kind, name, &errors));
            }
            Ok(ObjectUpdate::new(object))
        })
        .await
    }
}

/// Sets the condition PodScheduled.
fn scheduled(pod: &mut Object, now: jiff::Timestamp) {
    let status = pod.map_mut("status");
    let conditions = status.entry("conditions").or_insert_with(|| json!([]));
    if let Some(conditions) = conditions.as_array_mut() {
        conditions.retain(|condition| condition["type"] != "PodScheduled");
        let now = crate::meta::timestamp(now);
        conditions.push(json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now}));
        for condition in conditions.iter_mut().filter_map(Value::as_object_mut) {
            condition.retain(|_, value| !value.is_null());
        }
    }
}

/// The row of `Namespace`.
pub(crate) fn namespaces() -> &'static Kind {
    registry().find("", "v1", "namespaces").expect("the row is there")
}
