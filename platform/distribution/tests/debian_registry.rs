//! The client against Debian's docker-registry with TLS and a password, and against scripted registries that require
//! tokens, disconnect, redirect or send wrong content.

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    extract::Request,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::TryStreamExt as _;
use http::{StatusCode, header};
use http_body_util::Full;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use mayfly_distribution::{Keychain, PullError, RegistryClient, RegistryConfig, parse_reference};
use serde_json::json;
use sha2::{Digest as _, Sha256};

const PROGRAM: &str = "/usr/bin/docker-registry";
/// `user` with the password `pass:word`, hashed by bcrypt with the fewest rounds.
const HTPASSWD: &str = "user:$2b$04$dE3B4SbMdVKlDa1FenFKyucGJMkJcNwliGwjx9vcwgo7iDK4N/qv.\n";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// An image without layers that matter: a configuration and one blob.
struct Sample {
    config: &'static [u8],
    layer: Vec<u8>,
    manifest: Vec<u8>,
}

fn sample() -> Sample {
    let config: &[u8] = b"{}";
    let layer: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    let part =
        |kind: &str, bytes: &[u8]| json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()});
    let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST,
        "config": part("application/vnd.oci.image.config.v1+json", config),
        "layers": [part("application/vnd.oci.image.layer.v1.tar", &layer)]});
    Sample { config, layer, manifest: manifest.to_string().into_bytes() }
}

/// A docker-registry that ends when this value is dropped.
struct Debian {
    child: Child,
    address: SocketAddr,
}

impl Drop for Debian {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts docker-registry on the folder's content, with what `http` and `auth` say beside the address.
fn start(folder: &Path, name: &str, http: &str, auth: &str) -> Debian {
    let file = folder.join(name);
    let text = format!(
        "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp:\n  addr: 127.0.0.1:0\n{http}{auth}",
        folder.join("content").display()
    );
    std::fs::write(&file, text).unwrap();
    let mut command = Command::new(PROGRAM);
    command
        .arg("serve")
        .arg(&file)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .env("OTEL_TRACES_EXPORTER", "none");
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = Vec::new();
    let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
        let found = line.split("listening on ").nth(1).and_then(|rest| {
            let end = rest.find(|character: char| !(character.is_ascii_digit() || ".:".contains(character)));
            rest[..end.unwrap_or(rest.len())].parse().ok()
        });
        said.push(line);
        found
    });
    // Its further output is read, so that it never blocks.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
    let address = address.unwrap_or_else(|| panic!("docker-registry does not listen: {said:?}"));
    Debian { child, address }
}

async fn push(address: SocketAddr, sample: &Sample) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let base = format!("http://{address}/v2/team/app");
    for blob in [sample.config, &sample.layer] {
        let begin = http::Request::post(format!("{base}/blobs/uploads/")).body(Full::default()).unwrap();
        let answer = client.request(begin).await.unwrap();
        assert_eq!(answer.status(), StatusCode::ACCEPTED);
        let location = answer.headers()[header::LOCATION].to_str().unwrap().to_owned();
        let put = http::Request::put(format!("{location}&digest={}", digest(blob)));
        let put = put.header(header::CONTENT_TYPE, "application/octet-stream");
        let answer = client.request(put.body(Full::from(blob.to_vec())).unwrap()).await.unwrap();
        assert_eq!(answer.status(), StatusCode::CREATED);
    }
    let put = http::Request::put(format!("{base}/manifests/1")).header(header::CONTENT_TYPE, OCI_MANIFEST);
    let answer = client.request(put.body(Full::from(sample.manifest.clone())).unwrap()).await.unwrap();
    assert_eq!(answer.status(), StatusCode::CREATED);
}

