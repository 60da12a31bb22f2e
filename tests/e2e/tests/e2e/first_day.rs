//! The first steps of a user with the commands of the binary.

use std::{path::Path, process::Stdio};

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Up, guest_or_skip, wait};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_function_is_deployed_called_shown_and_deleted() -> Result<()> {
    let hello = guest_or_skip!("hello");
    let up = Up::start().await?;
    let said = up.cli().ok(&["deploy", &hello.to_string_lossy()]).await?;
    ensure!(said.contains("hello") && said.contains("/fn/default/hello/"), "{said}");

    let answer = up.http().get("/fn/default/hello/").await?;
    assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "Hello from Mayfly!\n"));
    ensure!(!answer.header("x-request-id").is_empty(), "{answer:?}");
    let timing = answer.header("server-timing");
    for part in ["queue", "load", "instantiate", "run"] {
        ensure!(timing.contains(part), "server-timing has no {part}: {timing:?}");
    }

    let table = up.cli().ok(&["get", "functions"]).await?;
    ensure!(table.contains("NAME") && table.contains("hello"), "{table}");
    let described = up.cli().ok(&["describe", "function", "hello"]).await?;
    ensure!(described.contains("hello-00001") && described.contains("Ready"), "{described}");

    up.cli().ok(&["delete", "function", "hello"]).await?;
    wait::until("hello is gone from the gateway and its revisions from the API", || async {
        let gone = up.http().get("/fn/default/hello/").await?.status == 404;
        let left = up.cli().ok(&["get", "revisions,replicasets,pods", "--output", "json"]).await?;
        let left: Value = serde_json::from_str(&left)?;
        Ok((gone && left["items"].as_array().is_some_and(Vec::is_empty)).then_some(()))
    })
    .await
}

