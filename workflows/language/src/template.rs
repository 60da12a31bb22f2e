//! Templates: Parameters, ResultSelector, ItemSelector, Assign in JSONPath; Arguments, Output, Assign in JSONata.
//!
//! In JSONPath a key that ends in `.$` holds a path or an intrinsic call. In JSONata any string `{% … %}` is an
//! expression. Everything else is a literal; parts without expressions are shared, not copied.

pub(crate) mod hash_order;
mod jsonata;
mod payload;

use std::sync::Arc;

use crate::dataflow::EvaluationScope;
use crate::definition::QueryLanguage;
use crate::error::{Problem, StateError};
use crate::intrinsic::Intrinsic;
use crate::jsonata::Available;
use crate::path::{Path, Root};
use crate::value::Value;

/// The maximum nesting of a template.
const DEPTH_MAX: usize = 200;

/// A compiled template of either language.
#[derive(Clone, Debug)]
pub struct Template {
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    Payload(Arc<payload::PayloadNode>),
    Jsonata(Arc<jsonata::JsonataNode>),
    Text(Arc<PathExpression>),
}

impl Template {
    /// Compiles a template; returns all of its problems.
    pub fn compile(value: &Value, language: QueryLanguage) -> Result<Self, Vec<Problem>> {
        Self::compile_for(value, language, Available::ALL)
    }

    /// Like [`Self::compile`], for a field in which only a part of `$states` is available.
    pub fn compile_for(
        value: &Value,
        language: QueryLanguage,
        there: Available,
    ) -> Result<Self, Vec<Problem>> {
        if !value.is_within_depth(DEPTH_MAX) {
            return Err(vec![Problem::here(format!("A template nests at most {DEPTH_MAX} deep"))]);
        }
        let mut problems = Vec::new();
        let form = match language {
            QueryLanguage::JsonPath => {
                Form::Payload(Arc::new(payload::PayloadNode::compile(value, &mut problems)))
            }
            QueryLanguage::Jsonata => {
                Form::Jsonata(Arc::new(jsonata::JsonataNode::compile(value, there, &mut problems)))
            }
        };
        if problems.is_empty() { Ok(Self { form }) } else { Err(problems) }
    }

    /// Compiles one path or intrinsic call, as in `CausePath`.
    pub fn compile_text(text: &str) -> Result<Self, Problem> {
        Ok(Self { form: Form::Text(Arc::new(PathExpression::parse(text)?)) })
    }

    /// The template's value. `field` names the definition's field, such as `Output`, for JSONata's errors.
    ///
    /// # Errors
    /// The errors of its paths, calls and expressions; `States.DataLimitExceeded` if the value is nested too deeply.
    pub fn evaluate(&self, scope: &EvaluationScope<'_>, field: &str) -> Result<Value, StateError> {
        let value = match &self.form {
            Form::Payload(node) => node.evaluate(scope)?,
            Form::Jsonata(node) => node.evaluate(scope, field)?,
            Form::Text(expression) => expression.evaluate(scope, field)?,
        };
        within_depth(value)
    }

    /// The expression, if the whole template is one.
    pub fn expression(&self) -> Option<&crate::jsonata::Expression> {
        match &self.form {
            Form::Jsonata(node) => node.expression(),
            Form::Payload(_) | Form::Text(_) => None,
        }
    }

    /// True if an evaluation rarely or never waits for another thread; see
    /// [`Expression::is_light`](crate::jsonata::Expression::is_light).
    pub fn is_light(&self) -> bool {
        match &self.form {
            Form::Payload(_) | Form::Text(_) => true,
            Form::Jsonata(node) => node.is_light(),
        }
    }

    /// Calls `tell` with each variable that the template references, including duplicates.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        match &self.form {
            Form::Payload(node) => node.variables(tell),
            Form::Jsonata(node) => node.variables(tell),
            Form::Text(expression) => expression.variables(tell),
        }
    }
}

/// The right side of a `.$` field.
#[derive(Clone, Debug)]
pub enum PathExpression {
    Path(Path),
    Intrinsic(Intrinsic),
}

impl PathExpression {
    /// Compiles a path `$…` or a call `States.…`.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        if Intrinsic::is_call(text) {
            return Intrinsic::parse(text).map(Self::Intrinsic);
        }
        Path::parse(text).map(Self::Path)
    }

    /// The value; `field` is its key, such as `value.$` or `CausePath`.
    pub fn evaluate(&self, scope: &EvaluationScope<'_>, field: &str) -> Result<Value, StateError> {
        match self {
            Self::Intrinsic(call) => call.evaluate(scope),
            Self::Path(path) => {
                if scope.input.is_null() && *path.root() == Root::Input {
                    return Err(StateError::runtime(
                        "Unable to apply Path transformation to null or empty input.",
                    ));
                }
                path.evaluate(scope).map_err(|_| not_found(path, field, scope))
            }
        }
    }

    /// Calls `tell` with each variable that it references.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        match self {
            Self::Path(path) => path.variables(tell),
            Self::Intrinsic(call) => call.variables(tell),
        }
    }
}

/// The value, unless it is nested more deeply than parsed text may be: a loop that repeatedly wraps its data must fail
/// with an error, not with a stack overflow.
pub(crate) fn within_depth(value: Value) -> Result<Value, StateError> {
    if value.is_within_depth(crate::value::DEPTH_MAX) {
        return Ok(value);
    }
    let cause = format!("The state's data nests deeper than {} levels.", crate::value::DEPTH_MAX);
    Err(StateError::new(crate::error::names::DATA_LIMIT_EXCEEDED, cause))
}

/// AWS's message about a field whose path has no result.
fn not_found(path: &Path, field: &str, scope: &EvaluationScope<'_>) -> StateError {
    StateError::runtime(format!(
        "The JSONPath '{}' specified for the field '{field}' could not be found in the input '{}'",
        path.source(),
        path.searched(scope)
    ))
}

#[cfg(test)]
mod tests;