fn keychain(host: &str, password: &str) -> Keychain {
    let mut keychain = Keychain::default();
    let text = json!({"auths": {host: {"username": "user", "password": password}}}).to_string();
    keychain.add_docker_config(text.as_bytes()).unwrap();
    keychain
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
async fn pulls_from_debians_registry_with_tls_and_a_password() {
    if !Path::new(PROGRAM).is_file() {
        println!("SKIPPED pulls_from_debians_registry_with_tls_and_a_password: no docker-registry");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name).display().to_string()
    };
    let certificate =
        rcgen::generate_simple_self_signed(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
    let (ca, key) = (
        write("ca.pem", &certificate.cert.pem()),
        write("key.pem", &certificate.signing_key.serialize_pem()),
    );
    let sample = sample();
    let open = start(folder.path(), "open.yml", "", "");
    push(open.address, &sample).await;
    let htpasswd = write("htpasswd", HTPASSWD);
    let closed = start(
        folder.path(),
        "closed.yml",
        &format!("  tls: {{certificate: {ca}, key: {key}}}\n"),
        &format!("auth: {{htpasswd: {{realm: test, path: {htpasswd}}}}}\n"),
    );
    let host = closed.address.to_string();
    let settings = |tls: &str, mirror: &str| {
        let file = write(
            "registries.yaml",
            &format!("mirrors: {{{mirror}}}\nconfigs: {{'{host}': {{tls: {tls}}}}}\n"),
        );
        RegistryClient::new(RegistryConfig::read(Path::new(&file)).unwrap())
    };
    let trusting = settings(&format!("{{ca_file: {ca}}}"), "");
    let image = parse_reference(&format!("{host}/team/app:1")).unwrap();

    let found = trusting.open(&image, &keychain(&host, "pass:word")).await.unwrap();
    assert_eq!(found.target.digest, digest(&sample.manifest));
    let layer_digest = digest(&sample.layer);
    for offset in [0, 1000] {
        let body = found.blob(&layer_digest, offset).await.unwrap();
        assert_eq!(body.offset, offset);
        let bytes: Vec<Bytes> = body.stream.try_collect().await.unwrap();
        assert!(bytes.concat() == sample.layer[usize::try_from(offset).unwrap()..]);
    }
    let by_digest = parse_reference(&format!("{host}/team/app@{}", digest(&sample.manifest))).unwrap();
    assert!(trusting.open(&by_digest, &keychain(&host, "pass:word")).await.is_ok());

    let refused = async |client: &RegistryClient, password| {
        client.open(&image, &keychain(&host, password)).await.err().unwrap()
    };
    let error = refused(&trusting, "wrong").await;
    assert!(matches!(&error, PullError::Denied { .. }), "{error}");
    let error = trusting.open(&image, &Keychain::default()).await.err().unwrap();
    assert!(matches!(&error, PullError::Denied { .. }), "{error}");
    let absent = parse_reference(&format!("{host}/team/app:2")).unwrap();
    let error = trusting.open(&absent, &keychain(&host, "pass:word")).await.err().unwrap();
    assert_eq!(error, PullError::NotFound(absent.whole()));
    let error = refused(&settings("{}", ""), "pass:word").await;
    assert!(
        matches!(&error, PullError::Unreachable { cause, .. } if cause.contains("certificate")),
        "{error}"
    );
    assert!(
        settings("{insecure_skip_verify: true}", "")
            .open(&image, &keychain(&host, "pass:word"))
            .await
            .is_ok()
    );

    // The mirror has it, so the registry of the name gets no request.
    let mirrored = settings("{}", &format!("registry.invalid: {{endpoint: ['http://{}']}}", open.address));
    let elsewhere = parse_reference("registry.invalid/team/app:1").unwrap();
    assert_eq!(mirrored.open(&elsewhere, &Keychain::default()).await.unwrap().target, found.target);
}

/// Serves the responses of `answer` on a port of its own.
async fn scripted(
    answer: impl Fn(Request, SocketAddr) -> Response + Clone + Send + Sync + 'static,
) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().fallback(move |request: Request| {
        let answer = answer(request, address);
        async move { answer }
    });
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

fn manifest_answer(bytes: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, OCI_MANIFEST)], bytes).into_response()
}

