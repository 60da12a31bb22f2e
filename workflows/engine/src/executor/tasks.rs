//! The work of Task states.

use mayfly_workflows_language::arn::{ActivityArn, ExecutionArn};
use mayfly_workflows_language::execution::RunStatus;
use std::sync::Arc;

use futures::future::BoxFuture;
use mayfly_workflows_language::definition::{IntegrationKind, IntegrationPattern, Resource};
use mayfly_workflows_language::value::Value;
use tokio::sync::mpsc;

use super::activities::Work;
use super::endpoint;
use super::http;
use super::sdk;
use crate::engine::{
    CallOrigin, Description, EffectGuards, ExecutionError, FunctionCall, FunctionError, FunctionOutput,
    IntegrationCall, InvokeError, OperationError, Reporter, Started,
};
use crate::service::ResourceName;
use mayfly_workflows_journal::JournalError;
use mayfly_workflows_language::execution::{Digest, Payload, uuid_of};
use mayfly_workflows_machine::envelope::{self, Envelope};
use mayfly_workflows_machine::{Event, TaskCall, time_text};

/// The result of an effect.
pub(crate) enum Finished {
    /// With a result.
    Result(Value),
    /// With a result that is text already.
    Text(String),
    /// A function's result for `lambda:invoke`.
    Answered(FunctionOutput),
    /// With an error.
    Failed(FunctionError),
    /// Another event reports the outcome later.
    Later,
    /// Not called yet: it has to be tried again.
    Unavailable {
        /// The reason, for the log.
        reason: String,
    },
}

impl From<InvokeError> for Finished {
    fn from(error: InvokeError) -> Self {
        match error {
            InvokeError::Failed(failure) => Finished::Failed(failure),
            InvokeError::Unavailable { reason } => Finished::Unavailable { reason },
        }
    }
}

impl From<Result<Value, InvokeError>> for Finished {
    fn from(outcome: Result<Value, InvokeError>) -> Self {
        match outcome {
            Ok(value) => Finished::Result(value),
            Err(error) => error.into(),
        }
    }
}

/// Carries out a task.
pub(crate) async fn run(reporter: &Reporter, task: &TaskCall, guards: &mut EffectGuards) -> Finished {
    if let Some(mocks) = &reporter.inner.deps.mocks {
        return super::mocked::run(reporter, task, guards, mocks).await;
    }
    match &task.resource {
        Resource::Function(_) => function(reporter, task).await,
        Resource::LambdaInvoke(pattern) if *pattern != IntegrationPattern::WaitForTaskToken => {
            match invoke(reporter, task).await {
                Ok(answer) => Finished::Answered(answer),
                Err(error) => error.into(),
            }
        }
        Resource::Activity(arn) => activity(reporter, arn, task).await,
        Resource::StartExecution { pattern: IntegrationPattern::Sync, parsed_output } => {
            start_and_wait(reporter, task, *parsed_output, guards).await
        }
        resource => {
            let pattern = resource.pattern();
            if pattern == IntegrationPattern::WaitForTaskToken && task.submitted.is_some() {
                return Finished::Later;
            }
            if matches!(resource, Resource::JobRun(IntegrationPattern::Sync) | Resource::FunctionRequest) {
                // It may wait for hours: others may have its place.
                guards.release();
            }
            let outcome = request(reporter, task).await;
            match (pattern, outcome) {
                (IntegrationPattern::WaitForTaskToken, Ok(answer)) => {
                    let output = Payload::Inline(answer.to_text().into());
                    reporter.report(Event::Submitted { n: reporter.n, output }).await;
                    Finished::Later
                }
                (_, outcome) => outcome.into(),
            }
        }
    }
}

/// The one call that a task makes. All calls but those of functions have a box of their own: a task's future is as
/// large as the largest of them, and is copied when it begins.
async fn request(reporter: &Reporter, task: &TaskCall) -> Result<Value, InvokeError> {
    let answer = match &task.resource {
        Resource::LambdaInvoke(_) => {
            let FunctionOutput { payload, status, executed_version } = invoke(reporter, task).await?;
            let now_ms = reporter.inner.now_ms();
            let id = reporter.inner.deps.randomness.uuid();
            return Ok(envelope::of_function(&payload, status, &executed_version, now_ms, id));
        }
        Resource::StartExecution { .. } => {
            start_execution(reporter, &task.arguments, false).await.map(|(answer, _)| answer)
        }
        Resource::HttpInvoke => Box::pin(http::invoke(&*reporter.inner.deps.http, &task.arguments)).await,
        Resource::Integration { service, action, kind: IntegrationKind::AwsSdk, .. }
            if &**service == "sfn" =>
        {
            Box::pin(own_api(reporter, action, &task.arguments)).await
        }
        Resource::Integration { service, action, kind: IntegrationKind::AwsSdk, .. }
            if &**service == "s3" =>
        {
            // The form of S3's request ids.
            let made_up = || hex::encode_upper(&reporter.inner.deps.randomness.bytes()[..8]);
            Box::pin(endpoint::call_objects(reporter, task, action, made_up)).await
        }
        Resource::Integration { service, action, kind, .. } => {
            match Box::pin(endpoint::call(reporter, task, service, action, *kind)).await {
                Some(answer) => answer,
                None => return Box::pin(integration(reporter, task)).await,
            }
        }
        _ => return Box::pin(integration(reporter, task)).await,
    };
    answer.map_err(InvokeError::Failed)
}