/// `mayfly deploy` creates a function, and a manifest changes its default values.
#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_changes_a_deployed_function() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    let component = up.cli().get("function", "hello").await?["spec"]["source"]["component"].clone();
    let component = component.as_str().context("no component")?;
    let limits = json!({"limits": {"concurrency": 7}});
    up.cli().apply(&mayfly_e2e::function("hello", component, limits)).await?;
    let function = up.cli().get("function", "hello").await?;
    ensure!(function["spec"]["limits"]["concurrency"] == 7, "{function}");
    // Fields of another manager still conflict.
    let limits = json!({"limits": {"concurrency": 8}});
    up.api()?.apply_function(&mayfly_e2e::function("hello", component, limits)).await?;
    let limits = json!({"limits": {"concurrency": 9}});
    let manifest = mayfly_e2e::function("hello", component, limits).to_string();
    let refused = up.cli().with_stdin(&["apply", "-f", "-"], manifest.as_bytes()).await?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("--force-conflicts"), "{refused:?}");
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn its_own_host_leads_to_a_function_too() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    let http = up.http();
    let request = http.request(http::Method::GET, "/").header("host", "hello.default.fn.localhost");
    let answer = http.call(request, mayfly_e2e::full("")).await?;
    assert_eq!(answer.text(), "Hello from Mayfly!\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_goes_in_and_its_result_or_typed_error_comes_out() -> Result<()> {
    guest_or_skip!("greet");
    let up = Up::start().await?;
    up.deploy("greet", "greet", &[]).await?;
    let said = up.cli().ok(&["invoke", "greet", "-d", r#"{"name":"Ada"}"#]).await?;
    assert_eq!(serde_json::from_str::<Value>(&said)?["message"], "Hello, Ada!");
    let refused = up.cli().run(&["invoke", "greet", "-d", r#"{"name":""}"#]).await?;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    ensure!(
        refused.stderr.contains("NoName") && refused.stderr.contains("a person needs a name"),
        "{refused:?}"
    );
    let answer = up.http().post("/fn/default/greet/", r#"{"nam": 1}"#).await?;
    ensure!(answer.status.is_client_error(), "{answer:?}");
    ensure!(
        answer.json()?["errorType"].is_string() && answer.json()?["errorMessage"].is_string(),
        "{answer:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_shown_and_followed() -> Result<()> {
    guest_or_skip!("logger");
    let up = Up::start().await?;
    up.deploy("logger", "logger", &[]).await?;
    up.http().get("/fn/default/logger/?lines=2").await?;
    wait::until("the log has the first call's lines", || async {
        let log = up.cli().ok(&["logs", "logger"]).await?;
        Ok((log.contains("plain line 2 on stdout") && log.contains("plain line 2 on stderr")).then_some(()))
    })
    .await?;
    let mut follow = up.cli().command(&["logs", "logger", "--follow", "--tail", "0"])?;
    let mut follow = follow.stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(follow.stdout.take().context("no stdout")?).lines();
    // The follower may start after the first of these calls: repeat the call until it shows a line.
    let seen = tokio::spawn(async move {
        while let Some(line) = lines.next_line().await? {
            if line.contains("plain line 7 on stdout") {
                return Ok(());
            }
        }
        anyhow::bail!("the log ended")
    });
    let http = up.http();
    wait::until("a followed log shows new lines", || async {
        http.get("/fn/default/logger/?lines=7").await?;
        Ok(seen.is_finished().then_some(()))
    })
    .await?;
    seen.await??;
    follow.kill().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn new_functions_are_built_deployed_and_called_anywhere() -> Result<()> {
    // The toolchain that built the examples builds this.
    guest_or_skip!("hello");
    let up = Up::start().await?;
    let folder = tempfile::tempdir()?;
    let project = folder.path().join("first");
    let mut new = up.cli().command(&["new", "rust", "first"])?;
    let made = new.current_dir(&folder).output().await?;
    ensure!(made.status.success(), "{made:?}");
    let mut build = up.cli().command(&["build"])?;
    let built = build.current_dir(&project).output().await?;
    let printed = String::from_utf8_lossy(&built.stdout).into_owned();
    ensure!(built.status.success(), "{printed}{}", String::from_utf8_lossy(&built.stderr));
    let component = printed.split_whitespace().find(|word| word.ends_with(".wasm"));
    let component = component.with_context(|| format!("mayfly build names no component: {printed:?}"))?;
    ensure!(project.join(component).is_file(), "{component} is not there");
    let mut deploy = up.cli().command(&["deploy"])?;
    let deployed = deploy.current_dir(&project).output().await?;
    ensure!(deployed.status.success(), "{deployed:?}");
    let answer = up.http().get("/fn/default/first/").await?;
    assert_eq!(answer.status, 200, "{answer:?}");
    a_new_function_of_events_takes_one(&up, folder.path(), &project.join("target")).await?;
    every_save_is_deployed(&up, &project, &answer.text()).await
}

/// `built` has the compiled dependencies of both templates, so that they are compiled only once.
async fn a_new_function_of_events_takes_one(up: &Up, folder: &Path, built: &Path) -> Result<()> {
    let mut new = up.cli().command(&["new", "rust-event", "second"])?;
    let made = new.current_dir(folder).output().await?;
    ensure!(made.status.success(), "{made:?}");
    let mut deploy = up.cli().command(&["deploy"])?;
    let deploy = deploy.current_dir(folder.join("second")).env("CARGO_TARGET_DIR", built);
    let deployed = deploy.output().await?;
    ensure!(deployed.status.success(), "{deployed:?}");
    let said = up.cli().ok(&["invoke", "second", "-d", r#"{"name":"Ada"}"#]).await?;
    assert_eq!(serde_json::from_str::<Value>(&said)?, json!({"message": "Hello, Ada!"}));
    let refused = up.cli().run(&["invoke", "second", "-d", r#"{"name":""}"#]).await?;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    ensure!(
        refused.stderr.contains("NoName") && refused.stderr.contains("an event needs a name"),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_job_is_built_pushed_and_run() -> Result<()> {
    // The toolchain that built the examples builds this.
    guest_or_skip!("hello");
    let up = Up::start().await?;
    let folder = tempfile::tempdir()?;
    let project = folder.path().join("letters");
    let run = async |line: &[&str], at: &Path| -> Result<String> {
        let ran = up.cli().command(line)?.current_dir(at).output().await?;
        ensure!(ran.status.success(), "{line:?}: {ran:?}");
        Ok(String::from_utf8(ran.stdout)?)
    };
    run(&["new", "rust-job", "letters"], folder.path()).await?;
    let component = run(&["build"], &project).await?;
    let digest = run(&["artifact", "push", component.trim()], &project).await?;
    let manifest = project.join("job.yaml");
    let text = tokio::fs::read_to_string(&manifest).await?;
    let none = format!("sha256:{}", "0".repeat(64));
    ensure!(text.contains(&none), "{text}");
    tokio::fs::write(&manifest, text.replace(&none, digest.trim())).await?;
    run(&["apply", "-f", "job.yaml"], &project).await?;
    wait::until("the job is complete", || async {
        let job: Value =
            serde_json::from_str(&run(&["get", "job", "letters", "-o", "json"], &project).await?)?;
        ensure!(job["status"]["failed"].is_null(), "{job}");
        Ok((job["status"]["succeeded"] == 1).then_some(()))
    })
    .await?;
    let pods: Value = serde_json::from_str(&run(&["get", "pods", "-o", "json"], &project).await?)?;
    let pod = pods["items"][0]["metadata"]["name"].as_str().context("no pod")?;
    assert_eq!(run(&["logs", &format!("pod/{pod}")], &project).await?, "Hello, Ada!\n");
    // The node's object is neither a component nor user data.
    let listed = run(&["artifact", "list"], &project).await?;
    let types: Vec<_> = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    ensure!(types.contains(&"component") && types.contains(&"data") && types.len() == 2, "{listed}");
    let all = run(&["artifact", "list", "--all"], &project).await?;
    ensure!(all.contains("job report"), "{all}");
    Ok(())
}

/// `mayfly dev`: each save is deployed; a program that does not compile changes nothing.
async fn every_save_is_deployed(up: &Up, project: &Path, before: &str) -> Result<()> {
    let mut dev = up.cli().command(&["dev"])?;
    let mut dev = dev.current_dir(project).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut told = BufReader::new(dev.stderr.take().context("no stderr")?).lines();
    let watching = async {
        while let Some(line) = told.next_line().await? {
            if line.contains("watching") {
                return Ok(());
            }
        }
        anyhow::bail!("mayfly dev ended")
    };
    tokio::time::timeout(wait::PATIENCE, watching).await??;
    let source = project.join("src/lib.rs");
    let handler = |body: &str| {
        format!(
            "use mayfly::{{Request, Response}};\n\n#[mayfly::http]\nasync fn first(_request: Request) -> Response {{\n    {body}\n}}\n"
        )
    };
    std::fs::write(&source, handler("this is no Rust"))?;
    let failed = async {
        while let Some(line) = told.next_line().await? {
            if line.contains("error") {
                return Ok(());
            }
        }
        anyhow::bail!("mayfly dev ended")
    };
    tokio::time::timeout(wait::PATIENCE * 2, failed).await??;
    assert_eq!(up.http().get("/fn/default/first/").await?.text(), before);
    // Keep reading, so that it does not block on a full pipe.
    let reading = tokio::spawn(async move { while let Ok(Some(_)) = told.next_line().await {} });
    std::fs::write(&source, handler("Response::text(\"saved\")"))?;
    wait::until("what was saved answers", || async {
        Ok((up.http().get("/fn/default/first/").await?.text() == "saved").then_some(()))
    })
    .await?;
    dev.kill().await?;
    reading.await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_metrics_tell_how_it_is() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(up.admin().get(path).await?.status, 200, "{path}");
    }
    up.deploy("hello", "hello", &[]).await?;
    up.http().get("/fn/default/hello/").await?;
    let metrics = up.admin().get("/metrics").await?.text();
    let names = |text: &str| metrics.lines().any(|line| !line.starts_with('#') && line.contains(text));
    ensure!(names("mayfly_") && names("hello"), "no metric of the function in\n{metrics}");
    for name in [
        "mayfly_build_info{version=",
        "process_resident_memory_bytes ",
        "process_cpu_seconds_total ",
        r#"mayfly_workflows_executions_ended_total{type="STANDARD",status="FAILED"} 0"#,
    ] {
        ensure!(names(name), "no {name} in\n{metrics}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_to_the_wrong_port_is_told() -> Result<()> {
    let up = Up::start().await?;
    let mut socket = TcpStream::connect(up.address("api")).await?;
    socket.write_all(b"GET /version HTTP/1.1\r\nhost: h\r\n\r\n").await?;
    let mut said = String::new();
    socket.read_to_string(&mut said).await?;
    ensure!(said.starts_with("HTTP/1.0 400 ") && said.contains("to an HTTPS server"), "{said:?}");
    let answer = up.workflows().get("/").await?;
    ensure!(answer.status == 405 && answer.text().contains("AWS Step Functions API"), "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_server_a_command_says_where_it_looked() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut command = tokio::process::Command::new(mayfly_e2e::binary()?);
    command.args(["get", "functions", "--data-dir"]).arg(folder.path());
    let output = command.env_remove("KUBECONFIG").output().await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains(&*folder.path().to_string_lossy()), "{said}");
    Ok(())
}

/// Controllers write to a function right after each deployment, which must not cause a conflict.
#[tokio::test(flavor = "multi_thread")]
async fn deployments_in_a_row_do_not_get_in_each_others_way() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    for n in 0..12 {
        up.deploy("hello", "hello", &["--env", &format!("N={n}"), "--no-wait"]).await?;
    }
    up.deploy("hello", "hello", &["--env", "N=last"]).await?;
    ensure!(up.http().get("/fn/default/hello/").await?.status == 200);
    Ok(())
}
