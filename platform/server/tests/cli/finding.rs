//! Where the server is looked for, and the error when there is none.

use serde_json::json;

use crate::fake::{Fake, finish, kubeconfig, mayfly, ok};

fn version(seen: &crate::fake::Seen) -> Option<axum::response::Response> {
    (seen.path == "/version").then(|| ok(&json!({"gitVersion": "v1.33.0"})))
}

#[tokio::test]
async fn nothing_found_lists_every_place() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = mayfly(folder.path());
    command.args(["get", "functions"]);
    let ran = finish(command, b"").await;
    let home = folder.path().join("home/.local/state/mayfly");
    let expected = format!(
        "error: no Mayfly server was found\n  looked at:\n    --kubeconfig: not given\n    KUBECONFIG: not set\n    \
         data directory {} (the default): does not exist\n  start one with: mayfly up\n",
        home.display()
    );
    assert_eq!(ran.stdout, "");
    assert_eq!(ran.failed(), expected);
}

#[tokio::test]
async fn a_server_that_went_away_is_told_with_its_places() {
    let folder = tempfile::tempdir().unwrap();
    // A port that was free just now.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let file = folder.path().join("k");
    std::fs::write(&file, kubeconfig(&format!("http://127.0.0.1:{port}"))).unwrap();
    for line in [&["get", "functions"][..], &["logs", "hello"], &["artifact", "list"]] {
        let mut command = mayfly(folder.path());
        command.args(line).env("KUBECONFIG", &file);
        let error = finish(command, b"").await.failed();
        let first = format!("error: no Mayfly server answers at http://127.0.0.1:{port} (");
        assert!(error.starts_with(&first), "{error}");
        assert!(error.contains(&format!("KUBECONFIG: {}\n", file.display())), "{error}");
        assert!(error.ends_with("start one with: mayfly up\n"), "{error}");
    }
}

#[tokio::test]
async fn every_way_to_name_a_server_leads_to_it() {
    let fake = Fake::start(version).await;
    let data = fake.path("data").display().to_string();
    let kubeconfig = fake.path("data/kubeconfig").display().to_string();
    let ways: [(&[&str], &[(&str, &str)]); 6] = [
        (&["--data-dir", &data], &[]),
        (&["--kubeconfig", &kubeconfig], &[]),
        (&["--server", &fake.url], &[]),
        (&[], &[("KUBECONFIG", &kubeconfig)]),
        (&[], &[("MAYFLY_DATA_DIR", &data)]),
        // A flag has precedence over the environment.
        (&["--data-dir", &data], &[("KUBECONFIG", "/nowhere"), ("MAYFLY_DATA_DIR", "/nowhere")]),
    ];
    for (flags, environment) in ways {
        let mut command = mayfly(&fake.path(""));
        command.arg("version").args(flags).envs(environment.iter().copied());
        let ran = finish(command, b"").await;
        assert!(
            ran.stdout.contains("server: Kubernetes API v1.33.0"),
            "{flags:?} {environment:?}: {}",
            ran.stderr
        );
    }
    let tokens: Vec<_> = fake.seen().iter().map(|seen| seen.authorization.clone()).collect();
    assert_eq!(tokens.iter().filter(|token| *token == "Bearer secret").count(), 5, "{tokens:?}");
}

#[tokio::test]
async fn a_token_that_is_not_known_says_where_it_came_from() {
    let fake = Fake::start(|_| Some(crate::fake::status(401, "Unauthorized", "Unauthorized"))).await;
    let error = fake.run(&["delete", "-f", &fake.file("p.yaml", POD)]).await.failed();
    assert!(error.starts_with("error: Unauthorized\n"), "{error}");
    assert!(error.contains("does not accept this token; it came from data directory"), "{error}");
}

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n";

#[tokio::test]
async fn usage_errors_exit_with_two_and_say_what_was_meant() {
    let folder = tempfile::tempdir().unwrap();
    for (line, expected) in [
        (&["invok", "hello"][..], "'invoke'"),
        (&["logs", "hello", "--folow"], "'--follow'"),
        (&["deploy", "--memory", "much"], "is not a quantity"),
        (&["apply"], "--filename"),
        (&["get"], "KIND"),
    ] {
        let mut command = mayfly(folder.path());
        command.args(line);
        let ran = finish(command, b"").await;
        assert_eq!(ran.code, 2, "{line:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{line:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}

#[tokio::test]
async fn commands_without_a_server_need_none() {
    let folder = tempfile::tempdir().unwrap();
    for (line, expected) in [
        (&["completion", "bash"][..], "_mayfly()"),
        (&["completion", "zsh"], "#compdef mayfly"),
        (&["completion", "fish"], "complete -c mayfly"),
        (&["version", "--client", "-o", "json"], "\"client\": \"0."),
        (&["--version"], "mayfly 0."),
        (&["--help"], "Example:"),
    ] {
        let mut command = mayfly(folder.path());
        command.args(line);
        let out = finish(command, b"").await.ok();
        assert!(out.contains(expected), "{line:?}: {out}");
    }
    let mut command = mayfly(folder.path());
    command.args(["image", "list"]);
    let error = finish(command, b"").await.failed();
    assert!(error.contains("no Mayfly server was found"), "images are on a node: {error}");
}

#[tokio::test]
async fn each_class_of_failure_has_its_code_for_programs() {
    let fake = Fake::start(version).await;
    fake.file("half.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: [x\n");
    fake.file("noise.wasm", "no component");
    std::fs::create_dir(fake.path("full")).unwrap();
    fake.file("full/README", "");
    fake.file(
        "spin.toml",
        "spin_manifest_version = 2\n[application]\nname = \"a\"\nversion = \"1.0.0\"\n[[trigger.redis]]\n\
         channel = \"c\"\ncomponent = \"c\"\n[[trigger.http]]\nroute = \"/\"\ncomponent = \"c\"\n[component.c]\nsource = \"c.wasm\"\n",
    );
    for (line, code) in [
        (&["new", "rust", "Bad.Name"][..], "usage"),
        (&["new", "rust", "full"], "file_error"),
        (&["build", "nothing.py"], "file_error"),
        (&["deploy", "nothing.py"], "file_error"),
        (&["deploy", "full"], "file_error"),
        (&["deploy", "noise.wasm"], "invalid_file"),
        (&["apply", "-f", "half.yaml"], "invalid_file"),
        (&["apply", "-f", "/dev/zero"], "invalid_file"),
        (&["apply", "-f", "nothing.yaml"], "file_error"),
        (&["invoke", "hello", "-d", "{"], "usage"),
        (&["get", "nonsense"], "not_found"),
        (&["node"], "usage"),
        (&["deploy", "spin.toml"], "unsupported"),
    ] {
        let line: Vec<_> = ["-o", "json"].iter().chain(line).copied().collect();
        let stderr = fake.run(&line).await.failed();
        let last = stderr.lines().last().unwrap_or_default();
        let error: serde_json::Value = serde_json::from_str(last).unwrap_or_default();
        assert_eq!(error["error"]["code"], code, "{line:?}: {stderr}");
    }
}
