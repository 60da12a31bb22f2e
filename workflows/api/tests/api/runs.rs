//! What executions tell when they fail: names of errors, causes, orders of events. Each rule names where it was
//! learned; "remembered" means that no source backs the wording.

use serde_json::{Value, json};

use crate::world::StepFunctionsRouter;
use crate::{PREFIX, ROLE};

/// A machine of one state that ends.
fn alone(state: Value) -> Value {
    let mut state = state;
    state["End"] = json!(true);
    json!({"StartAt": "S", "States": {"S": state}})
}

fn each(more: Value) -> Value {
    let mut map = json!({"Type": "Map",
        "ItemProcessor": {"StartAt": "I", "States": {"I": {"Type": "Pass", "End": true}}}});
    map.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    alone(map)
}

/// Error and cause of an express execution, without what every cause begins with.
async fn failure(
    world: &StepFunctionsRouter,
    name: usize,
    definition: &Value,
    input: &Value,
) -> (String, String) {
    let machine = json!({"name": format!("m{name}"), "definition": definition.to_string(), "roleArn": ROLE,
        "type": "EXPRESS"});
    let arn = world.call("CreateStateMachine", machine).await["stateMachineArn"].clone();
    let ended =
        world.call("StartSyncExecution", json!({"stateMachineArn": arn, "input": input.to_string()})).await;
    let text = |field: &str| ended[field].as_str().unwrap_or_default().to_owned();
    let cause = text("cause");
    let cause = cause
        .strip_prefix("An error occurred while executing the state 'S' (entered at the event id #2). ")
        .unwrap_or(&cause);
    (text("error"), cause.to_owned())
}

#[tokio::test]
async fn failures_are_told_in_awss_words() {
    let world = StepFunctionsRouter::new().await;
    let runtime = "States.Runtime";
    let choice = |variable: &str| json!({"Type": "Choice", "Choices": [{"Variable": variable, "NumericEquals": 1, "Next": "E"}]});
    let choosing = json!({"StartAt": "S", "States": {"S": choice("$.n"), "E": {"Type": "Succeed"}}});
    let jsonata = json!({"StartAt": "S", "QueryLanguage": "JSONata", "States": {"E": {"Type": "Succeed"}, "S": {
        "Type": "Choice", "Default": "E",
        "Choices": [{"Condition": "{% false %}", "Next": "E"},
            {"Condition": "{% true %}", "Output": {"a": "{% $nope() %}"}, "Next": "E"}]}}});
    let cases = [
        // floci-io/floci#3167
        (
            choosing,
            json!({"n": 2}),
            runtime,
            "Failed to transition out of the state. The state does not point to a next state.",
        ),
        // as LocalStack has it
        (
            each(json!({"MaxConcurrencyPath": "$.n", "ItemsPath": "$.i"})),
            json!({"n": -1, "i": []}),
            runtime,
            "Expected non-negative integer for MaxConcurrency, got '-1' instead.",
        ),
        // floci-io/floci#3731: the text of a number is one; that of no number is not.
        (each(json!({"MaxConcurrencyPath": "$.n", "ItemsPath": "$.i"})), json!({"n": "2", "i": [1]}), "", ""),
        (
            each(json!({"MaxConcurrencyPath": "$.n", "ItemsPath": "$.i"})),
            json!({"n": "two", "i": []}),
            runtime,
            "The MaxConcurrencyPath field refers to value \"two\" which is not a valid integer: $.n",
        ),
        // remembered
        (
            each(json!({"QueryLanguage": "JSONata", "Items": "{% 1 %}"})),
            json!({}),
            "States.QueryEvaluationError",
            "The JSONata expression '1' specified for the field 'Items' returned an unexpected result type. \
             Expected 'array', but was 'number' for value: 1",
        ),
        (
            jsonata,
            json!({}),
            "States.QueryEvaluationError",
            "The JSONata expression '$nope()' specified for the field 'Choices[1]/Output/a' threw an error during \
             evaluation. T1006: Attempted to invoke a non-function",
        ),
    ];
    let wait = |fields: Value| {
        let mut state = json!({"Type": "Wait", "QueryLanguage": "JSONata", "End": true});
        state.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        json!({"StartAt": "S", "States": {"S": state}})
    };
    let query = "States.QueryEvaluationError";
    let evaluated = [
        (
            wait(json!({"Seconds": "{% 'a' %}"})),
            query,
            "The JSONata expression ''a'' specified for the field 'Seconds' returned an unexpected result type. \
             Expected 'number', but was 'string' for value: \"a\"",
        ),
        (
            wait(json!({"Seconds": "{% 1.5 %}"})),
            query,
            "The Seconds field cannot be parsed as an integer: 1.5",
        ),
        (wait(json!({"Seconds": "{% -1 %}"})), query, "Seconds must be between 0 and 99999999 but was: -1"),
        (
            wait(json!({"Timestamp": "{% '2016-13-05T21:29:29Z' %}"})),
            query,
            "The Timestamp parameter does not reference a valid ISO-8601 extended offset date-time format string: \
             '2016-13-05T21:29:29Z' == 2016-13-05T21:29:29Z",
        ),
        (
            each(json!({"QueryLanguage": "JSONata", "Items": [], "MaxConcurrency": "{% -1 %}"})),
            query,
            "Expected non-negative integer for MaxConcurrency, got '-1' instead.",
        ),
    ];
    let evaluated = evaluated.map(|(definition, error, cause)| (definition, json!({}), error, cause));
    for (name, (definition, input, error, cause)) in cases.iter().chain(&evaluated).enumerate() {
        let found = failure(&world, name, definition, input).await;
        assert_eq!(found, ((*error).to_owned(), (*cause).to_owned()), "{definition} {input}");
    }
}

