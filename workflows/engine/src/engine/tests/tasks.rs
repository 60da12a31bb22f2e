//! Graphs of tasks, compiled to definitions and run.

use std::collections::BTreeSet;

use mayfly_workflows_language::tasks;
use mayfly_workflows_language::value::Value;
use proptest::prelude::*;

use super::*;

/// Tasks by number, each with the numbers of its dependencies, which are smaller.
fn graphs() -> impl Strategy<Value = Vec<BTreeSet<usize>>> {
    (1_usize..14, proptest::collection::vec(any::<(u8, u8)>(), 0..30)).prop_map(|(count, pairs)| {
        let mut edges = vec![BTreeSet::new(); count];
        for (one, other) in pairs {
            let (one, other) = (usize::from(one) % count, usize::from(other) % count);
            if one != other {
                edges[one.max(other)].insert(one.min(other));
            }
        }
        edges
    })
}

/// A task whose output is `{"task": its number, "saw": the numbers of its dependencies, "input": the input's x}`. There
/// are functions, and states in both languages.
fn numbered(at: usize, dependencies: &BTreeSet<usize>) -> serde_json::Value {
    let listed = |suffix: &str, path: &dyn Fn(usize) -> String| -> serde_json::Value {
        let members = dependencies.iter().map(|at| (format!("t{at}{suffix}"), json!(path(*at))));
        members.collect::<serde_json::Map<_, _>>().into()
    };
    let paths = listed(".$", &|at| format!("$.tasks.t{at}.task"));
    let template = json!({"task": at, "saw": paths, "input.$": "$.input.x"});
    let mut task = match at % 4 {
        0 | 1 => json!({"function": "echo", "payload": template}),
        2 => json!({"state": {"Type": "Pass", "Parameters": template}}),
        _ => {
            let saw = listed("", &|at| format!("{{% $states.input.tasks.t{at}.task %}}"));
            let output = json!({"task": at, "saw": saw, "input": "{% $states.input.input.x %}"});
            json!({"state": {"Type": "Pass", "QueryLanguage": "JSONata", "Output": output}})
        }
    };
    task["dependencies"] = dependencies.iter().map(|at| format!("t{at}")).collect();
    task
}

fn compiled(document: &serde_json::Value) -> serde_json::Value {
    let document = Value::parse(&document.to_string()).expect("JSON");
    let definition = tasks::compile(&document).unwrap_or_else(|problems| panic!("{problems:?}"));
    serde_json::from_str(&definition.to_text()).expect("JSON")
}

/// The names in the history's events of a kind, each with the number of its event.
async fn states(world: &TestEngine, arn: &ExecutionArn, entered: bool) -> Vec<(String, u64)> {
    let all = HistoryQuery { reverse: false, include_data: false, limit: 10_000, from: None };
    let history = world.engine.history(arn, all).await.expect("read").expect("there");
    let details = if entered { "stateEnteredEventDetails" } else { "stateExitedEventDetails" };
    let named = |event: &serde_json::Value| {
        Some((event[details]["name"].as_str()?.to_owned(), event["id"].as_u64()?))
    };
    history.items.iter().filter_map(named).collect()
}

async fn check(edges: &[BTreeSet<usize>]) {
    let world = TestEngine::new().await;
    let numbered = edges.iter().enumerate().map(|(at, needs)| (format!("t{at}"), numbered(at, needs)));
    let document = json!({"tasks": numbered.collect::<serde_json::Map<_, _>>()});
    let machine = machine(compiled(&document), StateMachineType::Standard);
    let arn = world.start(&machine, r#"{"x":[7]}"#).await;
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.status, RunStatus::Succeeded, "{:?}", ended.cause);

    let (entered, exited) = (states(&world, &arn, true).await, states(&world, &arn, false).await);
    let only = |events: &[(String, u64)], at: usize| {
        let name = format!("t{at}");
        let found: Vec<u64> = events.iter().filter(|(known, _)| *known == name).map(|(_, id)| *id).collect();
        assert_eq!(found.len(), 1, "{name} of {edges:?}");
        found[0]
    };
    for (at, dependencies) in edges.iter().enumerate() {
        let begun = only(&entered, at);
        for dependency in dependencies {
            assert!(only(&exited, *dependency) < begun, "t{at} and t{dependency} of {edges:?}");
        }
    }
    let calls = world.functions.calls.lock().len();
    assert_eq!(calls, (0..edges.len()).filter(|at| at % 4 < 2).count(), "each function is called once");

    let sinks = (0..edges.len()).filter(|at| !edges.iter().any(|needs| needs.contains(at)));
    let expected = sinks.map(|at| {
        let saw: serde_json::Map<_, _> = edges[at].iter().map(|at| (format!("t{at}"), json!(at))).collect();
        (format!("t{at}"), json!({"task": at, "saw": saw, "input": [7]}))
    });
    let expected: serde_json::Value = expected.collect::<serde_json::Map<_, _>>().into();
    let output: serde_json::Value = serde_json::from_str(&ended.output.expect("an output")).expect("JSON");
    assert_eq!(output, expected, "{edges:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn tasks_run_once_after_their_dependencies_and_their_outputs_arrive(edges in graphs()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(check(&edges));
    }
}

#[tokio::test]
async fn a_task_is_left_out_and_an_error_is_an_output() {
    let world = TestEngine::new().await;
    let document = json!({"tasks": {
        "left-out": {"function": "echo", "when": {"Variable": "$.input.all", "BooleanEquals": true}},
        "left_out_too": {"state": {"Type": "Pass", "QueryLanguage": "JSONata"}, "when": "{% $states.input.input.all %}"},
        "taken": {"state": {"Type": "Pass", "QueryLanguage": "JSONata", "Output": 1},
            "when": "{% $not($states.input.input.all) %}"},
        "wrong": {"function": "fail", "catch": [{"ErrorEquals": ["Broken"]}]},
        "wait": {"state": {"Type": "Wait", "Seconds": 3600}, "dependencies": ["wrong"]},
        "report": {"state": {"Type": "Pass", "Parameters": {
            "of.$": "$.tasks['left-out']", "error.$": "$.tasks.wrong.Error", "waited.$": "$.tasks.wait",
            "all.$": "$.input.all"}},
            "dependencies": ["left-out", "left_out_too", "wrong", "wait"]},
    }});
    let (ended, _) = world.run(compiled(&document), r#"{"all":false}"#).await;
    assert_eq!(ended.status, RunStatus::Succeeded, "{:?}", ended.cause);
    let output: serde_json::Value = serde_json::from_str(&ended.output.expect("an output")).expect("JSON");
    let report = json!({"of": null, "error": "Broken", "waited": null, "all": false});
    assert_eq!(output, json!({"taken": 1, "report": report}));
    assert_eq!(world.functions.calls.lock().len(), 1);
}

#[tokio::test]
async fn a_task_that_fails_ends_the_execution() {
    let world = TestEngine::new().await;
    let document = json!({"tasks": {
        "wrong": {"function": "fail", "retry": [{"ErrorEquals": ["Broken"], "MaxAttempts": 2}]},
        "never": {"function": "echo", "dependencies": ["wrong"]},
        "beside": {"function": "double", "payload": 2},
    }});
    let (ended, _) = world.run(compiled(&document), "{}").await;
    assert_eq!((ended.status, ended.error.as_deref()), (RunStatus::Failed, Some("Broken")));
    let calls = world.functions.calls.lock();
    assert_eq!(calls.iter().filter(|(name, _)| name == "fail").count(), 3);
    assert!(!calls.iter().any(|(name, _)| name == "echo"));
}
