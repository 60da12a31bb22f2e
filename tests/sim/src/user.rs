//! The user of the cluster: requests as kubectl sends them.

use http::{Method, Request, header};
use kube::Client;
use mayfly_store::Key;
use serde_json::{Value, json};

/// A way to the API that meets no faults of the wire.
#[derive(Clone)]
pub struct UserClient {
    client: Client,
}

impl std::fmt::Debug for UserClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UserClient").finish_non_exhaustive()
    }
}

/// The propagation policies of a deletion.
pub const POLICIES: [&str; 3] = ["Background", "Foreground", "Orphan"];

impl UserClient {
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    pub async fn create(&self, object: &Value) -> kube::Result<Value> {
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or("");
        let (api_version, kind) = (object["apiVersion"].as_str(), object["kind"].as_str());
        let plural = format!("{}s", kind.unwrap_or("").to_lowercase());
        let path = collection(api_version.unwrap_or(""), namespace, &plural);
        self.send(Method::POST, path, "application/json", object).await
    }

    /// A JSON merge patch.
    pub async fn patch(&self, key: &Key, change: &Value) -> kube::Result<Value> {
        self.send(Method::PATCH, object(key), "application/merge-patch+json", change).await
    }

    pub async fn delete(&self, key: &Key, policy: &str, grace_seconds: Option<i64>) -> kube::Result<Value> {
        let mut options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy});
        if let Some(seconds) = grace_seconds {
            options["gracePeriodSeconds"] = seconds.into();
        }
        self.send(Method::DELETE, object(key), "application/json", &options).await
    }

    pub async fn evict(&self, pod: &Key) -> kube::Result<Value> {
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"namespace": &*pod.namespace, "name": &*pod.name}});
        let path = format!("{}/eviction", object(pod));
        self.send(Method::POST, path, "application/json", &eviction).await
    }

    async fn send(&self, method: Method, path: String, content: &str, body: &Value) -> kube::Result<Value> {
        let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, content);
        let request = request.body(body.to_string().into_bytes()).map_err(kube::Error::HttpError)?;
        self.client.request(request).await
    }
}

fn collection(api_version: &str, namespace: &str, plural: &str) -> String {
    let root = if api_version.contains('/') { "apis" } else { "api" };
    match namespace {
        "" => format!("/{root}/{api_version}/{plural}"),
        namespace => format!("/{root}/{api_version}/namespaces/{namespace}/{plural}"),
    }
}

fn object(key: &Key) -> String {
    let (plural, group) = key.resource.split_once('.').unwrap_or((&*key.resource, ""));
    let api_version = if group.is_empty() { "v1".into() } else { format!("{group}/v1") };
    format!("{}/{}", collection(&api_version, &key.namespace, plural), key.name)
}
