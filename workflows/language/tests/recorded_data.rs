//! The recorded executions that need no engine: machines with only Pass, Choice, Succeed and Fail states, executed with
//! the functions of `dataflow` and compared with AWS's results: outputs, error names and causes.
//!
//! The recordings are test data and not part of the project; without them the test prints a message and returns.

mod common;

use mayfly_workflows_language::choice;
use mayfly_workflows_language::dataflow::{self, Ambient, Context, EvaluationScope, Variables};
use mayfly_workflows_language::definition::{
    Condition, DataFlow, State, StateKind, StateMachine, StateMachineType, Text, Transition,
};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::parse;
use mayfly_workflows_language::value::Value;

/// How an execution ends.
#[derive(Debug, PartialEq)]
enum End {
    Output(Value),
    Failure { error: String, cause: String },
}

/// The minimum number of compared executions, so that the test cannot become empty.
const EXECUTIONS_AT_LEAST: usize = 60;

fn is_pure(machine: &StateMachine) -> bool {
    machine.states().iter().all(|state| {
        matches!(
            state.kind,
            StateKind::Pass(_) | StateKind::Choice(_) | StateKind::Succeed | StateKind::Fail(_)
        )
    })
}

/// Runs the machine with its input.
fn walk(machine: &StateMachine, input: Value) -> End {
    let execution_input = input.clone();
    let mut state = machine.state(machine.flow(machine.root()).start_at);
    let (mut data, mut variables, ambient) = (input, Variables::new(), Ambient::new(0, 1));
    for step in 0.. {
        let context = Value::object([
            ("Execution", Value::object([("Id", Value::from("arn")), ("Input", execution_input.clone())])),
            ("StateMachine", Value::object([("Id", Value::from("arn")), ("Name", Value::from("machine"))])),
            ("State", Value::object([("Name", Value::String(state.name.clone()))])),
        ]);
        let scope = EvaluationScope {
            input: &data,
            result: None,
            error_output: None,
            context: Context::Ready(&context),
            variables: &variables,
            ambient: &ambient,
        };
        let left = match leave(state, &scope) {
            Ok(left) => left,
            Err(error) => {
                let prefix = format!(
                    "An error occurred while executing the state '{}' (entered at the event id #{}). ",
                    state.name,
                    2 + 2 * step
                );
                return End::Failure { error: error.error.into_owned(), cause: prefix + &error.cause };
            }
        };
        let (output, assigned, transition) = match left {
            StateExit::Goes(output, assigned, transition) => (output, assigned, transition),
            StateExit::Fails(error, cause) => return End::Failure { error, cause },
        };
        variables = variables.assign(&assigned);
        data = output;
        match transition {
            Transition::Next(next) => state = machine.state(next),
            _ => break,
        }
    }
    End::Output(data)
}

enum StateExit {
    Goes(Value, mayfly_workflows_language::value::Map, Transition),
    Fails(String, String),
}

fn leave(state: &State, scope: &EvaluationScope<'_>) -> Result<StateExit, StateError> {
    let transition = match &state.kind {
        StateKind::Choice(choice) => {
            let mut chosen = None;
            for rule in &choice.rules {
                let matches = match &rule.condition {
                    Condition::JsonPath(condition) => condition.matches(scope)?,
                    Condition::Jsonata(expression) => {
                        choice::condition(expression, scope, "Choices/Condition")?
                    }
                    Condition::Always(answer) => *answer,
                };
                if matches {
                    chosen = Some(rule.next.clone());
                    break;
                }
            }
            chosen.or_else(|| choice.default.clone()).unwrap_or(Transition::End)
        }
        StateKind::Fail(fail) => {
            let text = |text: &Option<Text>, field: &str| -> Result<String, StateError> {
                match text {
                    None => Ok(String::new()),
                    Some(Text::Literal(literal)) => Ok(literal.to_string()),
                    Some(Text::Template(template)) => {
                        Ok(template.evaluate(scope, field)?.as_str().unwrap_or_default().to_owned())
                    }
                    Some(Text::Expression(expression)) => {
                        Ok(expression.evaluate(scope, field)?.as_str().unwrap_or_default().to_owned())
                    }
                }
            };
            return Ok(StateExit::Fails(text(&fail.error, "ErrorPath")?, text(&fail.cause, "CausePath")?));
        }
        _ => state.next.clone(),
    };
    let (output, assigned) = match &state.data {
        DataFlow::JsonPath { input_path, parameters, result_path, output_path, .. } => {
            let input = dataflow::effective_input(input_path, scope)?;
            let result = dataflow::parameters(parameters.as_ref(), &scope.with_input(&input), "Parameters")?;
            let result = match &state.kind {
                StateKind::Pass(pass) => pass.result.clone().unwrap_or(result),
                _ => result,
            };
            let assigned = dataflow::assign(state.assign.as_ref(), &scope.with_input(&result), "Assign")?;
            let placed = dataflow::place_result(result_path, scope.input, result)?;
            (dataflow::effective_output(output_path, &scope.with_input(&placed))?, assigned)
        }
        DataFlow::Jsonata { output, .. } => {
            let assigned = dataflow::assign(state.assign.as_ref(), scope, "Assign")?;
            (dataflow::output(output.as_ref(), scope, scope.input, "Output")?, assigned)
        }
    };
    Ok(StateExit::Goes(output, assigned, transition))
}

