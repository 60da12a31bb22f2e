//! The definition under test, and the names that can be mocked.

use std::{path::Path, sync::Arc};

use mayfly_api::{
    wellknown::NAMESPACE_DEFAULT,
    workflow::names::{ROLE, STATE_MACHINE_PREFIX},
};
use mayfly_workflows_engine::engine::StartedMachine;
use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::definition::{self, State, StateMachineType, Transition};
use mayfly_workflows_language::{parse, validate};

use super::super::{definition as text, reference::Workflow};
use super::file::Mocks;
use crate::failure::{ErrorCode, Failure};

/// The longest duration of an express execution on AWS, in seconds.
const EXPRESS_SECONDS_MAX: u64 = 300;

/// A compiled definition.
pub(super) struct Subject {
    pub(super) machine: Arc<StartedMachine>,
}

impl Subject {
    /// Reads and compiles a definition; the error lists all problems.
    pub(super) fn load(
        path: &Path,
        kind: Option<StateMachineType>,
        namespace: Option<&str>,
    ) -> anyhow::Result<Self> {
        let source = text::source(path);
        let text = text::read(path)?;
        let machine_type = kind.unwrap_or(StateMachineType::Standard);
        let mut compiled = parse::compile(&text, machine_type).map_err(|rejection| {
            let mut found = rejection.diagnostics;
            for missing in validate::missing_targets(&text, machine_type) {
                if !found.contains(&missing) {
                    found.push(missing);
                }
            }
            let problems: Vec<_> = found
                .iter()
                .map(|one| match &one.location {
                    Some(place) => format!("{place}: {}", one.message),
                    None => one.message.clone(),
                })
                .collect();
            Failure::new(
                ErrorCode::InvalidFile,
                format!("{source} is not a valid state machine"),
                problems.join("\n"),
            )
        })?;
        if machine_type == StateMachineType::Express {
            let given = compiled.timeout_seconds.unwrap_or(u64::MAX);
            compiled.timeout_seconds = Some(given.min(EXPRESS_SECONDS_MAX));
        }
        let name = text::name_of_file(path).unwrap_or_else(|| "workflow".into());
        let name = match Workflow::parse(&name) {
            Ok(workflow) => workflow.within(namespace.unwrap_or(NAMESPACE_DEFAULT)).name().to_owned(),
            Err(_) => name,
        };
        let machine = Arc::new(StartedMachine {
            arn: StateMachineArn::from_trusted(format!("{STATE_MACHINE_PREFIX}{name}")),
            name,
            role_arn: ROLE.to_owned(),
            // Express workflows run as standard ones with their limit of five minutes: tests check the history, which
            // express executions do not store.
            kind: StateMachineType::Standard,
            definition_text: text.into(),
            definition: Arc::new(compiled),
            details: None,
            flow: None,
        });
        Ok(Self { machine })
    }

    pub(super) fn states(&self) -> &[State] {
        self.machine.definition.states()
    }

    pub(super) fn state(&self, name: &str) -> Option<&State> {
        self.machine.definition.state_named(name)
    }

    pub(super) fn has_state(&self, name: &str) -> bool {
        self.state(name).is_some()
    }

    /// The target of a transition.
    pub(super) fn target(&self, transition: &Transition) -> Option<&str> {
        match transition {
            Transition::Next(id) => Some(&self.machine.definition.state(*id).name),
            Transition::End | Transition::Outside(_) => None,
        }
    }

    fn tasks(&self) -> impl Iterator<Item = (&str, &definition::TaskState)> {
        self.states().iter().filter_map(|state| match &state.kind {
            definition::StateKind::Task(task) => Some((&*state.name, task)),
            _ => None,
        })
    }

    /// Refuses mocks of states that never use one.
    pub(super) fn check_names(&self, mocks: &Mocks, place: &str) -> anyhow::Result<()> {
        for (name, mock) in mocks {
            let mut named =
                self.tasks().filter(|(state, task)| state == name || &*task.arn == name).peekable();
            if named.peek().is_none() {
                let what = match self.state(name) {
                    Some(state) => {
                        format!("{place}: {name} is a {} state, and only tasks are mocked", state.kind.name())
                    }
                    None => format!("{place}: there is no state and no resource {name}"),
                };
                return Err(Failure::error(ErrorCode::InvalidFile, what, self.nearest(name)));
            }
            let enveloped = |(_, task): (&str, &definition::TaskState)| {
                matches!(task.resource, definition::Resource::LambdaInvoke(_))
            };
            if mock.answers.iter().any(|answer| answer.payload.is_some()) && !named.all(enveloped) {
                let what = format!("{place}: {name} has a payload, and its resource is not lambda:invoke");
                return Err(Failure::error(
                    ErrorCode::InvalidFile,
                    what,
                    "write result instead: what the service answers",
                ));
            }
        }
        Ok(())
    }

    /// A suggestion for a misspelt name.
    pub(super) fn nearest(&self, name: &str) -> String {
        let meant = self.states().iter().find(|state| state.name.eq_ignore_ascii_case(name));
        let tasks: Vec<_> = self.tasks().map(|(state, _)| state).collect();
        match meant {
            Some(state) => format!("did you mean {}?", state.name),
            None if tasks.is_empty() => "the definition has no tasks".into(),
            None => format!("the tasks are {}", tasks.join(", ")),
        }
    }
}
