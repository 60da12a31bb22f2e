//! Container functions: deployed by the command, next to a wasm revision. Needs root.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use mayfly_e2e::{CompleteResponse, Up, full, guest_or_skip, skipped, test_name, wait::until};
use serde_json::json;

use crate::containers::{ContainerNode, containers_or_skip};

/// The program of the template `container` as a shell script, for an image without the template's files.
fn script(handler: &str) -> String {
    format!(
        "mkdir -p /www/cgi-bin; cat > /www/cgi-bin/index.cgi <<'EOF'\n{handler}\nEOF\n\
         busybox chmod +x /www/cgi-bin/index.cgi; exec busybox httpd -f -p \"$PORT\" -h /www"
    )
}

async fn greet(up: &Up, headers: &[(&str, &str)], body: &str) -> Result<CompleteResponse> {
    let http = up.http();
    let mut request = http.request(Method::POST, "/fn/default/greet/");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    http.call(request, full(body.to_owned())).await
}

const ADA: &str = r#"{"name":"Ada"}"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_container_revision_answers_beside_one_of_wasm() -> Result<()> {
    guest_or_skip!("greet");
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let up = &node.kubectl.up;
    // The template's project, tested as in its README.
    let project = node.folder.path().join("greet");
    let path = project.to_string_lossy().into_owned();
    up.cli().ok(&["new", "container", "greet", "--dir", &path]).await?;
    let test = std::process::Command::new("sh").arg(project.join("test.sh")).output()?;
    ensure!(test.status.success(), "{test:?}");
    let handler = std::fs::read_to_string(project.join("www/cgi-bin/index.cgi"))?;

    up.deploy("greet", "greet", &[]).await?;
    let script = script(&handler);
    // The timeout is also the grace period, whose end busybox httpd waits for: as process 1 it ignores SIGTERM.
    let image =
        ["deploy", "--image", "busybox:local", "--name", "greet", "--timeout", "15s", "--port", "8081"];
    let program =
        ["--env", "GREETING=from a container", "--command", "/bin/sh", "--arg", "-c", "--arg", &script];
    up.cli().ok(&[&image[..], &program].concat()).await?;
    let source = up.cli().get("revision", "greet-00002").await?["spec"]["source"].clone();
    ensure!(source["command"] == json!(["/bin/sh"]) && source["args"][0] == "-c", "{source}");

    // From zero, with the headers and the log of any function.
    let answer = greet(up, &[], ADA).await?;
    ensure!(answer.status == 200 && answer.json()?["message"] == "from a container, Ada", "{answer:?}");
    ensure!(answer.header("mayfly-cold") == "true", "{answer:?}");
    for part in ["queue;dur=", "load;dur=", "run;dur="] {
        ensure!(answer.header("server-timing").contains(part), "{answer:?}");
    }
    let answer = greet(up, &[], "{}").await?;
    ensure!(answer.status == 400 && answer.json()?["errorType"] == "NoName", "{answer:?}");
    ensure!(
        answer.header("mayfly-cold").is_empty() && !answer.header("x-request-id").is_empty(),
        "{answer:?}"
    );
    until("the log has the container's lines", || async {
        let log = up.cli().ok(&["logs", "greet", "--revision", "greet-00002"]).await?;
        Ok(log.contains("an event of 14 bytes").then_some(()))
    })
    .await?;

    // Half of the traffic each; tags and sticky clients behave equally for both.
    let split = json!({"spec": {
        "sticky": {"header": "x-user"},
        "traffic": [{"revision": "greet-00001", "percent": 50, "tag": "wasm"},
                    {"revision": "greet-00002", "percent": 50, "tag": "container"}]}});
    let split = split.to_string();
    node.kubectl.ok(&["patch", "function", "greet", "--type=merge", "-p", &split]).await?;
    until("the split is there", || async {
        Ok((greet(up, &[("mayfly-tag", "wasm")], ADA).await?.status == 200).then_some(()))
    })
    .await?;
    for (tag, expected) in [("wasm", "Hello, Ada!"), ("container", "from a container, Ada")] {
        let answer = greet(up, &[("mayfly-tag", tag)], ADA).await?;
        ensure!(answer.json()?["message"] == expected, "{tag}: {answer:?}");
        ensure!(answer.header("server-timing").contains("run;dur="), "{tag}: {answer:?}");
    }
    let mut seen = BTreeSet::new();
    for user in 0..16 {
        let user = format!("user-{user}");
        let mut own = BTreeSet::new();
        for _ in 0..3 {
            let answer = greet(up, &[("x-user", &user)], ADA).await?;
            own.insert(answer.json()?["message"].as_str().context("no message")?.to_owned());
        }
        ensure!(own.len() == 1, "{user} met both: {own:?}");
        seen.extend(own);
    }
    ensure!(seen.len() == 2, "16 users of an even split all met one revision: {seen:?}");

    node.kubectl.ok(&["delete", "function", "greet", "--cascade=foreground"]).await?;
    node.leaves_nothing().await
}
