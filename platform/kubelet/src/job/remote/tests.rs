//! Transfers with servers on loopback: HTTP, an S3 service that checks signatures, and a Git repository.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use axum::{Router, body::Bytes, extract::State, http::Request, response::IntoResponse, routing::any};
use hyper::{HeaderMap, StatusCode};
use mayfly_api::{
    job_io::Inputs,
    k8s::{ByteString, api::core::v1::ConfigMap, jiff},
};
use mayfly_artifacts::Artifacts;
use mayfly_runtime::PodUid;
use mayfly_sigv4::{Credentials, body_sha256, sign};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;
use crate::job::{ContainerResult, JobFiles, collect};

const PASSWORD: &str = "hunter2-secret";

/// The Secret `login`.
struct OneSecret;

impl EnvSources for OneSecret {
    fn config_map(&self, _: &str, _: &str) -> Option<Arc<ConfigMap>> {
        None
    }
    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        let entries = [
            ("Authorization", format!("Bearer {PASSWORD}\n")),
            ("accessKeyId", "AKID".into()),
            ("secretAccessKey", PASSWORD.into()),
            ("username", "ada".into()),
            ("password", PASSWORD.into()),
        ];
        let data = |keys: &[&str]| -> BTreeMap<String, ByteString> {
            let wanted = entries.iter().filter(|(key, _)| keys.contains(key));
            wanted.map(|(key, value)| ((*key).to_owned(), ByteString(value.clone().into_bytes()))).collect()
        };
        let data = match (namespace, name) {
            ("ns", "header") => data(&["Authorization"]),
            ("ns", "s3") => data(&["accessKeyId", "secretAccessKey"]),
            ("ns", "git") => data(&["username", "password"]),
            _ => return None,
        };
        Some(Arc::new(Secret { data: Some(data), ..Secret::default() }))
    }
}

/// The requests that a server received, and the contents that were uploaded to it.
#[derive(Clone, Default)]
struct Seen {
    requests: Arc<Mutex<Vec<(String, HeaderMap)>>>,
    stored: Arc<Mutex<BTreeMap<String, Bytes>>>,
    /// The folder that is served below `/git`.
    folder: PathBuf,
}

impl Seen {
    fn times(&self, path: &str) -> usize {
        self.requests.lock().iter().filter(|(seen, _)| seen == path).count()
    }
}

async fn serve(seen: Seen) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(any(answer)).with_state(seen);
    // Ends with the test's runtime.
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

async fn answer(State(seen): State<Seen>, request: Request<axum::body::Body>) -> axum::response::Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let path = head.uri.path().to_owned();
    seen.requests.lock().push((path.clone(), head.headers.clone()));
    let authorized =
        head.headers.get("authorization").is_some_and(|value| value == &format!("Bearer {PASSWORD}"));
    let redirect = |to: &str| (StatusCode::FOUND, [("location", to.to_owned())]).into_response();
    match path.as_str() {
        "/data" => "a,b\n1,2\n".into_response(),
        "/private" if authorized => "private".into_response(),
        "/private" => StatusCode::UNAUTHORIZED.into_response(),
        "/moved" => redirect("/private"),
        "/away" => redirect(head.uri.query().unwrap_or_default()),
        "/circle" => redirect("/circle"),
        "/large" => vec![b'x'; 2000].into_response(),
        "/busy" if seen.times("/busy") == 1 => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        "/busy" => "at last".into_response(),
        "/put" => {
            seen.stored.lock().insert(path, body);
            StatusCode::CREATED.into_response()
        }
        _ if path.starts_with("/bucket/") => bucket(&seen, &head, &path, body),
        _ if path.starts_with("/git/") => {
            let login = head.headers.get("authorization").and_then(|value| value.to_str().ok());
            // ada:hunter2-secret
            if login != Some("Basic YWRhOmh1bnRlcjItc2VjcmV0") {
                return (StatusCode::UNAUTHORIZED, [("www-authenticate", "Basic realm=\"x\"")])
                    .into_response();
            }
            match std::fs::read(seen.folder.join(path.trim_start_matches("/git/"))) {
                Ok(content) => content.into_response(),
                Err(_) => StatusCode::NOT_FOUND.into_response(),
            }
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

/// An S3 service with one bucket: computes the signature of what arrived.
fn bucket(
    seen: &Seen,
    head: &axum::http::request::Parts,
    path: &str,
    body: Bytes,
) -> axum::response::Response {
    let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let refused = |code: &str| {
        let document = format!("<Error><Code>{code}</Code><StringToSign>{PASSWORD}</StringToSign></Error>");
        (StatusCode::FORBIDDEN, document).into_response()
    };
    if text("x-amz-content-sha256") != body_sha256(&body) {
        return refused("XAmzContentSHA256Mismatch");
    }
    let uri = format!("http://{}{}", text("host"), head.uri.path());
    let built = axum::http::Request::builder().method(head.method.clone()).uri(uri).body(()).unwrap();
    let (mut expected, ()) = built.into_parts();
    let date = text("x-amz-date");
    let time = jiff::civil::DateTime::strptime("%Y%m%dT%H%M%SZ", date).unwrap();
    let now_ms = time.to_zoned(jiff::tz::TimeZone::UTC).unwrap().timestamp().as_millisecond();
    let credentials =
        Credentials { access_key_id: "AKID".into(), secret_access_key: PASSWORD.into(), session_token: None };
    sign(&mut expected, &body_sha256(&body), &credentials, "eu-north-1", "s3", now_ms);
    if text("authorization") != expected.headers["authorization"] {
        return refused("SignatureDoesNotMatch");
    }
    let mut stored = seen.stored.lock();
    match head.method.as_str() {
        "PUT" => {
            stored.insert(path.to_owned(), body);
            StatusCode::OK.into_response()
        }
        _ => match stored.get(path) {
            Some(content) => content.clone().into_response(),
            None => (StatusCode::NOT_FOUND, "<Error><Code>NoSuchKey</Code></Error>").into_response(),
        },
    }
}

fn pod(egress: &str, inputs: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "annotations": {
        "mayfly.dev/egress": egress, "mayfly.dev/inputs": inputs.to_string()}}}))
    .unwrap()
}

