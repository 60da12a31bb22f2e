//! The API at its edges: the protocol, requests that are refused, tests of single states. One helper, many
//! cases; what needs AWS's word for it is in the recordings.

mod arns;
mod named;
mod runs;
#[path = "../stand_ins/mod.rs"]
mod stand_ins;
mod words;
mod world;

use serde_json::{Value, json};

use world::StepFunctionsRouter;

const ROLE: &str = "arn:aws:iam::000000000000:role/r";
const PREFIX: &str = "arn:aws:states:us-east-1:000000000000";

fn pass() -> String {
    json!({"StartAt": "S", "States": {"S": {"Type": "Pass", "End": true}}}).to_string()
}

#[tokio::test]
async fn the_protocol_answers_as_aws_does() {
    let world = StepFunctionsRouter::new().await;
    let coral = "com.amazon.coral.service#";
    let cases = [
        (None, "{}", 400, format!("{coral}UnknownOperationException")),
        (Some("AWSStepFunctions.Nonsense"), "{}", 400, format!("{coral}UnknownOperationException")),
        (Some("DynamoDB_20120810.ListTables"), "{}", 400, format!("{coral}UnknownOperationException")),
        (Some("AWSStepFunctions.ListActivities"), "{", 400, format!("{coral}SerializationException")),
        (Some("AWSStepFunctions.ListActivities"), "[]", 400, format!("{coral}SerializationException")),
        (
            Some("AWSStepFunctions.ListActivities"),
            r#"{"maxResults": "x"}"#,
            400,
            format!("{coral}SerializationException"),
        ),
        (
            Some("AWSStepFunctions.ListActivities"),
            r#"{"maxResults": 1001}"#,
            400,
            "com.amazon.coral.validate#ValidationException".into(),
        ),
    ];
    for (target, body, status, kind) in cases {
        let (found, headers, answer) = world.post(target, body).await;
        assert_eq!((found, answer["__type"].as_str()), (status, Some(kind.as_str())), "{target:?} {body}");
        assert_eq!(headers["content-type"], "application/x-amz-json-1.0");
        assert!(headers.contains_key("x-amzn-requestid"));
    }
    let (status, _, answer) = world.post(Some("AWSStepFunctions.ListActivities"), "").await;
    assert_eq!((status, answer), (200, json!({"activities": []})));
}

#[tokio::test]
async fn an_answer_waits_for_the_end_if_asked_to() {
    let world = StepFunctionsRouter::new().await;
    let machine = async |name: &str, kind: &str, seconds: u32| {
        let states = json!({"W": {"Type": "Wait", "Seconds": seconds, "End": true}});
        let definition = json!({"StartAt": "W", "States": states}).to_string();
        let params = json!({"name": name, "type": kind, "roleArn": ROLE, "definition": definition});
        world.call("CreateStateMachine", params).await["stateMachineArn"].clone()
    };
    let describe = |arn: &Value| ("DescribeExecution", json!({"executionArn": arn}));
    let wait = async |(operation, params): (&str, Value), seconds: &str| {
        world.wait(operation, params, seconds).await
    };

    let short = machine("short", "STANDARD", 1).await;
    let started = world.call("StartExecution", json!({"stateMachineArn": short, "input": "[1]"})).await;
    let arn = &started["executionArn"];
    let (status, ended) = wait(describe(arn), "60").await;
    assert_eq!((status, &ended["status"], &ended["output"]), (200, &json!("SUCCEEDED"), &json!("[1]")));
    assert_eq!(ended, world.call("DescribeExecution", json!({"executionArn": arn})).await);
    // It is asked again after the end.
    assert_eq!(wait(describe(arn), "60").await, (200, ended));
    let (status, ended) =
        wait(("StartExecution", json!({"stateMachineArn": short, "input": "[2]"})), "60").await;
    assert_eq!((status, &ended["status"], &ended["output"]), (200, &json!("SUCCEEDED"), &json!("[2]")));

    // What does not end in time is shown as it is; what cannot be described was started all the same.
    let long = machine("long", "STANDARD", 3600).await;
    let (status, running) = wait(("StartExecution", json!({"stateMachineArn": long})), "0").await;
    assert_eq!((status, &running["status"]), (200, &json!("RUNNING")));
    let express = machine("express", "EXPRESS", 0).await;
    let (status, begun) = wait(("StartExecution", json!({"stateMachineArn": express})), "60").await;
    assert_eq!((status, begun["status"].as_str(), begun["executionArn"].is_string()), (200, None, true));

    for (asked, seconds, code) in [
        (describe(arn), "61", "ValidationException"),
        (describe(arn), "soon", "ValidationException"),
        (describe(&json!("nonsense")), "1", "InvalidArn"),
        (describe(&json!(format!("{PREFIX}:execution:short:nobody"))), "1", "ExecutionDoesNotExist"),
    ] {
        let (status, answer) = wait(asked.clone(), seconds).await;
        let kind = answer["__type"].as_str().unwrap_or_default();
        assert!(status == 400 && kind.ends_with(code), "{asked:?} {seconds}: {status} {answer}");
    }
}

