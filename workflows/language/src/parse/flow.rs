//! Compiles machines and their flows: top-level fields, the list of states, the arena.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::definition::{
    Flow, FlowId, Head, QueryLanguage, SECONDS_MAX, State, StateId, StateMachine, StateMachineType,
    Transition,
};
use crate::validate::{DiagnosticCode, ProblemReport};
use crate::value::Value;

use super::fields::{EMPTY, Fields, neither};
use super::{FLOW_DEPTH_MAX, STATE_NAME_CHARS_MAX};

/// Compiles one machine.
pub(crate) struct Compiler {
    pub(super) report: ProblemReport,
    pub(super) machine_language: QueryLanguage,
    machine_type: StateMachineType,
    head: Option<Head>,
    flows: Vec<FlowDraft>,
    /// Indexed by state id; `None` until (and unless) the state is valid.
    states: Vec<Option<State>>,
    names: HashSet<Arc<str>>,
    pub(super) labels: HashSet<Arc<str>>,
    /// Whether the compiler is inside an Express machine, or a distributed Map with Express children.
    pub(super) express: bool,
    /// Whether the compiler is inside a distributed Map, whose items are child executions.
    pub(super) distributed: bool,
    depth: usize,
    lone: bool,
    /// Whether the definition was accepted earlier: checks that only later versions have are skipped.
    pub(super) accepted: bool,
}

/// A flow during compilation, with the transitions between its states.
pub(crate) struct FlowDraft {
    /// The path of the flow; empty for the machine.
    pub(crate) at: String,
    pub(crate) start_at: Option<Arc<str>>,
    pub(crate) states: Vec<StateDraft>,
    ids: HashMap<Arc<str>, StateId>,
    /// The id of the first state; the others have the following ids.
    first: u32,
    parent: Option<StateId>,
    comment: Option<Arc<str>>,
    definition: Arc<str>,
}

/// A state in the graph of transitions.
pub(crate) struct StateDraft {
    pub(crate) name: Arc<str>,
    pub(crate) targets: Vec<NextTarget>,
    /// Whether the execution can end in this state.
    pub(crate) terminal: bool,
}

/// The target of a transition, and its path in the definition.
pub(crate) struct NextTarget {
    pub(crate) name: Arc<str>,
    pub(crate) at: String,
}

/// The context of a flow.
pub(super) struct FlowContext {
    pub(super) at: String,
    pub(super) parent: Option<StateId>,
    /// Fields that this flow may have in addition to the common ones.
    pub(super) more: &'static [&'static str],
}

/// The state that is being compiled.
#[derive(Clone, Copy)]
pub(super) struct StateCursor {
    pub(super) flow: FlowId,
    pub(super) state: StateId,
}

impl Compiler {
    pub(crate) fn new(
        machine_type: StateMachineType,
        language: QueryLanguage,
        report: ProblemReport,
    ) -> Compiler {
        Compiler {
            report,
            machine_language: language,
            machine_type,
            head: None,
            flows: Vec::new(),
            states: Vec::new(),
            names: HashSet::new(),
            labels: HashSet::new(),
            express: machine_type == StateMachineType::Express,
            distributed: false,
            depth: 0,
            lone: false,
            accepted: false,
        }
    }

    /// Compiles a whole machine.
    pub(crate) fn machine(&mut self, root: &Value) {
        self.head(root);
        let more = &["Version", "TimeoutSeconds", "QueryLanguage"];
        self.flow(root, FlowContext { at: String::new(), parent: None, more });
    }

    fn head(&mut self, root: &Value) {
        let Some(map) = root.as_object() else { return };
        let report = &mut self.report;
        let fields = Fields::new(map, "", QueryLanguage::JsonPath);
        let language = match fields.word("QueryLanguage", &["JSONPath", "JSONata"], report) {
            Some("JSONata") => QueryLanguage::Jsonata,
            _ => QueryLanguage::JsonPath,
        };
        self.machine_language = language;
        self.head = Some(Head {
            comment: fields.string("Comment", report),
            version: fields.word("Version", &["1.0"], report).map(Arc::from),
            query_language: language,
            timeout_seconds: fields.integer("TimeoutSeconds", 0, SECONDS_MAX, report),
        });
    }

    /// Compiles a single state as a machine of its own.
    pub(crate) fn lone_state(&mut self, value: &Value, name: &str) {
        self.lone = true;
        let name: Arc<str> = name.into();
        let ids = HashMap::from([(name.clone(), StateId(0))]);
        self.head = Some(Head {
            comment: None,
            version: None,
            query_language: QueryLanguage::JsonPath,
            timeout_seconds: None,
        });
        self.flows.push(FlowDraft {
            at: String::new(),
            start_at: Some(name.clone()),
            states: vec![StateDraft { name: name.clone(), targets: Vec::new(), terminal: true }],
            ids,
            first: 0,
            parent: None,
            comment: None,
            definition: value.to_text().into(),
        });
        self.states.push(None);
        let here = StateCursor { flow: FlowId(0), state: StateId(0) };
        self.states[0] = self.state(value, "", name, here);
    }