/// Calls a function: one of this process, else one at Lambda's endpoint.
async fn call_function(reporter: &Reporter, call: FunctionCall) -> Result<FunctionOutput, InvokeError> {
    match reporter.callees.functions.invoke(call.clone()).await {
        Err(InvokeError::Failed(failure)) if failure.error_type == "Lambda.ResourceNotFoundException" => {
            let answer = Box::pin(endpoint::invoke_function(reporter, &call)).await;
            Ok(answer.unwrap_or(Err(failure))?)
        }
        answer => answer,
    }
}

async fn function(reporter: &Reporter, task: &TaskCall) -> Finished {
    let call = FunctionCall {
        function: task.arn.to_string(),
        payload: task.arguments.to_text(),
        detached: false,
        idempotency_key: reporter.idempotency_key(),
    };
    match call_function(reporter, call).await {
        Ok(output) => Finished::Text(output.payload),
        Err(error) => error.into(),
    }
}

/// The call of a `lambda:invoke`.
async fn invoke(reporter: &Reporter, task: &TaskCall) -> Result<FunctionOutput, InvokeError> {
    let arguments = &task.arguments;
    let text = |name: &str| arguments.get(name).and_then(Value::as_str);
    let Some(function) = text("FunctionName") else {
        return Err(FunctionError::new(
            "States.Runtime",
            "The field 'FunctionName' is required but was missing",
        )
        .into());
    };
    let function = match text("Qualifier") {
        Some(qualifier) => format!("{function}:{qualifier}"),
        None => function.to_owned(),
    };
    let detached = detached(text("InvocationType"), || request_id(reporter))?;
    let call = FunctionCall {
        function,
        payload: arguments.get("Payload").map_or_else(|| "{}".to_owned(), Value::to_text),
        detached,
        idempotency_key: reporter.idempotency_key(),
    };
    call_function(reporter, call).await
}

/// Whether the call is fire and forget. Lambda's request framework refuses an unknown invocation type in these words;
/// a dry run, which only asks about permissions, has nothing to ask here.
fn detached(invocation_type: Option<&str>, request_id: impl Fn() -> String) -> Result<bool, FunctionError> {
    let reason = match invocation_type {
        None | Some("RequestResponse") => return Ok(false),
        Some("Event") => return Ok(true),
        Some("DryRun") => "InvocationType DryRun is not carried out here".to_owned(),
        Some(other) => format!(
            "1 validation error detected: Value '{other}' at 'invocationType' failed to satisfy constraint: Member must \
             satisfy enum value set: [Event, RequestResponse, DryRun]"
        ),
    };
    Err(FunctionError::new(
        "Lambda.InvalidParameterValueException",
        format!("{reason} (Service: Lambda, Status Code: 400, Request ID: {})", request_id()),
    ))
}

fn request_id(reporter: &Reporter) -> String {
    reporter.inner.deps.randomness.uuid().to_string()
}

async fn activity(reporter: &Reporter, arn: &ActivityArn, task: &TaskCall) -> Finished {
    let n = reporter.n;
    if !reporter.inner.deps.activities.exists(arn) {
        let cause = format!("The activity {arn} does not exist.");
        reporter.report(Event::Refused { n, cause }).await;
        return Finished::Later;
    }
    if reporter.report(Event::Accepted { n }).await {
        let work = Work {
            activity: arn.clone(),
            execution: reporter.execution(),
            effect: n,
            token: task.token.clone(),
            input: task.arguments.to_text().into(),
        };
        reporter.inner.offer_work(work);
    }
    Finished::Later
}

