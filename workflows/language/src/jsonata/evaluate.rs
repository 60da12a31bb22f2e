//! One evaluation: at once where it is plain, on the caller's thread where it is cheap, else on the pool.

use std::sync::Arc;

use indexmap::IndexMap;
use jsonata_core::evaluator::{Context, Evaluator, EvaluatorOptions};
use jsonata_core::value::JValue;

use super::limits::{LIGHT_MILLIS, MAX_MILLIS, MAX_SEQUENCE, MAX_STACK_DEPTH};
use super::pool::{self, Gone};
use super::{Program, convert, functions, guard, wording};
use crate::dataflow::{Ambient, Scope};
use crate::value::Value;

/// The value, nothing when it is undefined, or the error's text.
pub(super) type Outcome = Result<Option<Value>, String>;

/// Evaluates.
pub(super) fn run(program: &Arc<Program>, scope: &Scope<'_>) -> Outcome {
    if let Some(value) = program.fast.as_ref().and_then(|fast| fast.evaluate(scope)) {
        return Ok(value);
    }
    let data = Data::of(program, scope);
    if program.is_light {
        let evaluate = || data.evaluate(program, &JValue::Undefined, bounds(LIGHT_MILLIS));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(evaluate));
        match outcome {
            Ok(Err(error)) if error.starts_with("D1012") => {}
            Ok(outcome) => return outcome,
            Err(_) => return Err(BROKEN.to_owned()),
        }
    }
    let program = Arc::clone(program);
    match pool::run(move || data.evaluate(&program, &JValue::Undefined, bounds(MAX_MILLIS))) {
        Ok(outcome) => outcome,
        Err(Gone::Late) => Err(format!("The evaluation took longer than {MAX_MILLIS} milliseconds.")),
        Err(Gone::Busy) => Err("Too many evaluations are under way.".to_owned()),
        Err(Gone::Broken) => Err(BROKEN.to_owned()),
    }
}

fn bounds(millis_max: u64) -> EvaluatorOptions {
    EvaluatorOptions {
        timeout_ms: Some(millis_max),
        cancel: None,
        max_stack_depth: Some(MAX_STACK_DEPTH),
        max_sequence_length: Some(MAX_SEQUENCE),
    }
}

const BROKEN: &str = "The evaluation failed.";

/// What an evaluation reads, taken out of its scope so that it can go to another thread.
pub(super) struct Data {
    pub(super) variables: Vec<(String, Value)>,
    pub(super) states: Option<Vec<(&'static str, Value)>>,
    pub(super) ambient: Ambient,
}

impl Data {
    pub(super) fn of(program: &Program, scope: &Scope<'_>) -> Self {
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
        // A seed of its own, so that the same scope gives each expression other random values.
        let ambient = Ambient::new(scope.ambient.now_ms(), scope.ambient.next_u64());
        Self { variables, states, ambient }
    }

    /// `root` is what `$` and names at the top stand for: nothing, in a workflow.
    pub(super) fn evaluate(&self, program: &Program, root: &JValue, bounds: EvaluatorOptions) -> Outcome {
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
        let value = evaluator
            .evaluate(&program.ast, root)
            .map_err(|error| wording::of_evaluation(error.message(), &program.uses))?;
        convert::from_jsonata(&value)
    }
}
