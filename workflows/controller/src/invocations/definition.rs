//! The state machine of a function's asynchronous invocations; pure.
//!
//! ```text
//! Invoke ──(2xx, 3xx)──▶ end
//!   │ retries used up, or the event is too old
//!   ├──(no destination)──▶ the execution fails
//!   └──▶ IsJson ─▶ DeliverJson | DeliverText ─▶ Failed
//!             (to a workflow, if it is too large) └─▶ DeliverHead ─▶ Failed
//! ```
//! After `Invoke` the states' data is the error alone. The event is read from the execution's input: what goes from
//! state to state is limited to 256 KiB, which the event may have already.

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
    let Some(to) = rules.on_failure.as_ref().filter(|to| delivery(function, to, Payload::Json).is_some())
    else {
        return json!({"StartAt": "Invoke", "States": {"Invoke": invoke}});
    };
    invoke["Catch"] = json!([{"ErrorEquals": ["States.ALL"], "Next": "IsJson"}]);
    let deliver = |payload, too_large| deliver(function, to, payload, too_large);
    let mut states = json!({
        "Invoke": invoke,
        "IsJson": {
            "Type": "Choice",
            "Choices": [{"Variable": "$$.Execution.Input.isJson", "BooleanEquals": true, "Next": "DeliverJson"}],
            "Default": "DeliverText",
        },
        "Failed": {"Type": "Fail", "ErrorPath": "$.Error", "CausePath": "$.Cause"},
    });
    let too_large = if to.workflow.is_some() { "DeliverHead" } else { "Failed" };
    states["DeliverJson"] = deliver(Payload::Json, too_large);
    states["DeliverText"] = deliver(Payload::Text, too_large);
    if to.workflow.is_some() {
        states["DeliverHead"] = deliver(Payload::Omitted, "Failed");
    }
    json!({"StartAt": "Invoke", "States": states})
}

/// The part of the event in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Payload {
    Json,
    Text,
    /// The record with the event is larger than a workflow's input may be.
    Omitted,
}

/// The state that delivers a record. The state `too_large` follows if the target refuses the record for its form.
fn deliver(function: &ObjectKey, to: &FailureDestination, payload: Payload, too_large: &str) -> Value {
    let mut deliver = delivery(function, to, payload).unwrap_or_default();
    let refused =
        json!(["StepFunctions.ValidationException", "StepFunctions.InvalidExecutionInputException"]);
    deliver["Type"] = "Task".into();
    deliver["ResultPath"] = Value::Null;
    deliver["Retry"] = json!([
        {"ErrorEquals": refused, "MaxAttempts": 0},
        {
            "ErrorEquals": ["States.ALL"],
            "IntervalSeconds": 1,
            "BackoffRate": 2,
            "MaxDelaySeconds": AsyncInvocation::RETRY_DELAY_MAX.0.as_secs(),
            "MaxAttempts": DELIVERY_RETRIES,
        },
    ]);
    deliver["Catch"] = json!([
        {"ErrorEquals": refused, "ResultPath": null, "Next": too_large},
        {"ErrorEquals": ["States.ALL"], "ResultPath": null, "Next": "Failed"},
    ]);
    deliver["Next"] = "Failed".into();
    deliver
}

/// The record of an event that was given up, in the form of Lambda's destinations.
fn record(function: &ObjectKey, payload: Payload) -> Value {
    let mut record = json!({
        "version": "1.0",
        "timestamp.$": "$$.State.EnteredTime",
        "requestContext": {
            "requestId.$": "$$.Execution.Name",
            "functionArn": format!(
                "arn:aws:lambda:us-east-1:000000000000:function:{}",
                state_machine_name(function)
            ),
            "condition.$": "$.Error",
        },
        "responseContext": {"executedVersion": "$LATEST", "functionError": "Unhandled"},
        "responsePayload.$": "States.StringToJson($.Cause)",
    });
    let body = "$$.Execution.Input.request.body";
    match payload {
        Payload::Json => record["requestPayload.$"] = format!("States.StringToJson({body})").into(),
        Payload::Text => record["requestPayload.$"] = body.into(),
        Payload::Omitted => record["requestPayloadOmitted"] = true.into(),
    }
    record
}

/// The task that delivers the record; `None` for a destination without a target.
fn delivery(function: &ObjectKey, to: &FailureDestination, payload: Payload) -> Option<Value> {
    let here = |name: &str| state_machine_name(&ObjectKey::new(function.namespace.as_str(), name));
    let record = record(function, payload);
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
        assert_eq!(
            delivery(&function, &to, Payload::Json).unwrap()["Parameters"]["FunctionName"],
            "shop.dead"
        );
        let to = FailureDestination { workflow: Some("dead".into()), ..Default::default() };
        let arn = delivery(&function, &to, Payload::Json).unwrap()["Parameters"]["StateMachineArn"].clone();
        assert_eq!(arn, "arn:aws:states:us-east-1:000000000000:stateMachine:shop.dead");
    }
}
