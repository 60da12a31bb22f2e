//! Filters, `[?(@.price < 10 && @.tags contains 'x')]`: Jayway's operators and its rules of comparison.

use std::cmp::Ordering;
use std::sync::Arc;

use regex::{Regex, RegexBuilder};

use super::parse::{Cursor, prefix};
use super::{Path, evaluate};
use crate::error::Problem;
use crate::value::Value;

/// The maximum nesting of parentheses and `!` in a filter.
const NESTING_MAX: usize = 64;
/// The maximum size of a filter's compiled regular expression, in bytes.
const REGEX_BYTES_MAX: usize = 1 << 20;

/// A compiled filter.
#[derive(Clone, Debug)]
pub(crate) enum Filter {
    And(Vec<Filter>),
    Or(Vec<Filter>),
    Not(Box<Filter>),
    /// A path without an operator: true if it has a result.
    Exists(Operand),
    Compare(Operand, Operator, Operand),
    /// A filter with a constant result, such as `[?(true)]`.
    Always(bool),
}

#[derive(Clone, Debug)]
pub(crate) enum Operand {
    /// `@…`: relative to the current item.
    Item(Arc<Path>),
    /// `$…`: relative to the root.
    Root(Arc<Path>),
    Literal(Value),
    Pattern(Arc<Regex>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Matches,
    In,
    NotIn,
    SubsetOf,
    AnyOf,
    NoneOf,
    Contains,
    Size,
    Empty,
}

/// Longer spellings first, so that `<=` is not parsed as `<`.
const OPERATORS: [(&str, Operator); 19] = [
    ("===", Operator::Equal),
    ("!==", Operator::Unequal),
    ("==", Operator::Equal),
    ("!=", Operator::Unequal),
    ("<>", Operator::Unequal),
    ("<=", Operator::LessOrEqual),
    (">=", Operator::GreaterOrEqual),
    ("<", Operator::Less),
    (">", Operator::Greater),
    ("=~", Operator::Matches),
    ("=", Operator::Equal),
    ("nin", Operator::NotIn),
    ("in", Operator::In),
    ("subsetof", Operator::SubsetOf),
    ("anyof", Operator::AnyOf),
    ("noneof", Operator::NoneOf),
    ("contains", Operator::Contains),
    ("size", Operator::Size),
    ("empty", Operator::Empty),
];

/// Reads `(…)`; the `?` before it has been consumed.
pub(super) fn parse(cursor: &mut Cursor<'_>) -> Result<Filter, Problem> {
    cursor.skip_space();
    if !cursor.eat('(') {
        return Err(cursor.problem("Expected '(' after '?'"));
    }
    let filter = alternatives(cursor, 0)?;
    cursor.skip_space();
    if !cursor.eat(')') {
        return Err(cursor.problem("Expected ')'"));
    }
    Ok(filter)
}

fn alternatives(cursor: &mut Cursor<'_>, nesting: usize) -> Result<Filter, Problem> {
    let mut parts = vec![conjunction(cursor, nesting)?];
    loop {
        cursor.skip_space();
        if !cursor.eat_text("||") {
            return Ok(if parts.len() == 1 { parts.remove(0) } else { Filter::Or(parts) });
        }
        parts.push(conjunction(cursor, nesting)?);
    }
}

fn conjunction(cursor: &mut Cursor<'_>, nesting: usize) -> Result<Filter, Problem> {
    let mut parts = vec![term(cursor, nesting)?];
    loop {
        cursor.skip_space();
        if !cursor.eat_text("&&") {
            return Ok(if parts.len() == 1 { parts.remove(0) } else { Filter::And(parts) });
        }
        parts.push(term(cursor, nesting)?);
    }
}

fn term(cursor: &mut Cursor<'_>, nesting: usize) -> Result<Filter, Problem> {
    if nesting > NESTING_MAX {
        return Err(cursor.problem("The filter nests too deep"));
    }
    cursor.skip_space();
    if cursor.rest().starts_with('!') {
        cursor.eat('!');
        return Ok(Filter::Not(Box::new(term(cursor, nesting + 1)?)));
    }
    if cursor.eat('(') {
        let inner = alternatives(cursor, nesting + 1)?;
        cursor.skip_space();
        if !cursor.eat(')') {
            return Err(cursor.problem("Expected ')'"));
        }
        return Ok(inner);
    }
    let left = operand(cursor, nesting)?;
    cursor.skip_space();
    let Some(operator) = operator(cursor) else {
        return Ok(match left {
            Operand::Literal(value) => Filter::Always(value != Value::Bool(false) && !value.is_null()),
            path => Filter::Exists(path),
        });
    };
    cursor.skip_space();
    let right = operand(cursor, nesting)?;
    Ok(Filter::Compare(left, operator, right))
}

fn operator(cursor: &mut Cursor<'_>) -> Option<Operator> {
    let rest = cursor.rest();
    let (spelling, operator) = OPERATORS.iter().find(|(spelling, _)| {
        rest.get(..spelling.len()).is_some_and(|found| found.eq_ignore_ascii_case(spelling))
    })?;
    cursor.at += spelling.len();
    Some(*operator)
}

fn operand(cursor: &mut Cursor<'_>, nesting: usize) -> Result<Operand, Problem> {
    match cursor.peek() {
        Some('@') => Ok(Operand::Item(Arc::new(path(cursor)?))),
        Some('$') => Ok(Operand::Root(Arc::new(path(cursor)?))),
        Some('\'' | '"') => Ok(Operand::Literal(Value::from(cursor.unescaped()?))),
        Some('/') => pattern(cursor),
        Some('[') => list(cursor, nesting),
        _ => {
            let word = cursor
                .take_while(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '+' | '.' | '_'));
            // A word without quotes is a string.
            let is_word = word.starts_with(|letter: char| letter.is_alphabetic() || letter == '_');
            match Value::parse(word) {
                Ok(value) => Ok(Operand::Literal(value)),
                Err(_) if is_word => Ok(Operand::Literal(Value::from(word))),
                Err(_) => Err(cursor.problem("Expected a value")),
            }
        }
    }
}

