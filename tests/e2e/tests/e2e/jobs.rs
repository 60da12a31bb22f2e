//! Jobs: with kubectl, as tasks of workflows, with input and output files, and with failures.

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Start, Up, guest, guest_or_skip, test_name, wait::until};
use serde_json::{Value, json};

use crate::{
    kubectl::kubectl,
    workflows::{call, create, ended, start},
};

const JOBS: &str = "/apis/batch/v1/namespaces/default/jobs";

/// A Job whose pods run a component.
fn job(name: &str, component: &str, spec: Value, container: Value) -> Value {
    let image = format!("component.mayfly.dev/sha256@{component}");
    let mut template = json!({"runtimeClassName": "wasm", "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1, "containers": [{"name": "job", "image": image}]});
    lay_over(&mut template["containers"][0], container);
    let mut job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
        "spec": {"template": {"spec": template}}});
    lay_over(&mut job["spec"], spec);
    job
}

fn lay_over(onto: &mut Value, more: Value) {
    if let (Value::Object(onto), Value::Object(more)) = (onto, more) {
        onto.extend(more);
    }
}

/// A definition of one task that runs a job, with a catcher that returns the error's name and cause.
fn one_job(component: &str, arguments: Value) -> Value {
    let mut all = json!({"Component": component});
    lay_over(&mut all, arguments);
    json!({"StartAt": "Run", "States": {
        "Run": {"Type": "Task", "Resource": "arn:aws:states:::job:run.sync", "Parameters": all,
            "Catch": [{"ErrorEquals": ["States.ALL"], "Next": "Caught"}], "End": true},
        "Caught": {"Type": "Pass", "Parameters": {"caught.$": "$.Error", "cause.$": "States.StringToJson($.Cause)"},
            "End": true}}})
}

fn output(told: &Value) -> Result<Value> {
    ensure!(told["status"] == "SUCCEEDED", "{told}");
    Ok(serde_json::from_str(told["output"].as_str().context("no output")?)?)
}

/// The records of created jobs in an execution's history.
async fn submitted(up: &Up, execution: &str) -> Result<Vec<Value>> {
    let told = call(up, "GetExecutionHistory", json!({"executionArn": execution})).await?;
    let events = told["events"].as_array().context("no events")?;
    let details = events.iter().filter(|event| event["type"] == "TaskSubmitted");
    let output =
        |event: &Value| event["taskSubmittedEventDetails"]["output"].as_str().map(serde_json::from_str);
    Ok(details.filter_map(output).collect::<Result<_, _>>()?)
}

