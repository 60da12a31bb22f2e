//! The functions that the host adds to an evaluation: AWS's own, those with external values (time, randomness), those
//! that must be bounded, and the two guards that [`guard`](mod@super::guard) inserts.

use std::cell::Cell;
use std::rc::Rc;

use jsonata_core::evaluator::{Evaluator, EvaluatorError, HostFnResult};
use jsonata_core::value::JValue;

use super::limits::{OPERAND_BYTES_MAX, PRODUCED_BYTES_MAX, SEQUENCE_MAX};
use super::{convert, guard};
use crate::dataflow::Ambient;
use crate::intrinsic::hash::hex_digest;
use crate::java_random::JavaRandom;
use crate::value::Value;

/// The remaining budget of produced bytes.
#[derive(Clone)]
struct Budget(Rc<Cell<usize>>);

impl Budget {
    fn take(&self, bytes: usize) -> Result<(), EvaluatorError> {
        match self.0.get().checked_sub(bytes) {
            Some(rest) => {
                self.0.set(rest);
                Ok(())
            }
            None => Err(fail(format!("The expression produced more than {PRODUCED_BYTES_MAX} bytes"))),
        }
    }
}

fn fail(message: impl Into<String>) -> EvaluatorError {
    EvaluatorError::EvaluationError(message.into())
}

/// Registers the named functions; registering all would only take time.
pub(super) fn register<'n>(
    evaluator: &mut Evaluator,
    names: impl Iterator<Item = &'n str>,
    ambient: &Ambient,
) {
    let budget = Budget(Rc::new(Cell::new(PRODUCED_BYTES_MAX)));
    let ambient = Rc::new(ambient.clone());
    for name in names {
        // Registration fails only for names that the crate compiles itself, which these are not.
        let _ = match name {
            guard::OPERAND => evaluator.register_fn(name, operand),
            guard::RESULT => {
                let budget = budget.clone();
                evaluator.register_fn(name, move |arguments: &[JValue]| result(arguments, &budget))
            }
            guard::JOIN => {
                let budget = budget.clone();
                evaluator.register_fn(name, move |arguments: &[JValue]| join(arguments, &budget))
            }
            guard::PAD => {
                let budget = budget.clone();
                evaluator.register_fn(name, move |arguments: &[JValue]| pad(arguments, &budget))
            }
            guard::TEXT => {
                let budget = budget.clone();
                evaluator.register_fn(name, move |arguments: &[JValue]| replaced_text(arguments, &budget))
            }
            guard::PICTURE => evaluator.register_fn(name, picture),
            "partition" => evaluator.register_fn(name, partition),
            "range" => {
                let budget = budget.clone();
                evaluator.register_fn(name, move |arguments: &[JValue]| range(arguments, &budget))
            }
            "hash" => evaluator.register_fn(name, hash),
            "parse" => evaluator.register_fn(name, parse),
            "uuid" => {
                let ambient = Rc::clone(&ambient);
                evaluator.register_fn(name, move |_: &[JValue]| {
                    Ok(JValue::string(ambient.next_uuid().to_string()))
                })
            }
            "random" => {
                let ambient = Rc::clone(&ambient);
                evaluator.register_fn_override(name, move |arguments: &[JValue]| random(arguments, &ambient))
            }
            "shuffle" => {
                let ambient = Rc::clone(&ambient);
                evaluator.register_fn_override(name, move |arguments: &[JValue]| shuffle(arguments, &ambient))
            }
            "millis" => {
                let now_ms = ambient.now_ms();
                evaluator.register_fn_override(name, move |_: &[JValue]| Ok(JValue::from(now_ms)))
            }
            "now" => {
                let now_ms = ambient.now_ms();
                evaluator.register_fn_override(name, move |_: &[JValue]| Ok(now(now_ms)))
            }
            "eval" => evaluator.register_fn_override(name, |_: &[JValue]| {
                Err(fail("T1006: Attempted to invoke a non-function"))
            }),
            _ => Ok(()),
        };
    }
}