fn path(cursor: &mut Cursor<'_>) -> Result<Path, Problem> {
    let source = cursor.rest();
    prefix(cursor, source)
}

fn list(cursor: &mut Cursor<'_>, nesting: usize) -> Result<Operand, Problem> {
    if nesting > NESTING_MAX {
        return Err(cursor.problem("The filter nests too deep"));
    }
    cursor.eat('[');
    let mut items = Vec::new();
    loop {
        cursor.skip_space();
        if cursor.eat(']') {
            return Ok(Operand::Literal(Value::from(items)));
        }
        if !items.is_empty() && !cursor.eat(',') {
            return Err(cursor.problem("Expected ',' or ']'"));
        }
        cursor.skip_space();
        match operand(cursor, nesting + 1)? {
            Operand::Literal(item) => items.push(item),
            _ => return Err(cursor.problem("Expected a value")),
        }
    }
}

fn pattern(cursor: &mut Cursor<'_>) -> Result<Operand, Problem> {
    cursor.eat('/');
    let mut source = String::new();
    loop {
        match cursor.peek() {
            None => return Err(cursor.problem("Pattern not closed")),
            Some('/') => break,
            Some('\\') => {
                cursor.eat('\\');
                if cursor.peek() != Some('/') {
                    source.push('\\');
                }
                if let Some(escaped) = cursor.peek() {
                    source.push(escaped);
                    cursor.at += escaped.len_utf8();
                }
            }
            Some(letter) => {
                source.push(letter);
                cursor.at += letter.len_utf8();
            }
        }
    }
    cursor.eat('/');
    let flags = cursor.take_while(|letter| letter.is_ascii_alphabetic());
    // Jayway matches against the whole text.
    let regex = RegexBuilder::new(&format!("^(?:{source})$"))
        .case_insensitive(flags.contains('i'))
        .multi_line(flags.contains('m'))
        .dot_matches_new_line(flags.contains('s'))
        .size_limit(REGEX_BYTES_MAX)
        .build()
        .map_err(|_| cursor.problem("Invalid pattern"))?;
    Ok(Operand::Pattern(Arc::new(regex)))
}

