//! JSONata with AWS's changes, based on the crate `jsonata-core`.
//!
//! An [`Expression`] is compiled once and evaluated with an [`EvaluationScope`]. AWS's changes: no `$eval`; `$partition`,
//! `$range`, `$hash`, `$random`, `$uuid` and `$parse` are added; `$states` holds the state's data; `$` and `$$` are
//! undefined at the top level; a result that is undefined, a function or a regular expression is an error.
//!
//! The crate has neither a fuel nor a memory limit, so this module adds them: [`guard`](mod@guard) rewrites operations
//! with unbounded growth, [`functions`](mod@functions) replaces functions that cannot be bounded from outside,
//! [`pool`](mod@pool) runs possibly long evaluations on its own threads and abandons them at a time limit, and
//! [`fast`](mod@fast) evaluates plain paths and arithmetic directly.

mod analysis;
mod convert;
mod evaluate;
mod fast;
mod functions;
mod guard;
mod limits;
mod pool;
mod wording;

use std::fmt;
use std::sync::Arc;

use jsonata_core::ast::AstNode;

use crate::dataflow::EvaluationScope;
use crate::error::{Fault, Problem, StateError};
use crate::value::Value;
use analysis::Uses;
use fast::Fast;
use guard::Guards;
pub use limits::{EXPRESSION_CHARS_MAX, MILLIS_MAX, PRODUCED_BYTES_MAX};

/// A compiled expression.
#[derive(Clone)]
pub struct Expression {
    source: Arc<str>,
    program: Arc<JsonataProgram>,
}

/// The compiled form of an expression.
pub(crate) struct JsonataProgram {
    /// The syntax tree, with guards.
    ast: AstNode,
    guards: Guards,
    uses: Uses,
    /// The plain form, if the expression has one.
    fast: Option<Fast>,
    /// Whether the expression is cheap enough to be tried on the caller's thread.
    is_light: bool,
}

impl JsonataProgram {
    fn compile(source: &str) -> Result<Self, String> {
        let ast = jsonata_core::parser::parse(source)
            .map_err(|error| wording::of_compilation(&error.to_string()))?;
        let uses = Uses::of(&ast);
        let fast = Fast::compile(&ast);
        let is_light = analysis::is_light(&ast);
        let (ast, guards) = guard::rewrite(ast);
        Ok(Self { ast, guards, uses, fast, is_light })
    }
}

/// Classification of a string in a JSONata template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delimited<'a> {
    /// A literal string.
    No,
    /// The text between `{%` and `%}`.
    Expression(&'a str),
    /// The string has only one of the delimiters.
    Invalid(Problem),
}

/// Classifies a string: an expression begins with `{%` and ends with `%}`, without spaces outside.
pub fn delimited(text: &str) -> Delimited<'_> {
    match (text.strip_prefix("{%"), text.ends_with("%}")) {
        (Some(rest), true) if rest.len() >= 2 => Delimited::Expression(rest[..rest.len() - 2].trim()),
        (None, false) => Delimited::No,
        _ => {
            Delimited::Invalid(Problem::here("The JSONata expression must begin with '{%' and end with '%}'"))
        }
    }
}

impl Expression {
    /// Compiles an expression, with or without `{% … %}`.
    pub fn compile(text: &str) -> Result<Self, Problem> {
        let source = match delimited(text) {
            Delimited::Expression(source) => source,
            _ => text.trim(),
        };
        if source.len() > EXPRESSION_CHARS_MAX {
            return Err(Problem::here(format!(
                "A JSONata expression has at most {EXPRESSION_CHARS_MAX} characters"
            )));
        }
        let program = JsonataProgram::compile(source)
            .map_err(|message| Problem::here(without_code(&message)).with(Fault::InvalidJsonata))?;
        if let Some(problem) = &program.uses.problem {
            return Err(Problem::here(problem.clone()).with(Fault::UnsupportedJsonata));
        }
        // The guide on JSONata in Step Functions says that `$eval` is unavailable and that `$parse` reads JSON. The
        // message is Mayfly's own.
        if program.uses.functions.contains("eval") {
            let told = "The function '$eval' is not supported; '$parse' reads JSON.";
            return Err(Problem::here(told).with(Fault::UnsupportedJsonata));
        }
        Ok(Self { source: source.into(), program: Arc::new(program) })
    }

