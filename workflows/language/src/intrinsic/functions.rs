//! The `States.…` functions, with AWS's limits.

use crate::java_random::JavaRandom;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{IntrinsicError, hash};
use crate::dataflow::Ambient;
use crate::template::hash_order;
use crate::value::{Map, Number, Value};

/// The maximum number of characters of Base64 and Hash.
const ENCODED_CHARS_MAX: usize = 10_000;
/// The maximum number of elements of `States.ArrayRange`.
const RANGE_MAX: i64 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IntrinsicFunction {
    Format,
    StringToJson,
    JsonToString,
    Array,
    ArrayPartition,
    ArrayContains,
    ArrayRange,
    ArrayGetItem,
    ArrayLength,
    ArrayUnique,
    Base64Encode,
    Base64Decode,
    Hash,
    JsonMerge,
    MathRandom,
    MathAdd,
    StringSplit,
    Uuid,
}

/// Name, function, minimum and maximum number of arguments.
const FUNCTIONS: [(&str, IntrinsicFunction, usize, usize); 18] = [
    ("States.Format", IntrinsicFunction::Format, 1, usize::MAX),
    ("States.StringToJson", IntrinsicFunction::StringToJson, 1, 1),
    ("States.JsonToString", IntrinsicFunction::JsonToString, 1, 1),
    ("States.Array", IntrinsicFunction::Array, 0, usize::MAX),
    ("States.ArrayPartition", IntrinsicFunction::ArrayPartition, 2, 2),
    ("States.ArrayContains", IntrinsicFunction::ArrayContains, 2, 2),
    ("States.ArrayRange", IntrinsicFunction::ArrayRange, 3, 3),
    ("States.ArrayGetItem", IntrinsicFunction::ArrayGetItem, 2, 2),
    ("States.ArrayLength", IntrinsicFunction::ArrayLength, 1, 1),
    ("States.ArrayUnique", IntrinsicFunction::ArrayUnique, 1, 1),
    ("States.Base64Encode", IntrinsicFunction::Base64Encode, 1, 1),
    ("States.Base64Decode", IntrinsicFunction::Base64Decode, 1, 1),
    ("States.Hash", IntrinsicFunction::Hash, 2, 2),
    ("States.JsonMerge", IntrinsicFunction::JsonMerge, 3, 3),
    ("States.MathRandom", IntrinsicFunction::MathRandom, 2, 3),
    ("States.MathAdd", IntrinsicFunction::MathAdd, 2, 2),
    ("States.StringSplit", IntrinsicFunction::StringSplit, 2, 2),
    ("States.UUID", IntrinsicFunction::Uuid, 0, 0),
];

type IntrinsicResult = Result<Value, IntrinsicError>;

impl IntrinsicFunction {
    pub(super) fn named(name: &str) -> Option<Self> {
        FUNCTIONS.iter().find(|(known, ..)| *known == name).map(|(_, function, ..)| *function)
    }

    /// Minimum and maximum number of arguments.
    pub(super) fn arity(self) -> (usize, usize) {
        FUNCTIONS
            .iter()
            .find(|(_, function, ..)| *function == self)
            .map_or((0, 0), |(.., least, most)| (*least, *most))
    }

    /// Whether a literal is valid at a position. Values from paths are checked at run time.
    pub(super) fn takes(self, at: usize, literal: &Value) -> bool {
        match (self, at) {
            (Self::MathAdd | Self::MathRandom | Self::ArrayRange, _)
            | (Self::ArrayPartition | Self::ArrayGetItem, 1) => literal.is_number(),
            (Self::StringSplit | Self::StringToJson | Self::Base64Encode | Self::Base64Decode, _)
            | (Self::Format, 0)
            | (Self::Hash, 1) => literal.is_string(),
            (Self::JsonMerge, 2) => literal.as_bool().is_some(),
            (Self::ArrayPartition | Self::ArrayGetItem | Self::ArrayContains, 0)
            | (Self::ArrayLength | Self::ArrayUnique, _)
            | (Self::JsonMerge, _) => false,
            _ => true,
        }
    }