async fn job_names(up: &Up) -> Result<Vec<String>> {
    let list = up.api()?.get(JOBS).await?;
    let items = list.body["items"].as_array().with_context(|| format!("{list:?}"))?;
    Ok(items.iter().filter_map(|job| job["metadata"]["name"].as_str().map(str::to_owned)).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_runs_jobs_to_their_end() -> Result<()> {
    guest_or_skip!("bad-job");
    let Some(kubectl) = kubectl(test_name!()).await? else { return Ok(()) };
    let component = kubectl.up.upload("bad-job").await?;
    let well =
        job("well", &component, json!({"completions": 5, "parallelism": 2}), json!({"args": ["exit", "0"]}));
    kubectl.ok(&["apply", "-f", &kubectl.file("well.json", &well)?]).await?;
    kubectl.ok(&["wait", "--for=condition=complete", "job/well", "--timeout=50s"]).await?;
    let line = kubectl.ok(&["get", "job", "well", "--no-headers"]).await?;
    ensure!(line.split_whitespace().take(3).eq(["well", "Complete", "5/5"]), "{line}");
    let pods = kubectl.ok(&["get", "pods", "-l", "job-name=well", "--no-headers"]).await?;
    ensure!(pods.lines().filter(|line| line.contains("Completed")).count() == 5, "{pods}");
    ensure!(kubectl.ok(&["logs", "job/well"]).await?.contains("about to exit 0"));
    ensure!(kubectl.ok(&["describe", "job", "well"]).await?.contains("Job completed"));
    // A repeated apply changes nothing.
    let again = kubectl.ok(&["apply", "-f", &kubectl.file("well.json", &well)?]).await?;
    ensure!(again.contains("unchanged") || again.contains("configured"), "{again}");
    // A failing job is retried up to its limit.
    let badly = job("badly", &component, json!({"backoffLimit": 1}), json!({"args": ["exit", "3"]}));
    kubectl.ok(&["apply", "-f", &kubectl.file("badly.json", &badly)?]).await?;
    kubectl.ok(&["wait", "--for=condition=failed", "job/badly", "--timeout=50s"]).await?;
    let told: Value = serde_json::from_str(&kubectl.ok(&["get", "job", "badly", "-o", "json"]).await?)?;
    ensure!(told["status"]["failed"] == 2, "{told}");
    let conditions = told["status"]["conditions"].as_array().context("no conditions")?;
    let failed = conditions.iter().find(|condition| condition["type"] == "Failed");
    ensure!(failed.is_some_and(|failed| failed["reason"] == "BackoffLimitExceeded"), "{told}");
    // Pods are deleted with their Job, including ended ones.
    kubectl.ok(&["delete", "job", "well", "badly", "--timeout=50s"]).await?;
    until("the pods are gone", async || {
        let pods = kubectl.ok(&["get", "pods", "-o", "name"]).await?;
        Ok(pods.trim().is_empty().then_some(()))
    })
    .await?;
    // Fields that are not implemented are rejected.
    let refused = job("refused", &component, json!({"backoffLimitPerIndex": 1}), json!({}));
    let refused = kubectl.run(&["apply", "-f", &kubectl.file("refused.json", &refused)?]).await?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("spec.backoffLimitPerIndex"), "{refused:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_creates_a_job_by_its_image() -> Result<()> {
    let Some(kubectl) = kubectl(test_name!()).await? else { return Ok(()) };
    kubectl
        .ok(&["create", "job", "later", "--image=registry.example/tool:1", "--", "tool", "--fast"])
        .await?;
    let told: Value = serde_json::from_str(&kubectl.ok(&["get", "job", "later", "-o", "json"]).await?)?;
    let container = &told["spec"]["template"]["spec"]["containers"][0];
    ensure!(container["command"] == json!(["tool", "--fast"]) && told["spec"]["backoffLimit"] == 6, "{told}");
    until("its pod is there", async || {
        let pods =
            kubectl.ok(&["get", "pods", "-l", "batch.kubernetes.io/job-name=later", "-o", "name"]).await?;
        Ok((pods.lines().count() == 1).then_some(()))
    })
    .await?;
    kubectl.ok(&["delete", "job", "later", "--timeout=50s"]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_past_its_deadline_ends_and_one_past_its_time_goes() -> Result<()> {
    guest_or_skip!("bad-job");
    let up = Up::start().await?;
    let component = up.upload("bad-job").await?;
    let spec = json!({"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 600});
    let slow = job("slow", &component, spec, json!({"args": ["sleep", "3600"]}));
    ensure!(up.api()?.post(JOBS, &slow).await?.status == 201);
    let condition = until("it has failed", async || {
        let told = up.api()?.get(&format!("{JOBS}/slow")).await?.body;
        let conditions = told["status"]["conditions"].as_array().cloned().unwrap_or_default();
        Ok(conditions.into_iter().find(|condition| condition["type"] == "Failed"))
    })
    .await?;
    ensure!(condition["reason"] == "DeadlineExceeded", "{condition}");
    let quick =
        job("quick", &component, json!({"ttlSecondsAfterFinished": 0}), json!({"args": ["exit", "0"]}));
    ensure!(up.api()?.post(JOBS, &quick).await?.status == 201);
    until("it is gone", async || {
        Ok((up.api()?.get(&format!("{JOBS}/quick")).await?.status == 404).then_some(()))
    })
    .await?;
    ensure!(job_names(&up).await? == ["slow"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_hands_files_from_job_to_job() -> Result<()> {
    let pipeline = guest_or_skip!("pipeline");
    let up = Up::start().await?;
    let folder = tempfile::tempdir()?;
    // In the example's folder, the definition refers to the component by its path.
    let example =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/pipeline/workflow.yaml");
    let definition = folder.path().join("workflow.yaml");
    std::fs::copy(example, &definition)?;
    std::fs::create_dir_all(folder.path().join("target/mayfly"))?;
    std::fs::copy(pipeline, folder.path().join("target/mayfly/pipeline.wasm"))?;
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "the fox and the dog\nand the cat\n".repeat(5))?;
    let pushed = up.cli().ok(&["artifact", "push", &text.to_string_lossy()]).await?;
    let deploy = ["workflow", "deploy", &definition.to_string_lossy(), "--name", "pipeline"];
    up.cli().ok(&deploy).await?;
    let machine = "arn:aws:states:us-east-1:000000000000:stateMachine:pipeline";
    let input = json!({"text": pushed.trim(), "linesPerPart": 4});
    let told = ended(&up, &start(&up, machine, input).await?).await?;
    let output = output(&told)?;
    ensure!(output["words"] == 40 && output["different"] == 5 && output["most"] == "the", "{output}");
    let table = output["table"].as_str().context("no table")?;
    let table = up.cli().ok(&["artifact", "get", table]).await?;
    ensure!(table.contains("15\tthe\n") && table.contains("10\tand\n"), "{table}");
    // Three parts make five jobs. Their files on the node have been removed.
    ensure!(job_names(&up).await?.len() == 5);
    until("the node has cleaned up", async || {
        let left = std::fs::read_dir(up.data().join("jobs")).map_or(0, Iterator::count);
        Ok((left == 0).then_some(()))
    })
    .await?;
    // An artifact that a job references is kept.
    let in_use = up.api()?.delete(&format!("/artifacts/{}", pushed.trim())).await?;
    ensure!(in_use.status == 409, "{in_use:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jobs_bad_end_has_a_name_and_leaves_its_outputs() -> Result<()> {
    guest_or_skip!("bad-job");
    let up = Up::start().await?;
    let component = up.upload("bad-job").await?;
    for (name, arguments, error, code) in [
        ("exits", json!({"Args": ["exit", "3"]}), "Job.ExitCode.3", json!(3)),
        ("oom", json!({"Args": ["oom"], "Memory": "16Mi"}), "Job.OOMKilled", json!(137)),
        ("traps", json!({"Args": ["panic"]}), "Job.Trap", json!(134)),
        (
            "late",
            json!({"Args": ["sleep", "3600"], "DeadlineSeconds": 5}),
            "Job.DeadlineExceeded",
            json!(137),
        ),
    ] {
        let machine = create(&up, name, "STANDARD", one_job(&component, arguments)).await?;
        let execution = start(&up, &machine, json!({})).await?;
        let output = output(&ended(&up, &execution).await?)?;
        ensure!(output["caught"] == error, "{name}: {output}");
        let submitted = submitted(&up, &execution).await?;
        ensure!(submitted.len() == 1 && submitted[0]["jobName"].is_string(), "{name}: {submitted:?}");
        let cause = &output["cause"];
        ensure!(cause["exitCode"] == code && cause["parameters"]["progress"] == "half", "{name}: {cause}");
        ensure!(
            cause["stderr"].as_str().is_some_and(|text| text.contains("not end well")),
            "{name}: {cause}"
        );
        let notes = cause["artifacts"]["notes.txt"]["digest"].as_str().context("no notes")?;
        ensure!(up.cli().ok(&["artifact", "get", notes]).await? == "what was done so far\n", "{name}");
    }
    // A job that can never run fails at once.
    let nowhere = format!("sha256:{}", "0".repeat(64));
    for (name, component, arguments, error) in [
        ("nowhere", nowhere.as_str(), json!({}), "Job.ComponentNotFound"),
        ("no-file", component.as_str(), json!({"Artifacts": {"a": nowhere}}), "Job.ArtifactNotFound"),
        ("misspelt", component.as_str(), json!({"Agrs": []}), "Job.InvalidArguments"),
    ] {
        let machine = create(&up, name, "STANDARD", one_job(component, arguments)).await?;
        let execution = start(&up, &machine, json!({})).await?;
        let output = output(&ended(&up, &execution).await?)?;
        ensure!(output["caught"] == error, "{name}: {output}");
        ensure!(submitted(&up, &execution).await?.is_empty(), "{name}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_execution_takes_its_job_along() -> Result<()> {
    guest_or_skip!("bad-job");
    let up = Up::start().await?;
    let component = up.upload("bad-job").await?;
    let definition = one_job(&component, json!({"Args": ["sleep", "3600"]}));
    let machine = create(&up, "long", "STANDARD", definition).await?;
    let execution = start(&up, &machine, json!({})).await?;
    until("its job is there", async || Ok((job_names(&up).await?.len() == 1).then_some(()))).await?;
    call(&up, "StopExecution", json!({"executionArn": execution})).await?;
    until("its job is gone", async || Ok(job_names(&up).await?.is_empty().then_some(()))).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_goes_with_its_execution_even_if_nobody_let_it_go() -> Result<()> {
    guest_or_skip!("bad-job");
    let up = Up::start().await?;
    let component = up.upload("bad-job").await?;
    let definition = one_job(&component, json!({"Args": ["sleep", "3600"]}));
    let machine = create(&up, "long", "STANDARD", definition).await?;
    let running = start(&up, &machine, json!({})).await?;
    let theirs =
        until("its job is there", async || Ok(job_names(&up).await?.first().map(ToString::to_string)))
            .await?;
    let at_once = json!({"StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}});
    let over = start(&up, &create(&up, "short", "STANDARD", at_once).await?, json!({})).await?;
    ended(&up, &over).await?;
    // The state after a crash between an execution's end and its job's; and a job that an execution had only started.
    let api = up.api()?;
    for (name, awaited) in [("left", "true"), ("begun", "false")] {
        let sleeps = json!({"args": ["sleep", "3600"]});
        let mut job = job(name, &component, json!({}), sleeps);
        job["metadata"]["annotations"] = json!({"mayfly.dev/task": format!("{over}#1"),
            "mayfly.dev/execution": over, "mayfly.dev/awaited": awaited});
        let made = api.post(JOBS, &job).await?;
        ensure!(made.status == 201, "{made:?}");
    }
    let names = async || {
        let mut names = job_names(&up).await?;
        names.sort();
        anyhow::Ok(names)
    };
    let mut stay = vec![theirs.clone(), "begun".to_owned()];
    stay.sort();
    until("the one that was left is gone", async || Ok((names().await? == stay).then_some(()))).await?;
    call(&up, "StopExecution", json!({"executionArn": running})).await?;
    until("the other goes as well", async || Ok((names().await? == ["begun"]).then_some(()))).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_finds_its_jobs_again() -> Result<()> {
    guest_or_skip!("bad-job");
    let component = mayfly_e2e::digest_of(&std::fs::read(guest("bad-job").map_err(anyhow::Error::msg)?)?);
    let up = Up::start().await?;
    up.upload("bad-job").await?;
    // Jobs in every stage at the kill: ended, running, and just started.
    let mut executions = Vec::new();
    for (n, seconds) in ["0", "1", "2", "3"].into_iter().enumerate() {
        let definition = one_job(&component, json!({"Args": ["sleep", seconds]}));
        let machine = create(&up, &format!("nap-{n}"), "STANDARD", definition).await?;
        executions.push((n, start(&up, &machine, json!({})).await?));
    }
    ended(&up, &executions[0].1).await?;
    let data = up.data().to_path_buf();
    let folder = up.kill()?;
    let up = Start::default().in_folder(&data).ready().await?;
    for (n, execution) in &executions {
        let output = output(&ended(&up, execution).await?)?;
        ensure!(output["exitCode"] == 0 && output["parameters"]["progress"] == "half", "{n}: {output}");
    }
    // Each task has exactly one job, even if it was repeated.
    ensure!(job_names(&up).await?.len() == executions.len());
    up.stop().await?;
    drop(folder);
    Ok(())
}