    /// Compiles an expression for a field in which only a part of `$states` is available.
    pub fn compile_for(text: &str, there: Available) -> Result<Self, Problem> {
        let expression = Self::compile(text)?;
        let is_there = |member: &str| match member {
            "input" | "context" => true,
            "result" => there.result,
            "errorOutput" => there.error_output,
            _ => false,
        };
        match expression.program.uses.members.iter().find(|member| !is_there(member)) {
            None => Ok(expression),
            // AWS's message, known for `$states.errorOutput` (sst/sst#6110).
            Some(member) => Err(Problem::here(format!("Field '$states.{member}' does not exist."))
                .with(Fault::UnsupportedJsonata)),
        }
    }

    /// The text between the delimiters.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether an evaluation rarely or never waits for another thread: plain paths, arithmetic, functions that are
    /// linear in their operands. Other expressions may block the caller for up to [`MILLIS_MAX`] plus a grace period.
    pub fn is_light(&self) -> bool {
        self.program.fast.is_some() || self.program.is_light
    }

    /// Calls `tell` with each free variable of the expression, except `$states`.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        self.program.uses.variables.iter().for_each(|name| tell(name));
    }

    /// The expression's value. `field` is its path, such as `Output/total`.
    ///
    /// # Errors
    /// `States.QueryEvaluationError`, with the field as its location.
    pub fn evaluate(&self, scope: &EvaluationScope<'_>, field: &str) -> Result<Value, StateError> {
        match evaluate::run(&self.program, scope) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(self.query_error(field, "returned nothing (undefined).")),
            // LocalStack's message for `Items`, which lacks the word "specified" of all other fields.
            Err(what) if what == convert::UNSUPPORTED => {
                let source = &self.source;
                let cause = format!(
                    "The JSONata expression '{source}' for the field '{field}' returned an unsupported result type."
                );
                Err(StateError::query(field, cause))
            }
            // AWS inserts a colon if the error has no JSONata code (floci-io/floci#2736).
            Err(what) => {
                let separator = if without_code(&what) == what { ": " } else { ". " };
                Err(self.query_error(field, &format!("threw an error during evaluation{separator}{what}")))
            }
        }
    }

    /// The error for a value of a type that the field does not accept; `expected` is such as `number`.
    pub fn unexpected_type(&self, field: &str, expected: &str, value: &Value) -> StateError {
        self.query_error(
            field,
            &format!(
                "returned an unexpected result type. Expected '{expected}', but was '{}' for value: {}",
                value.type_name(),
                value.to_text()
            ),
        )
    }

    fn query_error(&self, field: &str, what: &str) -> StateError {
        StateError::query(
            field,
            format!("The JSONata expression '{}' specified for the field '{field}' {what}", self.source),
        )
    }
}

/// The optional members of `$states` that a field may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Available {
    /// `$states.result`: in `Output` and `Assign` of states with a result.
    pub result: bool,
    /// `$states.errorOutput`: in `Output` and `Assign` of a catcher.
    pub error_output: bool,
}

impl Available {
    /// For fields whose available members are unknown.
    pub const ALL: Self = Self { result: true, error_output: true };
}

/// `S0207: Unexpected end of expression` , without its code.
fn without_code(message: &str) -> &str {
    match message.split_once(": ") {
        Some((code, text))
            if code.len() == 5
                && code.starts_with(|letter: char| letter.is_ascii_uppercase())
                && code[1..].bytes().all(|digit| digit.is_ascii_digit()) =>
        {
            text
        }
        _ => message,
    }
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Expression({:?})", self.source)
    }
}

#[cfg(test)]
mod suite;
#[cfg(test)]
mod tests;
