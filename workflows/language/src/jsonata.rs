//! JSONata as AWS has it, round the crate `jsonata-core`.
//!
//! An [`Expression`] is compiled once and evaluated with an [`EvaluationScope`]. AWS's changes: no `$eval`; `$partition`,
//! `$range`, `$hash`, `$random`, `$uuid` and `$parse` are added; `$states` holds the state's data; `$` and `$$` mean
//! nothing at the top; a result that is undefined, a function or a regular expression is an error.
//!
//! The crate has neither fuel nor a memory limit, so this module has them: [`guard`](mod@guard) rewrites what could
//! grow without end, [`functions`](mod@functions) replaces what cannot be bounded from outside, [`pool`](mod@pool)
//! runs what could take long on threads of its own and gives up on them, and [`fast`](mod@fast) answers plain paths
//! and arithmetic at once, without either.

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

/// A compiled expression.
pub(crate) struct JsonataProgram {
    /// With its guards.
    ast: AstNode,
    guards: Guards,
    uses: Uses,
    /// The plain form, where there is one.
    fast: Option<Fast>,
    /// Cheap enough to be tried on the caller's thread.
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

/// A string of a JSONata template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delimited<'a> {
    /// A string that stands for itself.
    No,
    /// The text between `{%` and `%}`.
    Expression(&'a str),
    /// It begins or ends as an expression does, and is none.
    Broken(Problem),
}

/// Tells whether a string is an expression: it begins with `{%` and ends with `%}`, without spaces outside.
pub fn delimited(text: &str) -> Delimited<'_> {
    match (text.strip_prefix("{%"), text.ends_with("%}")) {
        (Some(rest), true) if rest.len() >= 2 => Delimited::Expression(rest[..rest.len() - 2].trim()),
        (None, false) => Delimited::No,
        _ => {
            Delimited::Broken(Problem::here("The JSONata expression must begin with '{%' and end with '%}'"))
        }
    }
}

impl Expression {
    /// Compiles an expression, with or without its `{% … %}`.
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
        // The guide on JSONata in Step Functions: `$eval` is not there; `$parse` reads JSON. The sentence is ours.
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
            // AWS's sentence, as it is known for `$states.errorOutput` (sst/sst#6110).
            Some(member) => Err(Problem::here(format!("Field '$states.{member}' does not exist."))
                .with(Fault::UnsupportedJsonata)),
        }
    }

    /// The text between the delimiters.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// True when an evaluation never waits for another thread, or hardly ever: plain paths, arithmetic, functions
    /// that are linear in their operands. Others may keep their caller waiting for up to [`MILLIS_MAX`] and a grace.
    pub fn is_light(&self) -> bool {
        self.program.fast.is_some() || self.program.is_light
    }

    /// Tells the variables it reads and does not define itself; `$states` is none of them.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        self.program.uses.variables.iter().for_each(|name| tell(name));
    }

    /// The expression's value. `field` is where it stands, such as `Output/total`.
    ///
    /// # Errors
    /// `States.QueryEvaluationError`, with the field as its location.
    pub fn evaluate(&self, scope: &EvaluationScope<'_>, field: &str) -> Result<Value, StateError> {
        match evaluate::run(&self.program, scope) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(self.query_error(field, "returned nothing (undefined).")),
            // LocalStack's sentence for `Items`, which leaves out the "specified" of all the others.
            Err(what) if what == convert::UNSUPPORTED => {
                let source = &self.source;
                let cause = format!(
                    "The JSONata expression '{source}' for the field '{field}' returned an unsupported result type."
                );
                Err(StateError::query(field, cause))
            }
            // AWS has a colon before what has no code of JSONata's (floci-io/floci#2736).
            Err(what) => {
                let separator = if without_code(&what) == what { ": " } else { ". " };
                Err(self.query_error(field, &format!("threw an error during evaluation{separator}{what}")))
            }
        }
    }

    /// The error for a value of a type the field does not take; `expected` such as `number`.
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

/// The parts of `$states` that are not there everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Available {
    /// In `Output` and `Assign` of states that have a result.
    pub result: bool,
    /// In those of a catcher.
    pub error_output: bool,
}

impl Available {
    /// For fields whose available parts are unknown.
    pub const ALL: Self = Self { result: true, error_output: true };
}

/// `S0207: Unexpected end of expression` without its code.
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