/// A node's folders.
struct Node {
    files: JobFiles,
    _folder: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        Self::with_limit(10 << 20)
    }

    fn with_limit(artifact_bytes_max: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        let files = JobFiles {
            artifact_bytes_max,
            git_protocols: vec!["file".into()],
            ..JobFiles::new(artifacts, folder.path().join("jobs"))
        };
        Self { files, _folder: folder }
    }

    fn uid() -> PodUid {
        PodUid("uid".into())
    }

    /// The staged files by name; files within a folder by `folder/name`.
    async fn staged(
        &self,
        egress: &str,
        artifacts: Value,
    ) -> Result<BTreeMap<String, String>, TransferError> {
        let inputs = json!({"parameters": {"n": 1}, "artifacts": artifacts});
        Inputs::parse(inputs.to_string().as_bytes()).expect("good inputs");
        let _ = std::fs::remove_dir_all(&self.files.folder);
        self.files.stage(&pod(egress, &inputs), &Self::uid(), false, &OneSecret).await?;
        let mut found = BTreeMap::new();
        gather(&self.files.of(&Self::uid()).inputs(), "", &mut found);
        found.remove("n");
        Ok(found)
    }
}

fn gather(folder: &Path, prefix: &str, found: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match entry.path().is_dir() {
            true => gather(&entry.path(), &format!("{name}/"), found),
            false => drop(found.insert(name, std::fs::read_to_string(entry.path()).unwrap())),
        }
    }
}

fn permanent(result: Result<BTreeMap<String, String>, TransferError>) -> String {
    match result.expect_err("it fails") {
        TransferError::Permanent(why) => {
            assert!(!why.contains(PASSWORD), "{why}");
            why
        }
        TransferError::Transient(why) => panic!("{why}"),
    }
}

#[tokio::test]
async fn files_come_over_http() {
    let seen = Seen::default();
    let address = serve(seen.clone()).await;
    let node = Node::with_limit(1000);
    let egress = format!("http://{address}");
    let at = |path: &str| json!({"http": {"url": format!("http://{address}{path}")}});
    let private = json!({"http": {"url": format!("http://{address}/moved"), "headersSecret": "header"}});
    let mut checked = at("/data");
    checked["sha256"] = body_sha256(b"a,b\n1,2\n").to_uppercase().into();
    let artifacts =
        json!({"data.csv": checked, "private": private, "busy": at("/busy"), "note": {"raw": "as it is\n"}});
    let files = node.staged(&egress, artifacts).await.unwrap();
    let expected =
        [("busy", "at last"), ("data.csv", "a,b\n1,2\n"), ("note", "as it is\n"), ("private", "private")];
    assert_eq!(files, expected.map(|(name, text)| (name.to_owned(), text.to_owned())).into());
    assert!(!node.files.of(&Node::uid()).fetched().exists(), "nothing is there twice");

    let mut other = at("/data");
    other["sha256"] = body_sha256(b"x").into();
    for (artifact, why) in [
        (
            at("/nowhere"),
            format!("\"x\" cannot be fetched: http://{address}/nowhere: the server answers 404"),
        ),
        (at("/private?token=hunter2-secret"), "/private: the server answers 401".into()),
        (at("/large"), "it has more than 1000 bytes".into()),
        (at("/circle"), "redirects, too often".into()),
        (at("/away?ftp://example.com"), "to another protocol".into()),
        (other, "its SHA-256 is".into()),
    ] {
        let told = permanent(node.staged(&egress, json!({"x": artifact})).await);
        assert!(told.contains(&why), "{why}: {told}");
    }
    assert_eq!(seen.times("/nowhere"), 1, "it would fail again");
    assert_eq!(seen.times("/circle"), 6);
}

