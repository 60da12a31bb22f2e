//! Generates the states of arranged tasks.
//!
//! Between two elements of a sequence the data is `{"input": …, "tasks": {…}}` with the outputs that later elements
//! read: the data of a state is limited (256 KiB), so an output is dropped after its last reader. A flow, which is a
//! branch of a Parallel state or the whole state machine, ends with an object of the outputs that are read after it;
//! for the state machine these are the outputs of the tasks without dependents. [`Layout`] describes the data after an
//! element.
//!
//! Names of generated states have a part in parentheses, which task names cannot have.

use std::collections::BTreeSet;

use super::document::{GraphTask, StateType, TasksDocument};
use super::graph::Arrangement;
use crate::value::{Map, Value};

/// The form of the data after an element of a flow, and the tasks whose outputs it contains.
enum Layout {
    /// `{"input": …, "tasks": {…}}`.
    Data(BTreeSet<usize>),
    /// `{…}`: the end of a flow.
    Outputs(BTreeSet<usize>),
}

impl Layout {
    fn kept(&self) -> &BTreeSet<usize> {
        match self {
            Self::Data(kept) | Self::Outputs(kept) => kept,
        }
    }

    fn is_data(&self) -> bool {
        matches!(self, Self::Data(_))
    }
}

/// The states of one element, in document order; the first one is its entry. A state without a transition continues
/// with the next element.
type Element = Vec<(String, Map)>;

/// Generates the definition of a document's tasks.
pub(super) fn definition(document: &TasksDocument, arranged: &Arrangement) -> Value {
    let mut dependents = vec![Vec::new(); document.tasks.len()];
    for (at, task) in document.tasks.iter().enumerate() {
        task.dependencies.iter().for_each(|dependency| dependents[*dependency].push(at));
    }
    let sinks = (0..document.tasks.len()).filter(|at| dependents[*at].is_empty()).collect();
    let mut writer = Writer { tasks: &document.tasks, dependents, parallels: 0 };
    let begin = pass(Value::object([("input.$", Value::string("$")), ("tasks", Value::empty_object())]));
    let begin = vec![("(input)".to_owned(), begin)];
    let flow = writer.flow(begin, arranged, &BTreeSet::new(), &sinks);
    let mut definition = Map::new();
    if let Some(comment) = &document.comment {
        definition.insert("Comment", comment.clone());
    }
    if let Some(seconds) = &document.timeout_seconds {
        definition.insert("TimeoutSeconds", seconds.clone());
    }
    for (name, value) in flow {
        definition.insert(name, value);
    }
    definition.into()
}

struct Writer<'a> {
    tasks: &'a [GraphTask],
    dependents: Vec<Vec<usize>>,
    /// The number of Parallel states so far, used in their names.
    parallels: usize,
}

