//! `metrics.k8s.io`: requests the summary of each node's agent, like upstream's metrics-server.

use axum::{body::Body, response::Response};
use futures::future::join_all;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use mayfly_store::{Entry, ListOptions, Range};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    call::ResourceRequest,
    object::Object,
    registry::{Kind, registry},
    render::{ListMeta, ObjectView, json_response},
    selection::Selection,
    server::ServerState,
    status::ApiError,
    verbs::key,
};

/// Largest summary of a node, in bytes: some hundred for each of its pods.
const SUMMARY_BYTES_MAX: usize = 64 << 20;

/// The parts of upstream's summary that are shown (`kubelet/pkg/apis/stats/v1alpha1`).
#[derive(Deserialize)]
struct Summary {
    /// Seconds; a field of Mayfly's own.
    window: f64,
    node: Measured,
    pods: Vec<PodSummary>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSummary {
    pod_ref: PodRef,
    containers: Vec<ContainerSummary>,
}

#[derive(Deserialize)]
struct PodRef {
    name: String,
    namespace: String,
    uid: String,
}

#[derive(Deserialize)]
struct ContainerSummary {
    name: String,
    #[serde(flatten)]
    measured: Measured,
}

#[derive(Deserialize)]
struct Measured {
    cpu: Option<Cpu>,
    memory: Option<Memory>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Cpu {
    usage_nano_cores: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    time: String,
    working_set_bytes: u64,
}

impl Measured {
    fn usage(&self) -> Value {
        let mut usage = Map::new();
        if let Some(cpu) = &self.cpu {
            usage.insert("cpu".into(), format!("{}n", cpu.usage_nano_cores).into());
        }
        if let Some(memory) = &self.memory {
            usage.insert("memory".into(), format!("{}Ki", memory.working_set_bytes / 1024).into());
        }
        Value::Object(usage)
    }

    fn time(&self) -> &str {
        self.memory.as_ref().map_or("", |memory| &memory.time)
    }
}

impl ResourceRequest {
    /// Answers a request for the usage of nodes or pods.
    pub(crate) async fn measured(&self, view: ObjectView) -> Result<Response, ApiError> {
        let namespace = &self.target.namespace;
        match (self.parts.method.as_str(), &self.target.name, &self.target.subresource) {
            (_, _, Some(_)) => Err(ApiError::no_resource()),
            ("GET", None, None) => {
                let selection = Selection::parse(view.kind, &self.query)?;
                let mut entries = self.server.measure(view.kind, namespace, None).await?;
                entries.retain(|entry| selection.matches(entry));
                Ok(json_response(StatusCode::OK, view.list(&ListMeta::default(), entries.iter())?))
            }
            ("GET", Some(name), None) => {
                let entries = self.server.measure(view.kind, namespace, Some(name)).await?;
                let entry = entries.first().ok_or_else(|| ApiError::not_found(view.kind, name))?;
                let mut out = Vec::with_capacity(entry.value.len() + 64);
                view.append_stored(&mut out, &entry.value, entry.modified)?;
                Ok(json_response(StatusCode::OK, out))
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }
}

impl ServerState {
    /// The usage of the objects of a kind, sorted; `name` selects one. Nodes that do not answer are left out.
    async fn measure(
        &self,
        kind: &Kind,
        namespace: &str,
        name: Option<&str>,
    ) -> Result<Vec<Entry>, ApiError> {
        let of_nodes = kind.kind == "NodeMetrics";
        let nodes = match (of_nodes, name) {
            (true, Some(name)) => self.existing("nodes", "", name).into_iter().collect(),
            (false, Some(name)) => {
                let pod = self.existing("pods", namespace, name);
                let node = pod.map(|pod| pod.str_at(&["spec", "nodeName"]).to_owned());
                node.and_then(|node| self.existing("nodes", "", &node)).into_iter().collect()
            }
            (_, None) => self.all_nodes()?,
        };
        let asked = nodes.iter().map(|node| self.summary(node.name()));
        let mut found = Vec::new();
        for (node, summary) in nodes.iter().zip(join_all(asked).await) {
            let Some(summary) = summary else { continue };
            let window = format!("{:.3}s", summary.window);
            if of_nodes {
                let mut object = measured(kind, node, summary.node.time(), &window);
                object.0.insert("usage".into(), summary.node.usage());
                found.push(entry(kind, &object));
                continue;
            }
            for pod in &summary.pods {
                let PodRef { namespace: at, name: pod_name, uid } = &pod.pod_ref;
                let wanted =
                    (namespace.is_empty() || namespace == at) && name.is_none_or(|name| name == pod_name);
                // The object of the usage has the labels of the pod.
                let object = wanted.then(|| self.existing("pods", at, pod_name)).flatten();
                let Some(object) = object.filter(|object| object.uid() == uid) else { continue };
                let time = pod.containers.first().map_or("", |container| container.measured.time());
                let mut object = measured(kind, &object, time, &window);
                let containers = pod.containers.iter();
                let containers = containers
                    .map(|container| json!({"name": container.name, "usage": container.measured.usage()}));
                object.0.insert("containers".into(), containers.collect());
                found.push(entry(kind, &object));
            }
        }
        found.sort_by(|a, b| (&a.key.namespace, &a.key.name).cmp(&(&b.key.namespace, &b.key.name)));
        Ok(found)
    }

    fn existing(&self, plural: &str, namespace: &str, name: &str) -> Option<Object> {
        let kind = registry().find("", "v1", plural)?;
        let entry = self.store.get(&key(kind, namespace, name))?;
        Object::from_entry(&entry).ok()
    }

    fn all_nodes(&self) -> Result<Vec<Object>, ApiError> {
        let nodes = self.store.list(&Range::resource("nodes"), &ListOptions::default());
        let nodes = nodes.map_err(ApiError::internal)?.entries;
        nodes.iter().map(|entry| Object::from_entry(entry).map_err(ApiError::internal)).collect()
    }

    async fn summary(&self, node: &str) -> Option<Summary> {
        let request = Request::get("/stats/summary").body(Body::empty()).ok()?;
        let answered = async {
            let answer = (self.nodes)(node.to_owned(), request).await.map_err(|error| error.to_string())?;
            let body = Limited::new(answer.into_body(), SUMMARY_BYTES_MAX).collect().await;
            let body = body.map_err(|error| error.to_string())?.to_bytes();
            serde_json::from_slice(&body).map_err(|error| error.to_string())
        };
        let answered = tokio::time::timeout(self.config.request_timeout, answered).await;
        match answered.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
            Ok(summary) => Some(summary),
            Err(error) => {
                tracing::debug!(node, error, "cannot read the usage of a node");
                None
            }
        }
    }
}

/// The fields that measurements of nodes and pods share.
fn measured(kind: &Kind, of: &Object, time: &str, window: &str) -> Object {
    let mut object = Object::default();
    object.0.insert("kind".into(), kind.kind.into());
    object.0.insert("apiVersion".into(), kind.api_version().into());
    let metadata = ["name", "namespace", "labels"].into_iter();
    let mut metadata: Map<String, Value> =
        metadata.filter_map(|field| Some((field.to_owned(), of.at(&["metadata", field])?.clone()))).collect();
    metadata.insert("creationTimestamp".into(), time.into());
    object.0.insert("metadata".into(), Value::Object(metadata));
    object.0.insert("timestamp".into(), time.into());
    object.0.insert("window".into(), window.into());
    object
}

fn entry(kind: &Kind, object: &Object) -> Entry {
    let key = key(kind, object.meta_str("namespace"), object.name());
    Entry { key, value: object.encode(), created: Default::default(), modified: Default::default() }
}