    /// Evaluates the function. The number of arguments has been checked.
    pub(super) fn apply(self, arguments: &[Value], ambient: &Ambient) -> IntrinsicResult {
        let argument = |at: usize| arguments.get(at).unwrap_or(&Value::Null);
        match self {
            Self::Format => Err(IntrinsicError::new("States.Format takes its template unevaluated")),
            Self::StringToJson => string_to_json(argument(0)),
            Self::JsonToString => Ok(Value::from(argument(0).to_text())),
            Self::Array => Ok(Value::from(arguments.to_vec())),
            Self::ArrayPartition => partition(argument(0), argument(1)),
            Self::ArrayContains => {
                Ok(Value::Bool(array(argument(0), 1)?.iter().any(|item| same(item, argument(1)))))
            }
            Self::ArrayRange => range(argument(0), argument(1), argument(2)),
            Self::ArrayGetItem => item(argument(0), argument(1)),
            Self::ArrayLength => Ok(Value::from(array(argument(0), 1)?.len())),
            Self::ArrayUnique => unique(argument(0)),
            Self::Base64Encode => encode(argument(0)),
            Self::Base64Decode => decode(argument(0)),
            Self::Hash => digest(argument(0), argument(1)),
            Self::JsonMerge => merge(argument(0), argument(1), argument(2)),
            Self::MathRandom => random(arguments, ambient),
            Self::MathAdd => add(argument(0), argument(1)),
            Self::StringSplit => split(argument(0), argument(1)),
            Self::Uuid => Ok(Value::from(ambient.next_uuid().to_string())),
        }
    }
}

fn array(value: &Value, position: usize) -> Result<&[Value], IntrinsicError> {
    value
        .as_array()
        .ok_or_else(|| IntrinsicError::new(format!("Argument {position} is expected to be an array")))
}

fn text(value: &Value, position: usize) -> Result<&str, IntrinsicError> {
    value
        .as_str()
        .ok_or_else(|| IntrinsicError::new(format!("Argument {position} is expected to be a string")))
}

fn short_text(value: &Value) -> Result<&str, IntrinsicError> {
    let text = text(value, 1)?;
    if text.chars().count() > ENCODED_CHARS_MAX {
        return Err(IntrinsicError::new(format!(
            "The input exceeds the limit of {ENCODED_CHARS_MAX} characters"
        )));
    }
    Ok(text)
}

/// A number rounded as Java's `Math.round` does: halves are rounded up.
#[expect(
    clippy::cast_possible_truncation,
    reason = "as in Java, what does not fit becomes the nearest bound"
)]
fn rounded(value: &Value, position: usize) -> Result<i64, IntrinsicError> {
    match value {
        Value::Number(Number::Int(whole)) => Ok(*whole),
        Value::Number(number) => Ok((number.to_f64() + 0.5).floor() as i64),
        _ => Err(IntrinsicError::new(format!("Argument {position} is expected to be a number"))),
    }
}

/// A blank text is parsed as null, like in Jackson.
fn string_to_json(value: &Value) -> IntrinsicResult {
    let source = text(value, 1)?;
    if source.trim().is_empty() {
        return Ok(Value::Null);
    }
    Value::parse(source).map_err(|_| IntrinsicError::new(format!("Invalid JSON: '{source}'")))
}

fn partition(list: &Value, size: &Value) -> IntrinsicResult {
    let list = array(list, 1)?;
    let size = usize::try_from(rounded(size, 2)?).ok().filter(|size| *size > 0);
    let size = size.ok_or_else(|| IntrinsicError::new("The chunk size must be a positive number"))?;
    Ok(list.chunks(size).map(|chunk| Value::from(chunk.to_vec())).collect())
}

fn range(first: &Value, last: &Value, step: &Value) -> IntrinsicResult {
    let (first, last, step) = (rounded(first, 1)?, rounded(last, 2)?, rounded(step, 3)?);
    if step == 0 {
        return Err(IntrinsicError::new("The increment of States.ArrayRange cannot be 0"));
    }
    let (first, last, step) = (i128::from(first), i128::from(last), i128::from(step));
    let steps = (last - first) / step;
    let is_empty = (last > first) != (step > 0) && last != first;
    if is_empty {
        return Ok(Value::from(Vec::new()));
    }
    if steps >= i128::from(RANGE_MAX) {
        return Err(IntrinsicError::new(format!("States.ArrayRange gives at most {RANGE_MAX} elements")));
    }
    Ok((0..=steps).filter_map(|at| i64::try_from(first + at * step).ok()).map(Value::from).collect())
}

