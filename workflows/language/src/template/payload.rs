//! Payload templates of JSONPath states.
//!
//! The fields of an object in a template have AWS's order: literal fields first, as written, then those of `key.$`,
//! which AWS keeps in a Java `HashMap` by their names without `.$` (shown by the recordings:
//! `test-query-runtime-memory` has thirteen of them, `test-map-state-parameters-singleton-legacy` both kinds).

use std::sync::Arc;

use super::PathExpression;
use super::hash_order;
use crate::dataflow::EvaluationScope;
use crate::error::{Problem, StateError};
use crate::value::{Map, Value};

#[derive(Clone, Debug)]
pub(super) enum PayloadNode {
    Constant(Value),
    Object(Vec<Member>),
    Array(Vec<PayloadNode>),
}

#[derive(Clone, Debug)]
pub(super) struct Member {
    /// The key in the result.
    key: Arc<str>,
    value: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Node(PayloadNode),
    /// The value of `key.$`; `field` is the key as written.
    Dynamic {
        field: Arc<str>,
        expression: PathExpression,
    },
}

impl PayloadNode {
    pub(super) fn compile(value: &Value, problems: &mut Vec<Problem>) -> Self {
        match value {
            Value::Object(map) => {
                let members: Vec<Member> =
                    map.iter().filter_map(|(key, value)| member(key, value, problems)).collect();
                let (plain, dynamic): (Vec<Member>, Vec<Member>) =
                    members.into_iter().partition(|member| matches!(member.value, Content::Node(_)));
                let mut members = plain;
                members.extend(hash_order::sorted(dynamic, |member| &member.key));
                let is_constant =
                    members.iter().all(|member| matches!(member.value, Content::Node(Self::Constant(_))));
                if is_constant { Self::Constant(value.clone()) } else { Self::Object(members) }
            }
            Value::Array(items) => {
                let nodes: Vec<Self> = items
                    .iter()
                    .enumerate()
                    .map(|(at, item)| within(at, problems, |problems| Self::compile(item, problems)))
                    .collect();
                let is_constant = nodes.iter().all(|node| matches!(node, Self::Constant(_)));
                if is_constant { Self::Constant(value.clone()) } else { Self::Array(nodes) }
            }
            scalar => Self::Constant(scalar.clone()),
        }
    }

    pub(super) fn evaluate(&self, scope: &EvaluationScope<'_>) -> Result<Value, StateError> {
        match self {
            Self::Constant(value) => Ok(value.clone()),
            Self::Array(nodes) => nodes.iter().map(|node| node.evaluate(scope)).collect(),
            Self::Object(members) => {
                let mut map = Map::with_capacity(members.len());
                for member in members {
                    let value = match &member.value {
                        Content::Node(node) => node.evaluate(scope)?,
                        Content::Dynamic { field, expression } => expression.evaluate(scope, field)?,
                    };
                    map.insert(Arc::clone(&member.key), value);
                }
                Ok(Value::from(map))
            }
        }
    }

    pub(super) fn variables(&self, tell: &mut dyn FnMut(&str)) {
        match self {
            Self::Constant(_) => {}
            Self::Array(nodes) => nodes.iter().for_each(|node| node.variables(tell)),
            Self::Object(members) => {
                for member in members {
                    match &member.value {
                        Content::Node(node) => node.variables(tell),
                        Content::Dynamic { expression, .. } => expression.variables(tell),
                    }
                }
            }
        }
    }
}

fn member(key: &Arc<str>, value: &Value, problems: &mut Vec<Problem>) -> Option<Member> {
    let Some(plain) = key.strip_suffix(".$") else {
        let node = under(key, problems, |problems| PayloadNode::compile(value, problems));
        return Some(Member { key: Arc::clone(key), value: Content::Node(node) });
    };
    let expression = value.as_str().map(PathExpression::parse);
    if let Some(Ok(expression)) = expression {
        return Some(Member {
            key: plain.into(),
            value: Content::Dynamic { field: Arc::clone(key), expression },
        });
    }
    // AWS reports the object that contains the field, not the field.
    problems.push(Problem::here(format!(
        "The value for the field '{key}' must be a valid JSONPath or a valid intrinsic function call"
    )));
    None
}

/// Runs `compile` and prefixes the locations of its problems with `step`.
pub(super) fn under<T>(
    step: &str,
    problems: &mut Vec<Problem>,
    compile: impl FnOnce(&mut Vec<Problem>) -> T,
) -> T {
    let mut inner = Vec::new();
    let compiled = compile(&mut inner);
    problems.extend(inner.into_iter().map(|problem| problem.under(step)));
    compiled
}

/// Like [`under`], for an element of an array.
pub(super) fn within<T>(
    at: usize,
    problems: &mut Vec<Problem>,
    compile: impl FnOnce(&mut Vec<Problem>) -> T,
) -> T {
    let mut inner = Vec::new();
    let compiled = compile(&mut inner);
    problems.extend(inner.into_iter().map(|problem| problem.within(at)));
    compiled
}
