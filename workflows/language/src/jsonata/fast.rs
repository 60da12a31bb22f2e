//! Evaluates plain paths, literals, comparisons and arithmetic directly on [`Value`], without conversion.
//!
//! Only unambiguous cases are evaluated: members of objects, scalars of the expected types. All others (an array on the
//! path, a missing operand, an error) are left to `jsonata-core`.

use std::cmp::Ordering;
use std::sync::Arc;

use jsonata_core::ast::{AstNode, BinaryOp, PathStep};

use crate::dataflow::EvaluationScope;
use crate::value::{Map, Number, Value};

/// The maximum nesting of such an expression; deeper ones are not plain.
const DEPTH_MAX: usize = 32;
/// Longer results of `&` are left to the evaluation with limits.
const TEXT_BYTES_MAX: usize = 64 * 1024;

/// A plain expression.
#[derive(Clone, Debug)]
pub(super) enum Fast {
    Constant(Value),
    Path(PathRoot, Vec<Arc<str>>),
    Binary(BinaryOp, Box<Fast>, Box<Fast>),
    Conditional(Box<Fast>, Box<Fast>, Box<Fast>),
    Object(Vec<(Arc<str>, Fast)>),
}

#[derive(Clone, Debug)]
pub(super) enum PathRoot {
    Input,
    Result,
    ErrorOutput,
    Context,
    Variable(Arc<str>),
}

impl Fast {
    /// The plain form of an expression, if it has one.
    pub(super) fn compile(ast: &AstNode) -> Option<Self> {
        compile(ast, DEPTH_MAX)
    }

    /// The value: `None` if this case is left to `jsonata-core`, `Some(None)` if it is undefined.
    pub(super) fn evaluate(&self, scope: &EvaluationScope<'_>) -> Option<Option<Value>> {
        match self {
            Self::Constant(value) => Some(Some(value.clone())),
            Self::Path(root, names) => path(root, names, scope),
            Self::Binary(op, left, right) => {
                let left = left.evaluate(scope)??;
                match (op, &left) {
                    (BinaryOp::And, Value::Bool(false)) => return Some(Some(Value::Bool(false))),
                    (BinaryOp::Or, Value::Bool(true)) => return Some(Some(Value::Bool(true))),
                    _ => {}
                }
                binary(*op, &left, &right.evaluate(scope)??).map(Some)
            }
            Self::Conditional(condition, then_branch, else_branch) => match condition.evaluate(scope)?? {
                Value::Bool(true) => then_branch.evaluate(scope),
                Value::Bool(false) => else_branch.evaluate(scope),
                _ => None,
            },
            Self::Object(members) => {
                let mut map = Map::with_capacity(members.len());
                for (key, member) in members {
                    if let Some(value) = member.evaluate(scope)? {
                        map.insert(Arc::clone(key), value);
                    }
                }
                Some(Some(Value::from(map)))
            }
        }
    }
}

fn compile(ast: &AstNode, depth: usize) -> Option<Fast> {
    let depth = depth.checked_sub(1)?;
    let inner = |node: &AstNode| compile(node, depth).map(Box::new);
    match ast {
        AstNode::String(text) => Some(Fast::Constant(Value::from(text.as_str()))),
        AstNode::Number(number) => Number::from_jsonata(*number).map(|number| Fast::Constant(number.into())),
        AstNode::Boolean(flag) => Some(Fast::Constant(Value::Bool(*flag))),
        AstNode::Null => Some(Fast::Constant(Value::Null)),
        AstNode::Variable(name) if !name.is_empty() && name != "states" => {
            Some(Fast::Path(PathRoot::Variable(name.as_str().into()), Vec::new()))
        }
        AstNode::Path { steps } => compile_path(steps),
        AstNode::Binary { op, lhs, rhs } if is_plain(*op) => {
            Some(Fast::Binary(*op, inner(lhs)?, inner(rhs)?))
        }
        AstNode::Conditional { condition, then_branch, else_branch: Some(else_branch) } => {
            Some(Fast::Conditional(inner(condition)?, inner(then_branch)?, inner(else_branch)?))
        }
        AstNode::Block(items) if items.len() == 1 => compile(&items[0], depth),
        AstNode::Object(pairs) => {
            let mut members: Vec<(Arc<str>, Fast)> = Vec::with_capacity(pairs.len());
            for (key, value) in pairs {
                let AstNode::String(key) = key else { return None };
                if members.iter().any(|(known, _)| **known == **key) {
                    return None;
                }
                members.push((key.as_str().into(), compile(value, depth)?));
            }
            Some(Fast::Object(members))
        }
        _ => None,
    }
}