/// Types of an execution's events, each with its own number and that of the event before it.
async fn events(world: &StepFunctionsRouter, name: &str, definition: &Value) -> Vec<(String, u64, u64)> {
    let machine = json!({"name": name, "definition": definition.to_string(), "roleArn": ROLE});
    world.call("CreateStateMachine", machine).await;
    let machine = format!("{PREFIX}:stateMachine:{name}");
    let arn = world.call("StartExecution", json!({"stateMachineArn": machine})).await["executionArn"].clone();
    let (_, ended) = world.wait("DescribeExecution", json!({"executionArn": arn}), "60").await;
    assert_ne!(ended["status"], "RUNNING", "{name} does not end");
    let found = world.call("GetExecutionHistory", json!({"executionArn": arn})).await;
    let number = |event: &Value, field: &str| event[field].as_u64().unwrap_or_default();
    let event = |event: &Value| {
        let kind = event["type"].as_str().unwrap_or_default().to_owned();
        (kind, number(event, "id"), number(event, "previousEventId"))
    };
    found["events"].as_array().into_iter().flatten().map(event).collect()
}

fn types(events: &[(String, u64, u64)]) -> Vec<&str> {
    events.iter().map(|(kind, _, _)| kind.as_str()).collect()
}

/// `States.Runtime` cannot be caught or retried, so no part is told as failed (the recordings of failing parts
/// of a Map and a Parallel).
#[tokio::test]
async fn a_runtime_error_in_a_part_ends_the_execution_at_once() {
    let world = StepFunctionsRouter::new().await;
    let missing = json!({"Type": "Pass", "InputPath": "$.no", "End": true});
    let parallel =
        alone(json!({"Type": "Parallel", "Branches": [{"StartAt": "B", "States": {"B": missing}}]}));
    let map = alone(json!({"Type": "Map", "ItemProcessor": {"StartAt": "B", "States": {"B": missing}}}));
    let found = events(&world, "parallel", &parallel).await;
    assert_eq!(
        types(&found),
        [
            "ExecutionStarted",
            "ParallelStateEntered",
            "ParallelStateStarted",
            "PassStateEntered",
            "ExecutionFailed"
        ]
    );
    let mut map = map;
    map["StartAt"] = json!("I");
    map["States"]["I"] = json!({"Type": "Pass", "Result": [1], "Next": "S"});
    let found = events(&world, "map", &map).await;
    assert_eq!(
        types(&found)[3..],
        ["MapStateEntered", "MapStateStarted", "MapIterationStarted", "PassStateEntered", "ExecutionFailed"]
    );
}

