//! Documents of tasks and the definitions that they are compiled to.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::graph::NESTING_MAX;
use super::*;
use crate::definition::StateMachineType;
use crate::validate::check;

fn json(text: &str) -> Value {
    Value::parse_strict(text).expect("valid JSON")
}

fn compiled(text: &str) -> Value {
    let definition = compile(&json(text)).unwrap_or_else(|problems| panic!("{problems:?}"));
    let diagnostics = check(&definition.to_text(), StateMachineType::Standard, |_| false);
    assert_eq!(diagnostics, [], "{}", definition.to_text());
    definition
}

fn problems(text: &str) -> Vec<String> {
    let problems = compile(&json(text)).expect_err("it has problems");
    problems.iter().map(|problem| format!("{}: {}", problem.location, problem.message)).collect()
}

/// A document of Pass states with these dependencies: `a: b c` is `a` after `b` and `c`.
fn document(lines: &[&str]) -> String {
    let task = |line: &&str| {
        let (name, dependencies) = line.split_once(':').unwrap_or((line, ""));
        let dependencies: Vec<String> =
            dependencies.split_whitespace().map(|name| format!("\"{name}\"")).collect();
        format!(
            r#""{name}":{{"state":{{"Type":"Pass","Result":"{name}"}},"dependencies":[{}]}}"#,
            dependencies.join(",")
        )
    };
    format!(r#"{{"tasks":{{{}}}}}"#, lines.iter().map(task).collect::<Vec<_>>().join(","))
}

/// The order of a definition's tasks: `a, [b | c, d]`, where a list in brackets is a Parallel state.
fn shape(flow: &Value) -> String {
    let mut parts = Vec::new();
    let mut next = flow.get("StartAt").and_then(Value::as_str);
    while let Some(name) = next {
        let state = flow.get("States").and_then(|states| states.get(name)).expect("a state");
        if let Some(branches) = state.get("Branches").and_then(Value::as_array) {
            parts.push(format!("[{}]", branches.iter().map(shape).collect::<Vec<_>>().join(" | ")));
        } else if !name.contains('(') {
            parts.push(name.to_owned());
        }
        let chosen = state.get("Choices").and_then(|choices| choices.index(0));
        next = chosen.unwrap_or(state).get("Next").and_then(Value::as_str);
    }
    parts.join(", ")
}

#[test]
fn graphs_are_decomposed_into_series_and_parallel() {
    for (lines, expected) in [
        (&["a"][..], "a"),
        (&["b: a", "a"], "a, b"),
        (&["a", "b"], "[a | b]"),
        (&["a", "b: a", "c: a", "d: b c"], "a, [b | c], d"),
        // A redundant edge has no effect.
        (&["a", "b: a", "c: a b"], "a, b, c"),
        (&["a", "b", "c: a b", "d: a b"], "[a | b], [c | d]"),
        (&["a", "b: a", "c", "d: c", "e: b d"], "[a, b | c, d], e"),
        (&["a", "b: a", "c: b", "d: b", "e: c d", "f: a", "g: e f"], "a, [b, [c | d], e | f], g"),
        // The "N" graph, which is not series-parallel: d waits for a as well.
        (&["a", "b", "c: a b", "d: b"], "[a | b], [c | d]"),
        // A graph that waits for other tasks only at its beginning.
        (&["a1", "a2: a1", "a3: a2", "b1", "b2: b1 a1", "b3: b2"], "[a1 | b1], [a2, a3 | b2, b3]"),
    ] {
        assert_eq!(shape(&compiled(&document(lines))), expected, "{lines:?}");
    }
}

#[test]
fn invalid_graphs_are_rejected() {
    for (lines, expected) in [
        (&["a: b"][..], "/tasks/a/dependencies[0]: there is no task \"b\""),
        (&["a: a"], "/tasks/a/dependencies[0]: a task cannot depend on itself"),
        (&["a", "b: a a"], "/tasks/b/dependencies[1]: \"a\" is in the list twice"),
        (
            &["x", "a: c x", "b: a", "c: b", "d: c"],
            "/tasks/a/dependencies: the dependencies form a cycle: a → c → b → a",
        ),
        (&["a: b", "b: a"], "/tasks/a/dependencies: the dependencies form a cycle: a → b → a"),
    ] {
        assert_eq!(problems(&document(lines)), [expected]);
    }
    let two = problems(&document(&["a: b", "b: a", "c: d", "d: c"]));
    assert_eq!(two.len(), 2, "{two:?}");
    assert!(Value::parse_strict(&document(&["a", "a"])).is_err(), "names are different where they are read");
}

#[test]
fn documents_are_checked() {
    let pass = r#""state":{"Type":"Pass"}"#;
    for (text, expected) in [
        ("[]".to_owned(), ": a workflow of tasks"),
        (r#"{"tasks":{}}"#.to_owned(), "/tasks: an object of tasks by name, one at least"),
        (format!(r#"{{"tasks":{{"a":{{{pass}}}}},"States":{{}}}}"#), "/States: no such field"),
        (format!(r#"{{"tasks":{{"1a":{{{pass}}}}}}}"#), "/tasks/1a: a task's name has letters"),
        (format!(r#"{{"tasks":{{"a b":{{{pass}}}}}}}"#), "/tasks/a b: a task's name has letters"),
        (format!(r#"{{"tasks":{{"{}":{{{pass}}}}}}}"#, "n".repeat(61)), "60 characters"),
        (r#"{"tasks":{"a":1}}"#.to_owned(), "/tasks/a: a task is an object"),
        (r#"{"tasks":{"a":{}}}"#.to_owned(), "/tasks/a: exactly one of the fields function, job and state"),
        (format!(r#"{{"tasks":{{"a":{{{pass},"job":{{}}}}}}}}"#), "/tasks/a: exactly one of the fields"),
        (format!(r#"{{"tasks":{{"a":{{{pass},"payload":1}}}}}}"#), "/tasks/a/payload: no such field"),
        (format!(r#"{{"tasks":{{"a":{{{pass},"dependencies":"b"}}}}}}"#), "/tasks/a/dependencies: a list"),
        (
            format!(r#"{{"tasks":{{"a":{{{pass},"dependencies":[1]}}}}}}"#),
            "/tasks/a/dependencies[0]: the name",
        ),
        (format!(r#"{{"tasks":{{"a":{{{pass},"when":true}}}}}}"#), "/tasks/a/when: a rule"),
        (r#"{"tasks":{"a":{"function":""}}}"#.to_owned(), "/tasks/a/function: a function's name"),
        (
            r#"{"tasks":{"a":{"function":"shop.f"}}}"#.to_owned(),
            "/tasks/a/function: a function of another namespace",
        ),
        (
            r#"{"tasks":{"a":{"function":"f","payload":1,"payload.$":"$.input"}}}"#.to_owned(),
            "/tasks/a/payload.$: payload is there already",
        ),
        (r#"{"tasks":{"a":{"job":"x"}}}"#.to_owned(), "/tasks/a/job: the parameters of job:run"),
        (
            r#"{"tasks":{"a":{"state":{"Type":"Choice"}}}}"#.to_owned(),
            "/tasks/a/state/Type: a task makes no choices",
        ),
        (r#"{"tasks":{"a":{"state":{"Type":"Fail"}}}}"#.to_owned(), "/tasks/a/state/Type: one of Task"),
        (
            r#"{"tasks":{"a":{"state":{"Type":"Pass","Next":"b"}}}}"#.to_owned(),
            "/tasks/a/state/Next: the order follows",
        ),
        (
            r#"{"tasks":{"a":{"function":"f","catch":[{"ErrorEquals":["States.ALL"],"Next":"b"}]}}}"#
                .to_owned(),
            "/tasks/a/catch[0]/Next: a caught error is the task's output",
        ),
        (
            r#"{"tasks":{"a":{"state":{"Type":"Pass","Parameters":{"x.$":"$.tasks.b"}}}}}"#.to_owned(),
            "/tasks/a: its state reads the output of \"b\", which does not exist",
        ),
        (
            format!(
                r#"{{"tasks":{{"b-c":{{{pass}}},"a":{{"state":{{"Type":"Pass","Parameters":{{"x.$":"$.tasks['b-c'].y"}}}}}}}}}}"#
            ),
            "/tasks/a/dependencies: its state reads the output of \"b-c\", which is not in its dependencies",
        ),
        (
            format!(
                r#"{{"tasks":{{"b":{{{pass}}},"a":{{{pass},"when":"{{% $states.input.tasks.b = 1 %}}"}}}}}}"#
            ),
            "which is not in its dependencies",
        ),
    ] {
        let found = problems(&text);
        assert!(found.iter().any(|problem| problem.contains(expected)), "{text}: {found:?}");
    }
    let names: Vec<String> = (0..=TASKS_MAX).map(|at| format!("t{at}")).collect();
    let lines: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(
        problems(&document(&lines)),
        [format!("/tasks: {} tasks, more than {TASKS_MAX}", TASKS_MAX + 1)]
    );
    compiled(&document(&lines[1..]));
    let large =
        format!(r#"{{"tasks":{{"a":{{"state":{{"Type":"Pass","Result":"{}"}}}}}}}}"#, "x".repeat(1 << 20));
    assert!(problems(&large)[0].contains("more than the 1048576"), "{:?}", &problems(&large)[0]);
}

#[test]
fn a_definition_reads_as_if_written_by_hand() {
    let document = r#"{"comment":"c","timeoutSeconds":60,"tasks":{
        "get":{"job":{"Image":"busybox:local","Command":["get"]},"retry":[{"ErrorEquals":["Job.Failed"]}]},
        "count":{"function":"count","dependencies":["get"]},
        "size-of":{"function":"size","payload":{"of.$":"$.tasks.get.result"},"dependencies":["get"],
            "catch":[{"ErrorEquals":["States.ALL"]}]},
        "report":{"state":{"Type":"Pass","Parameters":{"n.$":"$.tasks.count","s.$":"$.tasks['size-of']"}},
            "dependencies":["count","size-of"]}}}"#;
    let expected = r#"{"Comment":"c","TimeoutSeconds":60,"StartAt":"(input)","States":{
      "(input)":{"Type":"Pass","Parameters":{"input.$":"$","tasks":{}},"Next":"get"},
      "get":{"Type":"Task","Resource":"arn:aws:states:::job:run.sync",
        "Parameters":{"Image":"busybox:local","Command":["get"]},"Retry":[{"ErrorEquals":["Job.Failed"]}],
        "ResultSelector":{"get.$":"$"},"ResultPath":"$.tasks","Next":"(parallel 1)"},
      "(parallel 1)":{"Type":"Parallel","Branches":[
        {"StartAt":"count","States":{"count":{"Type":"Task",
          "Resource":"arn:aws:lambda:us-east-1:000000000000:function:count",
          "Parameters":{"input.$":"$.input","tasks":{"get.$":"$.tasks.get"}},
          "ResultSelector":{"count.$":"$"},"End":true}}},
        {"StartAt":"size-of","States":{"size-of":{"Type":"Task",
          "Resource":"arn:aws:lambda:us-east-1:000000000000:function:size",
          "Parameters":{"of.$":"$.tasks.get.result"},
          "ResultSelector":{"size-of.$":"$"},
          "Catch":[{"ErrorEquals":["States.ALL"],"ResultPath":"$.tasks['size-of']","Next":"size-of (caught)"}],
          "End":true},
         "size-of (caught)":{"Type":"Pass","Parameters":{"size-of.$":"$.tasks['size-of']"},"End":true}}}],
        "ResultSelector":{"count.$":"$[0].count","size-of.$":"$[1]['size-of']"},"ResultPath":"$.tasks",
        "Next":"report"},
      "report":{"Type":"Pass","Parameters":{"n.$":"$.tasks.count","s.$":"$.tasks['size-of']"},
        "ResultPath":"$.tasks.report","Next":"report (output)"},
      "report (output)":{"Type":"Pass","Parameters":{"report.$":"$.tasks.report"},"End":true}}}"#;
    assert_eq!(compiled(document).to_text(), json(expected).to_text());
}

#[test]
fn every_kind_of_task_has_every_field() {
    let document = r#"{"tasks":{
        "a":{"state":{"Type":"Wait","Seconds":1}},
        "b":{"state":{"Type":"Pass","QueryLanguage":"JSONata","Output":{"x":"{% $states.input.tasks.a %}"}},
            "dependencies":["a"],"when":"{% $states.input.input.b %}"},
        "c":{"state":{"Type":"Task","QueryLanguage":"JSONata","Resource":"arn:aws:states:::lambda:invoke",
            "Arguments":{"FunctionName":"f"},"Catch":[{"ErrorEquals":["States.ALL"]}]},"dependencies":["a"]},
        "d":{"function":"f","payload.$":"$.tasks.b","dependencies":["a","b"],
            "when":{"Variable":"$.tasks.b","IsPresent":true},"catch":[{"ErrorEquals":["States.ALL"]}]},
        "e":{"state":{"Type":"Wait","QueryLanguage":"JSONata","Seconds":1},"dependencies":["a"]},
        "f":{"state":{"Type":"Map","ItemsPath":"$.tasks.d","ResultSelector":{"all.$":"$"},"ItemProcessor":{
            "StartAt":"g","States":{"g":{"Type":"Pass","Parameters":{"x.$":"$.tasks.unknown"},"End":true}}}},
            "dependencies":["d","c"]}}}"#;
    assert_eq!(shape(&compiled(document)), "a, [[b, d | c], f | e]");
}

/// Simulates a flow with a given duration of each task: records begin and end by name. Returns the end of the flow.
fn play(
    flow: &Value,
    begin: u32,
    lasts: &dyn Fn(&str) -> u32,
    times: &mut BTreeMap<String, (u32, u32)>,
) -> u32 {
    let mut now = begin;
    let mut next = flow.get("StartAt").and_then(Value::as_str);
    while let Some(name) = next {
        let state = flow.get("States").and_then(|states| states.get(name)).expect("a state");
        if let Some(branches) = state.get("Branches").and_then(Value::as_array) {
            let ends = branches.iter().map(|branch| play(branch, now, lasts, times));
            now = ends.max().unwrap_or(now);
        } else if !name.contains('(') {
            let end = now + lasts(name);
            assert!(times.insert(name.to_owned(), (now, end)).is_none(), "{name} runs twice");
            now = end;
        }
        next = state.get("Next").and_then(Value::as_str);
    }
    now
}

/// The dependencies of each task, by index.
type Edges = Vec<BTreeSet<usize>>;

/// Simulates the definition of a graph. Checks that each task runs once and after its dependencies; returns the times.
fn played(edges: &Edges, lasts: &[u32]) -> Vec<(u32, u32)> {
    let line = |(at, dependencies): (usize, &BTreeSet<usize>)| {
        let names: Vec<String> = dependencies.iter().map(|at| format!("t{at}")).collect();
        format!("t{at}:{}", names.join(" "))
    };
    let lines: Vec<String> = edges.iter().enumerate().map(line).collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let definition = compiled(&document(&lines));
    let mut times = BTreeMap::new();
    let lasts = |name: &str| lasts[name[1..].parse::<usize>().expect("a number")];
    play(&definition, 0, &lasts, &mut times);
    let times: Vec<_> = (0..edges.len()).map(|at| times[&format!("t{at}")]).collect();
    for (at, dependencies) in edges.iter().enumerate() {
        for dependency in dependencies {
            assert!(times[*dependency].1 <= times[at].0, "t{at} starts before t{dependency} has ended");
        }
    }
    times
}

/// The earliest times that the dependencies allow; dependencies have smaller indexes.
fn earliest(edges: &Edges, lasts: &[u32]) -> Vec<(u32, u32)> {
    let mut times: Vec<(u32, u32)> = Vec::new();
    for (dependencies, lasts) in edges.iter().zip(lasts) {
        let begin = dependencies.iter().map(|at| times[*at].1).max().unwrap_or(0);
        times.push((begin, begin + lasts));
    }
    times
}

/// Series-parallel graphs: a task, or two such graphs in sequence or in parallel.
#[derive(Debug, Clone)]
enum SeriesParallel {
    Task,
    Series(Box<SeriesParallel>, Box<SeriesParallel>),
    Parallel(Box<SeriesParallel>, Box<SeriesParallel>),
}

impl SeriesParallel {
    /// Adds the tasks to `edges`, after the tasks `before`; returns their indexes.
    fn add(&self, before: &BTreeSet<usize>, edges: &mut Edges) -> BTreeSet<usize> {
        match self {
            Self::Task => {
                edges.push(before.clone());
                BTreeSet::from([edges.len() - 1])
            }
            Self::Series(one, other) => {
                let first = one.add(before, edges);
                let all_before = before.union(&first).copied().collect();
                first.union(&other.add(&all_before, edges)).copied().collect()
            }
            Self::Parallel(one, other) => {
                let first = one.add(before, edges);
                first.union(&other.add(before, edges)).copied().collect()
            }
        }
    }
}

fn series_parallel() -> impl Strategy<Value = Edges> {
    let tree = Just(SeriesParallel::Task).prop_recursive(6, 40, 2, |inner| {
        let pair = (inner.clone(), inner, any::<bool>());
        pair.prop_map(|(one, other, series)| match series {
            true => SeriesParallel::Series(Box::new(one), Box::new(other)),
            false => SeriesParallel::Parallel(Box::new(one), Box::new(other)),
        })
    });
    tree.prop_map(|tree| {
        let mut edges = Vec::new();
        tree.add(&BTreeSet::new(), &mut edges);
        edges
    })
}

fn any_graph() -> impl Strategy<Value = Edges> {
    (1_usize..24, proptest::collection::vec(any::<(u8, u8)>(), 0..60)).prop_map(|(count, pairs)| {
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

proptest! {
    #[test]
    fn tasks_of_any_graph_run_once_and_in_order(
        edges in any_graph(),
        lasts in proptest::collection::vec(1_u32..100, 24),
    ) {
        played(&edges, &lasts);
    }

    #[test]
    fn series_parallel_graphs_wait_for_nothing_but_dependencies(
        edges in series_parallel(),
        lasts in proptest::collection::vec(1_u32..100, 64),
    ) {
        prop_assert_eq!(played(&edges, &lasts), earliest(&edges, &lasts));
    }
}

#[test]
fn deep_graphs_stay_within_the_nesting_of_the_language() {
    // A task in parallel to a sequence of a task and, recursively, the same.
    let mut edges: Edges = Vec::new();
    let mut before = BTreeSet::new();
    for _ in 0..NESTING_MAX + 10 {
        edges.push(before.clone());
        edges.push(before.clone());
        before.insert(edges.len() - 1);
    }
    let lasts = vec![1; edges.len()];
    let times = played(&edges, &lasts);
    let expected = earliest(&edges, &lasts);
    assert_eq!(times.iter().map(|(_, end)| end).max(), expected.iter().map(|(_, end)| end).max());
}
