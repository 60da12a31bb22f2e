//! An engine with many open executions: how late their timers fire, how long a start takes while they are resumed,
//! and how long a list of them takes.
//!
//! ```text
//! cargo run --release -p mayfly-workflows-engine --example open_executions -- --executions 100000
//! ```
//! All executions wait for the same instant; by then they have left memory. Before it the engine is closed and opened
//! again. Prints a line of JSON for each part.
#![expect(clippy::print_stdout, reason = "the report is this program's product")]

use mayfly_workflows_language::arn::StateMachineArn;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, future::BoxFuture, stream};
use jiff::Timestamp;
use mayfly_workflows_engine::{
    catalog::Catalog,
    engine::{
        Config, Engine, EngineDeps, ExecutionOwner, FunctionCall, FunctionError, FunctionOutput, Functions,
        HttpTasks, InvokeError, ListQuery, NoIntegrations, NoWireOperations, ObjectBody, ObjectError,
        ObjectPage, ObjectStore, OsRandomness, RunStatus, StartRequest, StartedMachine, StateMachineType,
    },
    timers::SystemClock,
};
use serde_json::{Value, json};

/// Starts that are in progress at the same time.
const STARTS: usize = 256;
/// Starts whose duration is measured while the executions are resumed.
const STARTS_MEASURED: usize = 200;
/// Executions on a page: the number that kubectl asks for.
const PAGE: usize = 500;
/// The longest wait for the last execution after its timer was due.
const END_PATIENCE: Duration = Duration::from_secs(120);

type Failure = Box<dyn std::error::Error + Send + Sync>;

struct Options {
    executions: usize,
    /// The time between the engine's second start and the timers.
    rest: Duration,
    dir: PathBuf,
    language: String,
}