#[tokio::test]
async fn a_node_connects_to_what_the_egress_rules_list() {
    let (seen, elsewhere) = (Seen::default(), Seen::default());
    let (address, other) = (serve(seen.clone()).await, serve(elsewhere.clone()).await);
    let node = Node::new();
    let at = |path: &str| json!({"x": {"http": {"url": format!("http://{address}{path}"), "headersSecret": "header"}}});
    for egress in ["", "https://127.0.0.1", "http://*.example.com"] {
        let told = permanent(node.staged(egress, at("/data")).await);
        assert!(
            told.contains("127.0.0.1 has no public address") && told.contains(&address.to_string()),
            "{told}"
        );
    }
    let localhost = json!({"x": {"http": {"url": format!("http://localhost:{}/data", address.port())}}});
    assert!(permanent(node.staged("", localhost.clone()).await).contains("no public address"));
    assert_eq!(seen.requests.lock().len(), 0);
    assert!(node.staged(&format!("http://localhost:{}", address.port()), localhost).await.is_ok());

    // Redirects obey the egress rules, and headers are not sent to another server.
    let away = at(&format!("/away?http://{other}/data"));
    let told = permanent(node.staged(&format!("http://{address}"), away.clone()).await);
    assert!(told.contains("no public address"), "{told}");
    node.staged(&format!("http://{address},http://{other}"), away).await.unwrap();
    let requests = elsewhere.requests.lock();
    assert!(requests.len() == 1 && !requests[0].1.contains_key("authorization"), "{requests:?}");
}

#[tokio::test]
async fn objects_come_from_and_go_to_s3() {
    let seen = Seen::default();
    let address = serve(seen.clone()).await;
    let node = Node::new();
    let egress = format!("http://{address}");
    let object = |key: &str| {
        json!({"endpoint": format!("http://{address}/"), "region": "eu-north-1", "bucket": "bucket", "key": key,
            "credentialsSecret": "s3"})
    };
    let path = "/bucket/a%20b/%C3%A4.csv";
    seen.stored.lock().insert(path.into(), Bytes::from_static(b"1;2"));
    let files = node.staged(&egress, json!({"x": {"s3": object("a b/ä.csv")}})).await.unwrap();
    assert_eq!(files["x"], "1;2");
    let mut unsigned = object("k");
    unsigned.as_object_mut().unwrap().remove("credentialsSecret");
    for (artifact, why) in
        [(object("none"), "the server answers 404 Not Found (NoSuchKey)"), (unsigned, "403 Forbidden")]
    {
        let told = permanent(node.staged(&egress, json!({"x": {"s3": artifact}})).await);
        assert!(told.contains(why), "{told}");
    }
    let mut wrong_region = object("k");
    wrong_region["region"] = "us-east-1".into();
    let told = permanent(node.staged(&egress, json!({"x": {"s3": wrong_region}})).await);
    assert!(told.contains("(SignatureDoesNotMatch)"), "{told}");

    // Outputs are sent after the program has succeeded.
    let targets = json!({"report": {"s3": object("out/report")}, "copy":
        {"http": {"url": format!("http://{address}/put"), "headersSecret": "header"}}});
    let pod = pod(&egress, &json!({"targets": targets}));
    let end = |exit_code: i32| {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let (reason, message) = ("Completed".to_owned(), String::new());
        ContainerResult { exit_code, reason, message, started: now, finished: now, gpu_time: None }
    };
    std::fs::remove_dir_all(&node.files.folder).unwrap();
    node.files.stage(&pod, &Node::uid(), false, &OneSecret).await.unwrap();
    let folder = node.files.of(&Node::uid()).artifacts();
    std::fs::write(folder.join("report"), "42").unwrap();
    std::fs::create_dir_all(folder.join("copy")).unwrap();
    let failed = collect(&node.files, &pod, &Node::uid(), end(1), &OneSecret).await.unwrap();
    assert!(failed.unsent.is_none() && !seen.stored.lock().contains_key("/put"));
    let done = collect(&node.files, &pod, &Node::uid(), end(0), &OneSecret).await.unwrap();
    assert_eq!(done.unsent, None);
    let stored = seen.stored.lock().clone();
    assert_eq!(stored["/bucket/out/report"], "42");
    // An empty folder's tar.
    assert_eq!(stored["/put"].len(), 1024);
}

