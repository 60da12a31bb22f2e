//! Triggers of executions: schedules, AWS's PutEvents, CloudEvents.

use anyhow::{Context, Result, ensure};
use http::Method;
use mayfly_e2e::{Start, Up, full, skipped, test_name, wait::until};
use serde_json::{Value, json};
use tokio::process::Command;

use super::workflows::{call, ended};

const PATH: &str = "/apis/mayfly.dev/v1/namespaces/default/workflows";

/// Creates a workflow that returns its input, and waits until it is ready.
async fn echo(up: &Up, name: &str, triggers: Value) -> Result<()> {
    let object = json!({"apiVersion": "mayfly.dev/v1", "kind": "Workflow", "metadata": {"name": name}, "spec": {
        "definition": {"StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}}, "triggers": triggers}});
    let api = up.api()?;
    let created = api.post(PATH, &object).await?;
    ensure!(created.status == 201, "{}", created.body);
    until(&format!("{name} is ready, its triggers known"), async || {
        let object = api.get(&format!("{PATH}/{name}")).await?.body;
        let ready = object["status"]["conditions"][0]["status"] == "True";
        Ok((ready && object["status"]["triggers"].is_array()).then_some(()))
    })
    .await
}

/// The names of a workflow's executions, oldest first.
async fn executions(up: &Up, name: &str) -> Result<Vec<String>> {
    let machine = format!("arn:aws:states:us-east-1:000000000000:stateMachine:{name}");
    let listed = call(up, "ListExecutions", json!({"stateMachineArn": machine})).await?;
    let names = listed["executions"].as_array().context("no list")?.iter().rev();
    Ok(names.filter_map(|execution| execution["name"].as_str().map(str::to_owned)).collect())
}

async fn input(up: &Up, workflow: &str, execution: &str) -> Result<Value> {
    let arn = format!("arn:aws:states:us-east-1:000000000000:execution:{workflow}:{execution}");
    let told = ended(up, &arn).await?;
    Ok(serde_json::from_str(told["input"].as_str().context("no input")?)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_starts_every_second_once_and_goes_on_after_a_kill() -> Result<()> {
    let up = Up::start().await?;
    let every_second = json!([{"name": "tick", "schedule": {"cron": "* * * * * *"}},
        {"name": "never", "suspend": true, "schedule": {"cron": "* * * * * *"}}]);
    echo(&up, "clock", every_second).await?;
    let three = async |up: &Up, more_than: usize| {
        until("three starts", async || {
            let names = executions(up, "clock").await?;
            Ok((names.len() >= more_than + 3).then_some(names))
        })
        .await
    };
    let names = three(&up, 0).await?;
    ensure!(names.iter().all(|name| name.starts_with("tick-")), "{names:?}");
    let told = input(&up, "clock", &names[0]).await?;
    ensure!(told["trigger"] == "tick" && told["scheduledTime"].is_string(), "{told}");
    let data = up.data().to_path_buf();
    let folder = up.kill()?;
    let up = Start::default().in_folder(&data).ready().await?;
    let names = three(&up, names.len()).await?;
    // One for each second: names are unique, and none is missing.
    ensure!(names.windows(2).all(|pair| pair[0] < pair[1]), "{names:?}");
    let status = up.api()?.get(&format!("{PATH}/clock")).await?.body["status"]["triggers"].clone();
    ensure!(status[0]["lastExecution"].is_string() && status[0]["nextScheduleTime"].is_string(), "{status}");
    ensure!(status[1]["lastExecution"].is_null(), "{status}");
    up.stop().await?;
    drop(folder);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_starts_what_it_fits() -> Result<()> {
    let up = Up::start().await?;
    let paid =
        json!({"source": ["shop"], "detail-type": ["Paid"], "detail": {"euros": [{"numeric": [">=", 100]}]}});
    echo(&up, "large", json!([{"name": "paid", "event": {"pattern": paid}}])).await?;
    let transform =
        json!({"paths": {"id": "$.detail.order"}, "template": {"order": "<id>", "text": "order <id>"}});
    let any = json!({"source": [{"prefix": "sh"}]});
    echo(&up, "all", json!([{"name": "any", "event": {"pattern": any}, "inputTransform": transform}]))
        .await?;

    let put = |euros: u32| {
        let detail = json!({"order": 7, "euros": euros}).to_string();
        json!({"Source": "shop", "DetailType": "Paid", "Detail": detail})
    };
    let http = up.workflows();
    let send = async |body: Value| {
        let request = http
            .request(Method::POST, "/")
            .header("content-type", "application/x-amz-json-1.1")
            .header("x-amz-target", "AWSEvents.PutEvents");
        http.call(request, full(body.to_string())).await?.json()
    };
    let answer = send(json!({"Entries": [put(500), put(5), {"Source": "shop"}]})).await?;
    ensure!(
        answer["FailedEntryCount"] == 1 && answer["Entries"][2]["ErrorCode"] == "InvalidArgument",
        "{answer}"
    );
    // When an event is acknowledged, its executions have been started.
    let large = executions(&up, "large").await?;
    let id = answer["Entries"][0]["EventId"].as_str().context("no id")?;
    assert_eq!(large, [format!("paid-{id}")]);
    let event = input(&up, "large", &large[0]).await?;
    ensure!(event["detail"]["euros"] == 500 && event["detail-type"] == "Paid", "{event}");
    let all = executions(&up, "all").await?;
    assert_eq!(all.len(), 2);
    assert_eq!(input(&up, "all", &all[0]).await?, json!({"order": 7, "text": "order 7"}));

    // The same CloudEvent in structured and in binary mode is one event.
    let data = json!({"order": 8, "euros": 100});
    let structured =
        json!({"specversion": "1.0", "id": "e-1", "source": "shop", "type": "Paid", "data": data});
    let request =
        http.request(Method::POST, "/events").header("content-type", "application/cloudevents+json");
    assert_eq!(http.call(request, full(structured.to_string())).await?.status, 202);
    let binary = [("ce-specversion", "1.0"), ("ce-id", "e-1"), ("ce-source", "shop"), ("ce-type", "Paid")];
    let request = http.request(Method::POST, "/events").header("content-type", "application/json");
    let request = binary.into_iter().fold(request, |request, (name, value)| request.header(name, value));
    assert_eq!(http.call(request, full(data.to_string())).await?.status, 202);
    assert_eq!(executions(&up, "large").await?.len(), 2);
    let refused = http.call(http.request(Method::POST, "/events"), full("{}")).await?;
    ensure!(refused.status == 400 && refused.text().contains("ce-specversion"), "{}", refused.text());
    // A rejected batch starts no execution.
    let good = json!({"specversion": "1.0", "id": "e-2", "source": "shop", "type": "Paid", "data": data});
    let request =
        http.request(Method::POST, "/events").header("content-type", "application/cloudevents-batch+json");
    let refused = http.call(request, full(json!([good, {"id": "e-3"}]).to_string())).await?;
    ensure!(refused.status == 400, "{}", refused.text());
    assert_eq!(executions(&up, "large").await?.len(), 2);

    // A workflow's own task puts events.
    let definition = json!({"StartAt": "Put", "States": {"Put": {"Type": "Task", "End": true,
        "Resource": "arn:aws:states:::events:putEvents", "Parameters": {"Entries": [
            {"Source": "shop", "DetailType": "Paid", "Detail": {"order": 9, "euros": 900}}]}}}});
    let machine = super::workflows::create(&up, "putter", "STANDARD", definition).await?;
    let told = ended(&up, &super::workflows::start(&up, &machine, json!({})).await?).await?;
    ensure!(told["status"] == "SUCCEEDED", "{told}");
    assert_eq!(executions(&up, "large").await?.len(), 3);
    Ok(())
}

/// boto3's client for EventBridge.
#[tokio::test(flavor = "multi_thread")]
async fn boto3_puts_events() -> Result<()> {
    let python = std::env::var("MAYFLY_PYTHON").unwrap_or_else(|_| "python3".into());
    if !Command::new(&python).args(["-c", "import boto3"]).output().await.is_ok_and(|o| o.status.success()) {
        skipped(test_name!(), "no Python with boto3 (set MAYFLY_PYTHON to one)");
        return Ok(());
    }
    let up = Up::start().await?;
    echo(&up, "seen", json!([{"name": "any", "event": {"pattern": {"source": ["py"]}}}])).await?;
    let script = format!(
        "import boto3, json\n\
         keys = dict(region_name='us-east-1', aws_access_key_id='x', aws_secret_access_key='x')\n\
         events = boto3.client('events', endpoint_url='http://{address}', **keys)\n\
         told = events.put_events(Entries=[dict(Source='py', DetailType='T', Detail=json.dumps(dict(n=1)))])\n\
         assert told['FailedEntryCount'] == 0, told\n\
         machines = boto3.client('stepfunctions', endpoint_url='http://{address}', **keys)\n\
         arn = machines.list_state_machines()['stateMachines'][0]['stateMachineArn']\n\
         print(machines.list_executions(stateMachineArn=arn)['executions'][0]['name'])\n\
         print('any-' + told['Entries'][0]['EventId'])\n",
        address = up.address("workflows"),
    );
    let output = Command::new(&python).args(["-c", &script]).output().await?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = told.lines().collect();
    ensure!(lines.len() == 2 && lines[0] == lines[1], "{told}");
    Ok(())
}
