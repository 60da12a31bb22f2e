//! Runs one case on the real engine, with a journal in memory and a virtual clock.

use mayfly_workflows_language::arn::{ActivityArn, ExecutionArn, MapRunArn};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use futures::{StreamExt as _, future::BoxFuture};
use jiff::Timestamp;
use mayfly_api::workflow::names::{ACCOUNT, REGION};
use mayfly_workflows_engine::catalog::Catalog;
use mayfly_workflows_engine::engine::{
    Activities, Config, Engine, EngineDeps, ExecutionOwner, FunctionCall, FunctionError, FunctionOutput,
    Functions, HttpTasks, InvokeError, ListQuery, NoIntegrations, NoWireOperations, ObjectBody, ObjectEntry,
    ObjectError, ObjectPage, ObjectStore, Randomness, StartRequest,
};
use mayfly_workflows_engine::timers::VirtualClock;
use mayfly_workflows_machine::history::{DetailField, HistoryEvent};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::file::{TestCase, TestFile};
use super::script::MockScript;
use super::subject::Subject;

/// The default start time of executions.
const START: &str = "2026-01-01T00:00:00Z";
/// The interval of checks for the end of a case.
const ROUND: Duration = Duration::from_millis(2);
/// The number of rounds without progress after which the execution is stopped.
const IDLE_ROUNDS_MAX: u32 = 25;
/// The limit of events of a case's history, as on AWS: mocks may make a definition loop forever.
const HISTORY_EVENTS_MAX: u64 = 25_000;
/// The number of last states of a path that are searched for an endless loop.
const LOOP_STATES_MAX: usize = 200;
/// The longest duration of a case on the wall clock.
const CASE_MAX: Duration = Duration::from_secs(60);
/// The number of children of a map run whose history is read.
const CHILDREN_MAX: usize = 10_000;

/// The result of a case.
#[derive(Debug, Default)]
pub(super) struct CaseResult {
    pub(super) status: String,
    pub(super) output: Option<Value>,
    pub(super) error: Option<String>,
    pub(super) cause: Option<String>,
    pub(super) path: Vec<String>,
    pub(super) retries: BTreeMap<String, u32>,
    pub(super) calls: BTreeMap<String, Vec<Value>>,
    pub(super) elapsed: Duration,
    /// The reason why it could not be run to its end.
    pub(super) problem: Option<String>,
    /// The events of the execution, and of the children of its map runs.
    pub(super) events: Vec<Arc<Vec<HistoryEvent>>>,
}

/// Runs one case to its end, or until it cannot continue.
pub(super) async fn run(subject: &Subject, file: &TestFile, case: &TestCase) -> anyhow::Result<CaseResult> {
    let script = MockScript::new(file, case);
    let start = match case.now.or(file.now) {
        Some(now) => now,
        None => START.parse().context("the start of tests")?,
    };
    let engine = engine(file, start, script.clone()).await?;
    let input = serde_json::to_string(&case.input)?;
    let request = StartRequest {
        state_machine: subject.machine.clone(),
        name: Some("test".into()),
        input: input.into(),
        trace_header: None,
        version_arn: None,
        alias_arn: None,
    };
    let arn = engine.start_execution(request).await?.execution_arn;
    let problem = wait_for_end(&engine, &arn, &script).await;
    let mut ran = outcome(&engine, &arn, &script).await?;
    ran.problem = problem.or_else(|| endless_loop(&ran));
    engine.shutdown().await;
    Ok(ran)
}

async fn engine(file: &TestFile, start: Timestamp, script: Arc<MockScript>) -> anyhow::Result<Engine> {
    let deps = EngineDeps {
        http: Arc::new(NoServices),
        objects: Arc::new(Files::new(&file.files)),
        clock: Arc::new(VirtualClock::at(start)),
        randomness: Arc::new(SeededRandom::default()),
        catalog: Arc::new(Catalog::open(None)?),
        wire: Arc::new(NoWireOperations),
        activities: Arc::new(NoServices),
        supports_integration: |_| false,
        mocks: Some(script),
    };
    let mut config = Config { region: REGION.to_owned(), account: ACCOUNT.to_owned(), ..Config::default() };
    config.limits.execution.history_events_max = Some(HISTORY_EVENTS_MAX);
    Ok(Engine::open(config, deps).await?.start(Arc::new(NoServices), Arc::new(NoIntegrations)))
}

/// Waits for the end; returns the reason if the execution cannot end.
async fn wait_for_end(engine: &Engine, arn: &ExecutionArn, script: &MockScript) -> Option<String> {
    let ended = engine.wait(arn);
    tokio::pin!(ended);
    let deadline = tokio::time::Instant::now() + CASE_MAX;
    let mut idle_rounds = 0;
    loop {
        tokio::select! {
            _ = &mut ended => return script.problem(),
            () = tokio::time::sleep(ROUND) => {}
        }
        if let Some(problem) = script.problem() {
            return Some(problem);
        }
        idle_rounds = if engine.is_idle() { idle_rounds + 1 } else { 0 };
        if idle_rounds > IDLE_ROUNDS_MAX {
            return Some("it does not end: a mock never answers, and its state has no TimeoutSeconds".into());
        }
        if tokio::time::Instant::now() >= deadline {
            return Some(format!("it did not end within {} s", CASE_MAX.as_secs()));
        }
    }
}

/// Names the states of a loop that was ended only by the limit of events.
fn endless_loop(ran: &CaseResult) -> Option<String> {
    let events = ran.events.first().map_or(0, |events| events.len());
    if ran.status != "FAILED" || (events as u64) < HISTORY_EVENTS_MAX {
        return None;
    }
    let mut states: Vec<&str> = Vec::new();
    for state in ran.path.iter().rev().take(LOOP_STATES_MAX).rev() {
        if !states.contains(&&**state) {
            states.push(state);
        }
    }
    Some(format!(
        "it does not end: after {events} events it still loops between {}; give a mock another answer after \
         some calls (times: N), or a state that ends the loop",
        states.join(", ")
    ))
}

