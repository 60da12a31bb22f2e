//! Fetches the components of functions whose source is an artifact of a registry into the artifact store.

use std::time::Duration;

use futures::TryStreamExt as _;
use http::{Request, StatusCode, header};
use http_body_util::BodyExt as _;
use kube::{Client, client::Body};
use mayfly_api::Digest;
use mayfly_distribution::{Keychain, RegistryClient, RemoteImage, is_index, parse_reference};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::presence::Presence;

/// The largest number of concurrent fetches: each occupies one of the controller's workers.
const FETCHES_MAX: usize = 4;
/// Largest component, in bytes: it is held in memory during the fetch. (The artifact store's own limit is lower by
/// default.)
const COMPONENT_BYTES_MAX: usize = 256 << 20;
/// The timeout of one fetch.
const FETCH_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum length of a refusal that is read, in bytes.
const REFUSAL_BYTES_MAX: usize = 64 << 10;
/// Media types of layers that are components: wkg's and oras' today, and the one of older tools.
const COMPONENT_TYPES: [&str; 2] = ["application/wasm", "application/vnd.wasm.content.layer.v1+wasm"];

/// Fetches components from registries.
pub(super) struct OciSources {
    client: Client,
    registries: Option<RegistryClient>,
    turns: Semaphore,
}

impl OciSources {
    pub(super) fn new(client: Client, registries: Option<RegistryClient>) -> Self {
        Self { client, registries, turns: Semaphore::new(FETCHES_MAX) }
    }

    /// The digest of the component that a reference currently names, after it was fetched into the artifact store.
    ///
    /// # Errors
    /// The reason, as a message for users.
    pub(super) async fn fetch(&self, reference: &str, presence: &Presence) -> Result<Digest, String> {
        let registries = self.registries.as_ref().ok_or("this server pulls from no registry")?;
        let _turn = self.turns.try_acquire().map_err(|_| "other components are being fetched first")?;
        match tokio::time::timeout(FETCH_TIMEOUT, self.fetch_now(registries, reference, presence)).await {
            Ok(fetched) => fetched.map_err(|why| format!("cannot fetch {reference:?}: {why}")),
            Err(_) => {
                Err(format!("the fetch of {reference:?} took longer than {} s", FETCH_TIMEOUT.as_secs()))
            }
        }
    }

    async fn fetch_now(
        &self,
        registries: &RegistryClient,
        reference: &str,
        presence: &Presence,
    ) -> Result<Digest, String> {
        let name = parse_reference(reference).map_err(|error| error.to_string())?;
        let remote = registries.open(&name, &Keychain::default()).await.map_err(|error| error.to_string())?;
        if is_index(&remote.target.media_type) {
            return Err("it is an index of several variants, and a function has one component".into());
        }
        let manifest: Value =
            serde_json::from_slice(&remote.target.bytes).map_err(|error| error.to_string())?;
        let component = component_layer(&manifest)?;
        if !presence.has(component).await.map_err(|error| error.to_string())? {
            self.store(&remote, component).await?;
        }
        Ok(component)
    }

    /// Writes the component to the artifact store, which checks its digest and whether it is a component.
    async fn store(&self, remote: &RemoteImage, component: Digest) -> Result<(), String> {
        let mut blob = remote.blob(&component.to_string(), 0).await.map_err(|error| error.to_string())?;
        let mut content = Vec::new();
        while let Some(chunk) = blob.stream.try_next().await.map_err(|error| error.to_string())? {
            content.extend_from_slice(&chunk);
            if content.len() > COMPONENT_BYTES_MAX {
                return Err(format!("the component is larger than {COMPONENT_BYTES_MAX} bytes"));
            }
        }
        let request = Request::put(format!("/artifacts/{component}"))
            .header(header::CONTENT_TYPE, "application/wasm")
            .body(Body::from(content))
            .map_err(|error| error.to_string())?;
        let answer = self.client.send(request).await.map_err(|error| error.to_string())?;
        if matches!(answer.status(), StatusCode::OK | StatusCode::CREATED) {
            return Ok(());
        }
        let status = answer.status();
        let body = http_body_util::Limited::new(answer.into_body(), REFUSAL_BYTES_MAX);
        let text = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let said: Value = serde_json::from_slice(&text).unwrap_or_default();
        Err(said["message"].as_str().map_or_else(|| status.to_string(), str::to_owned))
    }
}

/// The layer of a manifest that is the component: the only one of such a type, else the only one. Pure.
fn component_layer(manifest: &Value) -> Result<Digest, String> {
    let layers: Vec<&Value> = manifest["layers"].as_array().into_iter().flatten().collect();
    let is_component =
        |layer: &&&Value| layer["mediaType"].as_str().is_some_and(|kind| COMPONENT_TYPES.contains(&kind));
    let components: Vec<&&Value> = layers.iter().filter(is_component).collect();
    let chosen = match (components.as_slice(), layers.as_slice()) {
        ([only], _) => **only,
        ([], [only]) if !is_file_system(only) => only,
        ([], _) => {
            return Err(format!(
                "it is not a component: none of its {} layers is of type {} (spec.source.image is for images of containers)",
                layers.len(),
                COMPONENT_TYPES[0]
            ));
        }
        (several, _) => return Err(format!("it has {} components, and a function has one", several.len())),
    };
    let digest = chosen["digest"].as_str().unwrap_or_default();
    digest.parse().map_err(|_| format!("its layer's digest is {digest:?}: only sha256 is known"))
}

fn is_file_system(layer: &Value) -> bool {
    layer["mediaType"].as_str().is_some_and(|kind| kind.contains("tar") || kind.contains("rootfs"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_component_of_a_manifest() {
        let digest = |text: &str| Digest::of(text.as_bytes());
        let layer = |kind: &str, text: &str| json!({"mediaType": kind, "digest": digest(text).to_string()});
        let of = |layers: Vec<Value>| component_layer(&json!({"layers": layers}));
        let tar = "application/vnd.oci.image.layer.v1.tar+gzip";
        assert_eq!(of(vec![layer("application/wasm", "a")]), Ok(digest("a")));
        assert_eq!(
            of(vec![layer("text/markdown", "readme"), layer(COMPONENT_TYPES[1], "a")]),
            Ok(digest("a"))
        );
        assert_eq!(of(vec![layer("application/octet-stream", "a")]), Ok(digest("a")));
        for (layers, why) in [
            (vec![], "none of its 0 layers"),
            (vec![layer(tar, "a")], "spec.source.image"),
            (vec![layer("a/b", "a"), layer("a/b", "b")], "none of its 2 layers"),
            (vec![layer("application/wasm", "a"), layer("application/wasm", "b")], "2 components"),
            (vec![json!({"mediaType": "application/wasm", "digest": "sha512:x"})], "sha512:x"),
        ] {
            let error = of(layers).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