/// The parts beside one that failed are told as aborted (AWS's list of event types; their order is remembered).
#[tokio::test]
async fn parts_beside_a_failed_one_are_told_as_aborted() {
    let world = StepFunctionsRouter::new().await;
    let fail = json!({"StartAt": "F", "States": {"F": {"Type": "Fail", "Error": "E"}}});
    let wait = json!({"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 600, "End": true}}});
    let parallel = alone(json!({"Type": "Parallel", "Branches": [wait, fail]}));
    let found = events(&world, "parallel", &parallel).await;
    let kinds = types(&found);
    for (kind, times) in [("WaitStateAborted", 1), ("ParallelStateFailed", 1), ("ExecutionFailed", 1)] {
        assert_eq!(kinds.iter().filter(|found| **found == kind).count(), times, "{kinds:?}");
    }
    let choice = json!({"StartAt": "C", "States": {
        "C": {"Type": "Choice", "Default": "W", "Choices": [{"Variable": "$", "NumericEquals": 1, "Next": "F"}]},
        "F": {"Type": "Fail", "Error": "E"},
        "W": {"Type": "Wait", "Seconds": 600, "End": true}}});
    let map = json!({"StartAt": "I", "States": {
        "I": {"Type": "Pass", "Result": [0, 1], "Next": "S"},
        "S": {"Type": "Map", "ItemProcessor": choice, "End": true}}});
    let found = events(&world, "map", &map).await;
    let kinds = types(&found);
    for (kind, times) in [
        ("WaitStateAborted", 1),
        ("MapIterationAborted", 1),
        ("MapIterationFailed", 1),
        ("MapStateFailed", 1),
    ] {
        assert_eq!(kinds.iter().filter(|found| **found == kind).count(), times, "{kinds:?}");
    }
    for (place, (_, id, _)) in found.iter().enumerate() {
        assert_eq!(*id, place as u64 + 1, "events are numbered without gaps");
    }
}

/// A timed out execution names its error and follows no event (the recordings of `TimeoutSeconds`).
#[tokio::test]
async fn a_timed_out_execution_follows_nothing() {
    let world = StepFunctionsRouter::new().await;
    let mut machine = alone(json!({"Type": "Wait", "Seconds": 600}));
    machine["TimeoutSeconds"] = json!(1);
    let found = events(&world, "slow", &machine).await;
    let (kind, _, previous) = found.last().expect("events");
    assert_eq!((kind.as_str(), *previous), ("ExecutionTimedOut", 0));
}

#[tokio::test]
async fn a_mock_goes_without_revealed_secrets() {
    let world = StepFunctionsRouter::new().await;
    let task = json!({"Type": "Task", "Resource": "arn:aws:states:::http:invoke", "End": true,
        "Parameters": {"ApiEndpoint": "https://example.com", "Method": "GET",
            "Authentication": {"ConnectionArn": "arn:aws:events:us-east-1:000000000000:connection/c/i"}}});
    let params = json!({"definition": task.to_string(), "inspectionLevel": "TRACE", "revealSecrets": true,
        "mock": {"result": "{}"}});
    // remembered
    assert_eq!(
        world.refused("TestState", params).await,
        "ValidationException: TestState does not support RevealSecrets when a mock is specified."
    );
}

/// What the API's model says of the stages between a file and a map's children.
#[tokio::test]
async fn a_map_shows_how_it_reads_and_groups_items() {
    let world = StepFunctionsRouter::new().await;
    let map = json!({"Type": "Map", "End": true,
        "ItemReader": {"Resource": "arn:aws:states:::s3:getObject", "Parameters": {"Bucket": "b", "Key": "k"},
            "ReaderConfig": {"InputType": "JSON", "ItemsPointer": "/rows"}},
        "ItemSelector": {"v.$": "$$.Map.Item.Value"},
        "ItemBatcher": {"MaxItemsPerBatch": 2, "BatchInput": {"x": 1}},
        "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "I", "States": {"I": {"Type": "Pass", "End": true}}}});
    let params = json!({"definition": map.to_string(), "inspectionLevel": "DEBUG", "mock": {"result": "[]"},
        "stateConfiguration": {"mapItemReaderData": json!({"rows": [1, 2, 3]}).to_string()}});
    let found = world.call("TestState", params).await;
    let shown = |stage: &str| {
        let text = found["inspectionData"][stage].as_str().unwrap_or("null");
        serde_json::from_str::<Value>(text).expect("JSON")
    };
    assert_eq!(shown("afterItemsPointer"), json!([1, 2, 3]), "{found}");
    assert_eq!(shown("afterItemSelector"), json!([{"v": 1}, {"v": 2}, {"v": 3}]));
    assert_eq!(
        shown("afterItemBatcher"),
        json!([{"BatchInput": {"x": 1}, "Items": [{"v": 1}, {"v": 2}]}, {"BatchInput": {"x": 1}, "Items": [{"v": 3}]}])
    );
}

#[tokio::test]
async fn an_output_that_is_no_json_is_quoted_and_the_task_goes_on() {
    let world = StepFunctionsRouter::new().await;
    let activity = world.call("CreateActivity", json!({"name": "a"})).await["activityArn"].clone();
    let definition = alone(json!({"Type": "Task", "Resource": activity}));
    let machine = json!({"name": "m", "definition": definition.to_string(), "roleArn": ROLE});
    let machine = world.call("CreateStateMachine", machine).await["stateMachineArn"].clone();
    world.call("StartExecution", json!({"stateMachineArn": machine})).await;
    let task = world.call("GetActivityTask", json!({"activityArn": activity})).await;
    let answer = |output: &str| json!({"taskToken": task["taskToken"], "output": output});
    assert_eq!(
        world.refused("SendTaskSuccess", answer("{x")).await,
        "InvalidOutput: Invalid Output: 'Unexpected character ('x' (code 120)): was expecting double-quote to start \
         field name\n at [Source: (String)\"{x\"; line: 1, column: 3]'"
    );
    world.call("SendTaskSuccess", answer("{}")).await;
}

/// The bounds of `TimeoutSeconds` and `HeartbeatSeconds` (developer guide, Task) hold for what is evaluated too.
#[tokio::test]
async fn evaluated_limits_of_a_task_have_bounds() {
    let world = StepFunctionsRouter::new().await;
    let task = |limits: Value| {
        let mut task = json!({"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke"});
        task.as_object_mut().expect("an object").extend(limits.as_object().expect("an object").clone());
        let given = if task["QueryLanguage"] == "JSONata" { "Arguments" } else { "Parameters" };
        task[given] = json!({"FunctionName": "f"});
        alone(task)
    };
    let evaluated = |timeout: &str, heartbeat: &str| {
        task(json!({"QueryLanguage": "JSONata", "TimeoutSeconds": timeout, "HeartbeatSeconds": heartbeat}))
    };
    let (query, runtime) = ("States.QueryEvaluationError", "States.Runtime");
    let smaller = "The field 'HeartbeatSeconds' should be smaller than the field 'TimeoutSeconds': 5 and 2";
    let cases = [
        (
            evaluated("{% 0 %}", "{% 1 %}"),
            json!({}),
            query,
            "TimeoutSeconds must be between 1 and 99999999 but was: 0",
        ),
        (
            evaluated("{% 100 %}", "{% 0 %}"),
            json!({}),
            query,
            "HeartbeatSeconds must be between 1 and 99999999 but was: 0",
        ),
        (evaluated("{% 2 %}", "{% 5 %}"), json!({}), query, smaller),
        (
            task(json!({"TimeoutSecondsPath": "$.t", "HeartbeatSecondsPath": "$.h"})),
            json!({"t": 2, "h": 5}),
            runtime,
            smaller,
        ),
        (
            task(json!({"TimeoutSecondsPath": "$.t"})),
            json!({"t": 100_000_000}),
            runtime,
            "The TimeoutSecondsPath parameter references a value greater than 99999999: $.t == 100000000",
        ),
        (
            alone(json!({"Type": "Wait", "SecondsPath": "$.s"})),
            json!({"s": 100_000_000}),
            runtime,
            "The SecondsPath parameter references a value greater than 99999999: $.s == 100000000",
        ),
    ];
    for (name, (definition, input, error, cause)) in cases.into_iter().enumerate() {
        let found = failure(&world, name, &definition, &input).await;
        assert_eq!(found, (error.to_owned(), cause.to_owned()), "{definition} {input}");
    }
}

/// A catcher's expression that fails is told as any other is.
#[tokio::test]
async fn a_catchers_failed_expression_has_its_event() {
    let world = StepFunctionsRouter::new().await;
    for (name, field) in ["Output", "Assign"].into_iter().enumerate() {
        let mut catcher = json!({"ErrorEquals": ["States.ALL"], "Next": "N"});
        let failing = "{% $states.errorOutput.Error + 1 %}";
        catcher[field] = if field == "Assign" { json!({"a": failing}) } else { json!(failing) };
        let task = json!({"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke", "End": true,
            "Arguments": {"FunctionName": "none"}, "Catch": [catcher]});
        let definition = json!({"StartAt": "S", "QueryLanguage": "JSONata",
            "States": {"S": task, "N": {"Type": "Succeed"}}});
        let found = events(&world, &format!("catches{name}"), &definition).await;
        let kinds = types(&found);
        assert_eq!(
            kinds[kinds.len() - 3..],
            ["TaskFailed", "EvaluationFailed", "ExecutionFailed"],
            "{field}"
        );
        assert_eq!(found[found.len() - 1].2, found[found.len() - 2].1, "the one leads to the other");
    }
}

/// What comes out for an integration is checked before anything is scheduled: there is no task that failed, and States.ALL
/// catches nothing. The sentence is one that people quote; that of a text is remembered.
#[tokio::test]
async fn a_task_is_not_scheduled_with_what_its_integration_does_not_take() {
    let world = StepFunctionsRouter::new().await;
    let task = |resource: &str, field: &str, given: Value| {
        let mut task = json!({"Type": "Task", "Resource": format!("arn:aws:states:::{resource}"), "End": true,
            "Catch": [{"ErrorEquals": ["States.ALL"], "Next": "N"}]});
        task[field] = given;
        if field == "Arguments" {
            task["QueryLanguage"] = json!("JSONata");
        }
        json!({"StartAt": "S", "States": {"S": task, "N": {"Type": "Succeed"}}})
    };
    let cases = [
        (
            task("lambda:invoke", "Parameters", json!({"FunctionName.$": "$.f"})),
            r#"The Parameters '{"FunctionName":5}' could not be used to start the Task: [The value for the field 'FunctionName' must be a STRING]"#,
        ),
        (
            task("lambda:invoke", "Parameters", json!({"FunctionName": "f", "TaskToken.$": "$.f"})),
            r#"The Parameters '{"FunctionName":"f","TaskToken":5}' could not be used to start the Task: [The field "TaskToken" is not supported by Step Functions]"#,
        ),
        (
            task("lambda:invoke", "Arguments", json!("{% {} %}")),
            "The Arguments '{}' could not be used to start the Task: [The field 'FunctionName' is required but was missing]",
        ),
        (
            task(
                "states:startExecution.sync",
                "Arguments",
                json!({"StateMachineArn": "{% 5 %}", "Input": 1}),
            ),
            r#"The Arguments '{"StateMachineArn":5,"Input":1}' could not be used to start the Task: [The value for the field 'StateMachineArn' must be a STRING]"#,
        ),
    ];
    for (name, (definition, cause)) in cases.into_iter().enumerate() {
        let name = format!("m{name}");
        let machine = json!({"name": name, "definition": definition.to_string(), "roleArn": ROLE});
        let machine = world.call("CreateStateMachine", machine).await["stateMachineArn"].clone();
        let start = json!({"stateMachineArn": machine, "input": "{\"f\": 5}"});
        let (_, ended) = world.wait("StartExecution", start, "60").await;
        let begins = "An error occurred while executing the state 'S' (entered at the event id #2). ";
        assert_eq!(ended["error"], "States.Runtime", "{definition}");
        assert_eq!(ended["cause"].as_str().and_then(|cause| cause.strip_prefix(begins)), Some(cause));
        let history = json!({"executionArn": ended["executionArn"]});
        let history = world.call("GetExecutionHistory", history).await;
        let kinds: Vec<_> =
            history["events"].as_array().into_iter().flatten().map(|event| &event["type"]).collect();
        assert_eq!(kinds, ["ExecutionStarted", "TaskStateEntered", "ExecutionFailed"], "{definition}");
    }
}

/// An EXPRESS execution cannot be asked how it ended, so it is not begun for a task that waits for that. The error's
/// name is after the API's; AWS's is in no recording.
#[tokio::test]
async fn a_task_waits_for_no_express_execution() {
    let world = StepFunctionsRouter::new().await;
    let child = alone(json!({"Type": "Pass"})).to_string();
    let child = json!({"name": "child", "definition": child, "roleArn": ROLE, "type": "EXPRESS"});
    let child = world.call("CreateStateMachine", child).await["stateMachineArn"].clone();
    let start = |resource: &str| {
        alone(json!({"Type": "Task", "Resource": format!("arn:aws:states:::states:startExecution{resource}"),
            "Parameters": {"StateMachineArn": child}}))
    };
    let found = events(&world, "waits", &start(".sync:2")).await;
    assert_eq!(types(&found)[2..], ["TaskScheduled", "TaskStarted", "TaskFailed", "ExecutionFailed"]);
    let found = events(&world, "goes-on", &start("")).await;
    assert_eq!(types(&found).last(), Some(&"ExecutionSucceeded"));
}

/// Lambda's request framework knows three types of invocation.
#[tokio::test]
async fn an_unknown_type_of_invocation_calls_nothing() {
    let world = StepFunctionsRouter::new().await;
    let definition = alone(json!({"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke",
        "Parameters": {"FunctionName": "f", "InvocationType": "Foo"}}));
    let (error, cause) = failure(&world, 0, &definition, &json!({})).await;
    assert_eq!(error, "Lambda.InvalidParameterValueException");
    assert!(cause.starts_with("1 validation error detected: Value 'Foo' at 'invocationType'"), "{cause}");
}

/// The threshold is compared when it changes, not only when the next child ends.
#[tokio::test]
async fn a_lower_threshold_ends_a_map_run_that_exceeds_it() {
    let world = StepFunctionsRouter::new().await;
    let choice = json!({"Type": "Choice", "Default": "W",
        "Choices": [{"Variable": "$", "NumericEquals": 0, "Next": "F"}]});
    let wait = json!({"Type": "Wait", "Seconds": 3600, "End": true});
    let items = json!({"StartAt": "C", "States": {"C": choice, "W": wait, "F": {"Type": "Fail", "Error": "E"}},
        "ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"}});
    let map = alone(json!({"Type": "Map", "ToleratedFailureCount": 5, "ItemProcessor": items}));
    let machine = json!({"name": "m", "definition": map.to_string(), "roleArn": ROLE});
    let machine = world.call("CreateStateMachine", machine).await["stateMachineArn"].clone();
    let start = json!({"stateMachineArn": machine, "input": "[0,1]"});
    let execution = world.call("StartExecution", start).await["executionArn"].clone();
    let runs = world.call("ListMapRuns", json!({"executionArn": execution})).await;
    let run = &runs["mapRuns"][0]["mapRunArn"];
    loop {
        let counts = world.call("DescribeMapRun", json!({"mapRunArn": run})).await["itemCounts"].clone();
        if counts["failed"] == json!(1) && counts["running"] == json!(1) {
            break;
        }
        tokio::task::yield_now().await;
    }
    world.call("UpdateMapRun", json!({"mapRunArn": run, "toleratedFailureCount": 0})).await;
    let (_, ended) = world.wait("DescribeExecution", json!({"executionArn": execution}), "60").await;
    let failed = json!(["FAILED", "States.ExceedToleratedFailureThreshold"]);
    assert_eq!(json!([ended["status"], ended["error"]]), failed, "{ended}");
}
