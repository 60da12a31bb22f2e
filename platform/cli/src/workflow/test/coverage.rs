//! The states, branches of choices and catchers that the cases have reached.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use mayfly_workflows_language::definition::{Catcher, State, StateKind};
use mayfly_workflows_machine::history::HistoryEvent;
use serde_json::{Value, json};

use super::run::{is_entry, text};
use super::subject::Subject;

/// The states, branches and catchers in the order of the definition, and the reached ones.
pub(super) struct Coverage {
    states: Part,
    /// Such as `Route → Ship`: rules with the same target count as one branch.
    choices: Part,
    /// Such as `Charge: CardDeclined → Refund`.
    catchers: Part,
}

#[derive(Default)]
struct Part {
    all: Vec<String>,
    reached: BTreeSet<String>,
}

impl Part {
    fn add(&mut self, name: String) {
        if !self.all.contains(&name) {
            self.all.push(name);
        }
    }

    fn missing(&self) -> Vec<&str> {
        self.all.iter().filter(|name| !self.reached.contains(*name)).map(String::as_str).collect()
    }

    fn to_json(&self) -> Value {
        json!({"total": self.all.len(), "reached": self.all.len() - self.missing().len(), "missing": self.missing()})
    }

    fn line(&self, name: &str) -> Option<String> {
        if self.all.is_empty() {
            return None;
        }
        let missing = self.missing();
        let counts = format!("{name} {}/{}", self.all.len() - missing.len(), self.all.len());
        Some(match missing.is_empty() {
            true => counts,
            false => format!("{counts} (not reached: {})", missing.join(", ")),
        })
    }
}

impl Coverage {
    pub(super) fn new(subject: &Subject) -> Self {
        let (mut states, mut choices, mut catchers) = (Part::default(), Part::default(), Part::default());
        for state in subject.states() {
            states.add(state.name.to_string());
            if let StateKind::Choice(choice) = &state.kind {
                let rules = choice.rules.iter().map(|rule| &rule.next);
                for next in rules.chain(&choice.default) {
                    choices.add(branch(state, subject.target(next).unwrap_or("End")));
                }
            }
            for catcher in &state.catch {
                catchers.add(catch(state, catcher, subject));
            }
        }
        Self { states, choices, catchers }
    }

    /// Adds the parts that a case reached.
    pub(super) fn add(&mut self, subject: &Subject, executions: &[Arc<Vec<HistoryEvent>>]) {
        for events in executions {
            let by_id: HashMap<u64, &HistoryEvent> = events.iter().map(|event| (event.id, event)).collect();
            for entry in events.iter().filter(|event| is_entry(event)) {
                let Some(name) = text(entry, "name") else { continue };
                if let Some(exit) =
                    by_id.get(&entry.previous).filter(|event| event.kind.ends_with("StateExited"))
                    && let Some(left) = text(exit, "name").and_then(|left| subject.state(&left))
                {
                    let before = by_id.get(&exit.previous).copied();
                    self.passed(subject, left, before, &name);
                }
                self.states.reached.insert(name);
            }
        }
    }

    /// Records a transition from one state to another.
    fn passed(&mut self, subject: &Subject, left: &State, before: Option<&HistoryEvent>, next: &str) {
        if matches!(left.kind, StateKind::Choice(_)) {
            self.choices.reached.insert(branch(left, next));
        }
        let failed = before.is_some_and(|event| {
            event.kind.ends_with("Failed")
                || event.kind.ends_with("TimedOut")
                || event.kind.ends_with("Aborted")
        });
        if !failed && subject.target(&left.next) == Some(next) {
            return;
        }
        let error = before.and_then(|event| text(event, "error"));
        let leads_there = |catcher: &&Catcher| subject.target(&catcher.next) == Some(next);
        let takes = |catcher: &&Catcher| match &error {
            Some(error) => {
                catcher.error_equals.iter().any(|name| &**name == error || name.starts_with("States."))
            }
            None => true,
        };
        let mut there = left.catch.iter().filter(leads_there);
        if let Some(catcher) = there.clone().find(takes).or_else(|| there.next()) {
            self.catchers.reached.insert(catch(left, catcher, subject));
        }
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "states": self.states.to_json(), "choices": self.choices.to_json(), "catchers": self.catchers.to_json()
        })
    }

    /// One line for each kind that the definition contains.
    pub(super) fn lines(&self) -> Vec<String> {
        let parts =
            [(&self.states, "states"), (&self.choices, "choice branches"), (&self.catchers, "catchers")];
        parts.into_iter().filter_map(|(part, name)| part.line(name)).collect()
    }
}

fn branch(state: &State, next: &str) -> String {
    format!("{} → {next}", state.name)
}

fn catch(state: &State, catcher: &Catcher, subject: &Subject) -> String {
    let next = subject.target(&catcher.next).unwrap_or("End");
    format!("{}: {} → {next}", state.name, catcher.error_equals.join("|"))
}