fn is_plain(op: BinaryOp) -> bool {
    matches!(
        op,
        BinaryOp::Add
            | BinaryOp::Subtract
            | BinaryOp::Multiply
            | BinaryOp::Divide
            | BinaryOp::Equal
            | BinaryOp::NotEqual
            | BinaryOp::LessThan
            | BinaryOp::LessThanOrEqual
            | BinaryOp::GreaterThan
            | BinaryOp::GreaterThanOrEqual
            | BinaryOp::And
            | BinaryOp::Or
            | BinaryOp::Concatenate
    )
}

fn compile_path(steps: &[PathStep]) -> Option<Fast> {
    let is_plain = |step: &PathStep| {
        step.stages.is_empty()
            && step.focus.is_none()
            && step.index_var.is_none()
            && step.ancestor_label.is_none()
            && !step.is_tuple
            && !step.inner_tuple
    };
    if !steps.iter().all(is_plain) {
        return None;
    }
    let mut names = Vec::with_capacity(steps.len());
    for step in &steps[1..] {
        let AstNode::Name(name) = &step.node else { return None };
        names.push(Arc::from(name.as_str()));
    }
    let AstNode::Variable(first) = &steps.first()?.node else { return None };
    let root = match (first.as_str(), names.first().map(|name: &Arc<str>| &**name)) {
        ("", _) => return None,
        ("states", Some("input")) => PathRoot::Input,
        ("states", Some("result")) => PathRoot::Result,
        ("states", Some("errorOutput")) => PathRoot::ErrorOutput,
        ("states", Some("context")) => PathRoot::Context,
        ("states", _) => return None,
        (name, _) => return Some(Fast::Path(PathRoot::Variable(name.into()), names)),
    };
    names.remove(0);
    Some(Fast::Path(root, names))
}

fn path(root: &PathRoot, names: &[Arc<str>], scope: &EvaluationScope<'_>) -> Option<Option<Value>> {
    let context;
    let start = match root {
        PathRoot::Input => Some(scope.input),
        PathRoot::Result => scope.result,
        PathRoot::ErrorOutput => scope.error_output,
        PathRoot::Context => {
            context = scope.context.get();
            Some(&context)
        }
        // A name that is not a variable may be a function.
        PathRoot::Variable(name) => Some(scope.variables.get(name)?),
    };
    let Some(mut value) = start else { return Some(None) };
    for name in names {
        match value {
            Value::Object(map) => match map.get(name) {
                Some(member) => value = member,
                None => return Some(None),
            },
            Value::Array(_) => return None,
            _ => return Some(None),
        }
    }
    Some(Some(value.clone()))
}

