//! Reference paths consist of names and indexes only. `ResultPath` writes to one.

use std::sync::Arc;

use super::{Path, PathError, PathSegment, Root};
use crate::dataflow::EvaluationScope;
use crate::error::{Problem, StateError, names};
use crate::value::{Map, Value};

/// A path that can be written to: `$`, `.name`, `['name']`, `[0]`.
#[derive(Clone, Debug)]
pub struct ReferencePath {
    path: Path,
}

impl ReferencePath {
    /// Compiles a reference path.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let path = Path::parse(text)?;
        let simple = path.steps.iter().all(|step| match step {
            PathSegment::Property(_) => true,
            PathSegment::Index(index) => *index >= 0,
            _ => false,
        });
        if simple { Ok(Self { path }) } else { Err(Problem::here("Value is not a Reference Path")) }
    }

    /// The path as written.
    pub fn source(&self) -> &str {
        self.path.source()
    }

    /// The same path, for reading.
    pub fn as_path(&self) -> &Path {
        &self.path
    }

    /// True for `$` itself.
    pub fn is_root(&self) -> bool {
        self.path.is_root() && self.path.root == Root::Input
    }

    /// Calls `tell` with the variable at which the path starts, if any.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        self.path.variables(tell);
    }

    /// The value of the path.
    pub fn get(&self, scope: &EvaluationScope<'_>) -> Result<Value, PathError> {
        self.path.evaluate(scope)
    }

    /// Returns a copy of `target` with `value` at this path: missing names are created, a value that is not an object
    /// is replaced by one where a name follows, and an index must exist.
    ///
    /// # Errors
    /// `States.ReferencePathConflict` if an index does not exist.
    pub fn set(&self, target: &Value, value: Value) -> Result<Value, StateError> {
        place(target, &self.path.steps, value).ok_or_else(|| {
            StateError::new(
                names::REFERENCE_PATH_CONFLICT,
                format!("Unable to apply ReferencePath {} to input {}", self.path.source, target.to_text()),
            )
        })
    }
}

fn place(target: &Value, steps: &[PathSegment], value: Value) -> Option<Value> {
    let Some((step, rest)) = steps.split_first() else { return Some(value) };
    match (step, target) {
        (PathSegment::Property(name), Value::Object(map)) => {
            let inner = place(map.get(name).unwrap_or(&Value::Null), rest, value)?;
            let mut map = Map::clone(map);
            map.insert(Arc::clone(name), inner);
            Some(Value::from(map))
        }
        // A null is replaced by an object, like a missing name.
        (PathSegment::Property(name), Value::Null) => {
            let mut map = Map::new();
            map.insert(Arc::clone(name), place(&Value::Null, rest, value)?);
            Some(Value::from(map))
        }
        (PathSegment::Index(index), Value::Array(items)) => {
            let at = usize::try_from(*index).ok().filter(|at| *at < items.len())?;
            let mut items = Vec::clone(items);
            items[at] = place(&items[at], rest, value)?;
            Some(Value::from(items))
        }
        _ => None,
    }
}
