//! Tasks of AWS services with configured endpoints: a small server imitates the services.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use mayfly_e2e::{Start, Up};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::workflows::{call, create, ended, start};

/// The received requests: the target or the path, the body, `Authorization`.
type Asked = Arc<Mutex<Vec<(String, Value, Option<String>)>>>;

/// The parts of AWS services that these tests call.
struct Services {
    url: String,
    asked: Asked,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Services {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Services {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let asked = Asked::default();
        let all = asked.clone();
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let asked = all.clone();
                let service = hyper::service::service_fn(move |request| answer(request, asked.clone()));
                tokio::spawn(async move {
                    // A disconnected client is not an error of the test.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Ok(Self { url, asked, server })
    }

    fn asked(&self) -> Vec<(String, Value, Option<String>)> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn answer(request: Request<Incoming>, asked: Asked) -> Result<Response<Full<Bytes>>> {
    let header = |name: &str| Some(request.headers().get(name)?.to_str().ok()?.to_owned());
    let what = header("x-amz-target").unwrap_or_else(|| request.uri().to_string());
    let authorization = header("authorization");
    let body = request.into_body().collect().await?.to_bytes();
    if what == "/" {
        return published(&String::from_utf8(body.to_vec())?, authorization, &asked);
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (status, answer, error) = match what.as_str() {
        "AmazonSQS.SendMessage" if body["QueueUrl"] == "missing" => {
            (400, json!({"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "no queue"}), None)
        }
        "AmazonSQS.SendMessage" => (200, json!({"MessageId": "m-1", "MD5OfMessageBody": "0f"}), None),
        "DynamoDB_20120810.GetItem" => (200, json!({"Item": {"id": {"S": "7"}}}), None),
        "DynamoDB_20120810.PutItem" => (
            400,
            json!({"__type": "com.amazonaws.dynamodb.v20120810#ConditionalCheckFailedException", "message": "The conditional request failed"}),
            None,
        ),
        "AmazonEC2ContainerServiceV20141113.RunTask" => {
            (200, json!({"tasks": [{"taskArn": "t", "createdAt": 1_700_000_000}], "failures": []}), None)
        }
        "/v1/submitjob" => (200, json!({"jobArn": "j", "jobId": "1", "jobName": "n"}), None),
        "/2015-03-31/functions/away/invocations?Qualifier=blue" => (200, json!({"got": body}), None),
        "/2015-03-31/functions/broken/invocations" => {
            (200, json!({"errorType": "OutOfStock", "errorMessage": "none left"}), Some("Unhandled"))
        }
        _ => (404, json!({"__type": "ResourceNotFoundException", "Message": "not here"}), None),
    };
    asked.lock().unwrap_or_else(PoisonError::into_inner).push((what, body, authorization));
    let mut response =
        Response::builder().status(StatusCode::from_u16(status)?).header("x-amzn-requestid", "r-1");
    if let Some(error) = error {
        response = response.header("x-amz-function-error", error);
    }
    Ok(response.body(Full::new(Bytes::from(answer.to_string())))?)
}

/// SNS accepts a form and responds with XML.
fn published(form: &str, authorization: Option<String>, asked: &Asked) -> Result<Response<Full<Bytes>>> {
    let (status, answer): (u16, _) = match form.contains("TopicArn=missing") {
        true => (
            404,
            "<ErrorResponse><Error><Type>Sender</Type><Code>NotFound</Code><Message>Topic does not exist\
                       </Message></Error><RequestId>r-1</RequestId></ErrorResponse>",
        ),
        false => (
            200,
            "<PublishResponse xmlns=\"http://sns.amazonaws.com/doc/2010-03-31/\"><PublishResult><MessageId>m-2\
                        </MessageId></PublishResult><ResponseMetadata><RequestId>r-2</RequestId></ResponseMetadata>\
                        </PublishResponse>",
        ),
    };
    let mut all = asked.lock().unwrap_or_else(PoisonError::into_inner);
    all.push(("SNS".to_owned(), Value::from(form), authorization));
    Ok(Response::builder().status(status).body(Full::new(Bytes::from(answer)))?)
}

async fn pointed(services: &Services) -> Result<Up> {
    let at = |service: &str| format!("{service}={}", services.url);
    let all = ["sqs", "sns", "dynamodb", "ecs", "batch", "lambda"].map(at).join(",");
    Start::default()
        .with(&["--task-endpoint", &all, "--task-endpoint", "kms=http://127.0.0.1:9"])
        .environment("MAYFLY_TASK_ACCESS_KEY_ID", "AKTEST")
        .environment("MAYFLY_TASK_SECRET_ACCESS_KEY", "secret")
        .ready()
        .await
}

/// Runs one task; returns its output, or the error's name and cause.
pub(crate) async fn task(
    up: &Up,
    name: &str,
    resource: &str,
    parameters: Value,
) -> Result<Result<Value, (String, String)>> {
    let definition = json!({"StartAt": "T", "States": {
        "T": {"Type": "Task", "Resource": resource, "Parameters": parameters, "End": true}}});
    let machine = create(up, name, "STANDARD", definition).await?;
    let told = ended(up, &start(up, &machine, json!({})).await?).await?;
    let text = |name: &str| told[name].as_str().unwrap_or_default().to_owned();
    Ok(match told["status"] == "SUCCEEDED" {
        true => Ok(serde_json::from_str(&text("output"))?),
        false => Err((text("error"), text("cause"))),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_reach_their_service_at_another_endpoint() -> Result<()> {
    let services = Services::start().await?;
    let up = pointed(&services).await?;
    let sqs = "arn:aws:states:::sqs:sendMessage";
    let sent = task(&up, "sqs", sqs, json!({"QueueUrl": "q", "MessageBody": {"a": 1}})).await?;
    let sent = sent.ok().context("refused")?;
    ensure!(sent["MessageId"] == "m-1" && sent["SdkResponseMetadata"]["RequestId"] == "r-1", "{sent}");
    let (what, body, authorization) = services.asked().pop().context("nothing was asked")?;
    ensure!(what == "AmazonSQS.SendMessage" && body["MessageBody"] == r#"{"a":1}"#, "{body}");
    let authorization = authorization.context("it is not signed")?;
    ensure!(authorization.starts_with("AWS4-HMAC-SHA256 Credential=AKTEST/"), "{authorization}");
    ensure!(authorization.contains("/us-east-1/sqs/aws4_request"), "{authorization}");
    let sdk = "arn:aws:states:::aws-sdk:sqs:sendMessage";
    let sent = task(&up, "sdk", sdk, json!({"QueueUrl": "q", "MessageBody": "x"})).await?;
    ensure!(sent == Ok(json!({"MessageId": "m-1", "Md5OfMessageBody": "0f"})), "{sent:?}");
    let item =
        task(&up, "get", "arn:aws:states:::aws-sdk:dynamodb:getItem", json!({"TableName": "t", "Key": {}}));
    let item = item.await?;
    ensure!(item == Ok(json!({"Item": {"id": {"S": "7"}}})), "{item:?}");
    let ran =
        task(&up, "ecs", "arn:aws:states:::aws-sdk:ecs:runTask", json!({"TaskDefinition": "t"})).await?;
    let expected =
        json!({"Failures": [], "Tasks": [{"TaskArn": "t", "CreatedAt": "2023-11-14T22:13:20.000Z"}]});
    ensure!(ran == Ok(expected), "{ran:?}");
    let job = task(&up, "batch", "arn:aws:states:::aws-sdk:batch:submitJob", json!({"JobName": "n"})).await?;
    ensure!(job == Ok(json!({"JobArn": "j", "JobId": "1", "JobName": "n"})), "{job:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_and_a_queue_carry_a_tasks_token() -> Result<()> {
    let services = Services::start().await?;
    let up = pointed(&services).await?;
    let sent =
        task(&up, "sns", "arn:aws:states:::sns:publish", json!({"TopicArn": "t", "Message": {"a": 1}}));
    let sent = sent.await?.ok().context("refused")?;
    ensure!(sent["MessageId"] == "m-2" && sent["SdkResponseMetadata"]["RequestId"] == "r-2", "{sent}");
    let (_, form, authorization) = services.asked().pop().context("nothing was asked")?;
    let expected = "Action=Publish&Version=2010-03-31&TopicArn=t&Message=%7B%22a%22%3A1%7D";
    ensure!(form == expected, "{form}");
    ensure!(authorization.context("it is not signed")?.contains("/us-east-1/sns/aws4_request"), "{form}");
    for (name, parameters) in [
        ("sns:publish", json!({"TopicArn": "t", "Message.$": "$$.Task.Token"})),
        ("sqs:sendMessage", json!({"QueueUrl": "q", "MessageBody.$": "$$.Task.Token"})),
    ] {
        let resource = format!("arn:aws:states:::{name}.waitForTaskToken");
        let definition = json!({"StartAt": "T", "States": {
            "T": {"Type": "Task", "Resource": resource, "Parameters": parameters, "End": true}}});
        let machine = create(&up, &name.replace(':', "-"), "STANDARD", definition).await?;
        let before = services.asked().len();
        let execution = start(&up, &machine, json!({})).await?;
        let token = mayfly_e2e::wait::until("the message is sent", async || {
            let asked = services.asked();
            Ok(asked.get(before).map(|(_, body, _)| match body {
                Value::String(form) => form.rsplit("Message=").next().unwrap_or_default().replace("%2F", "/"),
                body => body["MessageBody"].as_str().unwrap_or_default().to_owned(),
            }))
        })
        .await?;
        let token = token.replace("%2B", "+").replace("%3D", "=");
        call(&up, "SendTaskSuccess", json!({"taskToken": token, "output": "{\"done\":true}"})).await?;
        let told = ended(&up, &execution).await?;
        ensure!(told["output"] == "{\"done\":true}", "{name}: {told}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_services_errors_have_the_names_that_people_catch() -> Result<()> {
    let services = Services::start().await?;
    let up = pointed(&services).await?;
    for (n, (resource, parameters, error, cause)) in [
        (
            "aws-sdk:sqs:sendMessage",
            json!({"QueueUrl": "missing", "MessageBody": "x"}),
            "Sqs.QueueDoesNotExistException",
            "no queue (Service: Sqs, Status Code: 400, Request ID: r-1) (SDK Attempt Count: 1)",
        ),
        (
            "dynamodb:putItem",
            json!({"TableName": "t", "Item": {}}),
            "DynamoDB.ConditionalCheckFailedException",
            "The conditional request failed (Service: AmazonDynamoDBv2; Status Code: 400; Error Code: \
          ConditionalCheckFailedException; Request ID: r-1; Proxy: null)",
        ),
        (
            "aws-sdk:ecs:stopTask",
            json!({"Task": "x"}),
            "Ecs.ResourceNotFoundException",
            "not here (Service: Ecs,",
        ),
        ("aws-sdk:kms:encrypt", json!({}), "Kms.SdkClientException", "Unable to execute HTTP request: "),
        (
            "ecs:runTask.sync",
            json!({"TaskDefinition": "t"}),
            "Mayfly.IntegrationNotSupported",
            "without .sync",
        ),
        (
            "sns:publish",
            json!({"TopicArn": "missing", "Message": "x"}),
            "SNS.NotFoundException",
            "Topic does not exist (Service: AmazonSNS; Status Code: 404; Error Code: NotFound; Request ID: r-1; Proxy: null)",
        ),
        (
            "aws-sdk:ec2:describeInstances",
            json!({}),
            "Mayfly.IntegrationNotSupported",
            "is known but not carried out here",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let told = task(&up, &format!("e{n}"), &format!("arn:aws:states:::{resource}"), parameters).await?;
        let (name, words) = told.err().with_context(|| format!("{resource} succeeded"))?;
        ensure!(name == error && words.contains(cause), "{resource}: {name}: {words}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_that_are_not_here_are_asked_elsewhere() -> Result<()> {
    let services = Services::start().await?;
    let up = pointed(&services).await?;
    let invoke = "arn:aws:states:::lambda:invoke";
    let away = json!({"FunctionName": "away", "Qualifier": "blue", "Payload": {"n": 1}});
    let told = task(&up, "away", invoke, away).await?.ok().context("refused")?;
    ensure!(told["Payload"] == json!({"got": {"n": 1}}) && told["StatusCode"] == 200, "{told}");
    for (function, error, cause) in [
        ("broken", "OutOfStock", "none left"),
        ("nobody", "Lambda.ResourceNotFoundException", "not here (Service: Lambda, Status Code: 404"),
    ] {
        let told = task(&up, function, invoke, json!({"FunctionName": function})).await?;
        let (name, words) = told.err().context("it succeeded")?;
        ensure!(name == error && words.contains(cause), "{function}: {name}: {words}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_cannot_be_used_is_refused_at_the_start() -> Result<()> {
    for (flag, reason) in
        [("ec2=http://127.0.0.1:1", "cannot be sent to an endpoint"), ("sqs=there", "is no endpoint")]
    {
        let refused = Start::default().with(&["--task-endpoint", flag]).refused().await?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(reason), "{refused:?}");
    }
    Ok(())
}
