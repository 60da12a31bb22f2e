//! The registry by its protocol: the requests that docker, oras and skopeo make.

use axum::{Router, body::Body};
use http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use mayfly_api::Digest;
use mayfly_registry::{RegistryAccess, RegistryServer};
use serde_json::{Value, json};
use tower::ServiceExt as _;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> &str {
        self.headers[name].to_str().unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn code(&self) -> String {
        self.json()["errors"][0]["code"].as_str().unwrap_or_default().to_owned()
    }
}

struct Registry {
    router: Router,
    _folder: tempfile::TempDir,
}

impl Registry {
    fn new(access: RegistryAccess) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { router: RegistryServer::create(folder.path(), access).unwrap().router(), _folder: folder }
    }

    async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_vec())).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.unwrap().to_bytes().to_vec();
        Answer { status: parts.status, headers: parts.headers, body }
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, &[], b"").await
    }

    /// Pushes a blob in one piece, as curl would.
    async fn push_blob(&self, name: &str, content: &[u8]) -> String {
        let digest = Digest::of(content).to_string();
        let path = format!("/v2/{name}/blobs/uploads/?digest={digest}");
        assert_eq!(self.send(Method::POST, &path, &[], content).await.status, StatusCode::CREATED);
        digest
    }

    async fn push_manifest(&self, name: &str, reference: &str, manifest: &Value) -> Answer {
        let path = format!("/v2/{name}/manifests/{reference}");
        self.send(Method::PUT, &path, &[("content-type", MANIFEST)], manifest.to_string().as_bytes()).await
    }
}

fn manifest(config: &str, layers: &[&str]) -> Value {
    let part = |digest: &str| json!({"mediaType": "application/octet-stream", "digest": digest, "size": 1});
    json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": part(config),
        "layers": layers.iter().map(|layer| part(layer)).collect::<Vec<_>>()})
}

#[tokio::test]
async fn a_blob_is_pushed_in_chunks_and_read_in_parts() {
    let registry = Registry::new(RegistryAccess::Anyone);
    let begun = registry.send(Method::POST, "/v2/team/app/blobs/uploads/", &[], b"").await;
    assert_eq!(begun.status, StatusCode::ACCEPTED);
    let location = begun.header("location").to_owned();
    let first = registry.send(Method::PATCH, &location, &[("content-range", "0-3")], b"0123").await;
    assert_eq!((first.status, first.header("range")), (StatusCode::ACCEPTED, "0-3"));
    let wrong = registry.send(Method::PATCH, &location, &[("content-range", "9-11")], b"xyz").await;
    assert_eq!(wrong.status, StatusCode::RANGE_NOT_SATISFIABLE);
    let state = registry.get(&location).await;
    assert_eq!((state.status, state.header("range")), (StatusCode::NO_CONTENT, "0-3"));
    let digest = Digest::of(b"0123456789").to_string();
    let put = registry.send(Method::PUT, &format!("{location}?digest={digest}"), &[], b"456789").await;
    assert_eq!(put.status, StatusCode::CREATED);
    assert_eq!(put.header("docker-content-digest"), digest);
    let path = format!("/v2/team/app/blobs/{digest}");
    assert_eq!(registry.get(&path).await.body, b"0123456789");
    let part = registry.send(Method::GET, &path, &[("range", "bytes=2-4")], b"").await;
    assert_eq!((part.status, part.header("content-range")), (StatusCode::PARTIAL_CONTENT, "bytes 2-4/10"));
    assert_eq!(part.body, b"234");
    let head = registry.send(Method::HEAD, &path, &[], b"").await;
    assert_eq!((head.header("content-length"), head.body.len()), ("10", 0));
    // The session is over; a blob with another digest than its client says is not kept.
    assert_eq!(registry.get(&location).await.code(), "BLOB_UPLOAD_UNKNOWN");
    let lie = format!("/v2/team/app/blobs/uploads/?digest={}", Digest::of(b"other"));
    assert_eq!(registry.send(Method::POST, &lie, &[], b"mine").await.code(), "DIGEST_INVALID");
    let mount = format!("/v2/elsewhere/blobs/uploads/?mount={digest}&from=team/app");
    assert_eq!(registry.send(Method::POST, &mount, &[], b"").await.status, StatusCode::CREATED);
}