fn item(list: &Value, index: &Value) -> IntrinsicResult {
    let list = array(list, 1)?;
    let index = rounded(index, 2)?;
    usize::try_from(index).ok().and_then(|at| list.get(at).cloned()).ok_or_else(|| {
        IntrinsicError::new(format!("Index {index} is out of bounds for an array of length {}", list.len()))
    })
}

fn unique(list: &Value) -> IntrinsicResult {
    let mut kept: Vec<Value> = Vec::new();
    let mut scalars = std::collections::HashSet::new();
    for item in array(list, 1)? {
        let is_new = match item {
            Value::Array(_) | Value::Object(_) => !kept.contains(item),
            scalar => scalars.insert(format!("{}:{}", scalar.type_name(), scalar.to_text())),
        };
        if is_new {
            kept.push(item.clone());
        }
    }
    Ok(Value::from(kept))
}

/// Java's `equals`: an integer never equals a number with a fraction, so `1` is not `1.0`.
fn same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => {
            left.is_integer() == right.is_integer() && left == right
        }
        _ => left == right,
    }
}

fn encode(value: &Value) -> IntrinsicResult {
    Ok(Value::from(STANDARD.encode(short_text(value)?)))
}

fn decode(value: &Value) -> IntrinsicResult {
    let bytes = STANDARD
        .decode(short_text(value)?)
        .map_err(|_| IntrinsicError::new("The input is no valid Base64"))?;
    Ok(Value::from(String::from_utf8_lossy(&bytes).into_owned()))
}

fn digest(data: &Value, algorithm: &Value) -> IntrinsicResult {
    let data = match data {
        Value::String(text) => text.to_string(),
        other => other.to_text(),
    };
    if data.chars().count() > ENCODED_CHARS_MAX {
        return Err(IntrinsicError::new(format!(
            "The input exceeds the limit of {ENCODED_CHARS_MAX} characters"
        )));
    }
    let algorithm = text(algorithm, 2)?;
    hash::hex_digest(algorithm, data.as_bytes())
        .map(Value::from)
        .ok_or_else(|| IntrinsicError::new(format!("Unsupported hash algorithm: {algorithm}")))
}

fn merge(first: &Value, second: &Value, deep: &Value) -> IntrinsicResult {
    match deep {
        Value::Bool(false) => {}
        Value::Bool(true) => return Err(IntrinsicError::new("The deep merging mode is not supported")),
        _ => return Err(IntrinsicError::new("Argument 3 is expected to be a boolean")),
    }
    let (Some(first), Some(second)) = (first.as_object(), second.as_object()) else {
        return Err(IntrinsicError::new("Arguments 1 and 2 are expected to be JSON objects"));
    };
    let mut merged = Map::clone(first);
    for (key, value) in second.iter() {
        merged.insert(key.clone(), value.clone());
    }
    // AWS merges in a `HashMap` (test-json-merge-escaped-argument).
    let entries = merged.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    Ok(Value::from(hash_order::sorted(entries, |(key, _)| key).into_iter().collect::<Map>()))
}

fn random(arguments: &[Value], ambient: &Ambient) -> IntrinsicResult {
    let (first, last) = (rounded(&arguments[0], 1)?, rounded(&arguments[1], 2)?);
    if first >= last {
        return Err(IntrinsicError::new("The start of the range must be less than its end"));
    }
    let mut generator = match arguments.get(2) {
        Some(seed) => JavaRandom::new(rounded(seed, 3)?),
        None => JavaRandom::new(ambient.next_u64().cast_signed()),
    };
    let span = i128::from(last) - i128::from(first);
    let offset = match i32::try_from(span) {
        Ok(span) => i128::from(generator.next_int(span)),
        Err(_) => i128::from(generator.next_long().cast_unsigned()) % span,
    };
    Ok(i64::try_from(i128::from(first) + offset).map_or(Value::Null, Value::from))
}

fn add(first: &Value, second: &Value) -> IntrinsicResult {
    let (first, second) = (rounded(first, 1)?, rounded(second, 2)?);
    first
        .checked_add(second)
        .map(Value::from)
        .ok_or_else(|| IntrinsicError::new("The sum exceeds the range of integers"))
}

/// Splits at each of the delimiter's characters, and omits empty parts.
fn split(value: &Value, delimiters: &Value) -> IntrinsicResult {
    let (value, delimiters) = (text(value, 1)?, text(delimiters, 2)?);
    Ok(value
        .split(|letter| delimiters.contains(letter))
        .filter(|part| !part.is_empty())
        .map(Value::from)
        .collect())
}