/// The result of `$now` without a picture string; a call with one is rewritten to `$fromMillis`.
fn now(now_ms: i64) -> JValue {
    let instant = jiff::Timestamp::from_millisecond(now_ms).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    JValue::string(instant.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string())
}

/// Passes on a value whose text form is within the limit, counting shared parts each time they occur.
fn operand(arguments: &[JValue]) -> HostFnResult {
    let value = arguments.first().unwrap_or(&JValue::Undefined);
    let mut rest = OPERAND_BYTES_MAX;
    if measure(value, &mut rest) {
        Ok(value.clone())
    } else {
        Err(fail(format!("A value in the expression exceeds {OPERAND_BYTES_MAX} bytes")))
    }
}

/// Subtracts the value's size from `rest`; false if `rest` is too small.
fn measure(value: &JValue, rest: &mut usize) -> bool {
    let size = match value {
        JValue::String(text) => text.len() + 2,
        JValue::Object(map) => map.keys().map(|key| key.len() + 4).sum::<usize>() + 2,
        _ => 4,
    };
    let Some(left) = rest.checked_sub(size) else { return false };
    *rest = left;
    match value {
        JValue::Array(items) => {
            jsonata_core::value::with_stack(|| items.iter().all(|item| measure(item, rest)))
        }
        JValue::Object(map) => {
            jsonata_core::value::with_stack(|| map.values().all(|item| measure(item, rest)))
        }
        _ => true,
    }
}

/// Charges the result of a function to the budget: its own text or list, without the items.
fn result(arguments: &[JValue], budget: &Budget) -> HostFnResult {
    let value = arguments.first().unwrap_or(&JValue::Undefined);
    budget.take(match value {
        JValue::String(text) => text.len(),
        JValue::Array(items) => items.len() * size_of::<JValue>(),
        JValue::Object(map) => map.len() * 64,
        _ => 0,
    })?;
    Ok(value.clone())
}

/// `$join`, with the size of its result checked in advance.
fn join(arguments: &[JValue], budget: &Budget) -> HostFnResult {
    let mismatch = |at: usize| {
        fail(format!("T0410: Argument {at} of function \"join\" does not match function signature"))
    };
    let list = arguments.first().ok_or_else(|| mismatch(1))?;
    let separator = match arguments.get(1) {
        None | Some(JValue::Undefined) => "",
        Some(JValue::String(text)) => text,
        Some(_) => return Err(mismatch(2)),
    };
    if arguments.len() > 2 {
        return Err(mismatch(3));
    }
    let items = match list {
        JValue::Undefined => return Ok(JValue::Undefined),
        JValue::String(_) => std::slice::from_ref(list),
        JValue::Array(items) => items.as_slice(),
        _ => return Err(not_strings()),
    };
    let mut size = 0_usize;
    for item in items {
        let JValue::String(text) = item else { return Err(not_strings()) };
        size = size.saturating_add(text.len()).saturating_add(separator.len());
    }
    budget.take(size)?;
    let texts: Vec<&str> = items.iter().filter_map(JValue::as_str).collect();
    Ok(JValue::string(texts.join(separator)))
}

fn not_strings() -> EvaluatorError {
    fail("T0412: Argument 1 of function \"join\" must be an array of \"strings\"")
}

