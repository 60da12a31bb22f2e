//! workflow deploy, start, history and the rest, against a Step Functions API with one workflow.

use std::sync::Mutex;

use axum::response::Response;
use serde_json::{Value, json};

use crate::fake::{Fake, Ran, Seen, answer, finish, mayfly, ok};

const WORKFLOW: &str = "arn:aws:states:us-east-1:000000000000:stateMachine:order";
const EXECUTION: &str = "arn:aws:states:us-east-1:000000000000:execution:order:e1";

/// The API of a test: the workflow once it is created, and the result of its executions.
#[derive(Default)]
struct Api {
    workflow: Mutex<Option<Value>>,
    fails: bool,
}

impl Api {
    fn answer(&self, seen: &Seen) -> Option<Response> {
        assert_eq!((seen.method.as_str(), seen.path.as_str()), ("POST", "/"));
        assert_eq!(seen.content_type, "application/x-amz-json-1.0");
        assert!(seen.authorization.contains("/us-east-1/states/aws4_request"), "{}", seen.authorization);
        let params = seen.json();
        let mut workflow = self.workflow.lock().unwrap();
        Some(match seen.target.strip_prefix("AWSStepFunctions.")? {
            "ValidateStateMachineDefinition" => ok(&validation(&params)),
            "CreateStateMachine" => {
                *workflow = Some(json!({"name": params["name"], "type": params["type"], "status": "ACTIVE",
                                        "stateMachineArn": WORKFLOW, "definition": params["definition"]}));
                ok(&json!({"stateMachineArn": WORKFLOW}))
            }
            "UpdateStateMachine" => {
                workflow.as_mut()?["definition"] = params["definition"].clone();
                ok(&json!({"updateDate": 1.0}))
            }
            "DescribeStateMachine" => match workflow.as_ref() {
                Some(workflow) if params["stateMachineArn"] == WORKFLOW => ok(workflow),
                _ => refusal("StateMachineDoesNotExist", "State Machine Does Not Exist"),
            },
            "DeleteStateMachine" => ok(&json!({})),
            "ListStateMachines" => ok(&json!({"stateMachines": workflow.iter().collect::<Vec<_>>()})),
            "StartExecution" if params["name"] == "taken" => {
                refusal("ExecutionAlreadyExists", "Execution Already Exists")
            }
            "StartExecution" => ok(&json!({"executionArn": EXECUTION, "startDate": 10.0})),
            "StartSyncExecution" | "DescribeExecution" => ok(&self.execution()),
            "ListExecutions" => ok(&json!({"executions": [self.execution()]})),
            "GetExecutionHistory" => ok(&self.history(&params)),
            _ => return None,
        })
    }

    fn execution(&self) -> Value {
        let mut execution = json!({"executionArn": EXECUTION, "stateMachineArn": WORKFLOW, "name": "e1",
            "startDate": 10.0, "stopDate": 12.0, "input": "{}"});
        let end = match self.fails {
            true => json!({"status": "FAILED", "error": "Sold.Out", "cause": "no pens"}),
            false => json!({"status": "SUCCEEDED", "output": "{\"b\":1,\"a\":2}"}),
        };
        execution.as_object_mut().unwrap().extend(end.as_object().unwrap().clone());
        execution
    }

    /// Pages of two events, in the requested order.
    fn history(&self, params: &Value) -> Value {
        let end = if self.fails { "ExecutionFailed" } else { "ExecutionSucceeded" };
        let mut events = [
            json!({"id": 1, "previousEventId": 0, "timestamp": 10.0, "type": "ExecutionStarted"}),
            json!({"id": 2, "previousEventId": 0, "timestamp": 10.5, "type": "PassStateEntered",
                   "stateEnteredEventDetails": {"name": "Pack", "input": "{}"}}),
            json!({"id": 3, "previousEventId": 2, "timestamp": 11.5, "type": "PassStateExited",
                   "stateExitedEventDetails": {"name": "Pack", "output": "{}"}}),
            json!({"id": 4, "previousEventId": 3, "timestamp": 12.0, "type": end}),
        ];
        if params["reverseOrder"] == true {
            events.reverse();
        }
        match params["nextToken"].as_str() {
            None => json!({"events": events[..2], "nextToken": "second"}),
            Some(_) => json!({"events": events[2..]}),
        }
    }
}

