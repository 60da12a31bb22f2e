//! Kubernetes' own functions of expressions: lists, regular expressions. (Source: `apiserver/pkg/cel/library`.)

use std::sync::Arc;

use cel::{
    Env, ExecutionError, Value,
    common::{
        types::{DYN_TYPE, LIST_TYPE, STRING_TYPE, Type},
        value::{CowVal, Val},
    },
};
use regex::Regex;

/// The longest compiled form of a regular expression.
const REGEX_BYTES_MAX: usize = 1 << 20;

/// A function over values.
pub(super) type CelAnswer = Result<Value, ExecutionError>;

/// Registers a function of a library: a member function of its first argument, or one of its own.
macro_rules! declare {
    ($env:ident, member $name:literal, $id:literal, $target:expr, $arguments:expr, $function:path) => {
        $env.add_member_overload($name, $id, $target, $arguments, |arguments| {
            $crate::expressions::libraries::call(arguments, $function)
        })
    };
    ($env:ident, global $name:literal, $id:literal, $arguments:expr, $function:path) => {
        $env.add_overload($name, $id, $arguments, |arguments| {
            $crate::expressions::libraries::call(arguments, $function)
        })
    };
}
pub(super) use declare;

/// Calls a function over values with arguments of the interpreter.
pub(super) fn call<'b, 'v>(
    arguments: Vec<CowVal<'b, 'v>>,
    function: fn(&[Value]) -> CelAnswer,
) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let values: Vec<Value> =
        arguments.iter().map(|argument| Value::try_from(argument.as_ref())).collect::<Result<_, _>>()?;
    let answer: Box<dyn Val> = function(&values)?.try_into()?;
    Ok(CowVal::Owned(answer))
}

pub(super) fn failed(function: &str, why: impl ToString) -> ExecutionError {
    ExecutionError::function_error(function, why.to_string())
}

/// A text argument.
pub(super) fn text(values: &[Value], at: usize) -> Result<&str, ExecutionError> {
    match values.get(at) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(ExecutionError::missing_argument_or_target()),
    }
}

pub(super) fn string(text: impl Into<String>) -> Value {
    Value::String(Arc::new(text.into()))
}

pub(super) fn integer(number: usize) -> Value {
    Value::Int(i64::try_from(number).unwrap_or(i64::MAX))
}

/// An argument of any type.
pub(super) fn any(count: usize) -> Vec<Type> {
    (0..count).map(|_| DYN_TYPE).collect()
}

pub(super) fn extension(env: &mut Env) -> Result<(), cel::DeclarationError> {
    declare!(env, member "isSorted", "list_is_sorted", LIST_TYPE, any(0), is_sorted)?;
    declare!(env, member "sum", "list_sum", LIST_TYPE, any(0), sum)?;
    declare!(env, member "min", "list_min", LIST_TYPE, any(0), min)?;
    declare!(env, member "max", "list_max", LIST_TYPE, any(0), max)?;
    declare!(env, member "indexOf", "list_index_of", LIST_TYPE, any(1), index_of)?;
    declare!(env, member "lastIndexOf", "list_last_index_of", LIST_TYPE, any(1), last_index_of)?;
    declare!(env, member "find", "string_find", STRING_TYPE, vec![STRING_TYPE], find)?;
    declare!(env, member "findAll", "string_find_all", STRING_TYPE, vec![STRING_TYPE], find_all)?;
    let limited = vec![STRING_TYPE, cel::common::types::INT_TYPE];
    declare!(env, member "findAll", "string_find_all_limited", STRING_TYPE, limited, find_all)
}

fn list(values: &[Value]) -> Result<&[Value], ExecutionError> {
    match values.first() {
        Some(Value::List(items)) => Ok(items),
        _ => Err(ExecutionError::missing_argument_or_target()),
    }
}

fn is_sorted(values: &[Value]) -> CelAnswer {
    let items = list(values)?;
    Ok(Value::Bool(items.windows(2).all(|pair| pair[0] <= pair[1])))
}

fn sum(values: &[Value]) -> CelAnswer {
    let overflow = || failed("sum", "integer overflow");
    let mut items = list(values)?.iter();
    let Some(first) = items.next() else { return Ok(Value::Int(0)) };
    items.try_fold(first.clone(), |total, item| match (&total, item) {
        (Value::Int(one), Value::Int(other)) => one.checked_add(*other).map(Value::Int).ok_or_else(overflow),
        (Value::UInt(one), Value::UInt(other)) => {
            one.checked_add(*other).map(Value::UInt).ok_or_else(overflow)
        }
        (Value::Float(one), Value::Float(other)) => Ok(Value::Float(one + other)),
        _ => Err(failed("sum", "the items are not numbers of one type")),
    })
}

fn least(function: &str, values: &[Value], wins: fn(&Value, &Value) -> bool) -> CelAnswer {
    let mut items = list(values)?.iter();
    let none = || failed(function, format!("{function} called on empty list"));
    let first = items.next().ok_or_else(none)?;
    Ok(items.fold(first, |best, item| if wins(item, best) { item } else { best }).clone())
}

fn min(values: &[Value]) -> CelAnswer {
    least("min", values, |item, best| item < best)
}

fn max(values: &[Value]) -> CelAnswer {
    least("max", values, |item, best| item > best)
}

fn index_of(values: &[Value]) -> CelAnswer {
    let at = list(values)?.iter().position(|item| Some(item) == values.get(1));
    Ok(at.map_or(Value::Int(-1), integer))
}

fn last_index_of(values: &[Value]) -> CelAnswer {
    let at = list(values)?.iter().rposition(|item| Some(item) == values.get(1));
    Ok(at.map_or(Value::Int(-1), integer))
}

fn pattern(text: &str) -> Result<Regex, ExecutionError> {
    let built = regex::RegexBuilder::new(text).size_limit(REGEX_BYTES_MAX).build();
    built.map_err(|error| failed("find", format!("illegal regex: {error}")))
}

fn find(values: &[Value]) -> CelAnswer {
    let pattern = pattern(text(values, 1)?)?;
    Ok(string(pattern.find(text(values, 0)?).map_or("", |found| found.as_str())))
}

fn find_all(values: &[Value]) -> CelAnswer {
    let pattern = pattern(text(values, 1)?)?;
    let most = match values.get(2) {
        Some(Value::Int(most)) => usize::try_from(*most).unwrap_or(usize::MAX),
        _ => usize::MAX,
    };
    let found = pattern.find_iter(text(values, 0)?).take(most).map(|found| string(found.as_str()));
    Ok(Value::List(Arc::new(found.collect())))
}
