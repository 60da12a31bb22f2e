//! A fake server on port 0 that answers as a test says, with a data directory that refers to it; and the binary, run in
//! a clean environment.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Request, State},
    response::Response,
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpListener, process::Command, task::JoinHandle};

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: String,
    /// Path and query.
    pub(crate) path: String,
    pub(crate) content_type: String,
    pub(crate) accept: String,
    pub(crate) authorization: String,
    /// The operation, if the protocol puts it into a header.
    pub(crate) target: String,
    pub(crate) body: Vec<u8>,
}

impl Seen {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn line(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

type Answer = Box<dyn Fn(&Seen) -> Option<Response> + Send + Sync>;

struct Shared {
    answer: Answer,
    seen: Mutex<Vec<Seen>>,
}

/// The server. It stops when dropped.
pub(crate) struct Fake {
    pub(crate) url: String,
    folder: tempfile::TempDir,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The result of running the binary.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// Expects success; returns stdout.
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, 0, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self.stdout
    }

    /// Expects failure; returns stderr.
    pub(crate) fn failed(self) -> String {
        assert_eq!(self.code, 1, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self.stderr
    }
}

impl Fake {
    /// Answers discovery itself, other requests by `answer`, and those without an answer with 404.
    pub(crate) async fn start(answer: impl Fn(&Seen) -> Option<Response> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared { answer: Box::new(answer), seen: Mutex::default() });
        let router = Router::new().fallback(handle).with_state(Arc::clone(&shared));
        #[expect(clippy::disallowed_methods, reason = "the task ends with its test")]
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        std::fs::create_dir(&data).unwrap();
        std::fs::write(data.join("kubeconfig"), kubeconfig(&url)).unwrap();
        let endpoints = json!({"api": url, "http": url, "admin": url});
        std::fs::write(data.join("endpoints.json"), endpoints.to_string()).unwrap();
        Self { url, folder, shared, task }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file of the test; returns its path.
    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    }

    /// Runs a command line against this server.
    pub(crate) async fn run(&self, line: &[&str]) -> Ran {
        self.run_with(line, b"").await
    }

    pub(crate) async fn run_with(&self, line: &[&str], stdin: &[u8]) -> Ran {
        let mut command = mayfly(self.folder.path());
        command.args(line).env("MAYFLY_DATA_DIR", self.path("data"));
        finish(command, stdin).await
    }

    /// The received requests, without discovery.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        let seen = self.shared.seen.lock().unwrap();
        seen.iter().filter(|seen| seen.path != "/api" && seen.path != "/apis").cloned().collect()
    }

    /// The received requests, as `METHOD path?query`.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.seen().iter().map(Seen::line).collect()
    }
}

/// The binary without this process's environment, with the home directory `folder`.
pub(crate) fn mayfly(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mayfly"));
    command.env_clear().env("HOME", folder.join("home")).current_dir(folder).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) async fn finish(mut command: Command, stdin: &[u8]) -> Ran {
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(stdin).await.unwrap();
    drop(input);
    let output = child.wait_with_output().await.unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(crate) fn kubeconfig(url: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: \"{url}\"}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\nusers: [{{name: u, user: {{token: secret}}}}]\n"
    )
}

async fn handle(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let header = |name: &str| parts.headers.get(name).map_or("", |v| v.to_str().unwrap()).to_owned();
    let seen = Seen {
        method: parts.method.to_string(),
        path: parts.uri.path_and_query().unwrap().to_string(),
        content_type: header("content-type"),
        accept: header("accept"),
        authorization: header("authorization"),
        target: header("x-amz-target"),
        body: to_bytes(body, 64 << 20).await.unwrap().to_vec(),
    };
    shared.seen.lock().unwrap().push(seen.clone());
    let discovered = match seen.path.as_str() {
        "/api" => Some(ok(&core())),
        "/apis" => Some(ok(&groups())),
        _ => None,
    };
    discovered.or_else(|| (shared.answer)(&seen)).unwrap_or_else(|| {
        let message = format!("{:?} not found", seen.path);
        status(404, "NotFound", &message)
    })
}

fn resource(plural: &str, kind: &str, group: &str, short: &str, scope: &str) -> Value {
    json!({"resource": plural, "responseKind": {"group": group, "version": "v1", "kind": kind}, "scope": scope,
           "singularResource": kind.to_lowercase(), "shortNames": [short],
           "verbs": ["get", "list", "watch", "create", "patch", "delete"]})
}

fn core() -> Value {
    json!({"kind": "APIGroupDiscoveryList", "items": [{"metadata": {"name": ""}, "versions": [{"version": "v1",
        "resources": [resource("nodes", "Node", "", "no", "Cluster"), resource("pods", "Pod", "", "po", "Namespaced"),
                      resource("configmaps", "ConfigMap", "", "cm", "Namespaced")]}]}]})
}

fn groups() -> Value {
    json!({"kind": "APIGroupDiscoveryList", "items": [{"metadata": {"name": "mayfly.dev"}, "versions": [
        {"version": "v1", "resources": [resource("functions", "Function", "mayfly.dev", "fn", "Namespaced")]}]}]})
}

/// A response with a JSON body.
pub(crate) fn answer(code: u16, body: &Value) -> Response {
    let response = Response::builder().status(code).header("content-type", "application/json");
    response.body(Body::from(body.to_string())).unwrap()
}

pub(crate) fn ok(body: &Value) -> Response {
    answer(200, body)
}

/// A Status, the API's form of errors.
pub(crate) fn status(code: u16, reason: &str, message: &str) -> Response {
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                      "message": message, "reason": reason, "code": code});
    answer(code, &body)
}