fn validation(params: &Value) -> Value {
    let problem = |severity: &str, message: &str| json!({"severity": severity, "code": "CODE", "message": message, "location": "/States/Pack"});
    match params["definition"].as_str().unwrap() {
        text if text.contains("Nowhere") => {
            json!({"result": "FAIL", "diagnostics": [problem("ERROR", "there is no Nowhere"), problem("WARNING", "hm")]})
        }
        _ => json!({"result": "OK", "diagnostics": [problem("WARNING", "hm")]}),
    }
}

fn refusal(name: &str, message: &str) -> Response {
    answer(400, &json!({"__type": format!("com.amazonaws#{name}"), "message": message}))
}

async fn api(kind: Option<&str>, fails: bool) -> Fake {
    let definition = "{\"StartAt\":\"Pack\",\"States\":{\"Pack\":{\"Type\":\"Pass\",\"End\":true}}}";
    let workflow = kind.map(|kind| {
        json!({"name": "order", "type": kind, "status": "ACTIVE", "stateMachineArn": WORKFLOW,
               "creationDate": 10.0, "definition": definition})
    });
    let api = Api { workflow: Mutex::new(workflow), fails };
    Fake::start(move |seen| api.answer(seen)).await
}

async fn run(fake: &Fake, line: &[&str]) -> Ran {
    let flags = ["workflow", "--workflows-url", fake.url.as_str()];
    fake.run(&[&flags[..], line].concat()).await
}

fn targets(fake: &Fake) -> Vec<String> {
    fake.seen().iter().map(|seen| seen.target.replace("AWSStepFunctions.", "")).collect()
}

const YAML: &str = "StartAt: Pack\nStates:\n  Pack: {Type: Pass, Comment: x, End: true}\n";

#[tokio::test]
async fn deploy_creates_then_updates_then_leaves_alone() {
    let fake = api(None, false).await;
    let file = fake.file("order.yaml", YAML);
    let ran = run(&fake, &["deploy", &file]).await;
    assert_eq!(ran.stderr, "/States/Pack: warning: hm (CODE)\n");
    let out = ran.ok();
    assert!(out.starts_with(&format!("workflow order created (standard)\n  {WORKFLOW}\n")), "{out}");
    let created = fake.seen().iter().find(|seen| seen.target.ends_with("CreateStateMachine")).unwrap().json();
    let definition: String = created["definition"].as_str().unwrap().split_whitespace().collect();
    assert_eq!(
        definition,
        "{\"StartAt\":\"Pack\",\"States\":{\"Pack\":{\"Type\":\"Pass\",\"Comment\":\"x\",\"End\":true}}}"
    );
    assert!(run(&fake, &["deploy", &file]).await.ok().contains("order unchanged"));
    let other = fake.file("other.json", "{\"StartAt\": \"Z\", \"States\": {}}");
    let line = ["deploy", &other, "--name", "order", "-o", "json"];
    let deployed: Value = serde_json::from_str(&run(&fake, &line).await.ok()).unwrap();
    assert_eq!(deployed["change"], "updated");
    let error = run(&fake, &["deploy", &file, "--type", "express"]).await.failed();
    assert!(error.contains("workflow order is STANDARD"), "{error}");
}

