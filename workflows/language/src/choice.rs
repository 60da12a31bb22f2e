//! Choice rules of JSONPath states, compiled once.
//!
//! A comparison with a value of the wrong type is false. A `Variable` whose path has no result is an error, except for
//! `IsPresent`. [`timestamp`](mod@timestamp) parses timestamps, [`wildcard`](mod@wildcard) the patterns of
//! `StringMatches`. JSONata conditions are evaluated by [`condition`].

mod compile;
pub mod timestamp;
mod wildcard;

use std::cmp::Ordering;

use crate::dataflow::EvaluationScope;
use crate::error::{Problem, StateError};
use crate::jsonata::Expression;
use crate::path::Path;
use crate::value::Value;
use wildcard::Wildcard;

/// The test of one entry of `Choices`, without its `Next`.
#[derive(Clone, Debug)]
pub enum ChoiceTest {
    And(Vec<ChoiceTest>),
    Or(Vec<ChoiceTest>),
    Not(Box<ChoiceTest>),
    Test(Test),
}

/// One comparison.
#[derive(Clone, Debug)]
pub struct Test {
    variable: Path,
    operator: Operator,
}

#[derive(Clone, Debug)]
enum Operator {
    Compare { kind: ComparisonType, accepts: Accepts, with: Operand },
    Matches(Wildcard),
    Is { what: Is, wanted: bool },
}

/// The type of compared values; values of another type do not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ComparisonType {
    String,
    Numeric,
    Boolean,
    Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accepts {
    Equal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Null,
    Present,
    Numeric,
    String,
    Boolean,
    Timestamp,
}

#[derive(Clone, Debug)]
enum Operand {
    Constant(Value),
    Path(Path),
}

impl ChoiceTest {
    /// Compiles a rule from its JSON; `Next`, `Comment`, `Assign` and `Output` in it are ignored.
    pub fn compile(value: &Value) -> Result<Self, Vec<Problem>> {
        compile::rule(value)
    }

    /// Whether the rule matches.
    ///
    /// # Errors
    /// `States.Runtime` if a path has no result.
    pub fn matches(&self, scope: &EvaluationScope<'_>) -> Result<bool, StateError> {
        match self {
            Self::Not(rule) => rule.matches(scope).map(|answer| !answer),
            Self::And(rules) => {
                for rule in rules {
                    if !rule.matches(scope)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Self::Or(rules) => {
                for rule in rules {
                    if rule.matches(scope)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            Self::Test(test) => test.matches(scope),
        }
    }

    /// Calls `tell` with each variable that the rule references.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        match self {
            Self::Not(rule) => rule.variables(tell),
            Self::And(rules) | Self::Or(rules) => rules.iter().for_each(|rule| rule.variables(tell)),
            Self::Test(test) => {
                test.variable.variables(tell);
                if let Operator::Compare { with: Operand::Path(path), .. } = &test.operator {
                    path.variables(tell);
                }
            }
        }
    }
}

impl Test {
    fn matches(&self, scope: &EvaluationScope<'_>) -> Result<bool, StateError> {
        if let Operator::Is { what: Is::Present, wanted } = self.operator {
            return Ok(self.variable.is_present(scope) == wanted);
        }
        let value = read(&self.variable, scope)?;
        match &self.operator {
            Operator::Matches(pattern) => Ok(value.as_str().is_some_and(|text| pattern.matches(text))),
            Operator::Is { what, wanted } => Ok(what.holds(&value) == *wanted),
            Operator::Compare { kind, accepts, with } => {
                let other = match with {
                    Operand::Constant(constant) => constant.clone(),
                    Operand::Path(path) => read(path, scope)?,
                };
                Ok(kind.compare(&value, &other).is_some_and(|order| accepts.accepts(order)))
            }
        }
    }
}

fn read(path: &Path, scope: &EvaluationScope<'_>) -> Result<Value, StateError> {
    path.evaluate(scope).map_err(|_| {
        StateError::runtime(format!(
            "Invalid path '{}': The choice state's condition path references an invalid value.",
            path.source()
        ))
    })
}

impl Is {
    fn holds(self, value: &Value) -> bool {
        match self {
            Self::Null => value.is_null(),
            Self::Present => true,
            Self::Numeric => value.is_number(),
            Self::String => value.is_string(),
            Self::Boolean => value.as_bool().is_some(),
            Self::Timestamp => value.as_str().is_some_and(|text| timestamp::parse(text).is_some()),
        }
    }
}

impl Accepts {
    fn accepts(self, order: Ordering) -> bool {
        match self {
            Self::Equal => order.is_eq(),
            Self::Less => order.is_lt(),
            Self::LessOrEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterOrEqual => order.is_ge(),
        }
    }
}

impl ComparisonType {
    /// The order of two values; `None` if either has another type.
    fn compare(self, left: &Value, right: &Value) -> Option<Ordering> {
        match self {
            Self::String => Some(compare_texts(left.as_str()?, right.as_str()?)),
            Self::Numeric => left.as_number()?.partial_cmp(right.as_number()?),
            Self::Boolean => Some(left.as_bool()?.cmp(&right.as_bool()?)),
            Self::Timestamp => {
                Some(timestamp::parse(left.as_str()?)?.cmp(&timestamp::parse(right.as_str()?)?))
            }
        }
    }
}

/// Compares as Java does: by UTF-16 code units.
fn compare_texts(left: &str, right: &str) -> Ordering {
    if left.is_ascii() && right.is_ascii() {
        left.cmp(right)
    } else {
        left.encode_utf16().cmp(right.encode_utf16())
    }
}

/// The path of a field of the rule at `index`, such as `Choices[0]/Output`; of the state itself if no rule matched.
pub fn field_of(index: Option<usize>, field: &str) -> String {
    index.map_or_else(|| field.to_owned(), |index| format!("Choices[{index}]/{field}"))
}

/// Evaluates a JSONata condition to a boolean. `field` is its path, such as `Choices[0]/Condition`.
pub fn condition(
    expression: &Expression,
    scope: &EvaluationScope<'_>,
    field: &str,
) -> Result<bool, StateError> {
    let value = expression.evaluate(scope, field)?;
    value.as_bool().ok_or_else(|| expression.unexpected_type(field, "boolean", &value))
}

#[cfg(test)]
mod tests;
