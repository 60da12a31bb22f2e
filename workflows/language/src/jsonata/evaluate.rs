//! One evaluation by `jsonata-core`.

use indexmap::IndexMap;
use jsonata_core::evaluator::{Context, Evaluator, EvaluatorOptions};
use jsonata_core::value::JValue;

use super::limits::{MAX_MILLIS, MAX_SEQUENCE, MAX_STACK_DEPTH};
use super::{Program, convert};
use crate::dataflow::Scope;
use crate::value::Value;

/// The value, nothing when it is undefined, or the error's text.
pub(super) fn run(program: &Program, scope: &Scope<'_>) -> Result<Option<Value>, String> {
    let mut context = Context::new();
    for name in &program.uses.variables {
        if let Some(value) = scope.variables.get(name) {
            context.bind(name.clone(), convert::to_jsonata(value));
        }
    }
    if program.uses.states.any() {
        context.bind("states".to_owned(), states(program, scope));
    }
    let options = EvaluatorOptions {
        timeout_ms: Some(MAX_MILLIS),
        cancel: None,
        max_stack_depth: Some(MAX_STACK_DEPTH),
        max_sequence_length: Some(MAX_SEQUENCE),
    };
    let mut evaluator = Evaluator::with_options(context, options);
    let value =
        evaluator.evaluate(&program.ast, &JValue::Undefined).map_err(|error| error.message().to_owned())?;
    convert::from_jsonata(&value)
}

fn states(program: &Program, scope: &Scope<'_>) -> JValue {
    let uses = program.uses.states;
    let mut states = IndexMap::new();
    if uses.input {
        states.insert("input".to_owned(), convert::to_jsonata(scope.input));
    }
    if let (true, Some(result)) = (uses.result, scope.result) {
        states.insert("result".to_owned(), convert::to_jsonata(result));
    }
    if let (true, Some(error_output)) = (uses.error_output, scope.error_output) {
        states.insert("errorOutput".to_owned(), convert::to_jsonata(error_output));
    }
    if uses.context {
        states.insert("context".to_owned(), convert::to_jsonata(&scope.context.get()));
    }
    JValue::object(states)
}