async fn outcome(engine: &Engine, arn: &ExecutionArn, script: &MockScript) -> anyhow::Result<CaseResult> {
    let described = engine.describe(arn).await?.context("the execution is gone")?;
    let events = engine.events(arn).await?.context("the execution is gone")?;
    let path =
        events.iter().filter(|event| is_entry(event)).filter_map(|event| text(event, "name")).collect();
    let mut ran = CaseResult {
        status: described.status.as_str().to_owned(),
        output: described.output.as_deref().map(serde_json::from_str).transpose()?,
        error: described.error,
        cause: described.cause,
        path,
        ..CaseResult::default()
    };
    let ends = described.stop_date.or_else(|| Timestamp::from_millisecond(events.last()?.at_ms).ok());
    let elapsed = ends.map(|ends| ends.duration_since(described.start_date));
    ran.elapsed = elapsed.and_then(|elapsed| elapsed.try_into().ok()).unwrap_or_default();
    for call in script.calls() {
        if call.retries > 0 {
            *ran.retries.entry(call.state.clone()).or_default() += 1;
        }
        ran.calls.entry(call.state).or_default().push(call.arguments);
    }
    let runs: Vec<_> = events.iter().filter(|event| event.kind == "MapRunStarted").collect();
    let runs: Vec<_> = runs.into_iter().filter_map(|event| text(event, "mapRunArn")).collect();
    ran.events.push(events);
    for run in runs {
        let query = ListQuery {
            owner: ExecutionOwner::MapRun(MapRunArn::from_trusted(run)),
            status: None,
            redriven: None,
            limit: CHILDREN_MAX,
            from: None,
        };
        for child in engine.list(query).await?.items {
            ran.events.extend(engine.events(&child.execution_arn).await?);
        }
    }
    Ok(ran)
}

/// Whether the event enters a state.
pub(super) fn is_entry(event: &HistoryEvent) -> bool {
    event.kind.ends_with("StateEntered")
}

/// The text in an event's details under a name.
pub(super) fn text(event: &HistoryEvent, name: &str) -> Option<String> {
    let fields = event.details.iter().flat_map(|details| &details.fields);
    fields.filter(|(known, _)| *known == name).find_map(|(_, field)| match field {
        DetailField::Text(text) | DetailField::Data(text, _) => Some(text.to_string()),
        _ => None,
    })
}

/// Never called: the mocks answer first.
struct NoServices;

impl Functions for NoServices {
    fn invoke(&self, _call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, InvokeError>> {
        Box::pin(async { Err(FunctionError::new("Mayfly.NoMock", String::new()).into()) })
    }
}

impl HttpTasks for NoServices {
    fn send(&self, _request: http::Request<Bytes>) -> BoxFuture<'_, Result<http::Response<Bytes>, String>> {
        Box::pin(async { Err("there is no network in a test".to_owned()) })
    }
}

impl Activities for NoServices {
    fn exists(&self, _arn: &ActivityArn) -> bool {
        true
    }
}

/// Deterministic random numbers.
#[derive(Default)]
struct SeededRandom(AtomicU64);

impl Randomness for SeededRandom {
    fn bytes(&self) -> [u8; 16] {
        let digest = Sha256::digest(self.0.fetch_add(1, Ordering::Relaxed).to_be_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        bytes
    }
}

/// The `files` of a test, and the files that the workflow writes.
struct Files(Mutex<HashMap<String, Bytes>>);

impl Files {
    fn new(files: &HashMap<String, Value>) -> Self {
        let body = |value: &Value| match value {
            Value::String(text) => Bytes::from(text.clone()),
            other => Bytes::from(other.to_string()),
        };
        Self(Mutex::new(files.iter().map(|(name, value)| (name.clone(), body(value))).collect()))
    }

    fn there(&self) -> std::sync::MutexGuard<'_, HashMap<String, Bytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ObjectStore for Files {
    fn get(
        &self,
        bucket: &str,
        key: &str,
        _version: Option<&str>,
    ) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
        let name = format!("{bucket}/{key}");
        let found = self.there().get(&name).cloned();
        let missing = move || {
            let message =
                format!("The specified key does not exist: write it under files: {{\"{name}\": …}}");
            ObjectError { message, ..ObjectError::no_such_key() }
        };
        Box::pin(async move {
            let found = found.ok_or_else(missing)?;
            Ok(futures::stream::iter([Ok(found)]).boxed())
        })
    }

    fn put(&self, bucket: &str, key: &str, body: Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
        self.there().insert(format!("{bucket}/{key}"), body);
        Box::pin(async { Ok(()) })
    }

    fn list(
        &self,
        bucket: &str,
        prefix: &str,
        _from: Option<String>,
    ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
        let start = format!("{bucket}/");
        let mut entries: Vec<_> = self
            .there()
            .iter()
            .filter_map(|(name, body)| Some((name.strip_prefix(&start)?.to_owned(), body.len() as u64)))
            .filter(|(key, _)| key.starts_with(prefix))
            .map(|(key, size)| ObjectEntry {
                etag: format!("\"{size:x}\""),
                key,
                last_modified: Timestamp::UNIX_EPOCH,
                size,
                storage_class: "STANDARD".to_owned(),
            })
            .collect();
        entries.sort_by(|a, b| a.key.cmp(&b.key));
        Box::pin(async { Ok(ObjectPage { entries, next: None }) })
    }
}
