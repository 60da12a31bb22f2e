//! Graphs of tasks as workflows: from files and as objects.

use anyhow::{Context, Result, ensure};
use mayfly_e2e::{Up, wait::until};
use serde_json::{Value, json};

use super::{
    kubectl::kubectl_or_skip,
    workflows::{call, create, ended, start},
};

const TASKS: &str = "\
comment: twice and three times
tasks:
  sum:
    dependencies: [twice, thrice]
    state: {Type: Pass, QueryLanguage: JSONata, Output: '{% $states.input.tasks.twice + $states.input.tasks.thrice %}'}
  twice:
    state: {Type: Pass, QueryLanguage: JSONata, Output: '{% $states.input.input.n * 2 %}'}
  thrice:
    state: {Type: Pass, QueryLanguage: JSONata, Output: '{% $states.input.input.n * 3 %}'}
  large:
    dependencies: [sum]
    when: {Variable: $.tasks.sum, NumericGreaterThan: 100}
    state: {Type: Pass, Parameters: {sum.$: $.tasks.sum}}
";

fn arn(name: &str) -> String {
    format!("arn:aws:states:us-east-1:000000000000:stateMachine:{name}")
}

async fn definition(up: &Up, name: &str) -> Result<Value> {
    let told = call(up, "DescribeStateMachine", json!({"stateMachineArn": arn(name)})).await?;
    Ok(serde_json::from_str(told["definition"].as_str().context("no definition")?)?)
}