#[tokio::test]
async fn region_and_account_come_from_the_signature() {
    let world = StepFunctionsRouter::new().await;
    let made = world.signed("CreateActivity", &json!({"name": "a"}), "123456789012", "eu-west-1").await;
    assert_eq!(made["activityArn"], "arn:aws:states:eu-west-1:123456789012:activity:a");
    let there = world.signed("ListActivities", &json!({}), "123456789012", "eu-west-1").await;
    assert_eq!(there["activities"].as_array().map(Vec::len), Some(1));
    assert_eq!(world.call("ListActivities", json!({})).await["activities"], json!([]));
}

/// Machines of one name may exist in several regions, and so may their executions.
#[tokio::test]
async fn an_execution_has_the_region_and_the_account_of_its_machine() {
    let world = StepFunctionsRouter::new().await;
    let items = json!({"StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}},
        "ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"}});
    let map = json!({"Type": "Map", "Label": "l", "ItemProcessor": items, "End": true});
    let definition = json!({"StartAt": "M", "States": {"M": map}}).to_string();
    let there = async |operation: &str, params: Value| {
        world.signed(operation, &params, "123456789012", "eu-west-1").await
    };
    let create = json!({"name": "m", "definition": definition, "roleArn": ROLE});
    let here = world.call("CreateStateMachine", create.clone()).await["stateMachineArn"].clone();
    let other = there("CreateStateMachine", create).await["stateMachineArn"].clone();
    let start = |machine: &Value| json!({"stateMachineArn": machine, "name": "x", "input": "[1]"});
    let prefix = "arn:aws:states:eu-west-1:123456789012";
    world.call("StartExecution", start(&here)).await;
    let arn = there("StartExecution", start(&other)).await["executionArn"].clone();
    assert_eq!(arn, format!("{prefix}:execution:m:x"));

    let (_, ended) = world.wait("DescribeExecution", json!({"executionArn": arn}), "60").await;
    assert_eq!((&ended["status"], &ended["stateMachineArn"]), (&json!("SUCCEEDED"), &other), "{ended}");
    let runs = there("ListMapRuns", json!({"executionArn": arn})).await;
    let run = &runs["mapRuns"][0]["mapRunArn"];
    assert!(run.as_str().is_some_and(|run| run.starts_with(&format!("{prefix}:mapRun:m/l:"))), "{runs}");
    let children = there("ListExecutions", json!({"mapRunArn": run})).await;
    let child = &children["executions"][0];
    let of_machine = format!("{prefix}:stateMachine:m/l");
    assert_eq!(child["stateMachineArn"], of_machine, "{children}");
    let child = child["executionArn"].as_str().expect("an ARN");
    assert!(child.starts_with(&format!("{prefix}:execution:m/l:")), "{child}");
}

