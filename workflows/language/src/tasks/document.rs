//! Parses a document of tasks: checks fields and names, and converts each task to the body of a state.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock};

use regex::Regex;

use super::TASKS_MAX;
use crate::error::Problem;
use crate::value::{Map, Value};

/// The maximum length of a task's name, in characters: state names have 80, of which suffixes such as ` (skipped)` take
/// some.
const NAME_CHARS_MAX: usize = 60;
/// The ARN prefix of functions that are given by name: the default region and account of this server's API. An operator
/// may have configured others, which does not matter for functions.
const FUNCTION_PREFIX: &str = "arn:aws:lambda:us-east-1:000000000000:function:";
const JOB: &str = "arn:aws:states:::job:run.sync";

/// Fields of a state that the compiler of tasks sets itself.
const FILLED_IN: &[&str] = &["Next", "End", "InputPath", "OutputPath", "ResultPath", "Assign"];
/// Fields of a state whose flows have separate data.
const FLOWS: &[&str] = &["Branches", "ItemProcessor", "Iterator"];

/// The tasks of a workflow.
#[derive(Debug)]
pub(super) struct TasksDocument {
    pub(super) comment: Option<Value>,
    pub(super) timeout_seconds: Option<Value>,
    /// At least one, in the order of the document.
    pub(super) tasks: Vec<GraphTask>,
}

/// One task.
#[derive(Debug)]
pub(super) struct GraphTask {
    pub(super) name: Arc<str>,
    /// Indexes of other tasks in the document, without duplicates.
    pub(super) dependencies: Vec<usize>,
    /// Runs only if this is true: a rule of a Choice state, or a JSONata expression.
    pub(super) when: Option<Value>,
    pub(super) kind: StateType,
    /// Whether the state's language is JSONata.
    pub(super) jsonata: bool,
    /// The state's fields, without transitions and without `Catch`.
    pub(super) state: Map,
    /// The catchers: `ErrorEquals` only.
    pub(super) catch: Vec<Value>,
}

/// The types of states that tasks can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StateType {
    /// Task, Map or Parallel.
    Work,
    Pass,
    Wait,
}

impl TasksDocument {
    /// # Errors
    /// All problems.
    pub(super) fn parse(document: &Value) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let Some(members) = document.as_object() else {
            return Err(vec![Problem::here("a workflow of tasks is an object with the field tasks")]);
        };
        known(members, &["tasks", "comment", "timeoutSeconds"], "", &mut problems);
        let Some(written) = members.get("tasks").and_then(Value::as_object).filter(|tasks| !tasks.is_empty())
        else {
            let message = "an object of tasks by name, one at least";
            problems.push(Problem::at("/tasks", message));
            return Err(problems);
        };
        if written.len() > TASKS_MAX {
            let message = format!("{} tasks, more than {TASKS_MAX}", written.len());
            problems.push(Problem::at("/tasks", message));
            return Err(problems);
        }
        let positions = written.keys().cloned().enumerate().map(|(at, name)| (name, at)).collect();
        let mut tasks = Vec::with_capacity(written.len());
        for (name, task) in written.iter() {
            let mut reader =
                Reader { at: format!("/tasks/{name}"), positions: &positions, problems: Vec::new() };
            tasks.extend(reader.task(name, task));
            problems.append(&mut reader.problems);
        }
        match problems.is_empty() {
            true => Ok(Self {
                comment: members.get("comment").cloned(),
                timeout_seconds: members.get("timeoutSeconds").cloned(),
                tasks,
            }),
            false => Err(problems),
        }
    }
}

/// Reports fields that are not in `fields`.
fn known(members: &Map, fields: &[&str], at: &str, problems: &mut Vec<Problem>) {
    for name in members.keys().filter(|name| !fields.contains(&&***name)) {
        let message = format!("no such field; there are {}", fields.join(", "));
        problems.push(Problem::at(format!("{at}/{name}"), message));
    }
}