#[tokio::test]
async fn deploy_lists_every_problem_and_sends_nothing() {
    let fake = api(None, false).await;
    let file = fake.file("order.yaml", YAML.replace("End: true", "Next: Nowhere"));
    let error = run(&fake, &["deploy", &file]).await.failed();
    let expected = format!(
        "/States/Pack: there is no Nowhere (CODE)\n/States/Pack: warning: hm (CODE)\n\
         /States/Pack/Next: Missing 'Next' target: Nowhere (MISSING_TRANSITION_TARGET)\n\
         error: {file} has 2 errors\n  nothing was deployed\n"
    );
    assert_eq!(error, expected);
    assert_eq!(targets(&fake), ["DescribeStateMachine", "ValidateStateMachineDefinition"]);
}

#[tokio::test]
async fn start_prints_the_arn() {
    let fake = api(Some("STANDARD"), false).await;
    let line = ["start", "order", "-d", "{\"item\": \"pen\"}", "--name", "e1"];
    assert_eq!(run(&fake, &line).await.ok(), format!("{EXECUTION}\n"));
    let sent = fake.seen().last().unwrap().json();
    assert_eq!(sent, json!({"stateMachineArn": WORKFLOW, "input": "{\"item\": \"pen\"}", "name": "e1"}));
    let error = run(&fake, &["start", "order", "--name", "taken"]).await.failed();
    assert!(
        error.contains("Execution Already Exists (ExecutionAlreadyExists)\n  give another --name"),
        "{error}"
    );
    let error = run(&fake, &["start", "nothing"]).await.failed();
    assert!(error.contains("there is no workflow nothing\n  see what there is"), "{error}");
}

#[tokio::test]
async fn follow_shows_states_and_the_end() {
    let fake = api(Some("STANDARD"), false).await;
    let expected = "    0.500s  > Pack  Pass\n    1.500s  < Pack  1.0s\nsucceeded after 2.0s\n\
                    {\n  \"b\": 1,\n  \"a\": 2\n}\n";
    assert_eq!(run(&fake, &["start", "order", "--follow"]).await.ok(), expected);
    let fake = api(Some("STANDARD"), true).await;
    let ran = run(&fake, &["start", "order", "--follow", "-o", "json"]).await;
    let (execution, code): (Value, i32) = (serde_json::from_str(&ran.stdout).unwrap(), ran.code);
    assert_eq!((execution["error"].as_str(), code), (Some("Sold.Out"), 1));
    assert!(ran.stderr.contains("> Pack  Pass\n"), "{}", ran.stderr);
}

#[tokio::test]
async fn express_workflows_are_run_to_their_end() {
    let fake = api(Some("EXPRESS"), true).await;
    let ran = run(&fake, &["start", "order"]).await;
    assert_eq!((ran.stdout, ran.code), (format!("{EXECUTION}\nfailed after 2.0s: Sold.Out: no pens\n"), 1));
    assert_eq!(targets(&fake), ["DescribeStateMachine", "StartSyncExecution"]);
}

#[tokio::test]
async fn history_and_lists() {
    let fake = api(Some("STANDARD"), false).await;
    let out = run(&fake, &["history", "order"]).await.ok();
    assert!(out.contains("3    1.500s   PassStateExited      Pack    output {}\n"), "{out}");
    let events = run(&fake, &["history", "order/e1", "-o", "json"]).await.ok();
    assert_eq!(serde_json::from_str::<Vec<Value>>(&events).unwrap().len(), 4);
    let out = run(&fake, &["list"]).await.ok();
    assert!(out.starts_with("NAME    TYPE       AGE\norder   Standard "), "{out}");
    let line = ["list", "order", "--status", "succeeded", "-o", "name"];
    assert_eq!(run(&fake, &line).await.ok(), "execution/order/e1\n");
    assert_eq!(fake.seen().last().unwrap().json()["statusFilter"], "SUCCEEDED");
    let out = run(&fake, &["describe", "order"]).await.ok();
    assert!(out.contains("Pack (start)   Pass") && out.contains("order/e1   Succeeded"), "{out}");
    assert!(run(&fake, &["describe", "order/e1"]).await.ok().contains("Status:    Succeeded\n"));
}

