//! Templates of JSONata states: any JSON with `{% … %}` strings.

use std::sync::Arc;

use super::payload::{under, within};
use crate::dataflow::EvaluationScope;
use crate::error::{Problem, StateError};
use crate::jsonata::{Available, Delimited, Expression, delimited};
use crate::value::{Map, Value};

#[derive(Clone, Debug)]
pub(super) enum JsonataNode {
    Constant(Value),
    Expression(Expression),
    Object(Vec<(Arc<str>, JsonataNode)>),
    Array(Vec<JsonataNode>),
}

impl JsonataNode {
    pub(super) fn compile(value: &Value, there: Available, problems: &mut Vec<Problem>) -> Self {
        match value {
            Value::String(text) => match delimited(text) {
                Delimited::No => Self::Constant(value.clone()),
                Delimited::Invalid(problem) => {
                    problems.push(problem);
                    Self::Constant(value.clone())
                }
                Delimited::Expression(source) => match Expression::compile_for(source, there) {
                    Ok(expression) => Self::Expression(expression),
                    Err(problem) => {
                        problems.push(problem);
                        Self::Constant(value.clone())
                    }
                },
            },
            Value::Object(map) => {
                let members: Vec<(Arc<str>, Self)> = map
                    .iter()
                    .map(|(key, value)| {
                        (
                            Arc::clone(key),
                            under(key, problems, |problems| Self::compile(value, there, problems)),
                        )
                    })
                    .collect();
                let is_constant = members.iter().all(|(_, node)| matches!(node, Self::Constant(_)));
                if is_constant { Self::Constant(value.clone()) } else { Self::Object(members) }
            }
            Value::Array(items) => {
                let nodes: Vec<Self> = items
                    .iter()
                    .enumerate()
                    .map(|(at, item)| within(at, problems, |problems| Self::compile(item, there, problems)))
                    .collect();
                let is_constant = nodes.iter().all(|node| matches!(node, Self::Constant(_)));
                if is_constant { Self::Constant(value.clone()) } else { Self::Array(nodes) }
            }
            scalar => Self::Constant(scalar.clone()),
        }
    }

    /// `field` is the path of this node, such as `Output/items[0]/name`.
    pub(super) fn evaluate(&self, scope: &EvaluationScope<'_>, field: &str) -> Result<Value, StateError> {
        match self {
            Self::Constant(value) => Ok(value.clone()),
            Self::Expression(expression) => expression.evaluate(scope, field),
            Self::Object(members) => {
                let mut map = Map::with_capacity(members.len());
                for (key, node) in members {
                    let value = match node {
                        Self::Constant(value) => value.clone(),
                        node => node.evaluate(scope, &format!("{field}/{key}"))?,
                    };
                    map.insert(Arc::clone(key), value);
                }
                Ok(Value::from(map))
            }
            Self::Array(nodes) => nodes
                .iter()
                .enumerate()
                .map(|(at, node)| node.evaluate(scope, &format!("{field}[{at}]")))
                .collect(),
        }
    }

    pub(super) fn expression(&self) -> Option<&Expression> {
        match self {
            Self::Expression(expression) => Some(expression),
            _ => None,
        }
    }

    pub(super) fn is_light(&self) -> bool {
        match self {
            Self::Constant(_) => true,
            Self::Expression(expression) => expression.is_light(),
            Self::Object(members) => members.iter().all(|(_, node)| node.is_light()),
            Self::Array(nodes) => nodes.iter().all(Self::is_light),
        }
    }

    pub(super) fn variables(&self, tell: &mut dyn FnMut(&str)) {
        match self {
            Self::Constant(_) => {}
            Self::Expression(expression) => expression.variables(tell),
            Self::Object(members) => members.iter().for_each(|(_, node)| node.variables(tell)),
            Self::Array(nodes) => nodes.iter().for_each(|node| node.variables(tell)),
        }
    }
}