/// Checks the text, the pattern and the replacement of a `$replace` call in advance: the largest possible result must
/// fit.
fn replaced_text(arguments: &[JValue], budget: &Budget) -> HostFnResult {
    let (Some(value), Some(replacement)) = (arguments.first(), arguments.get(2)) else {
        return Err(fail("T0410: Argument 1 of function \"replace\" does not match function signature"));
    };
    let JValue::String(text) = value else { return Ok(value.clone()) };
    let replacement = match replacement {
        JValue::String(replacement) => replacement.len(),
        // A function value: its results cannot be counted.
        other if other.is_function() => OPERAND_BYTES_MAX,
        _ => 0,
    };
    let most = match arguments.get(1) {
        Some(JValue::String(pattern)) if !pattern.is_empty() => text.matches(&**pattern).count(),
        _ => text.chars().count() + 1,
    };
    if most.saturating_mul(replacement) > budget.0.get() {
        return Err(fail(format!("The expression produced more than {PRODUCED_BYTES_MAX} bytes")));
    }
    Ok(value.clone())
}

/// `$pad`, with the size of its result checked in advance. The first argument is the context, which replaces a missing
/// text.
fn pad(arguments: &[JValue], budget: &Budget) -> HostFnResult {
    let (context, given) = arguments.split_first().ok_or_else(|| fail("T0410: $pad has no arguments"))?;
    let (text, rest) = match given.split_first() {
        Some((JValue::Number(_), _)) | None => (context, given),
        Some((text, rest)) => (text, rest),
    };
    let text = match text {
        JValue::Undefined => return Ok(JValue::Undefined),
        JValue::String(text) => text,
        _ => return Err(fail("T0410: Argument 1 of function \"pad\" does not match function signature")),
    };
    let width = match rest.first() {
        Some(JValue::Number(width)) => width.trunc(),
        // As in JavaScript, where the width is NaN in this case.
        Some(JValue::Undefined) => return Ok(JValue::string(&**text)),
        _ => return Err(fail("T0410: Argument 2 of function \"pad\" does not match function signature")),
    };
    let filler = match rest.get(1) {
        None | Some(JValue::Undefined) => " ",
        Some(JValue::String(filler)) if filler.is_empty() => " ",
        Some(JValue::String(filler)) => filler,
        Some(_) => {
            return Err(fail("T0410: Argument 3 of function \"pad\" does not match function signature"));
        }
    };
    let missing = (width.abs() - count(text.chars().count())).max(0.0);
    budget.take(whole(missing).saturating_mul(4).saturating_add(text.len()))?;
    let padding: String = filler.chars().cycle().take(whole(missing)).collect();
    Ok(JValue::string(if width < 0.0 { padding + text } else { format!("{text}{padding}") }))
}

#[expect(clippy::cast_precision_loss, reason = "lengths in memory are far below 2^53")]
fn count(len: usize) -> f64 {
    len as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "what does not fit becomes the bound"
)]
fn whole(number: f64) -> usize {
    number as usize
}

/// Passes on a date-time picture string without excessive widths (`[Y,1000000]`), which would be padded.
fn picture(arguments: &[JValue]) -> HostFnResult {
    let value = arguments.first().unwrap_or(&JValue::Undefined);
    if let JValue::String(text) = value {
        let (mut in_width, mut digits) = (false, 0);
        for letter in text.chars() {
            match letter {
                ',' => in_width = true,
                '[' | ']' => in_width = false,
                _ => {}
            }
            digits = if in_width && letter.is_ascii_digit() { digits + 1 } else { 0 };
            if digits > 4 {
                return Err(fail("D3132: The picture holds a width of more than four digits"));
            }
        }
    }
    Ok(value.clone())
}

/// `$partition(list, size)`: lists of `size` items, the last may be shorter.
fn partition(arguments: &[JValue]) -> HostFnResult {
    let items = match arguments.first() {
        None | Some(JValue::Undefined) => return Ok(JValue::Undefined),
        Some(JValue::Array(items)) => items,
        Some(_) => {
            return Err(fail(
                "T0410: Argument 1 of function \"partition\" does not match function signature",
            ));
        }
    };
    let size = match arguments.get(1) {
        Some(JValue::Number(size)) if *size >= 1.0 => whole(size.floor()),
        _ => return Err(fail("T0410: Argument 2 of function \"partition\" must be a positive number")),
    };
    Ok(JValue::array(items.chunks(size).map(|chunk| JValue::array(chunk.to_vec())).collect()))
}

