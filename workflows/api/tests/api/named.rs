//! Requests by what their ARNs name: versions, aliases, map runs and the state machines of Distributed Maps. The rules
//! are those of the API reference; sentences are ours where no comment says more.

use serde_json::{Value, json};

use crate::world::StepFunctionsRouter;
use crate::{PREFIX, ROLE, pass};

/// The machine `m` with its version 1 and the alias `prod` of it.
async fn published(world: &StepFunctionsRouter) -> String {
    let machine = json!({"name": "m", "definition": pass(), "roleArn": ROLE, "publish": true});
    let made = world.call("CreateStateMachine", machine).await;
    let route = json!([{"stateMachineVersionArn": made["stateMachineVersionArn"], "weight": 100}]);
    world.call("CreateStateMachineAlias", json!({"name": "prod", "routingConfiguration": route})).await;
    made["stateMachineArn"].as_str().expect("an ARN").to_owned()
}

#[tokio::test]
async fn an_executions_first_event_names_what_was_started() {
    let world = StepFunctionsRouter::new().await;
    let arn = published(&world).await;
    let (version, alias) = (format!("{arn}:1"), format!("{arn}:prod"));
    let cases = [
        (&arn, json!({})),
        (&version, json!({"stateMachineVersionArn": version})),
        (&alias, json!({"stateMachineVersionArn": version, "stateMachineAliasArn": alias})),
    ];
    for (started, named) in cases {
        let begun = world.call("StartExecution", json!({"stateMachineArn": started})).await;
        let history = json!({"executionArn": begun["executionArn"], "maxResults": 1});
        let found = world.call("GetExecutionHistory", history).await;
        let mut wanted = json!({"input": "{}", "inputDetails": {"truncated": false}, "roleArn": ROLE});
        wanted.as_object_mut().expect("an object").extend(named.as_object().cloned().unwrap_or_default());
        assert_eq!(found["events"][0]["executionStartedEventDetails"], wanted, "{started}");
    }
}

#[tokio::test]
async fn metadata_alone_has_an_empty_object_for_a_definition() {
    let world = StepFunctionsRouter::new().await;
    let arn = published(&world).await;
    let begun = world.call("StartExecution", json!({"stateMachineArn": arn})).await;
    let asked = [
        ("DescribeStateMachine", json!({"stateMachineArn": arn})),
        ("DescribeStateMachineForExecution", json!({"executionArn": begun["executionArn"]})),
    ];
    for (operation, mut params) in asked {
        assert_eq!(world.call(operation, params.clone()).await["definition"], json!(pass()));
        params["includedData"] = json!("METADATA_ONLY");
        assert_eq!(world.call(operation, params).await["definition"], "{}", "{operation}");
    }
}

#[tokio::test]
async fn what_an_arn_names_decides_what_can_be_done_with_it() {
    let world = StepFunctionsRouter::new().await;
    let arn = published(&world).await;
    let of_map = format!("{arn}/label");
    let refused_map = format!(
        "ValidationException: The qualified state machine ARN refers to a Distributed Map state: '{of_map}'"
    );
    let of = |arn: &str| json!({"stateMachineArn": arn});
    let update = |arn: &str| json!({"stateMachineArn": arn, "definition": pass()});
    let invalid = |reason: &str| format!("InvalidArn: Invalid Arn: 'ARN is of {reason}'");
    let delete = "use DeleteStateMachineVersion or DeleteStateMachineAlias";
    let change = "only the state machine itself can be updated";
    let cases: [(&str, Value, String); 10] = [
        ("StartExecution", of(&of_map), refused_map.clone()),
        ("UpdateStateMachine", update(&of_map), refused_map.clone()),
        ("DescribeStateMachine", of(&of_map), refused_map.clone()),
        ("DeleteStateMachine", of(&of_map), refused_map),
        (
            "DeleteStateMachine",
            of(&format!("{arn}:1")),
            invalid(&format!("a state machine version: {arn}:1; {delete}")),
        ),
        (
            "DeleteStateMachine",
            of(&format!("{arn}:prod")),
            invalid(&format!("a state machine alias: {arn}:prod; {delete}")),
        ),
        (
            "UpdateStateMachine",
            update(&format!("{arn}:1")),
            invalid(&format!("a state machine version: {arn}:1; {change}")),
        ),
        // The sentence of DescribeMapRun.
        (
            "ListExecutions",
            json!({"mapRunArn": format!("{PREFIX}:mapRun:m/label:nowhere")}),
            "ResourceNotFound: Request references a resource that does not exist.".into(),
        ),
        // remembered from other services
        (
            "TagResource",
            json!({"resourceArn": arn, "tags": [{"key": "AWS:a", "value": "b"}]}),
            "ValidationException: aws: prefixed tag key names are not allowed for external use.".into(),
        ),
        (
            "TestState",
            json!({"definition": json!({"Type": "Succeed"}).to_string(), "roleArn": "x"}),
            "InvalidArn: Invalid Role Arn: 'x'".into(),
        ),
    ];
    for (operation, params, wanted) in cases {
        assert_eq!(world.refused(operation, params.clone()).await, wanted, "{operation} {params}");
    }
    world.call("DescribeStateMachine", of(&arn)).await;
}

#[tokio::test]
async fn a_map_runs_children_are_listed_by_its_arn() {
    let world = StepFunctionsRouter::new().await;
    let items = json!({"Type": "Pass", "Result": [1, 2], "Next": "M"});
    let map = json!({"Type": "Map", "End": true, "ItemProcessor": {
        "ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
        "StartAt": "I", "States": {"I": {"Type": "Pass", "End": true}}}});
    let definition = json!({"StartAt": "P", "States": {"P": items, "M": map}}).to_string();
    let made = world
        .call("CreateStateMachine", json!({"name": "m", "definition": definition, "roleArn": ROLE}))
        .await;
    let (_, ended) =
        world.wait("StartExecution", json!({"stateMachineArn": made["stateMachineArn"]}), "60").await;
    let runs = world.call("ListMapRuns", json!({"executionArn": ended["executionArn"]})).await;
    let run = &runs["mapRuns"][0]["mapRunArn"];
    let found = world.call("ListExecutions", json!({"mapRunArn": run})).await;
    assert_eq!(found["executions"].as_array().map(Vec::len), Some(2), "{found}");
}