#[tokio::test]
async fn what_is_refused_says_why() {
    let world = StepFunctionsRouter::new().await;
    let arn = format!("{PREFIX}:stateMachine:m");
    world
        .call(
            "CreateStateMachine",
            json!({"name": "m", "definition": pass(), "roleArn": ROLE, "publish": true}),
        )
        .await;
    let route = |version: &str, weight: u32| json!({"stateMachineVersionArn": version, "weight": weight});
    let (v1, v2) = (format!("{arn}:1"), format!("{arn}:2"));
    let alias = |routes: Value| json!({"name": "live", "routingConfiguration": routes});
    let log = |level: &str| json!({"name": "l", "definition": pass(), "roleArn": ROLE, "loggingConfiguration": {"level": level}});
    let cases = [
        (
            "CreateStateMachineAlias",
            alias(json!([route(&v1, 99)])),
            "ValidationException: Sum of routing configuration weights must equal 100. Received: [99]".to_owned(),
        ),
        (
            "CreateStateMachineAlias",
            alias(json!([route(&v1, 50), route(&v1, 50)])),
            format!(
                "ValidationException: Routing configuration must contain distinct state machine version ARNs. \
                 Received: [{v1}, {v1}]"
            ),
        ),
        (
            "CreateStateMachineAlias",
            alias(json!([route(&arn, 50), route(&arn, 50)])),
            format!(
                "ValidationException: Routing configuration must contain distinct state machine version ARNs. \
                 Received: [{arn}, {arn}]"
            ),
        ),
        (
            "CreateStateMachineAlias",
            alias(json!([route(&arn, 99)])),
            "ValidationException: Sum of routing configuration weights must equal 100. Received: [99]".into(),
        ),
        (
            "CreateStateMachineAlias",
            alias(json!([route(&v2, 100)])),
            "ResourceNotFound: Request references a resource that does not exist.".into(),
        ),
        (
            "CreateStateMachine",
            json!({"name": "x", "definition": pass(), "roleArn": ROLE, "versionDescription": "v"}),
            "ValidationException: Version description can only be set when publish is true".into(),
        ),
        (
            "CreateStateMachine",
            json!({"name": "x", "definition": pass(), "roleArn": "r"}),
            "InvalidArn: Invalid Role Arn: 'r'".into(),
        ),
        (
            "CreateStateMachine",
            log("ALL"),
            "InvalidLoggingConfiguration: Invalid Logging Configuration: Must specify exactly one Log Destination."
                .into(),
        ),
        (
            "CreateStateMachine",
            json!({"name": "l", "definition": pass(), "roleArn": ROLE,
                "loggingConfiguration": {"level": "ALL", "destinations": [{}]}}),
            "InvalidLoggingConfiguration: Invalid Logging Configuration: Must specify exactly one Log Destination."
                .into(),
        ),
        (
            "CreateStateMachine",
            json!({"name": "x".repeat(81), "definition": pass(), "roleArn": ROLE}),
            format!(
                "ValidationException: 1 validation error detected: Value '{}' at 'name' failed to satisfy \
                 constraint: Member must have length less than or equal to 80",
                "x".repeat(81)
            ),
        ),
        (
            "StartSyncExecution",
            json!({"stateMachineArn": arn}),
            "StateMachineTypeNotSupported: This operation is not supported by this type of state machine".into(),
        ),
        (
            "StartExecution",
            json!({"stateMachineArn": format!("{arn}:9")}),
            format!("StateMachineDoesNotExist: State Machine Does Not Exist: '{arn}:9'"),
        ),
        (
            "StartExecution",
            json!({"stateMachineArn": arn, "name": "a b"}),
            "InvalidName: Invalid Name: 'a b'".into(),
        ),
        (
            "DescribeExecution",
            json!({"executionArn": format!("{PREFIX}:execution:m:e")}),
            format!("ExecutionDoesNotExist: Execution Does Not Exist: '{PREFIX}:execution:m:e'"),
        ),
        (
            "DescribeExecution",
            json!({"executionArn": format!("{PREFIX}:express:m:e:f")}),
            "InvalidArn: Invalid Arn: 'Resource type not valid in this context: express'".into(),
        ),
        (
            "ListTagsForResource",
            json!({"resourceArn": format!("{arn}x")}),
            format!("ResourceNotFound: Resource not found: '{arn}x'"),
        ),
        (
            "GetActivityTask",
            json!({"activityArn": format!("{PREFIX}:activity:none")}),
            format!("ActivityDoesNotExist: Activity Does Not Exist: '{PREFIX}:activity:none'"),
        ),
        ("SendTaskHeartbeat", json!({"taskToken": "made-up"}), "InvalidToken: Invalid Token: 'Invalid token'".into()),
        (
            "DescribeMapRun",
            json!({"mapRunArn": format!("{PREFIX}:mapRun:m/l:u")}),
            "ResourceNotFound: Request references a resource that does not exist.".into(),
        ),
    ];
    for (operation, params, wanted) in cases {
        assert_eq!(world.refused(operation, params.clone()).await, wanted, "{operation} {params}");
    }
}