/// Reads one task.
struct Reader<'a> {
    at: String,
    positions: &'a HashMap<Arc<str>, usize>,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn problem(&mut self, field: &str, message: impl Into<String>) {
        self.problems.push(Problem::at(format!("{}{field}", self.at), message));
    }

    fn task(&mut self, name: &Arc<str>, task: &Value) -> Option<GraphTask> {
        static NAME: LazyLock<Regex> =
            LazyLock::new(|| Regex::new("^[A-Za-z][A-Za-z0-9_-]*$").expect("a regular expression"));
        if !NAME.is_match(name) || name.chars().count() > NAME_CHARS_MAX {
            self.problem(
                "",
                format!(
                    "a task's name has letters, digits, '_' and '-', begins with a letter, and has at most \
                     {NAME_CHARS_MAX} characters"
                ),
            );
        }
        let Some(members) = task.as_object() else {
            self.problem("", "a task is an object with one of the fields function, job and state");
            return None;
        };
        let dependencies = self.dependencies(name, members);
        let (mut state, fields): (Map, &[&str]) =
            match ["function", "job", "state"].map(|what| members.get(what)) {
                [Some(function), None, None] => (
                    self.function(function, members)?,
                    &[
                        "dependencies",
                        "when",
                        "function",
                        "payload",
                        "payload.$",
                        "retry",
                        "catch",
                        "timeoutSeconds",
                    ],
                ),
                [None, Some(job), None] => {
                    (self.job(job)?, &["dependencies", "when", "job", "retry", "catch", "timeoutSeconds"])
                }
                [None, None, Some(state)] => (self.state(state)?, &["dependencies", "when", "state"]),
                _ => {
                    self.problem("", "exactly one of the fields function, job and state is required");
                    return None;
                }
            };
        known(members, fields, &self.at.clone(), &mut self.problems);
        for (written, field) in [("retry", "Retry"), ("catch", "Catch"), ("timeoutSeconds", "TimeoutSeconds")]
        {
            if let Some(value) = members.get(written).filter(|_| fields.contains(&written)) {
                state.insert(field, value.clone());
            }
        }
        let kind = self.kind(&state)?;
        let jsonata = state.get("QueryLanguage").and_then(Value::as_str) == Some("JSONata");
        let catch = self.catch(state.remove("Catch"), members.get("state").is_some());
        let when = members.get("when").cloned();
        if let Some(when) = &when
            && !when.is_object()
            && !when.is_string()
        {
            self.problem("/when", "a rule of a Choice state without Next, or a JSONata expression {% … %}");
        }
        let task = GraphTask { name: name.clone(), dependencies, when, kind, jsonata, state, catch };
        self.references(&task);
        Some(task)
    }

    fn dependencies(&mut self, name: &Arc<str>, members: &Map) -> Vec<usize> {
        let Some(written) = members.get("dependencies") else { return Vec::new() };
        let Some(items) = written.as_array() else {
            self.problem("/dependencies", "a list of names of tasks");
            return Vec::new();
        };
        let mut found = Vec::with_capacity(items.len());
        for (at, item) in items.iter().enumerate() {
            let field = format!("/dependencies[{at}]");
            let Some(dependency) = item.as_str() else {
                self.problem(&field, "the name of a task");
                continue;
            };
            match self.positions.get(dependency) {
                _ if *dependency == **name => self.problem(&field, "a task cannot depend on itself"),
                None => self.problem(&field, format!("there is no task {dependency:?}")),
                Some(position) if found.contains(position) => {
                    self.problem(&field, format!("{dependency:?} is in the list twice"));
                }
                Some(position) => found.push(*position),
            }
        }
        found
    }

    /// A function is called with its payload; its response is the task's output.
    fn function(&mut self, function: &Value, members: &Map) -> Option<Map> {
        let Some(function) = function.as_str().filter(|name| !name.is_empty()) else {
            self.problem("/function", "a function's name or ARN");
            return None;
        };
        if !function.starts_with("arn:") && function.contains('.') {
            // Such a name cannot be part of an ARN.
            let message = "a function of another namespace is called by a state with the resource \
                           arn:aws:states:::lambda:invoke, whose FunctionName is NAMESPACE.NAME";
            self.problem("/function", message);
            return None;
        }
        let resource = match function.starts_with("arn:") {
            true => function.to_owned(),
            false => format!("{FUNCTION_PREFIX}{function}"),
        };
        let mut state = work(&resource);
        match (members.get("payload"), members.get("payload.$")) {
            (Some(_), Some(_)) => {
                self.problem("/payload.$", "payload is there already");
            }
            (Some(payload), None) => drop(state.insert("Parameters", payload.clone())),
            // The language has no template that is a single path; `InputPath` has the same effect.
            (None, Some(path)) => drop(state.insert("InputPath", path.clone())),
            (None, None) => drop(state.insert("Parameters", self.whole_input(members))),
        }
        Some(state)
    }

    /// The template of a task's whole input, without outputs of tasks that it does not depend on.
    fn whole_input(&self, members: &Map) -> Value {
        let listed = members.get("dependencies").and_then(Value::as_array).unwrap_or_default();
        let outputs = listed.iter().filter_map(Value::as_str);
        let outputs = outputs
            .map(|name| (format!("{name}.$"), Value::string(super::states::json_path("$.tasks", name))));
        Value::object([("input.$", Value::string("$.input")), ("tasks", Value::object(outputs))])
    }

    fn job(&mut self, job: &Value) -> Option<Map> {
        if !job.is_object() {
            self.problem(
                "/job",
                "the parameters of job:run: Component or Image, Command, Args, Parameters, …",
            );
            return None;
        }
        let mut state = work(JOB);
        state.insert("Parameters", job.clone());
        Some(state)
    }

    fn state(&mut self, state: &Value) -> Option<Map> {
        let Some(state) = state.as_object() else {
            self.problem("/state", "a state of type Task, Map, Parallel, Pass or Wait, without transitions");
            return None;
        };
        for field in FILLED_IN.iter().filter(|field| state.contains_key(field)) {
            let why = match *field {
                "Next" | "End" => "the order follows from the dependencies",
                "Assign" => "a task has no variables; other tasks read its output",
                "InputPath" => "a task's input is {\"input\": …, \"tasks\": {…}}; Parameters chooses from it",
                _ => "a task's output is kept under its name; ResultSelector or Output shapes it",
            };
            self.problem(&format!("/state/{field}"), why);
        }
        Some(state.clone())
    }

    fn kind(&mut self, state: &Map) -> Option<StateType> {
        match state.get("Type").and_then(Value::as_str) {
            Some("Task" | "Map" | "Parallel") => Some(StateType::Work),
            Some("Pass") => Some(StateType::Pass),
            Some("Wait") => Some(StateType::Wait),
            Some("Choice") => {
                self.problem(
                    "/state/Type",
                    "a task makes no choices: use the field when of the tasks to choose from",
                );
                None
            }
            _ => {
                self.problem("/state/Type", "one of Task, Map, Parallel, Pass and Wait");
                None
            }
        }
    }

    /// Catchers have no transition: a caught error becomes the task's output.
    fn catch(&mut self, catch: Option<Value>, in_state: bool) -> Vec<Value> {
        let Some(catch) = catch else { return Vec::new() };
        let field = if in_state { "/state/Catch" } else { "/catch" };
        let Some(catchers) = catch.as_array() else {
            self.problem(field, "a list of {ErrorEquals: […]}");
            return Vec::new();
        };
        for (at, catcher) in catchers.iter().enumerate() {
            let members = catcher.as_object();
            for name in members.into_iter().flat_map(Map::keys).filter(|name| &***name != "ErrorEquals") {
                let why = "a caught error is the task's output: a catcher has ErrorEquals only";
                self.problem(&format!("{field}[{at}]/{name}"), why);
            }
            if members.is_none() {
                self.problem(&format!("{field}[{at}]"), "an object with ErrorEquals");
            }
        }
        catchers.to_vec()
    }

    /// Reports uses of the output of a task that is not a dependency: its availability would depend on timing.
    fn references(&mut self, task: &GraphTask) {
        let mut named = BTreeSet::new();
        for (field, value) in task.state.iter().filter(|(field, _)| !FLOWS.contains(&&***field)) {
            gather(field, value, &mut named);
        }
        if let Some(when) = &task.when {
            gather("when", when, &mut named);
        }
        for name in named {
            match self.positions.get(&*name) {
                None => {
                    self.problem("", format!("its state reads the output of {name:?}, which does not exist"))
                }
                Some(position) if !task.dependencies.contains(position) => {
                    let message =
                        format!("its state reads the output of {name:?}, which is not in its dependencies");
                    self.problem("/dependencies", message);
                }
                Some(_) => {}
            }
        }
    }
}

