//! `mayfly workflow test`: runs definitions offline, on the engine, with mocks and a virtual clock.
//!
//! [`file`] is the format of tests, [`script`] answers the tasks, [`run`] runs one case on the engine, [`check`]
//! compares, [`coverage`] counts the reached parts, [`report`] prints. No server is used, nothing is stored, and a wait
//! of a year takes a millisecond.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use serde_json::Value;

mod check;
mod coverage;
mod file;
mod report;
mod run;
mod script;
mod subject;

use self::{
    file::{Expect, Mock, Mocks, ScriptedAnswer, TestCase},
    report::{CaseReport, FileReport, TestReport},
    subject::Subject,
};
use super::ordered::Ordered;
use crate::{
    failure::{self, ErrorCode, Failure},
    invoke,
    output::{self, OutputFormat},
    session::Session,
};

/// The maximum depth of the search for test files.
const FOLDER_DEPTH_MAX: usize = 16;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly workflow test
  mayfly workflow test order.test.yaml --output json
  mayfly workflow test --definition order.yaml --input '{\"item\":\"pen\"}' --mock 'Charge={\"ok\":true}'
  mayfly workflow test --definition order.yaml --mock-error Charge=CardDeclined

A test file lies beside its definition, order.test.yaml beside order.yaml:

  definition: order.yaml            # may be left out when the names match
  mocks:                            # for all cases; by state, or by resource
    Reserve: {result: {reserved: true}}
  cases:
    - name: pays at the second try
      input: {item: pen}
      mocks:
        Charge:                     # a list answers one call each
          - {error: Timeout, cause: bank is slow, after: 5s}
          - {result: {paid: true}}
        Approve: {result: {by: Ada}, after: 2h}      # a token's callback, an activity's worker
      expect:
        status: SUCCEEDED
        output: {paid: true}        # or outputIncludes: a part of it
        path: [Reserve, Charge, Approve]
        retries: {Charge: 1}
        elapsed: 2h 7s              # of the virtual clock

Answers: {result: …}, {payload: …} (of lambda:invoke), {error: …, cause: …}, never;
with after, heartbeat, times, when: {never: true, times: 2}.
With -n the workflow stands in that namespace: $$.StateMachine.Name says shop.order.

Expectations: status, output, outputIncludes, error, cause, causeIncludes, path, retries, calls, arguments, elapsed.

The exit code is 1 when a case fails.")]
pub(super) struct TestArgs {
    /// Test files, or folders in which they are looked for (*.test.yaml, *.test.yml, *.test.json) [default: .]
    #[arg(value_name = "DIR|FILE", conflicts_with_all = ["definition"])]
    paths: Vec<PathBuf>,
    /// Run this definition once, without a test file
    #[arg(long, value_name = "FILE")]
    definition: Option<PathBuf>,
    /// The input of that run, as JSON; @FILE reads a file, - reads stdin [default: {}]
    #[arg(
        long,
        short = 'd',
        visible_alias = "data",
        value_name = "JSON|@FILE|-",
        requires = "definition",
        allow_hyphen_values = true
    )]
    input: Option<String>,
    /// The result of a state's task, as JSON; may be given several times
    #[arg(long, value_name = "STATE=JSON", requires = "definition", value_parser = pair)]
    mock: Vec<(String, String)>,
    /// The error of a state's task; may be given several times
    #[arg(long, value_name = "STATE=ERROR[:CAUSE]", requires = "definition", value_parser = pair)]
    mock_error: Vec<(String, String)>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (state, value) = text.split_once('=').ok_or("write STATE=VALUE")?;
    Ok((state.trim().to_owned(), value.to_owned()))
}