#[tokio::test]
async fn a_machine_is_described_with_what_it_was_made_of() {
    let world = StepFunctionsRouter::new().await;
    let logs = json!([{"cloudWatchLogsLogGroup": {"logGroupArn": "arn:aws:logs:us-east-1:0:log-group:g:*"}}]);
    let made = json!({
        "name": "m", "definition": pass(), "roleArn": ROLE, "type": "EXPRESS",
        "loggingConfiguration": {"level": "ERROR", "destinations": logs},
        "tracingConfiguration": {"enabled": true},
        "encryptionConfiguration": {"type": "CUSTOMER_MANAGED_KMS_KEY", "kmsKeyId": "key"},
        "tags": [{"key": "a", "value": "b"}],
    });
    let arn = world.call("CreateStateMachine", made).await["stateMachineArn"].clone();
    let mut found = world.call("DescribeStateMachine", json!({"stateMachineArn": arn})).await;
    assert!(found["creationDate"].is_f64());
    found["creationDate"] = json!(0);
    let wanted = json!({
        "stateMachineArn": arn, "name": "m", "status": "ACTIVE", "type": "EXPRESS", "creationDate": 0,
        "definition": pass(), "roleArn": ROLE,
        "loggingConfiguration": {"level": "ERROR", "includeExecutionData": false, "destinations": logs},
        "tracingConfiguration": {"enabled": true},
        "encryptionConfiguration":
            {"type": "CUSTOMER_MANAGED_KMS_KEY", "kmsKeyId": "key", "kmsDataKeyReusePeriodSeconds": 300},
    });
    assert_eq!(found, wanted);
    let tags = world.call("ListTagsForResource", json!({"resourceArn": arn})).await;
    assert_eq!(tags, json!({"tags": [{"key": "a", "value": "b"}]}));
}

#[tokio::test]
async fn pages_of_versions_are_newest_first() {
    let world = StepFunctionsRouter::new().await;
    let arn = format!("{PREFIX}:stateMachine:m");
    world
        .call(
            "CreateStateMachine",
            json!({"name": "m", "definition": pass(), "roleArn": ROLE, "publish": true}),
        )
        .await;
    for number in 0..4 {
        let definition =
            json!({"StartAt": "S", "States": {"S": {"Type": "Pass", "Result": number, "End": true}}});
        let update = json!({"stateMachineArn": arn, "definition": definition.to_string(), "publish": true});
        world.call("UpdateStateMachine", update).await;
    }
    let mut numbers = Vec::new();
    let mut params = json!({"stateMachineArn": arn, "maxResults": 2});
    loop {
        let page = world.call("ListStateMachineVersions", params.clone()).await;
        for version in page["stateMachineVersions"].as_array().expect("a list") {
            numbers.push(
                version["stateMachineVersionArn"].as_str().expect("text").replace(&format!("{arn}:"), ""),
            );
        }
        let Some(token) = page.get("nextToken") else { break };
        params["nextToken"] = token.clone();
    }
    assert_eq!(numbers, ["5", "4", "3", "2", "1"]);
    params["stateMachineArn"] = json!(format!("{PREFIX}:stateMachine:other"));
    assert_eq!(
        world.refused("ListStateMachineVersions", params).await,
        "InvalidToken: Invalid Token: 'Invalid token'"
    );
}