#[tokio::test]
async fn stop_and_delete_say_what_cannot_be() {
    let fake = api(Some("STANDARD"), false).await;
    let error = run(&fake, &["stop", "order"]).await.failed();
    assert!(error.contains("execution order/e1 has ended: it is SUCCEEDED"), "{error}");
    assert_eq!(run(&fake, &["delete", "order"]).await.ok(), "workflow order deleted\n");
    assert!(run(&fake, &["delete", "nothing"]).await.failed().contains("there is no workflow nothing"));
}

/// A server with the namespace `shop` and the workflow `shop.order`.
async fn shop() -> Fake {
    Fake::start(|seen| {
        let Some(operation) = seen.target.strip_prefix("AWSStepFunctions.") else {
            return (seen.path == "/api/v1/namespaces/shop").then(|| ok(&json!({"kind": "Namespace"})));
        };
        let machine = |name: &str| json!({"name": name, "type": "STANDARD", "creationDate": 10.0});
        let params = seen.json();
        Some(match operation {
            "ValidateStateMachineDefinition" => ok(&json!({"result": "OK", "diagnostics": []})),
            "DescribeStateMachine" if params["stateMachineArn"].as_str()?.ends_with(":shop.order") => {
                ok(&json!({"name": "shop.order", "type": "STANDARD", "definition": "{}"}))
            }
            "DescribeStateMachine" => refusal("StateMachineDoesNotExist", ""),
            "ListStateMachines" => ok(&json!({"stateMachines": [machine("order"), machine("shop.order")]})),
            "DescribeExecution" => ok(&json!({"status": "RUNNING", "executionArn": params["executionArn"]})),
            "GetExecutionHistory" => ok(&json!({"events": []})),
            _ => ok(
                &json!({"executionArn": "a", "executions": [{"executionArn": "a:execution:shop.order:e1"}]}),
            ),
        })
    })
    .await
}

#[tokio::test]
async fn plain_names_stand_in_the_namespace() {
    let fake = shop().await;
    let (arn, execution) =
        (WORKFLOW.replace(":order", ":shop.order"), EXECUTION.replace(":order", ":shop.order"));
    let file = fake.file("order.yaml", YAML);
    let new = fake.file("new.yaml", YAML);
    for (line, operation, field, expected) in [
        (&["deploy", &file][..], "UpdateStateMachine", "stateMachineArn", arn.as_str()),
        (&["deploy", &new], "CreateStateMachine", "name", "shop.new"),
        (&["deploy", &file, "--name", "other.order"], "CreateStateMachine", "name", "other.order"),
        (&["start", "order"], "StartExecution", "stateMachineArn", &arn),
        (&["describe", "order/e1"], "DescribeExecution", "executionArn", &execution),
        (&["describe", "order.e1"], "DescribeExecution", "executionArn", &execution),
        (
            &["describe", WORKFLOW.replace(":order", ":shop.order").as_str()],
            "ListExecutions",
            "stateMachineArn",
            &arn,
        ),
        (&["history", "order/e1"], "GetExecutionHistory", "executionArn", &execution),
        (&["list", "order"], "ListExecutions", "stateMachineArn", &arn),
        (&["stop", "order/e1"], "StopExecution", "executionArn", &execution),
        (&["delete", "order"], "DeleteStateMachine", "stateMachineArn", &arn),
    ] {
        run(&fake, &[line, &["-n", "shop"]].concat()).await.ok();
        let last = fake.seen().last().unwrap().clone();
        assert!(last.target.ends_with(operation), "{line:?}: {}", last.target);
        assert_eq!(last.json()[field], expected, "{line:?}");
    }
    assert_eq!(run(&fake, &["list", "-o", "name", "-n", "shop"]).await.ok(), "workflow/shop.order\n");
    assert_eq!(run(&fake, &["list", "-o", "name"]).await.ok(), "workflow/order\nworkflow/shop.order\n");
    // As in other commands, the default namespace is the kubeconfig's.
    let kubeconfig = crate::fake::kubeconfig(&fake.url).replace("user: u}", "user: u, namespace: shop}");
    fake.file("data/kubeconfig", kubeconfig);
    assert_eq!(run(&fake, &["list", "-o", "name"]).await.ok(), "workflow/shop.order\n");
}