pub(super) async fn run(args: TestArgs, session: &Session) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.definition {
        return once(path, &args, session).await;
    }
    // Only from the flag: a test has the same result on every machine.
    let namespace = session.globals().namespace.as_deref();
    let mut report = TestReport::default();
    for path in find(&args.paths)? {
        report.add(run_file(&path, namespace).await);
    }
    show(&report, session)?;
    Ok(if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(report: &TestReport, session: &Session) -> anyhow::Result<()> {
    match session.format() {
        OutputFormat::Name => output::out(report.names())?,
        format => output::result(format, &report.to_json(), || report.text())?,
    }
    Ok(())
}

/// Runs the cases of one file. Errors of the file itself are in its report.
async fn run_file(path: &Path, namespace: Option<&str>) -> FileReport {
    let mut report = FileReport::new(path.display().to_string());
    match run_cases(path, namespace, &mut report).await {
        Ok(()) => {}
        Err(error) => report.problem = Some(failure::text(&error)),
    }
    report
}

async fn run_cases(path: &Path, namespace: Option<&str>, report: &mut FileReport) -> anyhow::Result<()> {
    let file = file::read(path)?;
    let definition = file::definition_of(path, &file)?;
    report.definition = definition.display().to_string();
    let subject = Subject::load(&definition, file.kind, namespace)?;
    subject.check_names(&file.mocks, "mocks")?;
    for case in &file.cases {
        subject.check_names(&case.mocks, &format!("the mocks of case {:?}", case.name))?;
        case.expect.check_names(&subject, &case.name)?;
    }
    let mut coverage = coverage::Coverage::new(&subject);
    for case in &file.cases {
        let ran = run::run(&subject, &file, case).await?;
        coverage.add(&subject, &ran.events);
        let differences = check::compare(&case.expect, &ran);
        report.cases.push(CaseReport::new(case.name.clone(), ran, differences));
    }
    report.coverage = Some(coverage);
    Ok(())
}

/// One run without a test file, whose result is printed.
async fn once(path: &Path, args: &TestArgs, session: &Session) -> anyhow::Result<ExitCode> {
    let subject = Subject::load(path, None, session.globals().namespace.as_deref())?;
    let mut mocks = Mocks::new();
    for (state, text) in &args.mock {
        let result: Ordered = serde_json::from_str(text).map_err(|error| {
            Failure::new(
                ErrorCode::Usage,
                format!("the mock of {state} is not JSON: {error}"),
                format!("quote it: --mock '{state}={{\"ok\":true}}'"),
            )
        })?;
        mocks.insert(
            state.clone(),
            Mock::always(ScriptedAnswer { result: Some(result), ..ScriptedAnswer::default() }),
        );
    }
    for (state, text) in &args.mock_error {
        let (error, cause) = text.split_once(':').map_or((text.as_str(), None), |(e, c)| (e, Some(c)));
        let cause = cause.map(Value::from);
        mocks.insert(
            state.clone(),
            Mock::always(ScriptedAnswer {
                error: Some(error.to_owned()),
                cause,
                ..ScriptedAnswer::default()
            }),
        );
    }
    subject.check_names(&mocks, "--mock")?;
    let input = match args.input.as_deref() {
        None => Ordered::Object(Vec::new()),
        Some(data) => serde_json::from_slice(&invoke::data(data)?).map_err(|error| {
            Failure::new(
                ErrorCode::Usage,
                format!("the input is not JSON: {error}"),
                "quote it, as in -d '{\"name\":\"Ada\"}'",
            )
        })?,
    };
    let file = file::TestFile { mocks, ..file::TestFile::default() };
    let case = TestCase { name: "once".into(), input, expect: Expect::nothing(), ..TestCase::default() };
    let ran = run::run(&subject, &file, &case).await?;
    let succeeded = ran.status == "SUCCEEDED";
    let mut report = FileReport::new(String::new());
    report.definition = path.display().to_string();
    let differences = check::compare(&case.expect, &ran);
    let case = CaseReport::new(case.name, ran, differences);
    match session.format() {
        OutputFormat::Name => output::out(format!("{}\n", case.ran.status))?,
        format => output::result(format, &case.to_json(), || case.end())?,
    }
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The test files at these paths.
fn find(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let here = [PathBuf::from(".")];
    let paths = if paths.is_empty() { &here[..] } else { paths };
    let mut found = Vec::new();
    for path in paths {
        let about = std::fs::metadata(path).map_err(|error| {
            Failure::new(
                ErrorCode::FileError,
                format!("cannot read {}: {error}", path.display()),
                "name test files, or a folder with some",
            )
        })?;
        if about.is_dir() {
            gather(path, FOLDER_DEPTH_MAX, &mut found)?;
        } else {
            found.push(path.clone());
        }
    }
    found.sort();
    found.dedup();
    if found.is_empty() {
        return Err(Failure::error(
            ErrorCode::FileError,
            "there are no test files here",
            "a test file is called order.test.yaml and lies beside order.yaml (see mayfly workflow test --help)",
        ));
    }
    Ok(found)
}

fn gather(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let unreadable = |error: std::io::Error| {
        Failure::new(
            ErrorCode::FileError,
            format!("cannot read {}: {error}", folder.display()),
            "name the test files themselves",
        )
    };
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Links are not followed: they may form a loop.
        let kind = entry.file_type().map_err(unreadable)?;
        let hidden = name.starts_with('.') || name == "target" || name == "node_modules";
        if kind.is_dir() && depth > 0 && !hidden {
            gather(&entry.path(), depth - 1, found)?;
        } else if kind.is_file() && file::ENDINGS.iter().any(|ending| name.ends_with(ending)) {
            found.push(entry.path().strip_prefix("./").map(Path::to_owned).unwrap_or_else(|_| entry.path()));
        }
    }
    Ok(())
}
