//! The state machine of a function's asynchronous invocations; pure.
//!
//! ```text
//! Invoke ──(2xx, 3xx)──▶ end
//!   │ retries used up, or the event is too old
//!   ├──(no destination)──▶ the execution fails
//!   └──▶ IsJson ─▶ ParsedEvent | TextEvent ─▶ DeadLetter ─▶ Failed
//! ```

use mayfly_api::{
    ObjectKey,
    invocation::{AsyncInvocation, FailureDestination},
    workflow::names::{STATE_MACHINE_PREFIX, state_machine_name},
};
use serde_json::{Value, json};

/// The error of an event that became too old. It is not retried.
pub(super) const EVENT_AGE_EXCEEDED: &str = "Mayfly.EventAgeExceeded";
/// Attempts to deliver a record to its destination: with the delays, about three quarters of an hour.
const DELIVERY_RETRIES: u32 = 20;

/// The definition for a function with these rules.
pub(super) fn definition(function: &ObjectKey, rules: &AsyncInvocation) -> Value {
    let mut retry = vec![json!({"ErrorEquals": [EVENT_AGE_EXCEEDED], "MaxAttempts": 0})];
    if rules.maximum_retry_attempts > 0 {
        retry.push(json!({
            "ErrorEquals": ["States.ALL"],
            "IntervalSeconds": rules.retry_delay.0.as_secs().max(1),
            "BackoffRate": 2,
            "MaxDelaySeconds": AsyncInvocation::RETRY_DELAY_MAX.0.as_secs(),
            "MaxAttempts": rules.maximum_retry_attempts,
        }));
    }
    let mut invoke = json!({
        "Type": "Task",
        "Resource": "arn:aws:states:::mayfly:invoke",
        "Retry": retry,
        "End": true,
    });
    let Some(mut deliver) = rules.on_failure.as_ref().and_then(|to| delivery(function, to)) else {
        return json!({"StartAt": "Invoke", "States": {"Invoke": invoke}});
    };
    invoke["Catch"] = json!([{"ErrorEquals": ["States.ALL"], "ResultPath": "$.failure", "Next": "IsJson"}]);
    deliver["Type"] = "Task".into();
    deliver["ResultPath"] = Value::Null;
    deliver["Retry"] = json!([{
        "ErrorEquals": ["States.ALL"],
        "IntervalSeconds": 1,
        "BackoffRate": 2,
        "MaxDelaySeconds": AsyncInvocation::RETRY_DELAY_MAX.0.as_secs(),
        "MaxAttempts": DELIVERY_RETRIES,
    }]);
    deliver["Catch"] = json!([{"ErrorEquals": ["States.ALL"], "ResultPath": null, "Next": "Failed"}]);
    deliver["Next"] = "Failed".into();
    json!({"StartAt": "Invoke", "States": {
        "Invoke": invoke,
        "IsJson": {
            "Type": "Choice",
            "Choices": [{"Variable": "$.isJson", "BooleanEquals": true, "Next": "ParsedEvent"}],
            "Default": "TextEvent",
        },
        "ParsedEvent": {
            "Type": "Pass",
            "Parameters": {"payload.$": "States.StringToJson($.request.body)"},
            "ResultPath": "$.event",
            "Next": "DeadLetter",
        },
        "TextEvent": {
            "Type": "Pass",
            "Parameters": {"payload.$": "$.request.body"},
            "ResultPath": "$.event",
            "Next": "DeadLetter",
        },
        "DeadLetter": deliver,
        "Failed": {"Type": "Fail", "ErrorPath": "$.failure.Error", "CausePath": "$.failure.Cause"},
    }})
}

/// The record of an event that was given up, in the form of Lambda's destinations.
fn record(function: &ObjectKey) -> Value {
    json!({
        "version": "1.0",
        "timestamp.$": "$$.State.EnteredTime",
        "requestContext": {
            "requestId.$": "$$.Execution.Name",
            "functionArn": format!(
                "arn:aws:lambda:us-east-1:000000000000:function:{}",
                state_machine_name(function)
            ),
            "condition.$": "$.failure.Error",
        },
        "requestPayload.$": "$.event.payload",
        "responseContext": {"executedVersion": "$LATEST", "functionError": "Unhandled"},
        "responsePayload.$": "States.StringToJson($.failure.Cause)",
    })
}

/// The task that delivers the record; `None` for a destination without a target.
fn delivery(function: &ObjectKey, to: &FailureDestination) -> Option<Value> {
    let here = |name: &str| state_machine_name(&ObjectKey::new(function.namespace.as_str(), name));
    let record = record(function);
    if let Some(name) = &to.function {
        return Some(json!({
            "Resource": "arn:aws:states:::lambda:invoke",
            "Parameters": {"FunctionName": here(name), "Payload": record},
        }));
    }
    if let Some(name) = &to.workflow {
        return Some(json!({
            "Resource": "arn:aws:states:::states:startExecution",
            "Parameters": {"StateMachineArn": format!("{STATE_MACHINE_PREFIX}{}", here(name)), "Input": record},
        }));
    }
    let url = to.url.as_ref()?;
    Some(json!({
        "Resource": "arn:aws:states:::http:invoke",
        "Parameters": {
            "ApiEndpoint": url,
            "Method": "POST",
            "Headers": {"content-type": "application/json"},
            "RequestBody": record,
        },
    }))
}

#[cfg(test)]
mod tests {
    use mayfly_workflows_engine::engine::StateMachineType;
    use mayfly_workflows_language::parse;

    use super::*;

    #[test]
    fn each_definition_is_valid() {
        let function = ObjectKey::new("shop", "charge");
        let to = |field: &str, value: &str| serde_json::from_value(json!({field: value})).ok();
        for (attempts, on_failure) in [
            (0, None),
            (2, None),
            (100, to("function", "dead")),
            (2, to("workflow", "dead")),
            (2, to("url", "https://example.com/dead")),
        ] {
            let rules =
                AsyncInvocation { maximum_retry_attempts: attempts, on_failure, ..Default::default() };
            let text = definition(&function, &rules).to_string();
            parse::compile(&text, StateMachineType::Standard).unwrap_or_else(|_| panic!("invalid: {text}"));
        }
    }

    #[test]
    fn targets_are_in_the_functions_namespace() {
        let function = ObjectKey::new("shop", "charge");
        let to = FailureDestination { function: Some("dead".into()), ..Default::default() };
        assert_eq!(delivery(&function, &to).unwrap()["Parameters"]["FunctionName"], "shop.dead");
        let to = FailureDestination { workflow: Some("dead".into()), ..Default::default() };
        let arn = delivery(&function, &to).unwrap()["Parameters"]["StateMachineArn"].clone();
        assert_eq!(arn, "arn:aws:states:us-east-1:000000000000:stateMachine:shop.dead");
    }
}