impl Operand {
    fn value(&self, item: &Value, root: &Value) -> Option<Value> {
        match self {
            Self::Item(path) => evaluate::value(path, item).ok(),
            Self::Root(path) => evaluate::value(path, root).ok(),
            Self::Literal(value) => Some(value.clone()),
            Self::Pattern(_) => None,
        }
    }
}

impl Filter {
    /// Whether the filter keeps an item.
    pub(super) fn accepts(&self, item: &Value, root: &Value) -> bool {
        match self {
            Self::And(parts) => parts.iter().all(|part| part.accepts(item, root)),
            Self::Or(parts) => parts.iter().any(|part| part.accepts(item, root)),
            Self::Not(part) => !part.accepts(item, root),
            Self::Exists(operand) => operand.value(item, root).is_some(),
            Self::Always(answer) => *answer,
            Self::Compare(left, operator, right) => {
                let left = left.value(item, root);
                if let (Operator::Matches, Operand::Pattern(regex)) = (operator, right) {
                    return left.is_some_and(|text| text.as_str().is_some_and(|text| regex.is_match(text)));
                }
                compare(left.as_ref(), *operator, right.value(item, root).as_ref())
            }
        }
    }
}

fn compare(left: Option<&Value>, operator: Operator, right: Option<&Value>) -> bool {
    let (Some(left), Some(right)) = (left, right) else {
        return matches!(operator, Operator::Unequal | Operator::NotIn);
    };
    let ordered = |wanted: &[Ordering]| order(left, right).is_some_and(|found| wanted.contains(&found));
    match operator {
        Operator::Equal => equal(left, right),
        Operator::Unequal => !equal(left, right),
        Operator::Less => ordered(&[Ordering::Less]),
        Operator::LessOrEqual => ordered(&[Ordering::Less, Ordering::Equal]),
        Operator::Greater => ordered(&[Ordering::Greater]),
        Operator::GreaterOrEqual => ordered(&[Ordering::Greater, Ordering::Equal]),
        Operator::Matches => false,
        Operator::In => holds(right, left),
        Operator::NotIn => !holds(right, left),
        Operator::Contains => match (left, right) {
            (Value::String(text), Value::String(part)) => text.contains(&**part),
            _ => holds(left, right),
        },
        Operator::SubsetOf => {
            left.as_array().is_some_and(|items| items.iter().all(|item| holds(right, item)))
        }
        Operator::AnyOf => left.as_array().is_some_and(|items| items.iter().any(|item| holds(right, item))),
        Operator::NoneOf => left.as_array().is_some_and(|items| !items.iter().any(|item| holds(right, item))),
        Operator::Size => size(left).is_some_and(|size| Value::from(size) == *right),
        Operator::Empty => size(left).is_some_and(|size| Value::Bool(size == 0) == *right),
    }
}

fn size(value: &Value) -> Option<usize> {
    match value {
        Value::String(text) => Some(text.encode_utf16().count()),
        Value::Array(items) => Some(items.len()),
        Value::Object(map) => Some(map.len()),
        _ => None,
    }
}

fn holds(list: &Value, item: &Value) -> bool {
    list.as_array().is_some_and(|items| items.iter().any(|held| equal(held, item)))
}

/// Jayway treats a number and its text as equal.
fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::String(text), Value::Number(number)) | (Value::Number(number), Value::String(text)) => {
            text.parse::<f64>().is_ok_and(|double| Value::from(double) == Value::Number(number.clone()))
        }
        _ => left == right,
    }
}

fn order(left: &Value, right: &Value) -> Option<Ordering> {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => left.partial_cmp(right),
        (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
        _ => None,
    }
}
