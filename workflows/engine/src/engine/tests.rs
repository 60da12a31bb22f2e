//! The engine from outside: real journals, scripted functions, time that jumps.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use mayfly_workflows_language::arn::{ActivityArn, ExecutionArn, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::parse;
use parking_lot::Mutex;
use serde_json::json;

use super::*;
use crate::catalog::Catalog;
use crate::service::{ServiceError, StartExecution, WorkflowService};
use crate::timers::VirtualClock;
use mayfly_workflows_journal::{Journal, MemoryJournal};

mod awaited;
mod checkpoints;
mod durability;
mod editions;
mod effects;
mod evaluation;
mod eviction;
mod items;
mod load;
mod states;
mod tasks;
mod test_state;
mod waits;
mod watched;

/// Far longer than anything here takes.
pub(super) const LONG: Duration = Duration::from_secs(20);

/// Lets the others run until it is so; panics with `what` when that does not come.
pub(super) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let looks = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let in_time = tokio::time::timeout(LONG, looks).await.is_ok();
    assert!(in_time, "not within {LONG:?}: {what}");
}

/// Functions by name; counts what was called with which key.
#[derive(Default)]
pub(super) struct Scripted {
    pub(super) calls: Mutex<Vec<(String, String)>>,
    pub(super) keys: Mutex<HashMap<String, u32>>,
    /// Lets `interrupted` fail.
    pub(super) interrupt: tokio::sync::Notify,
}

impl Functions for Scripted {
    fn invoke(&self, call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, InvokeError>> {
        Box::pin(async move {
            let name = call.function.rsplit(':').next().unwrap_or_default().to_owned();
            self.calls.lock().push((name.clone(), call.payload.clone()));
            let count = {
                let mut keys = self.keys.lock();
                let count = keys.entry(call.idempotency_key).or_default();
                *count += 1;
                *count
            };
            let answered = |payload: String| {
                Ok(FunctionOutput { payload, status: 200, executed_version: "$LATEST".to_owned() })
            };
            match name.as_str() {
                "echo" => answered(call.payload),
                "fail" => Err(FunctionError::new("Broken", "{\"errorMessage\":\"no\"}").into()),
                // Cannot be called at first.
                "interrupted" if count == 1 => {
                    self.interrupt.notified().await;
                    Err(FunctionError::new("Lambda.Unknown", "{}").into())
                }
                "late" if count <= 3 => Err(InvokeError::Unavailable { reason: "not yet".to_owned() }),
                "double" => {
                    let number: i64 = call.payload.parse().unwrap_or(0);
                    answered((number * 2).to_string())
                }
                "never" => std::future::pending().await,
                "panics" => panic!("as the test wants it"),
                "count" => answered(count.to_string()),
                _ => answered("null".to_owned()),
            }
        })
    }
}

pub(super) struct NoHttp;

impl HttpTasks for NoHttp {
    fn send(
        &self,
        _request: http::Request<bytes::Bytes>,
    ) -> BoxFuture<'_, Result<http::Response<bytes::Bytes>, String>> {
        Box::pin(async { Err("connection refused".to_owned()) })
    }
}

/// Files in memory.
#[derive(Default)]
pub(super) struct Files(pub(super) Mutex<HashMap<String, bytes::Bytes>>);

impl ObjectStore for Files {
    fn get(
        &self,
        bucket: &str,
        key: &str,
        _version: Option<&str>,
    ) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
        let found = self.0.lock().get(&format!("{bucket}/{key}")).cloned();
        Box::pin(async move {
            let found = found.ok_or_else(ObjectError::no_such_key)?;
            // Every byte comes alone.
            let bytes: Vec<_> = (0..found.len()).map(|at| Ok(found.slice(at..=at))).collect();
            Ok(futures::stream::iter(bytes).boxed())
        })
    }

    fn put(&self, bucket: &str, key: &str, body: bytes::Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
        self.0.lock().insert(format!("{bucket}/{key}"), body);
        Box::pin(async { Ok(()) })
    }

    /// Two keys are a page.
    fn list(
        &self,
        bucket: &str,
        prefix: &str,
        from: Option<String>,
    ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
        let files = self.0.lock();
        let mut keys: Vec<_> = files
            .iter()
            .filter_map(|(name, body)| {
                Some((name.strip_prefix(&format!("{bucket}/"))?.to_owned(), body.len()))
            })
            .filter(|(key, _)| key.starts_with(prefix) && from.as_ref().is_none_or(|from| key >= from))
            .collect();
        keys.sort();
        let next = keys.get(2).map(|(key, _)| key.clone());
        let entry = |(key, size): (String, usize)| ObjectEntry {
            key,
            etag: "\"e\"".to_owned(),
            last_modified: jiff::Timestamp::UNIX_EPOCH,
            size: size as u64,
            storage_class: "STANDARD".to_owned(),
        };
        let entries = keys.into_iter().take(2).map(entry).collect();
        Box::pin(async { Ok(ObjectPage { entries, next }) })
    }
}

pub(super) struct AnyActivity;

impl Activities for AnyActivity {
    fn exists(&self, arn: &ActivityArn) -> bool {
        arn.last_field() != "missing"
    }
}

pub(super) struct TestEngine {
    pub(super) engine: Engine,
    pub(super) functions: Arc<Scripted>,
    pub(super) files: Arc<Files>,
}