/// The recorded end of an execution; texts of JSON scalars and arrays are left as texts in the recordings.
fn recorded_end(response: &Value) -> Option<End> {
    let event = response.get("events")?.as_array()?.last()?;
    if let Some(details) = event.get("executionSucceededEventDetails") {
        let output = details.get("output")?;
        let parsed = output.as_str().and_then(|text| Value::parse(text).ok());
        return Some(End::Output(parsed.unwrap_or_else(|| output.clone())));
    }
    let details = event.get("executionFailedEventDetails")?;
    let text = |name: &str| details.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    Some(End::Failure { error: text("error"), cause: text("cause") })
}

/// Whether the ends are equal, apart from parts that the recordings mask: inputs quoted in causes, ARNs, random ids.
fn agrees(ours: &End, recorded: &End) -> bool {
    match (ours, recorded) {
        (End::Failure { error, cause }, End::Failure { error: recorded_error, cause: recorded_cause }) => {
            let mut rest = cause.as_str();
            let shown = recorded_cause.split(['<', '>']).step_by(2).all(|part| match rest.find(part) {
                Some(at) => {
                    rest = &rest[at + part.len()..];
                    true
                }
                // The whole cause is masked.
                None => part.is_empty(),
            });
            error == recorded_error && shown
        }
        (End::Output(ours), End::Output(recorded)) => {
            let hidden = recorded.to_text();
            ours == recorded || hidden.contains("generated-uuid") || hidden.contains("<ArnPart")
        }
        _ => false,
    }
}

#[test]
fn executions_without_tasks() {
    let Some(folder) = common::testdata("aws-recorded") else { return };
    let (mut compared, mut differing) = (0, Vec::new());
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .expect("folders")
        .flatten()
        .filter(|group| group.path().is_dir())
        .flat_map(|group| {
            std::fs::read_dir(group.path()).expect("a folder").flatten().map(|file| file.path())
        })
        .collect();
    files.sort();
    for file in files {
        let case = Value::parse(&std::fs::read_to_string(&file).expect("a recording")).expect("JSON");
        let calls = case.get("calls").and_then(Value::as_array).unwrap_or_default();
        let of = |operation: &str| -> Vec<&Value> {
            let wanted =
                calls.iter().filter(|call| call.get("operation").and_then(Value::as_str) == Some(operation));
            wanted.filter_map(|call| call.get("params")).collect()
        };
        let creations = of("CreateStateMachine");
        let [creation] = creations.as_slice() else { continue };
        let Some(definition) = creation.get("definition").and_then(Value::as_str) else { continue };
        let Ok(machine) = parse::compile(definition, StateMachineType::Standard) else { continue };
        if !is_pure(&machine) {
            continue;
        }
        let responses =
            case.get("expected").and_then(Value::as_object).into_iter().flat_map(|map| map.values());
        let ends: Vec<End> = responses.filter_map(recorded_end).collect();
        let starts = of("StartExecution");
        if starts.len() != ends.len() {
            continue;
        }
        for (start, recorded) in starts.iter().zip(&ends) {
            let input = start.get("input").and_then(Value::as_str).unwrap_or("{}");
            let ours = walk(&machine, Value::parse(input).expect("valid input"));
            compared += 1;
            if !agrees(&ours, recorded) {
                differing.push(format!("{}: {ours:?} is not {recorded:?}", file.display()));
            }
        }
    }
    eprintln!("recorded executions without tasks: {} of {compared} agree", compared - differing.len());
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    assert!(compared >= EXECUTIONS_AT_LEAST, "only {compared} compared");
}
