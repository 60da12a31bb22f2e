//! TestState.

use mayfly_workflows_engine::service::CredentialScope;
use mayfly_workflows_engine::test_state::{
    ErrorHandling, HttpRequestTrace, HttpResponseTrace, InspectionData, InspectionLevel, MockValidation,
    StateConfiguration, StateMock, TestState,
};
use serde_json::{Value, json};

use super::params::{ResponseFields, flag, optional, text};
use super::{Answer, Api, StepFunctionsError};

impl Api {
    pub(super) async fn test_state(&self, params: &Value, scope: &CredentialScope) -> Answer {
        let owned = |name: &str| optional(params, name).map(str::to_owned);
        let request = TestState {
            scope: scope.clone(),
            definition: text(params, "definition").to_owned(),
            state_name: owned("stateName"),
            role_arn: owned("roleArn"),
            input: owned("input"),
            level: match optional(params, "inspectionLevel") {
                Some("TRACE") => InspectionLevel::Trace,
                Some("DEBUG") => InspectionLevel::Debug,
                _ => InspectionLevel::Info,
            },
            reveal_secrets: flag(params, "revealSecrets").unwrap_or(false),
            variables: owned("variables"),
            context: owned("context"),
            mock: mock(params)?,
            configuration: configuration(params),
        };
        let tested = self.service.test_state(&request).await?;
        let fields = ResponseFields::default()
            .set("status", tested.status.as_str())
            .maybe("output", tested.output)
            .maybe("error", tested.error)
            .maybe("cause", tested.cause)
            .maybe("nextState", tested.next_state)
            .maybe("inspectionData", tested.inspection.map(inspection_json));
        Ok(fields.done())
    }
}

/// The mock of a request; none if it has neither a result nor an error.
fn mock(params: &Value) -> Result<Option<StateMock>, StepFunctionsError> {
    let Some(given) = params.get("mock") else { return Ok(None) };
    let error = given.get("errorOutput").filter(|error| !error.is_null());
    Ok(match (optional(given, "result"), error) {
        (Some(_), Some(_)) => {
            return Err(StepFunctionsError::validation(
                "A test mock should have only one of the following fields: [result, errorOutput].",
            ));
        }
        (Some(result), None) => Some(StateMock::Result {
            result: result.to_owned(),
            validation: match optional(given, "fieldValidationMode") {
                Some("NONE") => MockValidation::None,
                Some("PRESENT") => MockValidation::Present,
                _ => MockValidation::Strict,
            },
        }),
        (None, Some(error)) => Some(StateMock::Error {
            error: optional(error, "error").map(str::to_owned),
            cause: optional(error, "cause").map(str::to_owned),
        }),
        (None, None) => None,
    })
}

fn configuration(params: &Value) -> StateConfiguration {
    let Some(given) = params.get("stateConfiguration") else { return StateConfiguration::default() };
    StateConfiguration {
        retries: given.get("retrierRetryCount").and_then(Value::as_u64),
        caused_by: optional(given, "errorCausedByState").map(str::to_owned),
        failed_iterations: given.get("mapIterationFailureCount").and_then(Value::as_u64),
        reader_data: optional(given, "mapItemReaderData").map(str::to_owned),
    }
}

fn inspection_json(inspection: InspectionData) -> Value {
    let handling = error_handling_json(inspection.error_handling);
    let mut fields = ResponseFields::default()
        .maybe("maxConcurrency", inspection.max_concurrency)
        .maybe("toleratedFailureCount", inspection.tolerated_failure_count)
        .maybe("toleratedFailurePercentage", inspection.tolerated_failure_percentage)
        .maybe("request", inspection.request.map(request_json))
        .maybe("response", inspection.response.map(response_json))
        .maybe("errorDetails", handling);
    for (stage, value) in inspection.stages {
        fields = fields.set(stage.as_str(), value);
    }
    fields.done()
}

/// The handling of an error; none if neither a retrier nor a catcher matches one.
fn error_handling_json(handling: ErrorHandling) -> Option<Value> {
    if handling == ErrorHandling::default() {
        return None;
    }
    let fields = ResponseFields::default()
        .maybe("retryIndex", handling.retry_index)
        .maybe("retryBackoffIntervalSeconds", handling.retry_backoff_seconds)
        .maybe("catchIndex", handling.catch_index);
    Some(fields.done())
}

fn request_json(request: HttpRequestTrace) -> Value {
    json!({
        "protocol": request.protocol,
        "method": request.method,
        "url": request.url,
        "headers": request.headers,
        "body": request.body,
    })
}

fn response_json(response: HttpResponseTrace) -> Value {
    json!({
        "protocol": response.protocol,
        "statusCode": response.status_code,
        "statusMessage": response.status_message,
        "headers": response.headers,
        "body": response.body,
    })
}