pub(super) fn deps(files: Arc<Files>) -> EngineDeps {
    let start = jiff::Timestamp::from_second(1_700_000_000).expect("a time");
    EngineDeps {
        http: Arc::new(NoHttp),
        objects: files,
        clock: Arc::new(VirtualClock::at(start)),
        randomness: Arc::new(OsRandomness),
        catalog: Arc::new(Catalog::open(None).expect("opens")),
        wire: Arc::new(StartRequests),
        activities: Arc::new(AnyActivity),
        supports_integration: |_| false,
        mocks: None,
    }
}

/// An engine without integrations, which runs.
pub(super) async fn opened(
    config: Config,
    deps: EngineDeps,
    functions: Arc<Scripted>,
    journal: Arc<dyn Journal>,
) -> Engine {
    let opened = Engine::with_journal(config, deps, journal).await.expect("opens");
    opened.start(functions, Arc::new(NoIntegrations))
}

/// Decodes the members of a StartExecution that tests use.
pub(super) struct StartRequests;

impl WireOperations for StartRequests {
    fn decode_start(&self, request: &serde_json::Value) -> Result<StartExecution, OperationError> {
        let text = |name: &str| request.get(name).and_then(serde_json::Value::as_str).map(str::to_owned);
        let state_machine = text("stateMachineArn").unwrap_or_default();
        let state_machine = StateMachineArn::parse(&state_machine).map_err(ServiceError::from)?;
        Ok(StartExecution { state_machine, name: None, input: text("input"), trace_header: None })
    }

    fn call<'a>(
        &'a self,
        _service: &'a WorkflowService,
        operation: &'a str,
        _request: &'a serde_json::Value,
    ) -> BoxFuture<'a, Result<serde_json::Value, OperationError>> {
        panic!("no task of these tests calls {operation}");
    }
}

impl TestEngine {
    /// Waits until no work is in progress that continues without an event.
    pub(super) async fn settled(&self) {
        until("nothing is under way", || self.engine.inner.work.is_idle()).await;
    }

    pub(super) async fn new() -> Self {
        Self::on(Arc::new(MemoryJournal::default()), Arc::default()).await
    }

    pub(super) async fn on(journal: Arc<dyn Journal>, functions: Arc<Scripted>) -> Self {
        Self::checkpointing(journal, functions, EngineLimits::default().checkpoint_records).await
    }

    pub(super) async fn checkpointing(
        journal: Arc<dyn Journal>,
        functions: Arc<Scripted>,
        checkpoint_records: u64,
    ) -> Self {
        Self::limited(journal, functions, EngineLimits { checkpoint_records, ..EngineLimits::default() })
            .await
    }

    pub(super) async fn limited(
        journal: Arc<dyn Journal>,
        functions: Arc<Scripted>,
        limits: EngineLimits,
    ) -> Self {
        let config = Config { limits, ..Config::default() };
        let files: Arc<Files> = Arc::default();
        let deps = deps(files.clone());
        Self { engine: opened(config, deps, functions.clone(), journal).await, functions, files }
    }

    pub(super) async fn start(&self, machine: &Arc<StartedMachine>, input: &str) -> ExecutionArn {
        let started = self.engine.start_execution(request(machine, input)).await.expect("starts");
        started.execution_arn
    }

    /// Runs a definition to its end; its outcome and its history as lines.
    pub(super) async fn run(&self, definition: serde_json::Value, input: &str) -> (Description, Vec<String>) {
        let arn = self.start(&machine(definition, StateMachineType::Standard), input).await;
        let ended = self.engine.wait(&arn).await.expect("read").expect("there");
        (ended, self.lines(&arn).await)
    }

    pub(super) async fn lines(&self, arn: &ExecutionArn) -> Vec<String> {
        let events = self.engine.events(arn).await.expect("read").expect("there");
        events.iter().map(|event| format!("{} {} {}", event.id, event.previous, event.kind)).collect()
    }
}

pub(super) fn activity_arn(text: &str) -> ActivityArn {
    ActivityArn::parse(text).expect("an ARN")
}

pub(super) fn request(machine: &Arc<StartedMachine>, input: &str) -> StartRequest {
    StartRequest {
        state_machine: machine.clone(),
        name: None,
        input: input.into(),
        trace_header: None,
        version_arn: None,
        alias_arn: None,
    }
}

pub(super) fn machine(definition: serde_json::Value, kind: StateMachineType) -> Arc<StartedMachine> {
    let text = definition.to_string();
    let compiled = match parse::compile(&text, kind) {
        Ok(compiled) => compiled,
        Err(rejection) => panic!("{}", rejection.message()),
    };
    Arc::new(StartedMachine {
        arn: StateMachineArn::from_trusted("arn:aws:states:us-east-1:000000000000:stateMachine:m"),
        name: "m".to_owned(),
        role_arn: "arn:aws:iam::000000000000:role/r".to_owned(),
        kind,
        definition_text: text.into(),
        definition: Arc::new(compiled),
        details: None,
        flow: None,
    })
}

pub(super) fn task(name: &str) -> serde_json::Value {
    json!({"Type": "Task", "Resource": format!("arn:aws:lambda:us-east-1:000000000000:function:{name}")})
}

pub(super) fn with(mut state: serde_json::Value, more: serde_json::Value) -> serde_json::Value {
    let (Some(state_members), Some(more)) = (state.as_object_mut(), more.as_object()) else {
        panic!("objects")
    };
    state_members.extend(more.clone());
    state
}