/// Starts an execution, which the task may wait for; the answer as `states:startExecution` gives it, and the
/// execution's ARN.
async fn start_execution(
    reporter: &Reporter,
    arguments: &Value,
    waits: bool,
) -> Result<(Value, ExecutionArn), FunctionError> {
    let started = start(reporter, arguments, waits).await.map_err(|error| {
        let id = request_id(reporter);
        optimised_failure(&error, &id)
    })?;
    let id = request_id(reporter);
    let envelope = Envelope {
        request_id: &id,
        bytes: service_bytes(&started),
        at_ms: reporter.inner.now_ms(),
        content_type: "application/x-amz-json-1.0",
        extra: &[],
    };
    let [http_metadata, response_metadata] = envelope.members();
    let answer = Value::object([
        ("ExecutionArn", Value::from(started.execution_arn.as_str())),
        http_metadata,
        response_metadata,
        ("StartDate", Value::from(started.start_date.as_millisecond())),
    ]);
    Ok((answer, started.execution_arn))
}

async fn start(reporter: &Reporter, arguments: &Value, waits: bool) -> Result<Started, OperationError> {
    let mut request = reporter.inner.deps.wire.decode_start(&sdk::request(arguments))?;
    if request.name.is_none() {
        // A second try after a crash finds the execution of the first.
        let digest = Digest::of(reporter.idempotency_key().as_bytes());
        request.name = Some(ResourceName::parse(&uuid_of(&digest).to_string())?);
    }
    let service = reporter.service();
    Ok(match waits {
        true => Box::pin(service.start_awaited(request, reporter.waiter())).await?,
        false => Box::pin(service.start_execution(request)).await?,
    })
}

/// The length of the service's answer: it writes times as `1.688136138721E9`.
fn service_bytes(started: &Started) -> usize {
    let seconds = started.start_date.as_millisecond() as f64 / 1000.0;
    format!("{{\"executionArn\":\"{}\",\"startDate\":{seconds:E}}}", started.execution_arn).len()
}

async fn start_and_wait(
    reporter: &Reporter,
    task: &TaskCall,
    parsed_output: bool,
    guards: &mut EffectGuards,
) -> Finished {
    let arn =
        match task.submitted.as_ref().and_then(|answer| answer.get("ExecutionArn")).and_then(Value::as_str) {
            Some(arn) => ExecutionArn::from_trusted(arn),
            // Not left halfway: an execution that has begun is either waited for or stopped.
            None => {
                match reporter
                    .spawn_uncancelled(begin_awaited(reporter.clone(), task.arguments.clone()))
                    .await
                {
                    Ok(Ok(Some(arn))) => arn,
                    Ok(Err(failure)) => return Finished::Failed(failure),
                    Ok(Ok(None)) | Err(_) => return Finished::Later,
                }
            }
        };
    guards.release();
    match reporter.inner.wait(&arn).await {
        Ok(Some(ended)) => ended_execution(&ended, parsed_output),
        Ok(None) => lost(format!("The execution {arn} does not exist.")),
        // It is waited for again when the journal is opened again.
        Err(ExecutionError::Closed | ExecutionError::Journal(JournalError::Closed)) => Finished::Later,
        Err(error) => lost(error.to_string()),
    }
}

/// Starts the execution that a task waits for, and journals that; returns its ARN while a state waits for it.
async fn begin_awaited(reporter: Reporter, arguments: Value) -> Result<Option<ExecutionArn>, FunctionError> {
    let (answer, arn) = start_execution(&reporter, &arguments, true).await?;
    let output = Payload::Inline(answer.to_text().into());
    if reporter.report(Event::Submitted { n: reporter.n, output }).await {
        return Ok(Some(arn));
    }
    reporter.stop_unawaited(arn).await;
    Ok(None)
}

fn lost(cause: String) -> Finished {
    Finished::Failed(FunctionError::new("States.TaskFailed", cause))
}

fn ended_execution(ended: &Description, parsed_output: bool) -> Finished {
    let data = |text: &str| match parsed_output {
        true => Value::parse(text).unwrap_or_default(),
        false => Value::from(text),
    };
    let included = || Value::object([("Included", Value::from(true))]);
    let mut members: Vec<(&str, Value)> = Vec::new();
    if let Some(cause) = &ended.cause {
        members.push(("Cause", Value::from(cause.as_str())));
    }
    if let Some(error) = &ended.error {
        members.push(("Error", Value::from(error.as_str())));
    }
    members.push(("ExecutionArn", Value::from(ended.execution_arn.as_str())));
    members.push(("Input", data(&ended.input)));
    members.push(("InputDetails", included()));
    members.push(("Name", Value::from(ended.name.as_str())));
    if let Some(output) = &ended.output {
        members.push(("Output", data(output)));
        members.push(("OutputDetails", included()));
    }
    members.push(("StartDate", Value::from(ended.start_date.as_millisecond())));
    members.push(("StateMachineArn", Value::from(ended.state_machine_arn.as_str())));
    members.push(("Status", Value::from(ended.status.as_str())));
    if let Some(stopped) = ended.stop_date {
        members.push(("StopDate", Value::from(stopped.as_millisecond())));
    }
    let told = Value::object(members);
    if ended.status == RunStatus::Succeeded {
        return Finished::Result(told);
    }
    Finished::Failed(FunctionError::new("States.TaskFailed", told.to_text()))
}