#[tokio::test]
async fn a_token_is_fetched_with_the_login_and_not_shown_to_others() {
    let sample = Arc::new(sample());
    let stranger = scripted(|request, _| match request.headers().contains_key(header::AUTHORIZATION) {
        true => StatusCode::BAD_REQUEST.into_response(),
        false => "blob".into_response(),
    })
    .await;
    let manifest = sample.manifest.clone();
    let address = scripted(move |request, own| {
        let sent =
            request.headers().get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
        let (path, query) = (request.uri().path().to_owned(), request.uri().query().unwrap_or("").to_owned());
        let is_token = sent.as_deref() == Some("Bearer t-o.k");
        match path.as_str() {
            "/token"
                if sent.as_deref() == Some("Basic dXNlcjpwYXNzOndvcmQ=")
                    && query.contains("scope=repository%3Ateam%2Fapp%3Apull") =>
            {
                axum::Json(json!({"access_token": "t-o.k"})).into_response()
            }
            "/token" => (StatusCode::UNAUTHORIZED, axum::Json(json!({"details": "who?"}))).into_response(),
            "/v2/team/app/manifests/1" if is_token => manifest_answer(manifest.clone()),
            "/v2/team/app/blobs/sha256:b" if is_token => {
                (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, format!("http://{stranger}/blob"))])
                    .into_response()
            }
            _ => {
                let wanted = format!(
                    "Bearer realm=\"http://{own}/token\",service=\"s\",scope=\"repository:team/app:pull\""
                );
                (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, wanted)]).into_response()
            }
        }
    })
    .await;
    let client = RegistryClient::new(RegistryConfig::default());
    let image = parse_reference(&format!("{address}/team/app:1")).unwrap();
    let found = client.open(&image, &keychain(&address.to_string(), "pass:word")).await.unwrap();
    let body = found.blob("sha256:b", 0).await.unwrap();
    let bytes: Vec<Bytes> = body.stream.try_collect().await.unwrap();
    assert_eq!(bytes.concat(), b"blob");
    let error = client.open(&image, &keychain(&address.to_string(), "wrong")).await.err().unwrap();
    assert!(matches!(&error, PullError::Denied { message, .. } if message == "who?"), "{error}");
}

#[tokio::test]
async fn a_registry_that_lies_floods_or_fails_is_refused() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = asked.clone();
    let manifest = sample().manifest;
    let address = scripted(move |request, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        match request.uri().path() {
            "/v2/large/manifests/1" => manifest_answer(vec![b' '; 9 << 20]),
            "/v2/html/manifests/1" => "<html>".into_response(),
            "/v2/loop/manifests/1" => {
                (StatusCode::FOUND, [(header::LOCATION, "/v2/loop/manifests/1")]).into_response()
            }
            "/v2/broken/manifests/1" => {
                let text = json!({"errors": [{"code": "UNAVAILABLE", "message": "later"}]});
                (StatusCode::SERVICE_UNAVAILABLE, axum::Json(text)).into_response()
            }
            _ => manifest_answer(manifest.clone()),
        }
    })
    .await;
    let client = RegistryClient::new(RegistryConfig::default());
    let error = async |name: &str| {
        let image = parse_reference(&format!("{address}/{name}")).unwrap();
        client.open(&image, &Keychain::default()).await.err().unwrap()
    };
    let other = format!("sha256:{}", "0".repeat(64));
    assert!(matches!(error(&format!("liar@{other}")).await, PullError::DigestMismatch { .. }));
    assert!(matches!(error("large:1").await, PullError::TooLarge { .. }));
    assert!(matches!(error("html:1").await, PullError::Malformed(_)));
    assert!(matches!(error("loop:1").await, PullError::Malformed(why) if why.contains("redirects")));
    assert!(
        matches!(error("broken:1").await, PullError::Status { status: 503, message, .. } if message == "unavailable: later")
    );
    assert!(asked.load(Ordering::Relaxed) < 20, "a redirect is followed a few times only");
}
