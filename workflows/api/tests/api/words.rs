//! What AWS says where a state's data is no good, and what it makes of errors that say little.

use serde_json::{Value, json};

use crate::ROLE;
use crate::world::StepFunctionsRouter;

/// DescribeExecution of a run that has ended.
async fn run(world: &StepFunctionsRouter, name: &str, definition: &Value, input: Value) -> Value {
    let machine = json!({"name": name, "definition": definition.to_string(), "roleArn": ROLE});
    let arn = world.call("CreateStateMachine", machine).await["stateMachineArn"].clone();
    let started = json!({"stateMachineArn": arn, "input": input.to_string()});
    let arn = world.call("StartExecution", started).await["executionArn"].clone();
    world.wait("DescribeExecution", json!({"executionArn": arn}), "20").await.1
}

async fn cause_of(world: &StepFunctionsRouter, name: &str, definition: &Value, input: Value) -> String {
    let ended = run(world, name, definition, input).await;
    let cause = ended["cause"].as_str().unwrap_or_default();
    let (_, told) = cause.split_once("#2). ").unwrap_or(("", cause));
    format!("{}: {told}", ended["error"].as_str().unwrap_or("no error"))
}

#[tokio::test]
async fn a_wait_tells_a_path_that_leads_nowhere_in_words_of_its_own() {
    let world = StepFunctionsRouter::new().await;
    for (field, path) in [("SecondsPath", "$.in.s"), ("TimestampPath", "$$.Execution.Input.at")] {
        let mut wait = json!({"Type": "Wait", "End": true});
        wait[field] = json!(path);
        let definition = json!({"StartAt": "S", "States": {"S": wait}});
        let told = cause_of(&world, field, &definition, json!({"x": 1})).await;
        assert_eq!(
            told,
            format!("States.Runtime: The {field} parameter does not reference an input value: {path}")
        );
    }
}

#[tokio::test]
async fn an_error_output_has_both_members() {
    let world = StepFunctionsRouter::new().await;
    let cases = [
        (json!({}), json!({"Error": "", "Cause": ""})),
        (json!({"Error": "E"}), json!({"Error": "E", "Cause": ""})),
        (json!({"Cause": "C"}), json!({"Error": "", "Cause": "C"})),
    ];
    for (number, (mut fail, wanted)) in cases.into_iter().enumerate() {
        fail["Type"] = json!("Fail");
        let branch = json!({"StartAt": "F", "States": {"F": fail}});
        let parallel = |language: &str| {
            json!({"Type": "Parallel", "QueryLanguage": language, "Branches": [branch], "End": true,
                "Catch": [{"ErrorEquals": ["States.ALL"], "Next": "N"}]})
        };
        for language in ["JSONPath", "JSONata"] {
            let definition = json!({"StartAt": "S",
                "States": {"S": parallel(language), "N": {"Type": "Succeed"}}});
            let ended = run(&world, &format!("f{number}{language}"), &definition, json!({})).await;
            let output: Value =
                serde_json::from_str(ended["output"].as_str().expect("caught")).expect("JSON");
            assert_eq!(output, wanted, "{language}");
        }
    }
}

#[tokio::test]
async fn objects_are_for_distributed_maps() {
    let world = StepFunctionsRouter::new().await;
    let map = |mode: &str, language: &str| {
        let items =
            if language == "JSONata" { ("Items", "{% $states.input.o %}") } else { ("ItemsPath", "$.o") };
        let mut map = json!({"Type": "Map", "QueryLanguage": language, "End": true, "ItemProcessor": {
            "ProcessorConfig": {"Mode": mode}, "StartAt": "I", "States": {"I": {"Type": "Pass", "End": true}}}});
        if mode == "DISTRIBUTED" {
            map["ItemProcessor"]["ProcessorConfig"]["ExecutionType"] = json!("STANDARD");
        }
        map[items.0] = json!(items.1);
        json!({"StartAt": "S", "States": {"S": map}})
    };
    let input = json!({"o": {"a": 1}});
    for language in ["JSONPath", "JSONata"] {
        let ended = run(&world, &format!("d{language}"), &map("DISTRIBUTED", language), input.clone()).await;
        assert_eq!(ended["output"], json!(r#"[{"Key":"a","Value":1}]"#), "{language}");
    }
    assert_eq!(
        cause_of(&world, "path", &map("INLINE", "JSONPath"), input.clone()).await,
        "States.Runtime: Reference path \"$.o\" must point to array."
    );
    assert_eq!(
        cause_of(&world, "query", &map("INLINE", "JSONata"), input).await,
        "States.QueryEvaluationError: The JSONata expression '$states.input.o' specified for the field 'Items' returned \
         an unexpected result type. Expected 'array', but was 'object' for value: {\"a\":1}"
    );
}

#[tokio::test]
async fn a_jsonata_map_whose_input_is_no_list_fails_as_an_expression_does() {
    let world = StepFunctionsRouter::new().await;
    let map = json!({"Type": "Map", "End": true,
        "ItemProcessor": {"StartAt": "I", "States": {"I": {"Type": "Pass", "End": true}}}});
    let definition = json!({"StartAt": "S", "QueryLanguage": "JSONata", "States": {"S": map}});
    let ended = run(&world, "m", &definition, json!({"a": 1})).await;
    let history = json!({"executionArn": ended["executionArn"], "reverseOrder": true});
    let history = world.call("GetExecutionHistory", history).await;
    assert_eq!(history["events"][1]["type"], "MapStateFailed");
    let failed = &history["events"][2];
    let cause = "An error occurred while executing the state 'S' (entered at the event id #2). Map state input must be an \
                 array but was: object";
    let details = json!({"state": "S", "error": "States.QueryEvaluationError", "cause": cause});
    assert_eq!(
        (&failed["type"], &failed["evaluationFailedEventDetails"]),
        (&json!("EvaluationFailed"), &details)
    );
    assert_eq!(ended["cause"], cause);
}

#[tokio::test]
async fn what_a_leaving_machine_ran_is_not_redriven() {
    let world = StepFunctionsRouter::new().await;
    let definition = json!({"StartAt": "S", "States": {"F": {"Type": "Fail"}, "W": {"Type": "Wait", "Seconds": 600, "End": true},
        "S": {"Type": "Choice", "Default": "F", "Choices": [{"Variable": "$.wait", "IsPresent": true, "Next": "W"}]}}});
    let failed = run(&world, "m", &definition, json!({})).await;
    assert_eq!((&failed["status"], &failed["redriveStatus"]), (&json!("FAILED"), &json!("REDRIVABLE")));
    let started = json!({"stateMachineArn": failed["stateMachineArn"], "input": r#"{"wait": true}"#});
    world.call("StartExecution", started).await;
    world.call("DeleteStateMachine", json!({"stateMachineArn": failed["stateMachineArn"]})).await;
    let execution = json!({"executionArn": failed["executionArn"]});
    let described = world.call("DescribeExecution", execution.clone()).await;
    let reason = "State machine is in DELETING status";
    assert_eq!(
        (&described["redriveStatus"], &described["redriveStatusReason"]),
        (&json!("NOT_REDRIVABLE"), &json!(reason))
    );
    assert_eq!(
        world.refused("RedriveExecution", execution).await,
        format!("ExecutionNotRedrivable: {reason}")
    );
}
