//! Every operation that takes an ARN: one that cannot be an ARN of its kind is `InvalidArn` with the reason, one that
//! names nothing is refused by the sentence of its resource.

use serde_json::{Map, Value, json};

use crate::world::StepFunctionsRouter;
use crate::{PREFIX, pass};

/// The operation, the parameter that is the ARN, the resource that it names, the other required parameters.
fn operations() -> Vec<(&'static str, &'static str, &'static str, Value)> {
    let machine = [
        ("DeleteStateMachine", json!({})),
        ("DescribeStateMachine", json!({})),
        ("ListExecutions", json!({})),
        ("ListStateMachineAliases", json!({})),
        ("ListStateMachineVersions", json!({})),
        ("PublishStateMachineVersion", json!({})),
        ("StartExecution", json!({})),
        ("StartSyncExecution", json!({})),
        ("UpdateStateMachine", json!({"definition": pass()})),
    ];
    let execution = [
        "DescribeExecution",
        "DescribeStateMachineForExecution",
        "GetExecutionHistory",
        "ListMapRuns",
        "RedriveExecution",
        "StopExecution",
    ];
    let activity = ["DeleteActivity", "DescribeActivity", "GetActivityTask"];
    let map_run = ["DescribeMapRun", "ListExecutions", "UpdateMapRun"];
    let tagged = [
        ("ListTagsForResource", json!({})),
        ("TagResource", json!({"tags": []})),
        ("UntagResource", json!({"tagKeys": []})),
    ];
    let alias = [
        ("DeleteStateMachineAlias", json!({})),
        ("DescribeStateMachineAlias", json!({})),
        ("UpdateStateMachineAlias", json!({"description": "d"})),
    ];
    let mut all: Vec<(&str, &str, &str, Value)> = Vec::new();
    all.extend(machine.map(|(name, more)| (name, "stateMachineArn", "stateMachine:none", more)));
    all.extend(execution.map(|name| (name, "executionArn", "execution:none:e", json!({}))));
    all.extend(activity.map(|name| (name, "activityArn", "activity:none", json!({}))));
    all.extend(map_run.map(|name| (name, "mapRunArn", "mapRun:none/l:u", json!({}))));
    all.extend(tagged.map(|(name, more)| (name, "resourceArn", "stateMachine:none", more)));
    all.extend(alias.map(|(name, more)| (name, "stateMachineAliasArn", "stateMachine:none:alias", more)));
    all.push(("DeleteStateMachineVersion", "stateMachineVersionArn", "stateMachine:none:1", json!({})));
    all
}

fn params(member: &str, arn: &str, more: &Value) -> Value {
    let mut params = more.as_object().cloned().unwrap_or_else(Map::new);
    params.insert(member.to_owned(), arn.into());
    params.into()
}

#[tokio::test]
async fn what_cannot_be_an_arn_of_its_kind_is_invalid() {
    let world = StepFunctionsRouter::new().await;
    for (operation, member, resource, more) in operations() {
        let other = if resource.starts_with("mapRun") { "execution:m:e" } else { "mapRun:m/l:u" };
        let of_other = format!("{PREFIX}:{other}");
        let (other, _) = other.split_once(':').expect("a type");
        let nameless = format!("{PREFIX}:stateMachine:");
        let cases = [
            ("nonsense", "Invalid ARN prefix: nonsense".to_owned()),
            ("arn:aws:states", "ARN is not valid: arn:aws:states".to_owned()),
            (&nameless, format!("ARN is not valid: {nameless}")),
            (
                "arn:aws:lambda:us-east-1:000000000000:function:f",
                "Service name is invalid: lambda".to_owned(),
            ),
            ("arn:aws:states:us-east-1:000000000000:table:t", "Invalid resource type: table".to_owned()),
            (&of_other, format!("Resource type not valid in this context: {other}")),
        ];
        for (arn, reason) in cases {
            assert_eq!(
                world.refused(operation, params(member, arn, &more)).await,
                format!("InvalidArn: Invalid Arn: '{reason}'"),
                "{operation} {arn}"
            );
        }
    }
}

#[tokio::test]
async fn what_names_nothing_does_not_exist() {
    let world = StepFunctionsRouter::new().await;
    let missing = "ResourceNotFound: Request references a resource that does not exist.";
    for (operation, member, resource, more) in operations() {
        let arn = format!("{PREFIX}:{resource}");
        let params = params(member, &arn, &more);
        let wanted = match (operation, member) {
            // What is gone is gone.
            (
                "DeleteStateMachine"
                | "DeleteActivity"
                | "DeleteStateMachineAlias"
                | "DeleteStateMachineVersion",
                _,
            ) => {
                assert_eq!(world.call(operation, params).await, json!({}), "{operation}");
                continue;
            }
            ("ListStateMachineVersions", _) => {
                let none = json!({"stateMachineVersions": []});
                assert_eq!(world.call(operation, params).await, none);
                continue;
            }
            (_, "stateMachineArn") => {
                format!("StateMachineDoesNotExist: State Machine Does Not Exist: '{arn}'")
            }
            (_, "executionArn") => format!("ExecutionDoesNotExist: Execution Does Not Exist: '{arn}'"),
            (_, "activityArn") => format!("ActivityDoesNotExist: Activity Does Not Exist: '{arn}'"),
            (_, "resourceArn") => format!("ResourceNotFound: Resource not found: '{arn}'"),
            _ => missing.to_owned(),
        };
        assert_eq!(world.refused(operation, params).await, wanted, "{operation}");
    }
}
