//! Compiles choice rules from JSON.

use super::{Accepts, ChoiceTest, ComparisonType, Is, Operand, Operator, Test, Wildcard, timestamp};
use crate::error::Problem;
use crate::path::Path;
use crate::value::{Map, Value};

/// The maximum nesting of And, Or and Not.
const NESTING_MAX: usize = 100;

/// Fields of a rule that are not part of its test.
const OTHER_FIELDS: [&str; 5] = ["Next", "Comment", "Assign", "Output", "Variable"];

const COMPARISONS: [(&str, Accepts); 5] = [
    ("Equals", Accepts::Equal),
    ("LessThan", Accepts::Less),
    ("GreaterThan", Accepts::Greater),
    ("LessThanEquals", Accepts::LessOrEqual),
    ("GreaterThanEquals", Accepts::GreaterOrEqual),
];

const KINDS: [(&str, ComparisonType); 4] = [
    ("String", ComparisonType::String),
    ("Numeric", ComparisonType::Numeric),
    ("Boolean", ComparisonType::Boolean),
    ("Timestamp", ComparisonType::Timestamp),
];

const TESTS: [(&str, Is); 6] = [
    ("IsNull", Is::Null),
    ("IsPresent", Is::Present),
    ("IsNumeric", Is::Numeric),
    ("IsString", Is::String),
    ("IsBoolean", Is::Boolean),
    ("IsTimestamp", Is::Timestamp),
];

/// Compiles one rule.
pub(super) fn rule(value: &Value) -> Result<ChoiceTest, Vec<Problem>> {
    let mut problems = Vec::new();
    match compile(value, 0, &mut problems) {
        Some(rule) if problems.is_empty() => Ok(rule),
        _ => Err(problems),
    }
}

fn compile(value: &Value, nesting: usize, problems: &mut Vec<Problem>) -> Option<ChoiceTest> {
    let Some(fields) = value.as_object() else {
        problems.push(Problem::here("A choice rule must be an object"));
        return None;
    };
    if nesting > NESTING_MAX {
        problems.push(Problem::here(format!("And, Or and Not nest at most {NESTING_MAX} deep")));
        return None;
    }
    let operators: Vec<&str> =
        fields.keys().map(|key| &**key).filter(|key| !OTHER_FIELDS.contains(key)).collect();
    let [operator] = operators.as_slice() else {
        problems.push(Problem::here("A choice rule must have exactly one comparison operator"));
        return None;
    };
    let argument = fields.get(operator)?;
    match *operator {
        "And" => several(operator, argument, nesting, problems).map(ChoiceTest::And),
        "Or" => several(operator, argument, nesting, problems).map(ChoiceTest::Or),
        "Not" => below("Not", problems, |problems| compile(argument, nesting + 1, problems))
            .map(|rule| ChoiceTest::Not(Box::new(rule))),
        name => {
            let variable = variable(fields, problems);
            let operator = below(name, problems, |problems| test(name, argument, problems));
            Some(ChoiceTest::Test(Test { variable: variable?, operator: operator? }))
        }
    }
}

fn below<T>(step: &str, problems: &mut Vec<Problem>, compile: impl FnOnce(&mut Vec<Problem>) -> T) -> T {
    let mut inner = Vec::new();
    let compiled = compile(&mut inner);
    problems.extend(inner.into_iter().map(|problem| problem.under(step)));
    compiled
}

fn several(
    name: &str,
    argument: &Value,
    nesting: usize,
    problems: &mut Vec<Problem>,
) -> Option<Vec<ChoiceTest>> {
    let Some(items) = argument.as_array().filter(|items| !items.is_empty()) else {
        problems
            .push(Problem::at(format!("/{name}"), format!("'{name}' must be a non-empty array of rules")));
        return None;
    };
    let rules: Vec<Option<ChoiceTest>> = items
        .iter()
        .enumerate()
        .map(|(at, item)| {
            below(&format!("{name}[{at}]"), problems, |problems| compile(item, nesting + 1, problems))
        })
        .collect();
    rules.into_iter().collect()
}

fn variable(fields: &Map, problems: &mut Vec<Problem>) -> Option<Path> {
    let Some(value) = fields.get("Variable") else {
        problems.push(Problem::at("/Variable", "The field 'Variable' is required but was missing"));
        return None;
    };
    below("Variable", problems, |problems| path(value, problems))
}

fn path(value: &Value, problems: &mut Vec<Problem>) -> Option<Path> {
    match value.as_str().map(Path::parse) {
        Some(Ok(path)) => Some(path),
        Some(Err(problem)) => {
            problems.push(problem);
            None
        }
        None => {
            problems.push(Problem::here("Value is not a valid JSONPath"));
            None
        }
    }
}

fn test(name: &str, argument: &Value, problems: &mut Vec<Problem>) -> Option<Operator> {
    if let Some((_, what)) = TESTS.iter().find(|(known, _)| *known == name) {
        return boolean(argument, problems).map(|wanted| Operator::Is { what: *what, wanted });
    }
    if name == "StringMatches" {
        return match argument.as_str() {
            Some(pattern) => Some(Operator::Matches(Wildcard::new(pattern))),
            None => {
                problems.push(Problem::here("Value must be a string"));
                None
            }
        };
    }
    let Some((kind, accepts, is_path)) = comparison(name) else {
        problems.push(Problem::here(format!("'{name}' is not a comparison operator")));
        return None;
    };
    let with = if is_path {
        Operand::Path(path(argument, problems)?)
    } else {
        Operand::Constant(constant(kind, argument, problems)?)
    };
    Some(Operator::Compare { kind, accepts, with })
}

/// Splits an operator name such as `NumericLessThanEqualsPath`.
fn comparison(name: &str) -> Option<(ComparisonType, Accepts, bool)> {
    let (kind_name, kind) = KINDS.iter().find(|(prefix, _)| name.starts_with(prefix))?;
    let rest = &name[kind_name.len()..];
    let (rest, is_path) = rest.strip_suffix("Path").map_or((rest, false), |rest| (rest, true));
    let (_, accepts) = COMPARISONS.iter().find(|(known, _)| *known == rest)?;
    (*kind != ComparisonType::Boolean || *accepts == Accepts::Equal).then_some((*kind, *accepts, is_path))
}

fn boolean(value: &Value, problems: &mut Vec<Problem>) -> Option<bool> {
    let flag = value.as_bool();
    if flag.is_none() {
        problems.push(Problem::here("Value must be a boolean"));
    }
    flag
}

fn constant(kind: ComparisonType, value: &Value, problems: &mut Vec<Problem>) -> Option<Value> {
    let (fits, wanted) = match kind {
        ComparisonType::String => (value.is_string(), "a string"),
        ComparisonType::Numeric => (value.is_number(), "a number"),
        ComparisonType::Boolean => (value.as_bool().is_some(), "a boolean"),
        ComparisonType::Timestamp => (
            value.as_str().is_some_and(|text| timestamp::parse(text).is_some()),
            "a valid ISO-8601 timestamp",
        ),
    };
    if !fits {
        problems.push(Problem::here(format!("Value must be {wanted}")));
    }
    fits.then(|| value.clone())
}