#[tokio::test]
async fn an_output_that_is_not_sent_is_told() {
    let address = serve(Seen::default()).await;
    let node = Node::new();
    let to =
        |path: &str| json!({"targets": {"report": {"http": {"url": format!("http://{address}{path}")}}}});
    let end = || {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let (reason, message) = ("Completed".to_owned(), String::new());
        ContainerResult { exit_code: 0, reason, message, started: now, finished: now, gpu_time: None }
    };
    let pod = pod(&format!("http://{address}"), &to("/nowhere?x=hunter2-secret"));
    node.files.stage(&pod, &Node::uid(), false, &OneSecret).await.unwrap();
    let done = collect(&node.files, &pod, &Node::uid(), end(), &OneSecret).await.unwrap();
    assert!(done.unsent.unwrap().contains("the job did not write it"));
    let folder = node.files.of(&Node::uid()).artifacts();
    std::fs::write(folder.join("report"), "42").unwrap();
    let done = collect(&node.files, &pod, &Node::uid(), end(), &OneSecret).await.unwrap();
    let why = done.unsent.unwrap();
    assert!(why.ends_with("/nowhere: the server answers 404 Not Found") && !why.contains(PASSWORD), "{why}");
    let document = node.files.artifacts.path(&done.document).unwrap();
    let document: Value = serde_json::from_slice(&std::fs::read(document).unwrap()).unwrap();
    assert_eq!((&document["reason"], &document["message"]), (&json!("ArtifactNotSent"), &json!(why)));
}

/// A bare repository with two commits, a tag and a link, in `folder/project.git`; none without git.
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
fn repository(folder: &Path) -> bool {
    if Command::new("git").arg("--version").output().is_err() {
        println!("SKIPPED repositories_come_by_git: there is no git");
        return false;
    }
    let work = folder.join("work");
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(&work).args(arguments).env("GIT_CONFIG_GLOBAL", "/dev/null");
        for who in ["AUTHOR", "COMMITTER"] {
            command.env(format!("GIT_{who}_NAME"), "Ada").env(format!("GIT_{who}_EMAIL"), "ada@example.com");
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    std::fs::create_dir_all(work.join("src")).unwrap();
    git(&["init", "--quiet", "--initial-branch=main"]);
    std::fs::write(work.join("src/a"), "one").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", work.join("link")).unwrap();
    git(&["add", "."]);
    git(&["commit", "--quiet", "--message=one"]);
    git(&["tag", "v1"]);
    std::fs::write(work.join("src/a"), "two").unwrap();
    git(&["commit", "--quiet", "--all", "--message=two"]);
    git(&["clone", "--quiet", "--bare", ".", "../project.git"]);
    git(&["--git-dir=../project.git", "update-server-info"]);
    true
}

#[tokio::test]
async fn repositories_come_by_git() {
    let folder = tempfile::tempdir().unwrap();
    if !repository(folder.path()) {
        return;
    }
    let seen = Seen { folder: folder.path().to_owned(), ..Seen::default() };
    let address = serve(seen.clone()).await;
    let node = Node::new();
    let egress = format!("http://{address}");
    let files = |a: &str| {
        [("x/link", "/etc/passwd"), ("x/src/a", a)]
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .into()
    };
    let git = |repository: &str, more: Value| {
        let mut git = json!({ "repository": repository });
        git.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"x": {"git": git}})
    };
    let file = format!("file://{}/project.git", folder.path().display());
    assert_eq!(node.staged("", git(&file, json!({}))).await.unwrap(), files("two"));
    assert_eq!(node.staged("", git(&file, json!({"revision": "v1"}))).await.unwrap(), files("one"));
    // A bare repository served as static files, from which only the whole history can be fetched.
    let web = format!("http://{address}/git/project.git");
    let login = json!({"credentialsSecret": "git", "depth": 0, "revision": "v1"});
    assert_eq!(node.staged(&egress, git(&web, login.clone())).await.unwrap(), files("one"));

    let none = format!("{file}x");
    for (egress, artifacts, why) in [
        ("", git(&file, json!({"revision": "v9"})), "couldn't find remote ref v9"),
        ("", git(&none, json!({})), "does not appear to be a git repository"),
        (&*egress, git(&web, json!({"depth": 0})), "could not read Username"),
        ("", git(&web, login), "no public address"),
        ("", git("ssh://example.com/p.git", json!({})), "no repositories by ssh"),
        ("", git("ext://example.com/p.git", json!({})), "no repositories by ext"),
    ] {
        let told = permanent(node.staged(egress, artifacts).await);
        assert!(told.contains(why), "{why}: {told}");
    }
}
