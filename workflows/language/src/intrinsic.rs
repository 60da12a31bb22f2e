//! Intrinsic functions, `States.Format('{}', $.name)`: parsed once, nested up to AWS's limit.
//!
//! [`functions`](mod@functions) implements each of them.

mod functions;
pub(crate) mod hash;

use std::fmt;
use std::sync::Arc;

use crate::dataflow::EvaluationScope;
use crate::error::{Problem, StateError, names};
use crate::path::Path;
use crate::path::evaluate::java_text;
use crate::path::parse::{Cursor, prefix};
use crate::value::Value;
use functions::IntrinsicFunction;

/// The maximum nesting of calls, as AWS documents it.
pub const NESTING_MAX: usize = 10;

/// A compiled call.
#[derive(Clone, Debug)]
pub struct Intrinsic {
    /// The call as written, which AWS quotes in its errors.
    source: Arc<str>,
    function: IntrinsicFunction,
    arguments: Arc<[Argument]>,
}

#[derive(Clone, Debug)]
pub(crate) enum Argument {
    Path(Path),
    Call(Intrinsic),
    Constant(Value),
    /// A quoted string: its value, and its source, in which `\{` differs from `{`.
    Text {
        text: Value,
        written: Arc<str>,
    },
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct IntrinsicError {
    pub(crate) error: &'static str,
    pub(crate) what: String,
}

impl IntrinsicError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { error: names::INTRINSIC_FAILURE, what: what.into() }
    }
}

impl Intrinsic {
    /// Compiles a call.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let mut cursor = Cursor::new(text);
        let call = call(&mut cursor, 1)?;
        cursor.skip_space();
        if cursor.is_at_end() { Ok(call) } else { Err(cursor.problem("Unexpected text after the call")) }
    }

    /// True if the text begins like a call.
    pub fn is_call(text: &str) -> bool {
        text.starts_with("States.")
    }

    /// The call as written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Calls `tell` with each variable that the arguments reference.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        for argument in self.arguments.iter() {
            match argument {
                Argument::Path(path) => path.variables(tell),
                Argument::Call(call) => call.variables(tell),
                Argument::Constant(_) | Argument::Text { .. } => {}
            }
        }
    }

    /// The value of the call.
    ///
    /// # Errors
    /// `States.Runtime` if a path has no result, `States.IntrinsicFailure` if the function fails.
    pub fn evaluate(&self, scope: &EvaluationScope<'_>) -> Result<Value, StateError> {
        self.value(scope).map_err(|failure| {
            let cause = format!("The function '{}' had the following error: {}", self.source, failure.what);
            StateError::new(failure.error, cause)
        })
    }

    fn value(&self, scope: &EvaluationScope<'_>) -> Result<Value, IntrinsicError> {
        if self.function == IntrinsicFunction::Format {
            return self.format(scope);
        }
        let arguments: Vec<Value> =
            self.arguments.iter().map(|argument| argument.value(scope)).collect::<Result<_, _>>()?;
        self.function.apply(&arguments, scope.ambient)
    }

    /// `States.Format`: each `{}` is the next argument; `\{`, `\}`, `\'` and `\\` are escapes of the character.
    fn format(&self, scope: &EvaluationScope<'_>) -> Result<Value, IntrinsicError> {
        let Some((template, rest)) = self.arguments.split_first() else {
            return Err(IntrinsicError::new("Invalid number of arguments for States.Format"));
        };
        let written = match template {
            Argument::Text { written, .. } => Arc::clone(written),
            other => match other.value(scope)? {
                Value::String(text) => text,
                _ => return Err(IntrinsicError::new("The template of States.Format must be a string")),
            },
        };
        let mut rest = rest.iter();
        let mut out = String::new();
        let mut letters = written.chars().peekable();
        while let Some(letter) = letters.next() {
            match letter {
                '\\' => out.extend(letters.next()),
                '{' if letters.peek() == Some(&'}') => {
                    letters.next();
                    let argument = rest.next().ok_or_else(|| {
                        IntrinsicError::new(
                            "The number of arguments does not match the occurrences of {} in the template",
                        )
                    })?;
                    out.push_str(&java_text(&argument.value(scope)?));
                }
                plain => out.push(plain),
            }
        }
        if rest.next().is_some() {
            let what = "The number of arguments does not match the occurrences of {} in the template";
            return Err(IntrinsicError::new(what));
        }
        Ok(Value::from(out))
    }
}

impl fmt::Display for Intrinsic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}

impl Argument {
    fn value(&self, scope: &EvaluationScope<'_>) -> Result<Value, IntrinsicError> {
        match self {
            Self::Constant(value) | Self::Text { text: value, .. } => Ok(value.clone()),
            Self::Call(call) => call.value(scope),
            Self::Path(path) => path.evaluate(scope).map_err(|_| IntrinsicError {
                error: names::RUNTIME,
                what: format!(
                    "The JsonPath argument for the field '{}' could not be found in the input '{}'",
                    path.source(),
                    path.searched(scope)
                ),
            }),
        }
    }
}

fn call(cursor: &mut Cursor<'_>, nesting: usize) -> Result<Intrinsic, Problem> {
    if nesting > NESTING_MAX {
        return Err(cursor.problem(&format!("Calls nest at most {NESTING_MAX} deep")));
    }
    let from = cursor.at;
    let name = cursor.take_while(|letter| letter.is_ascii_alphanumeric() || letter == '.' || letter == '_');
    let Some(function) = IntrinsicFunction::named(name) else {
        return Err(cursor.problem(&format!("'{name}' is not an intrinsic function")));
    };
    cursor.skip_space();
    if !cursor.eat('(') {
        return Err(cursor.problem("Expected '('"));
    }
    let mut arguments = Vec::new();
    cursor.skip_space();
    while !cursor.eat(')') {
        if !arguments.is_empty() && !cursor.eat(',') {
            return Err(cursor.problem("Expected ',' or ')'"));
        }
        cursor.skip_space();
        arguments.push(argument(cursor, nesting)?);
        cursor.skip_space();
    }
    let (least, most) = function.arity();
    if !(least..=most).contains(&arguments.len()) {
        return Err(cursor.problem(&format!("Wrong number of arguments for {name}")));
    }
    for (at, argument) in arguments.iter().enumerate() {
        if let Argument::Constant(literal) | Argument::Text { text: literal, .. } = argument
            && !function.takes(at, literal)
        {
            return Err(cursor.problem(&format!("Argument {} of {name} is of the wrong type", at + 1)));
        }
    }
    Ok(Intrinsic { source: cursor.text[from..cursor.at].into(), function, arguments: arguments.into() })
}

fn argument(cursor: &mut Cursor<'_>, nesting: usize) -> Result<Argument, Problem> {
    match cursor.peek() {
        Some('$') => {
            let source = cursor.rest();
            prefix(cursor, source).map(Argument::Path)
        }
        Some('\'') => {
            let from = cursor.at + 1;
            let text = cursor.quoted()?;
            let written = cursor.text[from..cursor.at - 1].into();
            Ok(Argument::Text { text: Value::from(text), written })
        }
        Some('S') => call(cursor, nesting + 1).map(Argument::Call),
        _ => {
            let word = cursor
                .take_while(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '+' | '.'));
            match Value::parse(word) {
                Ok(constant) => Ok(Argument::Constant(constant)),
                Err(_) => {
                    Err(cursor.problem("Expected a path, a string in single quotes, a number or a call"))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