async fn output(up: &Up, name: &str, input: Value) -> Result<Value> {
    let told = ended(up, &start(up, &arn(name), input).await?).await?;
    ensure!(told["status"] == "SUCCEEDED", "{told}");
    Ok(serde_json::from_str(told["output"].as_str().context("no output")?)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_tasks_is_deployed_as_states() -> Result<()> {
    let up = Up::start().await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("times.yaml");
    let file = file.to_str().context("a path")?;
    std::fs::write(file, TASKS)?;
    ensure!(up.cli().ok(&["workflow", "deploy", file]).await?.contains("created"));
    let definition = definition(&up, "times").await?;
    let states = &definition["States"];
    ensure!(
        definition["StartAt"] == "(input)" && definition["Comment"] == "twice and three times",
        "{definition}"
    );
    ensure!(states["(parallel 1)"]["Branches"].as_array().map(Vec::len) == Some(2), "{definition}");
    ensure!(output(&up, "times", json!({"n": 2})).await? == json!({"large": null}));
    ensure!(output(&up, "times", json!({"n": 30})).await? == json!({"large": {"sum": 150}}));
    let shown = up.cli().ok(&["workflow", "start", "times", "-d", r#"{"n": 30}"#, "--follow"]).await?;
    ensure!(shown.contains("twice") && shown.contains("150"), "{shown}");

    std::fs::write(file, TASKS.replace("  twice:\n", "  twice:\n    dependencies: [large]\n"))?;
    let told = up.cli().fails(&["workflow", "deploy", file]).await?;
    ensure!(
        told.contains("/tasks/sum/dependencies: the dependencies form a cycle: sum → twice → large → sum"),
        "{told}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_an_object_are_a_state_machine() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let up = &kubectl.up;
    let object = |tasks: Value| json!({"apiVersion": "mayfly.dev/v1", "kind": "Workflow", "metadata": {"name": "graph"}, "spec": {"tasks": tasks}});
    let two = |result: u32| {
        json!({"first": {"state": {"Type": "Pass", "Result": result}},
            "second": {"state": {"Type": "Pass", "Parameters": {"of.$": "$.tasks.first"}}, "dependencies": ["first"]}})
    };
    let apply = async |tasks: Value| {
        let file = kubectl.file("graph.json", &object(tasks))?;
        kubectl.ok(&["apply", "-f", &file]).await
    };
    let gives = async |expected: Value| {
        until(&format!("the output is {expected}"), async || {
            Ok((output(up, "graph", json!({})).await? == expected).then_some(()))
        })
        .await
    };
    apply(two(1)).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", "workflow/graph", "--timeout=60s"]).await?;
    gives(json!({"second": {"of": 1}})).await?;
    apply(two(2)).await?;
    gives(json!({"second": {"of": 2}})).await?;
    let stored = kubectl.ok(&["get", "workflow", "graph", "-o", "json"]).await?;
    let stored: Value = serde_json::from_str(&stored)?;
    ensure!(stored["spec"]["tasks"] == two(2) && stored["spec"]["definition"].is_null(), "{stored}");

    // After a change by the Step Functions API it is no longer a graph of tasks; another apply restores it.
    let other = json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "Result": 3, "End": true}}});
    let parameters = json!({"stateMachineArn": arn("graph"), "definition": other.to_string()});
    call(up, "UpdateStateMachine", parameters).await?;
    until("the object has the definition", async || {
        let stored: Value =
            serde_json::from_str(&kubectl.ok(&["get", "workflow", "graph", "-o", "json"]).await?)?;
        Ok((stored["spec"]["definition"] == other && stored["spec"]["tasks"].is_null()).then_some(()))
    })
    .await?;
    gives(json!(3)).await?;
    apply(two(4)).await?;
    gives(json!({"second": {"of": 4}})).await?;

    let mut wrong = two(1);
    wrong["first"]["dependencies"] = json!(["second", "third"]);
    let file = kubectl.file("wrong.json", &object(wrong))?;
    let refused = kubectl.run(&["apply", "-f", &file]).await?;
    let why = "spec.tasks.first.dependencies[1]: Invalid value: there is no task \"third\"";
    ensure!(refused.code != Some(0) && refused.stderr.contains(why), "{refused:?}");
    let mut both = object(two(1));
    both["spec"]["definition"] = other.clone();
    let file = kubectl.file("both.json", &both)?;
    let refused = kubectl.run(&["create", "-f", &file]).await?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("one of definition and tasks"), "{refused:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_cannot_fetch_its_input_fails_with_the_reason() -> Result<()> {
    mayfly_e2e::guest_or_skip!("bad-job");
    let up = Up::start().await?;
    let component = up.upload("bad-job").await?;
    let job = |artifact: Value, egress: &str| {
        json!({"StartAt": "Run", "States": {
            "Run": {"Type": "Task", "Resource": "arn:aws:states:::job:run.sync", "End": true,
                "Parameters": {"Component": component, "Args": ["exit", "0"], "Egress": [egress],
                    "Artifacts": {"data": artifact}},
                "Catch": [{"ErrorEquals": ["Job.ArtifactNotFetched"], "Next": "Caught"}]},
            "Caught": {"Type": "Pass", "End": true}}})
    };
    let admin = format!("http://{}", up.address("admin"));
    let health = json!({"http": {"url": format!("{admin}/healthz")}});
    for (name, artifact, egress, why) in [
        ("private", health.clone(), "https://example.com", Some("has no public address")),
        (
            "missing",
            json!({"http": {"url": format!("{admin}/none")}}),
            &*admin,
            Some("the server answers 404"),
        ),
        ("fetched", health, &*admin, None),
        ("raw", json!({"raw": "text"}), "https://example.com", None),
    ] {
        let machine = create(&up, name, "STANDARD", job(artifact, egress)).await?;
        let told = ended(&up, &start(&up, &machine, json!({})).await?).await?;
        let output: Value = serde_json::from_str(told["output"].as_str().with_context(|| told.to_string())?)?;
        match why {
            None => ensure!(output["exitCode"] == 0, "{name}: {output}"),
            Some(why) => ensure!(
                output["Error"] == "Job.ArtifactNotFetched" && output["Cause"].to_string().contains(why),
                "{name}: {output}"
            ),
        }
    }
    Ok(())
}
