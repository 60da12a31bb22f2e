//! What executions tell when they fail: names of errors, causes, orders of events. Each rule names where it was
//! learned; "remembered" means that no source backs the wording.

use serde_json::{Value, json};

use crate::world::World;
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
async fn failure(world: &World, name: usize, definition: &Value, input: &Value) -> (String, String) {
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
    let world = World::new().await;
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
            runtime,
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
async fn events(world: &World, name: &str, definition: &Value) -> Vec<(String, u64, u64)> {
    let machine = json!({"name": name, "definition": definition.to_string(), "roleArn": ROLE});
    world.call("CreateStateMachine", machine).await;
    let machine = format!("{PREFIX}:stateMachine:{name}");
    let arn = world.call("StartExecution", json!({"stateMachineArn": machine})).await["executionArn"].clone();
    loop {
        let found = world.call("GetExecutionHistory", json!({"executionArn": arn})).await;
        let found = found["events"].as_array().cloned().unwrap_or_default();
        let kind = |event: &Value| event["type"].as_str().unwrap_or_default().to_owned();
        let ended = found.last().map(kind).is_some_and(|kind| {
            ["ExecutionSucceeded", "ExecutionFailed", "ExecutionTimedOut"].contains(&kind.as_str())
        });
        if ended {
            let number = |event: &Value, field: &str| event[field].as_u64().unwrap_or_default();
            return found
                .iter()
                .map(|event| (kind(event), number(event, "id"), number(event, "previousEventId")))
                .collect();
        }
        tokio::time::sleep(std::time::Duration::from_millis(3)).await;
    }
}

fn types(events: &[(String, u64, u64)]) -> Vec<&str> {
    events.iter().map(|(kind, _, _)| kind.as_str()).collect()
}

/// `States.Runtime` cannot be caught or retried, so no part is told as failed (the recordings of failing parts
/// of a Map and a Parallel).
#[tokio::test]
async fn a_runtime_error_in_a_part_ends_the_execution_at_once() {
    let world = World::new().await;
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
    let world = World::new().await;
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
    let world = World::new().await;
    let mut machine = alone(json!({"Type": "Wait", "Seconds": 600}));
    machine["TimeoutSeconds"] = json!(1);
    let found = events(&world, "slow", &machine).await;
    let (kind, _, previous) = found.last().expect("events");
    assert_eq!((kind.as_str(), *previous), ("ExecutionTimedOut", 0));
}

#[tokio::test]
async fn a_mock_goes_without_revealed_secrets() {
    let world = World::new().await;
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
    let world = World::new().await;
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
    let world = World::new().await;
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