    /// Compiles `StartAt` and `States` of a machine, a branch or a processor.
    pub(super) fn flow(&mut self, value: &Value, place: FlowContext) -> Option<FlowId> {
        let fields = Fields::of(value, &place.at, self.machine_language, &mut self.report)?;
        if self.depth == FLOW_DEPTH_MAX {
            self.report.error(DiagnosticCode::TooDeeplyNested, &place.at, "The states are too deeply nested");
            return None;
        }
        let id = FlowId(index(self.flows.len())?);
        for name in fields.names() {
            if !["StartAt", "States", "Comment"].contains(&&**name) && !place.more.contains(&&**name) {
                self.report.schema(&place.at, format!("Field '{name}' is not supported"));
            }
        }
        fields.require(&["StartAt", "States"], &mut self.report);
        let start_at = fields.string("StartAt", &mut self.report);
        let comment = fields.string("Comment", &mut self.report);
        let states = fields.object("States", &mut self.report)?;
        if states.names().len() == 0 {
            self.report.schema(&states.at, EMPTY);
        }
        let first = self.states.len();
        let mut draft = FlowDraft {
            at: place.at,
            start_at,
            states: Vec::new(),
            ids: HashMap::new(),
            first: index(first)?,
            parent: place.parent,
            comment,
            definition: value.to_text().into(),
        };
        for name in states.names() {
            draft.ids.insert(name.clone(), StateId(index(self.states.len())?));
            draft.states.push(StateDraft { name: name.clone(), targets: Vec::new(), terminal: false });
            self.states.push(None);
            self.name(name, &states.place(name));
        }
        self.flows.push(draft);
        self.depth += 1;
        for (offset, name) in states.names().enumerate() {
            let here = StateCursor { flow: id, state: StateId(index(first + offset)?) };
            if let Some(value) = states.get(name) {
                self.states[first + offset] = self.state(value, &states.place(name), name.clone(), here);
            }
        }
        self.depth -= 1;
        Some(id)
    }

    /// Checks that a state's name is valid and unique.
    fn name(&mut self, name: &Arc<str>, at: &str) {
        let chars = name.chars().count();
        if chars == 0 || chars > STATE_NAME_CHARS_MAX {
            let message = match chars {
                0 => "The state name is empty".to_string(),
                _ => format!(
                    "State name '{name}' exceeds the {STATE_NAME_CHARS_MAX}-character limit allowed by the service"
                ),
            };
            self.report.error(DiagnosticCode::InvalidStateName, at, message);
        }
        if !self.names.insert(name.clone()) {
            self.report.error(
                DiagnosticCode::DuplicateStateName,
                at,
                format!("Duplicate State name: {name}"),
            );
        }
    }

    /// Adds a transition to the state `name`.
    pub(super) fn leads_to(&mut self, here: StateCursor, name: Arc<str>, at: String) -> Transition {
        let flow = &mut self.flows[here.flow.0 as usize];
        let known = flow.ids.get(&name).copied();
        if !(self.lone && here.flow == FlowId(0)) {
            let from = self.draft(here);
            from.targets.push(NextTarget { name: name.clone(), at });
        }
        match known {
            Some(_) if self.lone && here.flow == FlowId(0) => Transition::Outside(name),
            Some(id) => Transition::Next(id),
            None => Transition::Outside(name),
        }
    }

    /// Marks that an execution can end in the state.
    pub(super) fn ends(&mut self, here: StateCursor) -> Transition {
        self.draft(here).terminal = true;
        Transition::End
    }

    /// `Next` or `End`, one of which the state must have.
    pub(super) fn onward(&mut self, fields: &Fields<'_>, here: StateCursor) -> Transition {
        let end = fields.bool("End", &mut self.report);
        let next = fields.string("Next", &mut self.report);
        match (end, next) {
            (Some(true), None) => self.ends(here),
            (Some(false) | None, Some(name)) => self.leads_to(here, name, fields.place("Next")),
            (Some(true), Some(_)) => {
                self.report
                    .schema(&fields.at, "There should only be one of the following fields: [Next, End]");
                Transition::End
            }
            (Some(false) | None, None) => {
                let malformed = fields.has("Next") || (fields.has("End") && end.is_none());
                if !malformed {
                    self.report.schema(&fields.at, neither(&["Next", "End"]));
                }
                Transition::End
            }
        }
    }

    fn draft(&mut self, here: StateCursor) -> &mut StateDraft {
        let flow = &mut self.flows[here.flow.0 as usize];
        &mut flow.states[(here.state.0 - flow.first) as usize]
    }

    /// The machine, if it is complete, and the data for checking its transitions.
    pub(crate) fn finish(self) -> (Option<StateMachine>, Vec<FlowDraft>, ProblemReport) {
        let Compiler { head, machine_type, flows: drafts, states, report, .. } = self;
        let states: Option<Vec<State>> = states.into_iter().collect();
        let flow = |(position, draft): (usize, &FlowDraft)| {
            let start_at = draft.start_at.as_ref().and_then(|name| draft.ids.get(name))?;
            Some(Flow {
                id: FlowId(index(position)?),
                start_at: *start_at,
                states: draft.states.iter().filter_map(|state| draft.ids.get(&state.name)).copied().collect(),
                parent: draft.parent,
                comment: draft.comment.clone(),
                definition: draft.definition.clone(),
            })
        };
        let flows: Option<Vec<Flow>> = drafts.iter().enumerate().map(flow).collect();
        let machine = match (head, states, flows) {
            (Some(head), Some(states), Some(flows)) if !flows.is_empty() && !report.has_errors() => {
                Some(StateMachine::new(head, machine_type, flows, states))
            }
            _ => None,
        };
        (machine, drafts, report)
    }
}

/// A position as an id; a definition of one megabyte has fewer than 2^32 states.
fn index(position: usize) -> Option<u32> {
    u32::try_from(position).ok()
}