fn main() -> Result<(), Failure> {
    let options = options(std::env::args().skip(1))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(bench(&options))
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, Failure> {
    let mut options = Options {
        executions: 100_000,
        rest: Duration::from_secs(40),
        dir: std::env::temp_dir(),
        language: "JSONata".to_owned(),
    };
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match &*flag {
            "--executions" => options.executions = value.parse()?,
            "--rest-seconds" => options.rest = Duration::from_secs(value.parse()?),
            // The disk to measure; the temporary directory may be in memory.
            "--dir" => options.dir = value.into(),
            "--language" => options.language = value,
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    Ok(options)
}

async fn bench(options: &Options) -> Result<(), Failure> {
    let dir = tempfile::tempdir_in(&options.dir)?;
    let engine = open(dir.path()).await?;
    let starts_max = Duration::from_micros(400 * options.executions as u64);
    let due = Timestamp::now().as_second() + i64::try_from((options.rest + starts_max).as_secs())? + 1;
    let waiting = machine("waiting", &wait_until(due, &options.language)?)?;

    let begin = Instant::now();
    stream::iter(0..options.executions)
        .map(|_| engine.start_execution(start(&waiting)))
        .buffer_unordered(STARTS)
        .try_for_each(|_| async { Ok(()) })
        .await?;
    let rate = options.executions as f64 / begin.elapsed().as_secs_f64();
    println!("{}", json!({"part": "start", "executions": options.executions, "perSecond": rate.round()}));
    engine.shutdown().await;
    drop(engine);

    let engine = open(dir.path()).await?;
    resume(&engine).await?;
    list(&engine).await?;
    lateness(&engine, &waiting, due).await?;
    engine.shutdown().await;
    Ok(())
}

/// Starts one execution after the other while the open ones are resumed.
async fn resume(engine: &Engine) -> Result<(), Failure> {
    let pass = machine("pass", &json!({"StartAt": "P", "States": {"P": {"Type": "Pass", "End": true}}}))?;
    let begin = Instant::now();
    let open = engine.begin_resume().await?;
    let ready = begin.elapsed();
    let resuming = {
        let engine = engine.clone();
        tokio::spawn(async move { engine.finish_resume().await })
    };
    let mut durations = Vec::new();
    for _ in 0..STARTS_MEASURED {
        let begin = Instant::now();
        engine.start_execution(start(&pass)).await?;
        durations.push(begin.elapsed());
    }
    let while_resuming = !resuming.is_finished();
    resuming.await??;
    let (first, resumed) = (durations[0], begin.elapsed());
    durations.sort_unstable();
    println!(
        "{}",
        json!({
            "part": "resume", "open": open, "readyMs": ms(ready), "firstStartMs": ms(first),
            "startP50Ms": ms(durations[STARTS_MEASURED / 2]), "startMaxMs": ms(durations[STARTS_MEASURED - 1]),
            "allWhileResuming": while_resuming, "resumedMs": ms(resumed),
        })
    );
    Ok(())
}

/// Lists all executions, a page after the other.
async fn list(engine: &Engine) -> Result<(), Failure> {
    let begin = Instant::now();
    let (mut from, mut pages, mut longest) = (None, 0, Duration::ZERO);
    loop {
        let page_begin = Instant::now();
        let query =
            ListQuery { owner: ExecutionOwner::Everyone, status: None, redriven: None, limit: PAGE, from };
        let page = engine.list(query).await?;
        longest = longest.max(page_begin.elapsed());
        pages += 1;
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    println!(
        "{}",
        json!({"part": "list", "pages": pages, "allMs": ms(begin.elapsed()), "longestPageMs": ms(longest)})
    );
    Ok(())
}

/// The end of each execution, less the instant that its Wait names.
async fn lateness(engine: &Engine, machine: &StartedMachine, due: i64) -> Result<(), Failure> {
    let rest = Duration::from_secs(u64::try_from(due - Timestamp::now().as_second())?);
    tokio::time::sleep(rest.saturating_sub(Duration::from_secs(1))).await;
    let (in_memory, timers) = engine.load();
    let cpu_before = cpu_ms()?;
    let deadline = Instant::now() + rest + END_PATIENCE;
    let page = |status, limit, from| ListQuery {
        owner: ExecutionOwner::StateMachine(machine.arn.clone()),
        status,
        redriven: None,
        limit,
        from,
    };
    while !engine.list(page(Some(RunStatus::Running), 1, None)).await?.items.is_empty() {
        if Instant::now() > deadline {
            return Err("executions are running long after their timers were due".into());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let cpu = cpu_ms()? - cpu_before;
    let (mut latenesses, mut from) = (Vec::new(), None);
    loop {
        let page = engine.list(page(None, PAGE, from)).await?;
        for execution in page.items {
            let stopped = execution.stop_date.ok_or("an execution has no stop date")?;
            latenesses.push(stopped.as_millisecond() - due * 1_000);
        }
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    latenesses.sort_unstable();
    let at = |percent: usize| latenesses[(latenesses.len() - 1) * percent / 100];
    println!(
        "{}",
        json!({
            "part": "timers", "executions": latenesses.len(), "inMemoryBefore": in_memory, "timersBefore": timers,
            "p50Ms": at(50), "p99Ms": at(99), "lastMs": at(100),
            "cpuMs": cpu,
        })
    );
    Ok(())
}

async fn open(dir: &Path) -> Result<Engine, Failure> {
    let config = Config { data_dir: Some(dir.to_owned()), ..Config::default() };
    let catalog = Arc::new(Catalog::open(None)?);
    let deps = EngineDeps {
        http: Arc::new(Nothing),
        objects: Arc::new(Nothing),
        clock: Arc::new(SystemClock),
        randomness: Arc::new(OsRandomness),
        activities: catalog.clone(),
        supports_integration: |_| false,
        mocks: None,
        catalog,
        wire: Arc::new(NoWireOperations),
    };
    Ok(Engine::open(config, deps).await?.start(Arc::new(Nothing), Arc::new(NoIntegrations)))
}

fn wait_until(due: i64, language: &str) -> Result<Value, Failure> {
    let timestamp = Timestamp::from_second(due)?.to_string();
    let timestamp = match language {
        "JSONPath" => timestamp,
        _ => format!("{{% $fromMillis({due}000) %}}"),
    };
    let wait = json!({"Type": "Wait", "Timestamp": timestamp, "End": true});
    Ok(json!({"QueryLanguage": language, "StartAt": "W", "States": {"W": wait}}))
}

fn machine(name: &str, definition: &Value) -> Result<Arc<StartedMachine>, Failure> {
    let text = definition.to_string();
    let kind = StateMachineType::Standard;
    let compiled = mayfly_workflows_language::parse::compile(&text, kind)
        .map_err(|rejection| format!("the definition is refused: {}", rejection.message()))?;
    Ok(Arc::new(StartedMachine {
        arn: StateMachineArn::from_trusted(format!(
            "arn:aws:states:us-east-1:000000000000:stateMachine:{name}"
        )),
        name: name.to_owned(),
        role_arn: "arn:aws:iam::000000000000:role/bench".to_owned(),
        kind,
        definition_text: text.into(),
        definition: Arc::new(compiled),
        details: None,
        flow: None,
    }))
}

fn start(machine: &Arc<StartedMachine>) -> StartRequest {
    StartRequest {
        state_machine: machine.clone(),
        name: None,
        input: "{}".into(),
        trace_header: None,
        version_arn: None,
        alias_arn: None,
    }
}

/// The processor time of this process, which other processes on the machine change less than the wall clock.
fn cpu_ms() -> Result<u64, Failure> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // In hundredths of a second, after the name: user time is the 12th, system time the 13th.
    let ticks = |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<u64>().ok());
    Ok((ticks(11).ok_or("no user time")? + ticks(12).ok_or("no system time")?) * 10)
}

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e4).round() / 10.0
}

/// Services that the measured state machines do not call.
struct Nothing;

impl Functions for Nothing {
    fn invoke(&self, _call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, InvokeError>> {
        Box::pin(async { Err(FunctionError::new("NoFunction", "{}").into()) })
    }
}

impl HttpTasks for Nothing {
    fn send(&self, _request: http::Request<Bytes>) -> BoxFuture<'_, Result<http::Response<Bytes>, String>> {
        Box::pin(async { Err("no network".to_owned()) })
    }
}

impl ObjectStore for Nothing {
    fn get(
        &self,
        _bucket: &str,
        _key: &str,
        _version: Option<&str>,
    ) -> BoxFuture<'_, Result<ObjectBody, ObjectError>> {
        Box::pin(async { Err(ObjectError::no_such_key()) })
    }

    fn put(&self, _bucket: &str, _key: &str, _body: Bytes) -> BoxFuture<'_, Result<(), ObjectError>> {
        Box::pin(async { Err(ObjectError::no_such_key()) })
    }

    fn list(
        &self,
        _bucket: &str,
        _prefix: &str,
        _from: Option<String>,
    ) -> BoxFuture<'_, Result<ObjectPage, ObjectError>> {
        Box::pin(async { Err(ObjectError::no_such_key()) })
    }
}