fn binary(op: BinaryOp, left: &Value, right: &Value) -> Option<Value> {
    match op {
        BinaryOp::Add | BinaryOp::Subtract | BinaryOp::Multiply | BinaryOp::Divide => {
            let (Value::Number(left), Value::Number(right)) = (left, right) else { return None };
            let (left, right) = (left.to_f64(), right.to_f64());
            Number::from_jsonata(match op {
                BinaryOp::Add => left + right,
                BinaryOp::Subtract => left - right,
                BinaryOp::Multiply => left * right,
                _ => left / right,
            })
            .map(Value::Number)
        }
        BinaryOp::Equal | BinaryOp::NotEqual => {
            let is_equal = match (left, right) {
                (Value::Array(_) | Value::Object(_), _) | (_, Value::Array(_) | Value::Object(_)) => {
                    return None;
                }
                (Value::Number(left), Value::Number(right)) => left.to_f64() == right.to_f64(),
                _ => left == right,
            };
            Some(Value::Bool(is_equal == (op == BinaryOp::Equal)))
        }
        BinaryOp::LessThan
        | BinaryOp::LessThanOrEqual
        | BinaryOp::GreaterThan
        | BinaryOp::GreaterThanOrEqual => {
            let order = match (left, right) {
                (Value::Number(left), Value::Number(right)) => left.to_f64().partial_cmp(&right.to_f64())?,
                (Value::String(left), Value::String(right)) if left.is_ascii() && right.is_ascii() => {
                    left.cmp(right)
                }
                _ => return None,
            };
            Some(Value::Bool(match op {
                BinaryOp::LessThan => order == Ordering::Less,
                BinaryOp::LessThanOrEqual => order != Ordering::Greater,
                BinaryOp::GreaterThan => order == Ordering::Greater,
                _ => order != Ordering::Less,
            }))
        }
        BinaryOp::And => Some(Value::Bool(left.as_bool()? && right.as_bool()?)),
        BinaryOp::Or => Some(Value::Bool(left.as_bool()? || right.as_bool()?)),
        BinaryOp::Concatenate => {
            let (Value::String(left), Value::String(right)) = (left, right) else { return None };
            (left.len() + right.len() <= TEXT_BYTES_MAX).then(|| Value::from(format!("{left}{right}")))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use jsonata_core::evaluator::EvaluatorOptions;
    use jsonata_core::value::JValue;
    use proptest::prelude::*;

    use super::super::{JsonataProgram, evaluate::Data};
    use super::*;
    use crate::dataflow::{Ambient, Context, Variables};

    /// Plain expressions, and some that look similar.
    fn expressions() -> impl Strategy<Value = String> {
        let leaf = prop::sample::select(vec![
            "1",
            "2.5",
            "'a'",
            "'b'",
            "true",
            "false",
            "null",
            "$n",
            "$s",
            "$o.a",
            "$o.none",
            "$l",
            "$l.x",
            "$one",
            "$none",
            "$states.input",
            "$states.input.n",
            "$states.input.o.a",
            "$states.input.l.x",
            "$states.result",
            "$states.context.c",
            "$o",
        ]);
        leaf.prop_map(str::to_owned).prop_recursive(4, 24, 3, |inner| {
            let operator = prop::sample::select(vec![
                "+", "-", "*", "/", "=", "!=", "<", "<=", ">", ">=", "and", "or", "&",
            ]);
            prop_oneof![
                (inner.clone(), operator, inner.clone()).prop_map(|(a, op, b)| format!("({a} {op} {b})")),
                (inner.clone(), inner.clone(), inner.clone())
                    .prop_map(|(a, b, c)| format!("({a} ? {b} : {c})")),
                (inner.clone(), inner).prop_map(|(a, b)| format!("{{'k': {a}, 'm': {b}}}")),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// The fast path has the results of `jsonata-core`.
        #[test]
        fn fast_path_and_full_evaluation_agree(source in expressions()) {
            let json = |text: &str| Value::parse(text).expect("valid JSON");
            let input = json(r#"{"n":3,"o":{"a":1},"l":[{"x":1},{"x":2}],"one":[5]}"#);
            let result = json("[7]");
            let context = json(r#"{"c":"ctx"}"#);
            let own = json(r#"{"n":4,"s":"text","o":{"a":{"b":2}},"l":[{"x":1}],"one":[[5]]}"#);
            let variables = Variables::of(own.as_object().expect("an object").clone());
            let ambient = Ambient::new(0, 1);
            let scope = EvaluationScope {
                input: &input,
                result: Some(&result),
                error_output: None,
                context: Context::Ready(&context),
                variables: &variables,
                ambient: &ambient,
            };
            let program = JsonataProgram::compile(&source).expect("valid");
            if let Some(short) = program.fast.as_ref().and_then(|fast| fast.evaluate(&scope)) {
                let data = Data::of(&program, &scope);
                let long = data.evaluate(&program, &JValue::Undefined, EvaluatorOptions::default());
                prop_assert_eq!(Ok(short), long, "{}", source);
            }
        }
    }
}