#[tokio::test]
async fn manifests_have_tags_referrers_and_an_end() {
    let registry = Registry::new(RegistryAccess::Anyone);
    let (config, layer) = (registry.push_blob("a/b", b"{}").await, registry.push_blob("a/b", b"layer").await);
    let absent = Digest::of(b"absent").to_string();
    let refused = registry.push_manifest("a/b", "1", &manifest(&config, &[&absent])).await;
    assert_eq!(refused.code(), "MANIFEST_BLOB_UNKNOWN");
    let image = manifest(&config, &[&layer]);
    let pushed = registry.push_manifest("a/b", "1", &image).await;
    assert_eq!(pushed.status, StatusCode::CREATED);
    let digest = pushed.header("docker-content-digest").to_owned();
    assert_eq!(registry.push_manifest("a/b", "latest", &image).await.status, StatusCode::CREATED);
    for reference in ["1", &digest] {
        let found = registry.get(&format!("/v2/a/b/manifests/{reference}")).await;
        assert_eq!(found.body, image.to_string().as_bytes());
        assert_eq!(found.header("content-type"), MANIFEST);
    }
    assert_eq!(registry.get("/v2/a/b/tags/list").await.json()["tags"], json!(["1", "latest"]));
    assert_eq!(registry.get("/v2/a/b/tags/list?n=1").await.json()["tags"], json!(["1"]));
    assert_eq!(registry.get("/v2/_catalog").await.json()["repositories"], json!(["a/b"]));

    let mut signature = manifest(&config, &[&layer]);
    signature["subject"] = json!({"mediaType": MANIFEST, "digest": digest, "size": 1});
    signature["artifactType"] = "application/vnd.example.signature".into();
    let signed = Digest::of(signature.to_string().as_bytes()).to_string();
    assert_eq!(registry.push_manifest("a/b", &signed, &signature).await.header("oci-subject"), digest);
    let about = registry.get(&format!("/v2/a/b/referrers/{digest}")).await.json();
    assert_eq!(about["manifests"][0]["digest"], signed);
    let other = registry.get(&format!("/v2/a/b/referrers/{digest}?artifactType=x")).await.json();
    assert_eq!(other["manifests"], json!([]));

    let delete = async |reference: &str| {
        registry.send(Method::DELETE, &format!("/v2/a/b/manifests/{reference}"), &[], b"").await
    };
    assert_eq!(delete("latest").await.status, StatusCode::ACCEPTED);
    assert_eq!(registry.get("/v2/a/b/manifests/1").await.status, StatusCode::OK);
    assert_eq!(delete(&digest).await.status, StatusCode::ACCEPTED);
    assert_eq!(registry.get("/v2/a/b/manifests/1").await.code(), "MANIFEST_UNKNOWN");
    assert_eq!(delete(&digest).await.code(), "MANIFEST_UNKNOWN");
    assert_eq!(delete(&signed).await.status, StatusCode::ACCEPTED);
    assert_eq!(registry.get("/v2/a/b/tags/list").await.code(), "NAME_UNKNOWN");
}

#[tokio::test]
async fn beyond_this_machine_the_token_is_wanted() {
    let registry = Registry::new(RegistryAccess::Token("s3cret".into()));
    let refused = registry.get("/v2/").await;
    assert_eq!(
        (refused.status, refused.header("www-authenticate")),
        (StatusCode::UNAUTHORIZED, "Basic realm=\"mayfly\"")
    );
    // `anyone:s3cret` and `anyone:wrong`.
    for (sent, status) in [
        ("Basic YW55b25lOnMzY3JldA==", StatusCode::OK),
        ("Basic YW55b25lOndyb25n", StatusCode::UNAUTHORIZED),
        ("Bearer s3cret", StatusCode::OK),
        ("Bearer ", StatusCode::UNAUTHORIZED),
    ] {
        let answer = registry.send(Method::GET, "/v2/", &[(header::AUTHORIZATION.as_str(), sent)], b"").await;
        assert_eq!(answer.status, status, "{sent}");
    }
    let open = Registry::new(RegistryAccess::Anyone);
    let browser =
        open.send(Method::POST, "/v2/a/blobs/uploads/", &[("origin", "https://example.com")], b"").await;
    assert_eq!(browser.code(), "DENIED");
}
