//! Quantities in expressions: exact, as a number and a power of ten. (Source: `apiserver/pkg/cel/library/quantity.go`.)

use std::{cmp::Ordering, sync::Arc};

use cel::{
    Env, ExecutionError, Value,
    common::types::{DYN_TYPE, STRING_TYPE},
    objects::Opaque,
};

use super::libraries::{CelAnswer, any, declare, failed, text};
use crate::schema::{ParsedQuantity, QuantityError};

/// `mantissa` × 10^`exponent`, without trailing zeros, so that equal amounts are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QuantityValue {
    mantissa: i128,
    exponent: i32,
}

impl Opaque for QuantityValue {
    fn runtime_type_name(&self) -> &str {
        "kubernetes.Quantity"
    }
}

impl QuantityValue {
    fn new(mut mantissa: i128, mut exponent: i32) -> Self {
        while mantissa != 0 && mantissa % 10 == 0 {
            mantissa /= 10;
            exponent += 1;
        }
        Self { mantissa, exponent: if mantissa == 0 { 0 } else { exponent } }
    }

    fn parse(text: &str) -> Result<Self, QuantityError> {
        let (mantissa, exponent) = ParsedQuantity::parse(text)?.scaled().ok_or(QuantityError::Number)?;
        Ok(Self::new(mantissa, exponent))
    }

    /// Both mantissas at the smaller of the exponents.
    fn aligned(self, other: Self) -> Option<(i128, i128, i32)> {
        let exponent = self.exponent.min(other.exponent);
        let scaled = |value: Self| {
            let power = u32::try_from(value.exponent - exponent).ok()?;
            value.mantissa.checked_mul(10_i128.checked_pow(power)?)
        };
        Some((scaled(self)?, scaled(other)?, exponent))
    }

    fn compare(self, other: Self) -> Ordering {
        match self.aligned(other) {
            Some((one, other, _)) => one.cmp(&other),
            // The exponents are too far apart for exact numbers.
            None => self.approximate().total_cmp(&other.approximate()),
        }
    }

    fn as_integer(self) -> Option<i64> {
        let power = u32::try_from(self.exponent).ok()?;
        i64::try_from(self.mantissa.checked_mul(10_i128.checked_pow(power)?)?).ok()
    }

    fn approximate(self) -> f64 {
        // Parsing the decimal text gives the nearest double.
        format!("{}e{}", self.mantissa, self.exponent).parse().unwrap_or(f64::NAN)
    }
}

pub(super) fn extension(env: &mut Env) -> Result<(), cel::DeclarationError> {
    declare!(env, global "quantity", "string_to_quantity", vec![STRING_TYPE], quantity)?;
    declare!(env, global "isQuantity", "is_quantity", vec![STRING_TYPE], is_quantity)?;
    declare!(env, member "isInteger", "quantity_is_integer", DYN_TYPE, any(0), is_integer)?;
    declare!(env, member "asInteger", "quantity_as_integer", DYN_TYPE, any(0), as_integer)?;
    declare!(env, member "asApproximateFloat", "quantity_as_float", DYN_TYPE, any(0), as_float)?;
    declare!(env, member "sign", "quantity_sign", DYN_TYPE, any(0), sign)?;
    declare!(env, member "isGreaterThan", "quantity_is_greater", DYN_TYPE, any(1), is_greater)?;
    declare!(env, member "isLessThan", "quantity_is_less", DYN_TYPE, any(1), is_less)?;
    declare!(env, member "compareTo", "quantity_compare", DYN_TYPE, any(1), compare)?;
    declare!(env, member "add", "quantity_add", DYN_TYPE, any(1), add)?;
    declare!(env, member "sub", "quantity_sub", DYN_TYPE, any(1), sub)
}

fn value(values: &[Value], at: usize) -> Result<QuantityValue, ExecutionError> {
    match values.get(at) {
        Some(Value::Opaque(value)) => value.downcast_ref::<QuantityValue>().copied(),
        Some(Value::Int(number)) => Some(QuantityValue::new((*number).into(), 0)),
        _ => None,
    }
    .ok_or_else(ExecutionError::missing_argument_or_target)
}

fn quantity(values: &[Value]) -> CelAnswer {
    let found = QuantityValue::parse(text(values, 0)?);
    found.map(|value| Value::Opaque(Arc::new(value))).map_err(|error| failed("quantity", error))
}

fn is_quantity(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(QuantityValue::parse(text(values, 0)?).is_ok()))
}

fn is_integer(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(value(values, 0)?.as_integer().is_some()))
}

fn as_integer(values: &[Value]) -> CelAnswer {
    let number = value(values, 0)?.as_integer();
    number.map(Value::Int).ok_or_else(|| failed("asInteger", "cannot convert value to integer"))
}

fn as_float(values: &[Value]) -> CelAnswer {
    Ok(Value::Float(value(values, 0)?.approximate()))
}

fn sign(values: &[Value]) -> CelAnswer {
    Ok(Value::Int(value(values, 0)?.mantissa.signum().try_into().unwrap_or(0)))
}

fn ordering(values: &[Value]) -> Result<Ordering, ExecutionError> {
    Ok(value(values, 0)?.compare(value(values, 1)?))
}

fn is_greater(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(ordering(values)? == Ordering::Greater))
}

fn is_less(values: &[Value]) -> CelAnswer {
    Ok(Value::Bool(ordering(values)? == Ordering::Less))
}

fn compare(values: &[Value]) -> CelAnswer {
    Ok(Value::Int(match ordering(values)? {
        Ordering::Less => -1,
        Ordering::Equal => 0,
        Ordering::Greater => 1,
    }))
}

fn combined(function: &str, values: &[Value], combine: fn(i128, i128) -> Option<i128>) -> CelAnswer {
    let (one, other) = (value(values, 0)?, value(values, 1)?);
    let sum = one.aligned(other).and_then(|(one, other, exponent)| Some((combine(one, other)?, exponent)));
    let (mantissa, exponent) = sum.ok_or_else(|| failed(function, "the quantity is too large"))?;
    Ok(Value::Opaque(Arc::new(QuantityValue::new(mantissa, exponent))))
}

fn add(values: &[Value]) -> CelAnswer {
    combined("add", values, i128::checked_add)
}

fn sub(values: &[Value]) -> CelAnswer {
    combined("sub", values, i128::checked_sub)
}
