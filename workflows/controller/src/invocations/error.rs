//! The errors of attempts: a name, and a cause in JSON; pure.

use bytes::Bytes;
use mayfly_workflows_engine::engine::FunctionError;
use mayfly_workflows_language::value::Value as JsonValue;
use serde_json::{Value, json};

/// Bytes of an error's message that are kept: the journal's bound of a cause is 32 KiB, and JSON's escapes come on top.
const MESSAGE_BYTES_MAX: usize = 8 << 10;
/// Bytes of an error's name that are kept, as in the Step Functions API. A longer one from a function's answer could make
/// the data between the states larger than they may be, and the event would not be delivered anywhere.
const NAME_BYTES_MAX: usize = 256;

/// The error of an answer that is none of success: by the contract of functions, else with status and body.
pub(super) fn function_error(status: u16, body: &Bytes) -> FunctionError {
    let told: Option<Value> = serde_json::from_slice(body).ok();
    let text = |field: &str| told.as_ref().and_then(|told| told[field].as_str());
    match (text("errorType"), text("errorMessage")) {
        (Some(error_type), message) => failed(error_type, &message.unwrap_or_default()),
        _ => failed("Lambda.Unknown", &format_args!("status {status}: {}", String::from_utf8_lossy(body))),
    }
}

/// The same error with a cause in JSON, from which the delivery to the destination of failures makes its record. The
/// gateway's refusal of an unknown function has a plain text.
pub(super) fn with_json_cause(error: FunctionError) -> FunctionError {
    match JsonValue::parse(&error.cause) {
        Ok(_) => error,
        Err(_) => failed(&error.error_type, &error.cause),
    }
}

/// An error whose cause is a JSON object, as Lambda's are.
pub(super) fn failed(error_type: &str, message: &dyn std::fmt::Display) -> FunctionError {
    let message = message.to_string();
    let message = &message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)];
    let error_type = &error_type[..error_type.floor_char_boundary(NAME_BYTES_MAX)];
    let cause = json!({"errorType": error_type, "errorMessage": message}).to_string();
    FunctionError::new(error_type, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_is_json() {
        let json = FunctionError::new("OutOfStock", r#"{"errorMessage":"none left"}"#);
        assert_eq!(with_json_cause(json.clone()), json);
        let missing = "Lambda.ResourceNotFoundException";
        let error = with_json_cause(FunctionError::new(missing, "Function not found: charge"));
        assert_eq!(error.error_type, missing);
        let cause: Value = serde_json::from_str(&error.cause).unwrap();
        assert_eq!(cause, json!({"errorType": missing, "errorMessage": "Function not found: charge"}));
    }

    #[test]
    fn a_failed_answer_becomes_an_error_with_a_json_cause() {
        for (body, error_type, message) in [
            (r#"{"errorType":"OutOfStock","errorMessage":"none left"}"#, "OutOfStock", "none left"),
            ("broken", "Lambda.Unknown", "status 500: broken"),
            ("[1]", "Lambda.Unknown", "status 500: [1]"),
        ] {
            let error = function_error(500, &Bytes::from_static(body.as_bytes()));
            let cause: Value = serde_json::from_str(&error.cause).unwrap();
            assert_eq!(
                (error.error_type.as_str(), cause["errorMessage"].as_str()),
                (error_type, Some(message))
            );
        }
        let long = Bytes::from("\u{fc}".repeat(MESSAGE_BYTES_MAX));
        let error = function_error(500, &long);
        assert!(error.cause.len() < 32 << 10, "{} bytes", error.cause.len());
        let body = json!({"errorType": "\u{fc}".repeat(300_000)}).to_string();
        assert_eq!(function_error(500, &Bytes::from(body)).error_type, "\u{fc}".repeat(128));
        serde_json::from_str::<Value>(&error.cause).unwrap();
    }
}