/// The error of an optimised integration for an error of the Step Functions API.
fn optimised_failure(error: &OperationError, request_id: &str) -> FunctionError {
    FunctionError::new(
        format!("StepFunctions.{}", exception(&error.code)),
        format!(
            "{} (Service: AWSStepFunctions; Status Code: 400; Error Code: {}; Request ID: {request_id}; Proxy: null)",
            error.message, error.code
        ),
    )
}

fn exception(code: &str) -> String {
    if code.ends_with("Exception") { code.to_owned() } else { format!("{code}Exception") }
}

/// `aws-sdk:sfn:…`: the operations of this process as the SDK integration calls them.
async fn own_api(reporter: &Reporter, action: &str, arguments: &Value) -> Result<Value, FunctionError> {
    let (service, operation, request) = (reporter.service(), sdk::capital(action), sdk::request(arguments));
    match reporter.inner.deps.wire.call(&service, &operation, &request).await {
        Ok(answer) => Ok(sdk::answer(&answer)),
        Err(error) => Err(FunctionError::new(
            format!("Sfn.{}", exception(&error.code)),
            format!(
                "{} (Service: Sfn, Status Code: 400, Request ID: {}) (SDK Attempt Count: 1)",
                error.message,
                request_id(reporter)
            ),
        )),
    }
}

async fn integration(reporter: &Reporter, task: &TaskCall) -> Result<Value, InvokeError> {
    let resource = task.arn.to_string();
    match (reporter.inner.deps.supports_integration)(&resource) {
        true => {
            let (submitted, told) = mpsc::channel(1);
            let call = IntegrationCall {
                resource,
                arguments: task.arguments.to_serde(),
                task_token: task.token.to_string(),
                idempotency_key: reporter.idempotency_key(),
                origin: CallOrigin {
                    state_machine: reporter.state_machine().arn.clone(),
                    execution: reporter.execution_arn().clone(),
                },
                submitted: Some(submitted).filter(|_| task.submitted.is_none()),
                retries: reporter.state().await.map_or(0, |(_, retries)| retries),
            };
            let answer = with_submission(reporter, reporter.callees.integrations.call(call), told).await;
            let of_aws =
                matches!(task.resource, Resource::Integration { kind: IntegrationKind::Optimised, .. });
            answer.map(|answer| if of_aws { enveloped(reporter, &answer) } else { Value::from(&answer) })
        }
        false => Err(FunctionError::not_supported(format!(
            "The service integration '{resource}' is known but not carried out here. Use a function \
                 (arn:aws:states:::lambda:invoke) or http:invoke instead, or point the service at an endpoint. \
                 (reached at {})",
            time_text(reporter.inner.now_ms())
        ))
        .into()),
    }
}

/// The answer of one of AWS's services that is carried out here, with what its SDK puts around it.
fn enveloped(reporter: &Reporter, answer: &serde_json::Value) -> Value {
    let Value::Object(members) = Value::from(answer) else { return Value::from(answer) };
    let id = request_id(reporter);
    let envelope = Envelope {
        request_id: &id,
        bytes: answer.to_string().len(),
        at_ms: reporter.inner.now_ms(),
        content_type: "application/x-amz-json-1.1",
        extra: &[],
    };
    let mut members = Arc::unwrap_or_clone(members);
    for (name, value) in envelope.members() {
        members.insert(Arc::<str>::from(name), value);
    }
    Value::from(members)
}

/// Runs a call to its end. Its report of having begun is added to the history before its outcome.
async fn with_submission(
    reporter: &Reporter,
    mut call: BoxFuture<'_, Result<serde_json::Value, InvokeError>>,
    mut told: mpsc::Receiver<serde_json::Value>,
) -> Result<serde_json::Value, InvokeError> {
    let report = async |begun: serde_json::Value| {
        let output = Payload::Inline(Value::from(&begun).to_text().into());
        reporter.report(Event::Submitted { n: reporter.n, output }).await
    };
    let answer = tokio::select! {
        biased;
        Some(begun) = told.recv() => {
            report(begun).await;
            call.await
        }
        answer = &mut call => answer,
    };
    if let Ok(begun) = told.try_recv() {
        report(begun).await;
    }
    answer
}
