//! Pulls images from scripted registries into real containerd.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use mayfly_runtime::{Runtime as _, RuntimeError};
use serde_json::{Value, json};

use super::fixture;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The image that the fixture's registry serves, and the registry's faults.
struct Served {
    index: Vec<u8>,
    manifest: (String, Vec<u8>),
    config: (String, Vec<u8>),
    layer: (String, Vec<u8>),
    /// Whether the next response with the layer ends early.
    breaks_off: AtomicBool,
    /// Whether layers have wrong bytes of the right length.
    lies: AtomicBool,
    layers_asked: AtomicUsize,
    ranges_asked: AtomicUsize,
}

fn digest(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    format!("sha256:{}", hex::encode(sha2::Sha256::digest(bytes)))
}

impl Served {
    fn new(image: &std::path::Path) -> Self {
        let named = |bytes: Vec<u8>| (digest(&bytes), bytes);
        let layer = named(std::fs::read(image.join("layer.tar")).unwrap());
        let config = named(std::fs::read(image.join("config.json")).unwrap());
        let part = |kind: &str, (digest, bytes): &(String, Vec<u8>)| json!({"mediaType": kind, "digest": digest, "size": bytes.len()});
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
            "config": part("application/vnd.oci.image.config.v1+json", &config),
            "layers": [part("application/vnd.oci.image.layer.v1.tar", &layer)]});
        let manifest = named(manifest.to_string().into_bytes());
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let variant = |architecture: &str, entry: Value| {
            let mut entry = entry;
            entry["platform"] = json!({"os": "linux", "architecture": architecture});
            entry
        };
        let absent = json!({"mediaType": MANIFEST, "digest": digest(b"absent"), "size": 1});
        let own = variant(architecture, part(MANIFEST, &manifest));
        let index =
            json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [variant("s390x", absent), own]});
        Self {
            index: index.to_string().into_bytes(),
            manifest,
            config,
            layer,
            breaks_off: AtomicBool::default(),
            lies: AtomicBool::default(),
            layers_asked: AtomicUsize::default(),
            ranges_asked: AtomicUsize::default(),
        }
    }

    fn answer(&self, request: &Request) -> Response {
        let path = request.uri().path();
        let typed = |kind: &'static str, bytes: &[u8]| {
            ([(header::CONTENT_TYPE, kind)], bytes.to_vec()).into_response()
        };
        match path.rsplit('/').next().unwrap_or_default() {
            "1" | "2" if path.contains("/manifests/") => typed(INDEX, &self.index),
            name if name == self.manifest.0 => typed(MANIFEST, &self.manifest.1),
            name if name == self.config.0 => self.config.1.clone().into_response(),
            name if name == self.layer.0 => self.layer_answer(request),
            _ => StatusCode::NOT_FOUND.into_response(),
        }
    }

    fn layer_answer(&self, request: &Request) -> Response {
        self.layers_asked.fetch_add(1, Ordering::Relaxed);
        let bytes = &self.layer.1;
        if self.lies.load(Ordering::Relaxed) {
            return vec![7; bytes.len()].into_response();
        }
        let range = request.headers().get(header::RANGE).and_then(|value| value.to_str().ok());
        let from =
            range.and_then(|text| text.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        if let Some(from) = from {
            self.ranges_asked.fetch_add(1, Ordering::Relaxed);
            return (StatusCode::PARTIAL_CONTENT, bytes[from..].to_vec()).into_response();
        }
        if self.breaks_off.swap(false, Ordering::Relaxed) {
            let first = Ok(axum::body::Bytes::copy_from_slice(&bytes[..bytes.len() / 2]));
            let chunks = [first, Err(std::io::Error::other("broken"))];
            return Body::from_stream(futures::stream::iter(chunks)).into_response();
        }
        bytes.clone().into_response()
    }

    async fn serve(self: &Arc<Self>) -> std::net::SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = self.clone();
        let app = Router::new().fallback(move |request: Request| {
            let answer = served.answer(&request);
            async move { answer }
        });
        tokio::spawn(async move { axum::serve(listener, app).await });
        address
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pulls_the_variant_of_this_platform_and_resumes_interrupted_downloads() {
    let test = "pulls_the_variant_of_this_platform_and_resumes_interrupted_downloads";
    let Some(fixture) = fixture(test).await else { return };
    let images = fixture.runtime.images().unwrap();
    let served = Arc::new(Served::new(&fixture.folder.path().join("image")));
    // Removed, so that the layer must come from the registry.
    images.remove("busybox:local").await.unwrap();
    let address = served.serve().await;
    served.breaks_off.store(true, Ordering::Relaxed);
    let name = format!("{address}/team/app:1");
    assert_eq!(images.find(&name).await.unwrap(), None);
    let record = images.pull(&name, &[]).await.unwrap();
    assert_eq!((&*record.reference, &*record.digest), (&*name, &*digest(&served.index)));
    assert_eq!(record.id, format!("{address}/team/app@{}", record.digest));
    assert_eq!(served.ranges_asked.load(Ordering::Relaxed), 1, "it is continued, not begun anew");
    assert_eq!(images.find(&name).await.unwrap().as_ref(), Some(&record));

    // Existing content is not fetched again, not even under another name; two concurrent pulls are one.
    let asked = served.layers_asked.load(Ordering::Relaxed);
    let other = format!("{address}/team/app:2");
    let (one, two, three) =
        tokio::join!(images.pull(&name, &[]), images.pull(&other, &[]), images.pull(&other, &[]));
    assert!(one.is_ok() && two.is_ok() && three.is_ok());
    assert_eq!(served.layers_asked.load(Ordering::Relaxed), asked);

    let mut container = fixture.container("pulled", "echo pulled");
    container.image = name.clone();
    fixture.runtime.create_sandbox(fixture.sandbox("pulled")).await.unwrap();
    fixture.runtime.start_container(container.clone()).await.unwrap();
    assert_eq!(fixture.exit(&container.id).await.0, 0);
    fixture.runtime.remove_sandbox(&container.id.pod).await.unwrap();
    fixture.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_with_another_digest_is_refused_and_leaves_nothing() {
    let Some(fixture) = fixture("a_layer_with_another_digest_is_refused_and_leaves_nothing").await else {
        return;
    };
    let images = fixture.runtime.images().unwrap();
    let served = Arc::new(Served::new(&fixture.folder.path().join("image")));
    images.remove("busybox:local").await.unwrap();
    let address = served.serve().await;
    served.lies.store(true, Ordering::Relaxed);
    let name = format!("{address}/team/app:1");
    let error = images.pull(&name, &[]).await.unwrap_err();
    let told =
        matches!(&error, RuntimeError::ImageMissing(why) if why.contains(&name) && why.contains("digest"));
    assert!(told, "{error}");
    assert_eq!(images.find(&name).await.unwrap(), None);
    // With correct content the pull succeeds: nothing of the wrong content was kept.
    served.lies.store(false, Ordering::Relaxed);
    images.pull(&name, &[]).await.unwrap();
    let error = images.pull(&format!("{address}/team/app:3"), &[]).await.unwrap_err();
    assert!(matches!(&error, RuntimeError::ImageMissing(why) if why.ends_with("not found")), "{error}");
    fixture.leaves_nothing().await;
}