impl Writer<'_> {
    /// `StartAt` and `States` of a sequence that begins with `begin`. `present` are the tasks whose outputs the input
    /// data contains, `outputs` those whose outputs are the flow's output.
    fn flow(
        &mut self,
        begin: Element,
        arranged: &Arrangement,
        present: &BTreeSet<usize>,
        outputs: &BTreeSet<usize>,
    ) -> Map {
        let parts = match arranged {
            Arrangement::Series(parts) => &parts[..],
            part => std::slice::from_ref(part),
        };
        let within: Vec<Vec<usize>> = parts.iter().map(members).collect();
        let mut present = present.clone();
        let mut elements = vec![begin];
        for (at, part) in parts.iter().enumerate() {
            let later: BTreeSet<usize> = within[at + 1..].iter().flatten().copied().collect();
            present.extend(&within[at]);
            let is_read = |task: &usize| {
                outputs.contains(task) || self.dependents[*task].iter().any(|reader| later.contains(reader))
            };
            let kept: BTreeSet<usize> = present.iter().copied().filter(is_read).collect();
            let layout = match at + 1 == parts.len() {
                true => Layout::Outputs(kept),
                false => Layout::Data(kept),
            };
            elements.push(match part {
                Arrangement::Task(task) => self.task(*task, &present, &layout),
                Arrangement::Parallel(branches) => self.parallel(branches, &present, &layout),
                Arrangement::Series(_) => unreachable!("a series is part of no other series"),
            });
            present = layout.kept().clone();
        }
        sequence(elements)
    }

    /// `present` includes the task itself, whose output a layout always keeps.
    fn task(&self, at: usize, present: &BTreeSet<usize>, layout: &Layout) -> Element {
        let task = &self.tasks[at];
        let name = &*task.name;
        let mut states = Vec::new();
        if let Some(when) = &task.when {
            states.push((format!("{name} (when)"), choice(when, name)));
        }
        let mut state = task.state.clone();
        let mut after = None;
        if task.jsonata {
            self.jsonata(at, &mut state, layout);
        } else {
            after = self.json_path(at, &mut state, present, layout);
        }
        let arranges = after.is_some();
        if arranges {
            state.insert("Next", Value::string(format!("{name} (output)")));
        }
        if !task.catch.is_empty() {
            let to = if arranges { format!("{name} (output)") } else { format!("{name} (caught)") };
            state.insert(
                "Catch",
                task.catch.iter().map(|catcher| self.catcher(at, catcher, &to, layout)).collect(),
            );
        }
        states.push((name.to_owned(), state));
        states.extend(after.map(|after| (format!("{name} (output)"), after)));
        if !task.catch.is_empty() && !arranges {
            let caught = match task.jsonata {
                true => bare_pass(),
                false => pass(self.template(layout, |task| Some(json_path("$.tasks", task)))),
            };
            states.push((format!("{name} (caught)"), caught));
        }
        if task.when.is_some() {
            let skipped = |other: &str| (other != name).then(|| json_path("$.tasks", other));
            states.push((format!("{name} (skipped)"), pass(self.template(layout, skipped))));
        }
        states
    }

    /// Adds the output to the data, for a state in JSONata.
    fn jsonata(&self, at: usize, state: &mut Map, layout: &Layout) {
        let task = &self.tasks[at];
        let own = state.remove("Output").unwrap_or_else(|| match task.kind {
            StateType::Work => Value::string("{% $states.result %}"),
            StateType::Pass => Value::string("{% $states.input %}"),
            StateType::Wait => Value::Null,
        });
        state.insert("Output", self.jsonata_template(at, own, layout));
    }

    fn jsonata_template(&self, at: usize, own: Value, layout: &Layout) -> Value {
        let outputs = layout.kept().iter().map(|kept| {
            let name = &self.tasks[*kept].name;
            let value = match *kept == at {
                true => own.clone(),
                false => Value::string(format!("{{% {} %}}", jsonata_path(name))),
            };
            (name.clone(), value)
        });
        let outputs = Value::object(outputs);
        match layout.is_data() {
            true => {
                Value::object([("input", Value::string("{% $states.input.input %}")), ("tasks", outputs)])
            }
            false => outputs,
        }
    }

    /// Adds the output to the data, for a state in JSONPath. Returns a following state that creates the layout, if the
    /// state itself cannot.
    fn json_path(
        &self,
        at: usize,
        state: &mut Map,
        present: &BTreeSet<usize>,
        layout: &Layout,
    ) -> Option<Map> {
        let GraphTask { name, kind, .. } = &self.tasks[at];
        if *kind == StateType::Wait {
            let waited = |task: &str| (task != &**name).then(|| json_path("$.tasks", task));
            return Some(pass(self.template(layout, waited)));
        }
        let alone = layout.kept().len() == 1;
        if *kind == StateType::Work && alone {
            let selected = match state.remove("ResultSelector") {
                Some(own) => Value::object([(&**name, own)]),
                None => Value::object([(format!("{name}.$"), Value::string("$"))]),
            };
            state.insert("ResultSelector", selected);
            if layout.is_data() {
                state.insert("ResultPath", Value::string("$.tasks"));
            }
            return None;
        }
        state.insert("ResultPath", Value::string(json_path("$.tasks", name)));
        let in_layout = layout.is_data() && present.len() == layout.kept().len();
        (!in_layout).then(|| pass(self.template(layout, |task| Some(json_path("$.tasks", task)))))
    }

    fn catcher(&self, at: usize, catcher: &Value, to: &str, layout: &Layout) -> Value {
        let task = &self.tasks[at];
        let mut members = catcher.as_object().cloned().unwrap_or_default();
        match task.jsonata {
            true => {
                let error = Value::string("{% $states.errorOutput %}");
                members.insert("Output", self.jsonata_template(at, error, layout));
            }
            false => drop(members.insert("ResultPath", Value::string(json_path("$.tasks", &task.name)))),
        }
        members.insert("Next", Value::string(to));
        members.into()
    }

    /// `present` includes the tasks of the branches.
    fn parallel(&mut self, branches: &[Arrangement], present: &BTreeSet<usize>, layout: &Layout) -> Element {
        self.parallels += 1;
        let name = format!("(parallel {})", self.parallels);
        let within: Vec<Vec<usize>> = branches.iter().map(members).collect();
        let inside: BTreeSet<usize> = within.iter().flatten().copied().collect();
        let before: BTreeSet<usize> = present.difference(&inside).copied().collect();
        let mut selected = Map::new();
        let mut flows = Vec::with_capacity(branches.len());
        for (at, (branch, within)) in branches.iter().zip(&within).enumerate() {
            // The outputs that are read after this state, or only within the branch.
            let outputs: BTreeSet<usize> =
                within.iter().copied().filter(|task| layout.kept().contains(task)).collect();
            for output in &outputs {
                let output = &self.tasks[*output].name;
                selected.insert(format!("{output}.$"), Value::string(json_path(&format!("$[{at}]"), output)));
            }
            flows.push(Value::from(self.flow(Vec::new(), branch, &before, &outputs)));
        }
        let mut state = Map::new();
        state.insert("Type", Value::string("Parallel"));
        state.insert("Branches", flows.into());
        state.insert("ResultSelector", selected.into());
        let others_kept = layout.kept().iter().any(|kept| !inside.contains(kept));
        if !others_kept {
            if layout.is_data() {
                state.insert("ResultPath", Value::string("$.tasks"));
            }
            return vec![(name, state)];
        }
        // `ResultPath` would replace the earlier outputs.
        let output = format!("{name} output");
        state.insert("ResultPath", Value::string("$.branches"));
        state.insert("Next", Value::string(&*output));
        let from_branches: BTreeSet<&str> = inside.iter().map(|task| &*self.tasks[*task].name).collect();
        let place = |task: &str| {
            let object = if from_branches.contains(task) { "$.branches" } else { "$.tasks" };
            Some(json_path(object, task))
        };
        let joined = pass(self.template(layout, place));
        vec![(name, state), (output, joined)]
    }

    /// A payload template that creates the layout; `place` returns the path of a task's output, which is null without
    /// one.
    fn template(&self, layout: &Layout, place: impl Fn(&str) -> Option<String>) -> Value {
        let outputs = layout.kept().iter().map(|kept| {
            let name = &*self.tasks[*kept].name;
            match place(name) {
                Some(path) => (format!("{name}.$"), Value::string(path)),
                None => (name.to_owned(), Value::Null),
            }
        });
        let outputs = Value::object(outputs);
        match layout.is_data() {
            true => Value::object([("input.$", Value::string("$.input")), ("tasks", outputs)]),
            false => outputs,
        }
    }
}