#[tokio::test]
async fn states_are_tested_alone() {
    let world = StepFunctionsRouter::new().await;
    let lambda = |more: Value| {
        let mut task = json!({"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke", "End": true});
        task["Parameters"] = json!({"FunctionName": "f"});
        task.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
        task.to_string()
    };
    let error = json!({"errorOutput": {"error": "E", "cause": "C"}});
    let retry = json!([{"ErrorEquals": ["E"], "IntervalSeconds": 3, "BackoffRate": 2, "MaxAttempts": 2}]);
    let catch = json!([{"ErrorEquals": ["X"], "Next": "A"},
        {"ErrorEquals": ["States.ALL"], "ResultPath": "$.e", "Next": "B"}]);
    let choice = json!({"Type": "Choice", "Default": "D",
        "Choices": [{"Variable": "$.n", "NumericGreaterThan": 1, "Next": "Many"}]});
    let cases = [
        (
            json!({"definition": lambda(json!({"Retry": retry})), "mock": error,
                   "stateConfiguration": {"retrierRetryCount": 1}, "inspectionLevel": "DEBUG"}),
            json!({"status": "RETRIABLE", "error": "E", "cause": "C",
                   "inspectionData": {"input": "{}", "afterInputPath": "{}", "afterParameters": "{\"FunctionName\": \"f\"}",
                        "errorDetails": {"retryIndex": 0, "retryBackoffIntervalSeconds": 6}}}),
        ),
        (
            json!({"definition": lambda(json!({"Retry": retry, "Catch": catch})), "input": "{\"a\": 1}",
                   "mock": error, "stateConfiguration": {"retrierRetryCount": 2}}),
            json!({"status": "CAUGHT_ERROR", "error": "E", "cause": "C", "nextState": "B",
                   "output": "{\"a\": 1, \"e\": {\"Error\": \"E\", \"Cause\": \"C\"}}"}),
        ),
        (
            json!({"definition": choice.to_string(), "input": "{\"n\": 2}"}),
            json!({"status": "SUCCEEDED", "output": "{\"n\": 2}", "nextState": "Many"}),
        ),
        (
            json!({"definition": choice.to_string(), "input": "{\"n\": 1}", "inspectionLevel": "DEBUG"}),
            json!({"status": "SUCCEEDED", "output": "{\"n\": 1}", "nextState": "D",
                   "inspectionData": {"input": "{\"n\": 1}", "afterInputPath": "{\"n\": 1}"}}),
        ),
        (
            json!({"definition": json!({"Type": "Pass", "QueryLanguage": "JSONata", "Assign": {"x": "{% $y + 1 %}"},
                        "Output": "{% $y %}", "End": true}).to_string(),
                   "variables": "{\"y\": 1}", "inspectionLevel": "DEBUG"}),
            json!({"status": "SUCCEEDED", "output": "1",
                   "inspectionData": {"input": "{}", "variables": "{\"y\": 1, \"x\": 2}"}}),
        ),
        (
            json!({"definition": json!({"Type": "Map", "ItemProcessor": {"StartAt": "I", "ProcessorConfig":
                        {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
                        "States": {"I": {"Type": "Pass", "End": true}}},
                        "ToleratedFailureCount": 1, "End": true}).to_string(),
                   "input": "[1, 2, 3]", "mock": {"result": "[1, 2, 3]"},
                   "stateConfiguration": {"mapIterationFailureCount": 2}}),
            json!({"status": "FAILED", "error": "States.ExceedToleratedFailureThreshold",
                   "cause": "The specified tolerated failure threshold was exceeded"}),
        ),
        (
            json!({"definition": json!({"Type": "Wait", "SecondsPath": "$.s", "End": true}).to_string(),
                   "input": "{\"s\": -1}"}),
            json!({"status": "FAILED", "error": "States.Runtime",
                   "cause": "The SecondsPath parameter references a negative value: $.s == -1"}),
        ),
        (
            json!({"definition": json!({"Type": "Wait", "QueryLanguage": "JSONata", "Seconds": "{% 1 + 1 %}",
                        "Next": "N"}).to_string()}),
            json!({"status": "SUCCEEDED", "output": "{}", "nextState": "N"}),
        ),
    ];
    for (params, wanted) in cases {
        assert_eq!(world.call("TestState", params.clone()).await, wanted, "{params}");
    }
    let context = json!({"definition": json!({"Type": "Succeed"}).to_string(), "context": "{}"});
    assert!(
        world
            .refused("TestState", context)
            .await
            .starts_with("ValidationException: TestState does not support")
    );
}