fn work(resource: &str) -> Map {
    let mut state = Map::new();
    state.insert("Type", Value::string("Task"));
    state.insert("Resource", Value::string(resource));
    state
}

/// Collects the names of the tasks whose outputs an expression reads: a path in a field of that type, or JSONata.
fn gather(field: &str, value: &Value, named: &mut BTreeSet<String>) {
    static PATH: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\$\.tasks(?:\.([A-Za-z0-9_-]+)|\[['\x22]([^'\x22\]]+)['\x22]\])")
            .expect("a regular expression")
    });
    static JSONATA: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\$states\.input\.tasks\.(?:([A-Za-z0-9_]+)|`([^`]+)`)").expect("a regular expression")
    });
    match value {
        Value::Object(members) => members.iter().for_each(|(name, value)| gather(name, value, named)),
        Value::Array(items) => items.iter().for_each(|item| gather(field, item, named)),
        Value::String(text) => {
            let pattern = if text.starts_with("{%") {
                &*JSONATA
            } else if field.ends_with(".$") || field.ends_with("Path") || field == "Variable" {
                &*PATH
            } else {
                return;
            };
            for found in pattern.captures_iter(text) {
                let name = found.get(1).or_else(|| found.get(2));
                named.extend(name.map(|name| name.as_str().to_owned()));
            }
        }
        _ => {}
    }
}