fn members(arranged: &Arrangement) -> Vec<usize> {
    let mut found = Vec::new();
    arranged.collect(&mut found);
    found
}

/// Concatenates elements; the last one ends the flow.
fn sequence(elements: Vec<Element>) -> Map {
    let elements: Vec<Element> = elements.into_iter().filter(|element| !element.is_empty()).collect();
    let entries: Vec<String> = elements.iter().map(|element| element[0].0.clone()).collect();
    let mut states = Map::new();
    for (at, element) in elements.into_iter().enumerate() {
        for (name, mut state) in element {
            let is_open = !["Next", "Choices"].iter().any(|field| state.contains_key(field));
            match entries.get(at + 1).filter(|_| is_open) {
                Some(next) => drop(state.insert("Next", Value::string(&**next))),
                None if is_open => drop(state.insert("End", Value::Bool(true))),
                None => {}
            }
            states.insert(name, state.into());
        }
    }
    let mut flow = Map::new();
    flow.insert("StartAt", Value::string(entries.first().map_or("", String::as_str)));
    flow.insert("States", states.into());
    flow
}

/// Runs the task if the condition is true; otherwise skips it.
fn choice(when: &Value, name: &str) -> Map {
    let mut state = Map::new();
    state.insert("Type", Value::string("Choice"));
    let mut rule = match when {
        Value::Object(rule) => (**rule).clone(),
        expression => {
            state.insert("QueryLanguage", Value::string("JSONata"));
            let mut rule = Map::new();
            rule.insert("Condition", expression.clone());
            rule
        }
    };
    rule.insert("Next", Value::string(name));
    state.insert("Choices", Value::from(vec![rule.into()]));
    state.insert("Default", Value::string(format!("{name} (skipped)")));
    state
}

fn bare_pass() -> Map {
    let mut state = Map::new();
    state.insert("Type", Value::string("Pass"));
    state
}

fn pass(parameters: Value) -> Map {
    let mut state = bare_pass();
    state.insert("Parameters", parameters);
    state
}

/// A member of an object as JSONPath.
pub(super) fn json_path(object: &str, member: &str) -> String {
    match member.contains('-') {
        true => format!("{object}['{member}']"),
        false => format!("{object}.{member}"),
    }
}

/// The output of a task as JSONata.
fn jsonata_path(name: &str) -> String {
    match name.contains('-') {
        true => format!("$states.input.tasks.`{name}`"),
        false => format!("$states.input.tasks.{name}"),
    }
}