/// `$range(first, last, step)`: the numbers from `first` to `last`.
fn range(arguments: &[JValue], budget: &Budget) -> HostFnResult {
    let number = |at: usize| match arguments.get(at) {
        Some(JValue::Number(number)) if number.is_finite() => Ok(*number),
        _ => Err(fail(format!(
            "T0410: Argument {} of function \"range\" does not match function signature",
            at + 1
        ))),
    };
    if arguments.iter().any(JValue::is_undefined) {
        return Ok(JValue::Undefined);
    }
    let (first, last) = (number(0)?, number(1)?);
    let step = if arguments.len() > 2 { number(2)? } else { 1.0 };
    if step == 0.0 {
        return Err(fail("D3070: The step of function \"range\" cannot be 0"));
    }
    let steps = ((last - first) / step).floor();
    if steps < 0.0 {
        return Ok(JValue::array(Vec::new()));
    }
    if steps >= count(SEQUENCE_MAX) {
        return Err(fail(format!("D2015: The maximum sequence length of {SEQUENCE_MAX} was exceeded.")));
    }
    budget.take(whole(steps) * size_of::<JValue>())?;
    Ok(JValue::array((0..=whole(steps)).map(|at| JValue::Number(first + count(at) * step)).collect()))
}

/// `$hash(content, algorithm)`, in lower-case hex.
fn hash(arguments: &[JValue]) -> HostFnResult {
    let text = |at: usize| match arguments.get(at) {
        Some(JValue::String(text)) => Ok(text),
        _ => Err(fail(format!(
            "T0410: Argument {} of function \"hash\" does not match function signature",
            at + 1
        ))),
    };
    if matches!(arguments.first(), None | Some(JValue::Undefined)) {
        return Ok(JValue::Undefined);
    }
    let (content, algorithm) = (text(0)?, text(1)?);
    hex_digest(algorithm, content.as_bytes())
        .map(JValue::string)
        .ok_or_else(|| fail(format!("Unsupported hash algorithm: {algorithm}")))
}

/// `$parse(text)`: parses JSON text.
fn parse(arguments: &[JValue]) -> HostFnResult {
    match arguments.first() {
        None | Some(JValue::Undefined) => Ok(JValue::Undefined),
        Some(JValue::String(text)) => Value::parse(text)
            .map(|value| convert::to_jsonata(&value))
            .map_err(|error| fail(format!("Invalid JSON: {}", error.message))),
        Some(_) => Err(fail("T0410: Argument 1 of function \"parse\" does not match function signature")),
    }
}

/// `$random(seed?)`: from 0 (inclusive) to 1 (exclusive); a seed always gives the same number as in Java.
fn random(arguments: &[JValue], ambient: &Ambient) -> HostFnResult {
    match arguments.first() {
        None | Some(JValue::Undefined) => Ok(JValue::Number(ambient.next_double())),
        #[expect(
            clippy::cast_possible_truncation,
            reason = "Java's conversion of a double to a seed saturates, too"
        )]
        Some(JValue::Number(seed)) => Ok(JValue::Number(JavaRandom::new(*seed as i64).next_double())),
        Some(_) => Err(fail("T0410: Argument 1 of function \"random\" does not match function signature")),
    }
}

/// `$shuffle(list)` (Fisher-Yates), with the evaluation's randomness.
fn shuffle(arguments: &[JValue], ambient: &Ambient) -> HostFnResult {
    let mut items = match arguments.first() {
        None | Some(JValue::Undefined) => return Ok(JValue::Undefined),
        Some(JValue::Array(items)) => items.to_vec(),
        Some(single) => vec![single.clone()],
    };
    for last in (1..items.len()).rev() {
        let other = whole(ambient.next_double() * count(last + 1));
        items.swap(last, other);
    }
    Ok(JValue::array(items))
}