#[tokio::test]
async fn deploy_refuses_what_would_be_elsewhere() {
    let fake = shop().await;
    let file = fake.file("Order_2.yaml", YAML);
    let dotted = fake.file("a.b.yaml", YAML);
    for (line, expected) in [
        (&["deploy", file.as_str(), "-n", "shop"][..], "shop.Order_2 cannot be an object in namespace shop"),
        (&["deploy", &dotted, "-n", "shop"], "a.b is not a name in namespace shop: it has a dot"),
        (&["deploy", &file, "--name", "order", "-n", "nosuch"], "there is no namespace nosuch"),
    ] {
        let error = run(&fake, line).await.failed();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(targets(&fake), [""], "nothing was asked of workflows");
}

#[tokio::test]
async fn what_is_no_definition_is_told_before_anything_is_sent() {
    let fake = api(None, false).await;
    let folder = fake.path("").display().to_string();
    let manifest = fake.file("k.yaml", "apiVersion: mayfly.dev/v1\nkind: Workflow\nmetadata: {name: k}\n");
    let two = fake.file("two.yaml", format!("{YAML}---\n{YAML}"));
    let component =
        b"\0asm\x0d\0\x01\0\x05\x03\x01\x01\0\x0b\x26\x01\0\x20wasi:http/incoming-handler@0.2.0\x05\0\0";
    fake.file("hello.wasm", component);
    let task = "StartAt: A\nStates:\n  A:\n    Type: Task\n    Resource: arn:aws:states:::job:run.sync\n    \
                Parameters: {Component: hello.wasm}\n    End: true\n";
    let job = fake.file("job.yaml", task);
    for (file, expected) in [
        (&folder, "is a folder\n  name the file".to_owned()),
        (
            &manifest,
            format!(
                "is a manifest of kind Workflow, not a state machine\n  apply it: mayfly apply -f {manifest}"
            ),
        ),
        (&two, "a second document begins here".to_owned()),
        (&job, "hello.wasm is a function (wasi:http/incoming-handler@0.2)".to_owned()),
    ] {
        let error = run(&fake, &["deploy", file]).await.failed();
        assert!(error.contains(&expected), "{error}");
    }
    let error = run(&fake, &["start", "order", "-d", "@"]).await.failed();
    assert_eq!(error, "error: -d @ names no file\n  -d @FILE reads a file, -d '{}' is the JSON itself\n");
    assert_eq!(targets(&fake), Vec::<String>::new());
}

#[tokio::test]
async fn a_definition_is_no_test_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("welcome.yaml"), YAML).unwrap();
    let mut command = mayfly(folder.path());
    command.args(["workflow", "test", "welcome.yaml"]);
    let told = finish(command, b"").await;
    let expected = "welcome.yaml is a definition, not a test file";
    assert!(told.code == 1 && told.stdout.contains(expected), "{}{}", told.stdout, told.stderr);
    assert!(told.stdout.contains("mayfly workflow test --definition welcome.yaml"), "{}", told.stdout);
}

#[tokio::test]
async fn without_a_server_every_place_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = mayfly(folder.path());
    command.args(["workflow", "list"]);
    let endpoints = folder.path().join("home/.local/state/mayfly/endpoints.json");
    let expected = format!(
        "error: no server with workflows was found\n  looked at:\n    --workflows-url: not given\n    \
         MAYFLY_WORKFLOWS_URL: not set\n    {}: no such file\n  start one with: mayfly up\n",
        endpoints.display()
    );
    assert_eq!(finish(command, b"").await.failed(), expected);
}
