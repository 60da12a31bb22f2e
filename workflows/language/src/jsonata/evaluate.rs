//! Runs one evaluation: directly for a plain expression, on the caller's thread for a cheap one, otherwise on the pool.

use std::sync::Arc;
use std::time::Duration;

use indexmap::IndexMap;
use jsonata_core::ast::{AstNode, BinaryOp};
use jsonata_core::evaluator::{Context, Evaluator, EvaluatorOptions};
use jsonata_core::value::JValue;

use super::limits::{GRACE_MILLIS, LIGHT_MILLIS, MILLIS_MAX, SEQUENCE_MAX, STACK_DEPTH_MAX};
use super::pool::{self, EvalError};
use super::{JsonataProgram, analysis, convert, functions, guard, wording};
use crate::dataflow::{Ambient, EvaluationScope};
use crate::value::Value;

/// The value, `None` if it is undefined, or the error's message.
pub(super) type EvalResult = Result<Option<Value>, String>;

/// Evaluates a program in a scope.
pub(super) fn run(program: &Arc<JsonataProgram>, scope: &EvaluationScope<'_>) -> EvalResult {
    if let Some(value) = program.fast.as_ref().and_then(|fast| fast.evaluate(scope)) {
        return Ok(value);
    }
    let data = Data::of(program, scope);
    let evaluation = scope.ambient.next_evaluation();
    if scope.ambient.is_replay() {
        return match scope.ambient.verdict(evaluation) {
            Some(error) => Err(error),
            // The recorded run finished, so a replay must finish, too, whatever the load of this machine.
            None => bounded(program, data, None),
        };
    }
    let outcome = bounded(program, data, Some(MILLIS_MAX));
    if let Err(error) = &outcome
        && (error.starts_with(TIMED_OUT) || error.starts_with(LATE))
    {
        scope.ambient.note(evaluation, error);
    }
    outcome
}

/// Evaluates on the caller's thread or on the pool, for at most `millis_max` milliseconds.
fn bounded(program: &Arc<JsonataProgram>, data: Data, millis_max: Option<u64>) -> EvalResult {
    if program.is_light {
        let light_max = millis_max.map(|_| LIGHT_MILLIS);
        let evaluate = || data.evaluate(program, &JValue::Undefined, bounds(light_max));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(evaluate));
        match outcome {
            Ok(Err(error)) if error.starts_with(TIMED_OUT) => {}
            Ok(outcome) => return outcome,
            Err(_) => return Err(BROKEN.to_owned()),
        }
    }
    let (program, owner) = (Arc::clone(program), data.ambient.state_machine().cloned());
    let evaluate = move || data.evaluate(&program, &JValue::Undefined, bounds(millis_max));
    let limit = millis_max.map(|millis| Duration::from_millis(millis + GRACE_MILLIS));
    match pool::run(owner, limit, evaluate) {
        Ok(outcome) => outcome,
        Err(EvalError::TimedOut) => Err(format!("{LATE} {MILLIS_MAX} milliseconds.")),
        Err(EvalError::Panicked) => Err(BROKEN.to_owned()),
    }
}

fn bounds(millis_max: Option<u64>) -> EvaluatorOptions {
    EvaluatorOptions {
        timeout_ms: millis_max,
        cancel: None,
        max_stack_depth: Some(STACK_DEPTH_MAX),
        max_sequence_length: Some(SEQUENCE_MAX),
    }
}

const BROKEN: &str = "The evaluation failed.";
/// The prefix of the error of an evaluation that exceeded its own time limit.
const TIMED_OUT: &str = "D1012";
/// The prefix of the error of an abandoned evaluation.
const LATE: &str = "The evaluation took longer than";

/// The inputs of an evaluation, copied from its scope so that they can be sent to another thread.
pub(super) struct Data {
    pub(super) variables: Vec<(String, Value)>,
    pub(super) states: Option<Vec<(&'static str, Value)>>,
    pub(super) ambient: Ambient,
}

impl Data {
    pub(super) fn of(program: &JsonataProgram, scope: &EvaluationScope<'_>) -> Self {
        let variables = program
            .uses
            .variables
            .iter()
            .filter_map(|name| scope.variables.get(name).map(|value| (name.clone(), value.clone())))
            .collect();
        let uses = program.uses.states;
        let states = uses.any().then(|| {
            let mut states = Vec::new();
            if uses.input {
                states.push(("input", scope.input.clone()));
            }
            states.extend(scope.result.filter(|_| uses.result).map(|value| ("result", value.clone())));
            states.extend(
                scope.error_output.filter(|_| uses.error_output).map(|value| ("errorOutput", value.clone())),
            );
            if uses.context {
                states.push(("context", scope.context.get()));
            }
            states
        });
        // A separate seed, so that each expression of a scope gets other random values.
        let ambient = scope.ambient.reseeded();
        Self { variables, states, ambient }
    }

    /// `root` is the value of `$` and of top-level names: undefined in a workflow.
    pub(super) fn evaluate(
        &self,
        program: &JsonataProgram,
        root: &JValue,
        bounds: EvaluatorOptions,
    ) -> EvalResult {
        let mut context = Context::new();
        for (name, value) in &self.variables {
            context.bind(name.clone(), convert::to_jsonata(value));
        }
        if let Some(states) = &self.states {
            let members: IndexMap<String, JValue> =
                states.iter().map(|(name, value)| ((*name).to_owned(), convert::to_jsonata(value))).collect();
            context.bind("states".to_owned(), JValue::object(members));
        }
        if program.guards.now {
            context.bind(guard::NOW.to_owned(), JValue::from(self.ambient.now_ms()));
        }
        let mut evaluator = Evaluator::with_options(context, bounds);
        let names =
            program.uses.functions.iter().map(String::as_str).chain(program.guards.functions.iter().copied());
        functions::register(&mut evaluator, names, &self.ambient);
        match evaluator.evaluate(&program.ast, root) {
            Ok(value) => convert::from_jsonata(&value),
            Err(error) => {
                let values = error
                    .message()
                    .starts_with("T2009")
                    .then(|| compared(&program.ast, &mut evaluator, root));
                let told = values.flatten().unwrap_or_else(|| error.message().to_owned());
                Err(wording::of_evaluation(&told, &program.uses))
            }
        }
    }
}

/// The reference implementation's message for the first comparison of a number with a string, which contains both
/// values; that of the crate contains neither. Only comparisons of the expression itself are examined, not those inside
/// functions and filters.
fn compared(node: &AstNode, evaluator: &mut Evaluator, root: &JValue) -> Option<String> {
    match node {
        AstNode::Block(nodes) => compared(nodes.last().filter(|_| nodes.len() == 1)?, evaluator, root),
        AstNode::Binary { op: BinaryOp::And | BinaryOp::Or, lhs, rhs } => {
            compared(lhs, evaluator, root).or_else(|| compared(rhs, evaluator, root))
        }
        AstNode::Binary { op, lhs, rhs } => {
            let operator = analysis::comparison(*op)?;
            let mut value = |node| convert::from_jsonata(&evaluator.evaluate(node, root).ok()?).ok()?;
            let (left, right) = (value(lhs)?, value(rhs)?);
            let mixed = |one: &Value, other: &Value| one.is_number() && other.as_str().is_some();
            (mixed(&left, &right) || mixed(&right, &left)).then(|| {
                format!(
                    "T2009: The values {} and {} either side of operator \"{operator}\" must be of the same data type",
                    left.to_text(),
                    right.to_text()
                )
            })
        }
        _ => None,
    }
}
