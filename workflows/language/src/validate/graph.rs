//! Checks the transitions between states: every target exists, every state is reachable, every flow can end.

use std::collections::{HashMap, HashSet};

use super::{DiagnosticCode, ProblemReport, Severity};
use crate::parse::FlowDraft;

/// Reports the problems of each flow, outer ones first.
pub(crate) fn check(flows: &[FlowDraft], report: &mut ProblemReport) {
    for flow in flows {
        targets(flow, report);
        if flow.states.iter().any(|state| state.terminal) {
            reachable(flow, report);
        } else {
            let at = Some(flow.at.clone()).filter(|at| !at.is_empty());
            report.add(
                Severity::Error,
                DiagnosticCode::MissingEndState,
                "Workflow has no terminal state",
                at,
            );
        }
    }
}

/// Reports targets that do not exist. May also be called for a definition with invalid fields.
pub(crate) fn targets(flow: &FlowDraft, report: &mut ProblemReport) {
    let known: HashSet<&str> = flow.states.iter().map(|state| &*state.name).collect();
    let mut missing = |name: &str, at: &str| {
        if !known.contains(name) {
            report.error(
                DiagnosticCode::MissingTransitionTarget,
                at,
                format!("Missing 'Next' target: {name}"),
            );
        }
    };
    if let Some(start_at) = &flow.start_at {
        missing(start_at, &format!("{}/StartAt", flow.at));
    }
    for target in flow.states.iter().flat_map(|state| &state.targets) {
        missing(&target.name, &target.at);
    }
}

fn reachable(flow: &FlowDraft, report: &mut ProblemReport) {
    let by_name: HashMap<&str, usize> =
        flow.states.iter().enumerate().map(|(position, state)| (&*state.name, position)).collect();
    let mut seen = vec![false; flow.states.len()];
    let start = flow.start_at.as_ref().and_then(|name| by_name.get(&**name));
    let mut ahead: Vec<usize> = start.into_iter().copied().collect();
    while let Some(position) = ahead.pop() {
        if !std::mem::replace(&mut seen[position], true) {
            let targets = &flow.states[position].targets;
            ahead.extend(targets.iter().filter_map(|target| by_name.get(&*target.name)));
        }
    }
    for (state, _) in flow.states.iter().zip(seen).filter(|(_, seen)| !seen) {
        let at = format!("{}/States/{}", flow.at, state.name);
        report.error(
            DiagnosticCode::MissingTransitionTarget,
            &at,
            format!("State \"{}\" is not reachable.", state.name),
        );
    }
}
