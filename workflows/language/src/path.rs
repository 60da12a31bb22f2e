//! AWS's dialect of JSONPath, compiled once.
//!
//! The dialect is Jayway's, not RFC 9535's. A *definite* path (names and single indexes) yields one value, and fails if
//! there is none; any other path yields an array, which may be empty. A path starts at the input (`$`), at the context
//! object (`$$`) or at a variable (`$name`).
//!
//! [`Path`] reads, [`ReferencePath`] reads and writes (`ResultPath`). [`parse`](mod@parse) is the grammar,
//! [`filter`](mod@filter) the part in `[?(…)]`, [`evaluate`](mod@evaluate) the evaluation.

pub(crate) mod evaluate;
mod filter;
mod function;
pub(crate) mod parse;
mod reference;

use std::fmt;
use std::sync::Arc;

pub use reference::ReferencePath;

use crate::dataflow::EvaluationScope;
use crate::error::Problem;
use crate::value::Value;
use filter::Filter;
use function::PathFunction;

/// The maximum length of a path in characters, far above that of handwritten paths.
pub const PATH_CHARS_MAX: usize = 8192;

/// A compiled path.
#[derive(Clone, Debug)]
pub struct Path {
    source: Arc<str>,
    root: Root,
    steps: Arc<[PathSegment]>,
    definite: bool,
}

/// The start of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Root {
    /// `$`
    Input,
    /// `$$`
    Context,
    /// `$name`
    Variable(Arc<str>),
}

#[derive(Clone, Debug)]
pub(crate) enum PathSegment {
    Property(Arc<str>),
    /// `['a','b']`
    Properties(Vec<Arc<str>>),
    Wildcard,
    Index(i64),
    Indexes(Vec<i64>),
    Slice {
        from: Option<i64>,
        to: Option<i64>,
    },
    Filter(Filter),
    /// `..` and the step that is applied to every container.
    Descend(Box<PathSegment>),
    /// `.length()` and other functions.
    Function(PathFunction),
}

/// A path without a result, with Jayway's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathError {
    /// The path as written.
    pub path: Arc<str>,
    /// The message, such as `No results for path: $['a']`.
    pub detail: String,
}

impl fmt::Display for PathError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Invalid path '{}' : {}", self.path, self.detail)
    }
}

impl std::error::Error for PathError {}

impl Path {
    /// Compiles a path.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        parse::path(text)
    }

    /// The path as written.
    pub fn source(&self) -> &str {
        &self.source
    }

    pub fn root(&self) -> &Root {
        &self.root
    }

    /// True if the path has at most one result; otherwise its value is an array.
    pub fn is_definite(&self) -> bool {
        self.definite
    }

    /// True for `$`, `$$` and `$name` themselves.
    pub fn is_root(&self) -> bool {
        self.steps.is_empty()
    }

    /// Calls `tell` with the variable at which the path starts, if any.
    pub fn variables(&self, tell: &mut dyn FnMut(&str)) {
        if let Root::Variable(name) = &self.root {
            tell(name);
        }
    }

    /// The value of the path.
    ///
    /// # Errors
    /// A definite path has no result, or a variable does not exist.
    pub fn evaluate(&self, scope: &EvaluationScope<'_>) -> Result<Value, PathError> {
        match &self.root {
            Root::Input => self.evaluate_on(scope.input),
            Root::Context => self.evaluate_on(&scope.context.get()),
            Root::Variable(name) => match scope.variables.get(name) {
                Some(value) => self.evaluate_on(value),
                None => Err(self.error(format!("The variable '${name}' is not defined"))),
            },
        }
    }

    /// The root value of the path, as shown in messages: the context object for `$$`, otherwise the input.
    pub(crate) fn searched(&self, scope: &EvaluationScope<'_>) -> String {
        match &self.root {
            Root::Context => scope.context.get().to_text(),
            Root::Input | Root::Variable(_) => scope.input.to_text(),
        }
    }

    /// Whether the path has a result (`IsPresent`). An index past the end of an array has none, although reading it
    /// yields null.
    pub fn is_present(&self, scope: &EvaluationScope<'_>) -> bool {
        let root = match &self.root {
            Root::Input => scope.input.clone(),
            Root::Context => scope.context.get(),
            Root::Variable(name) => match scope.variables.get(name) {
                Some(value) => value.clone(),
                None => return false,
            },
        };
        evaluate::is_present(self, &root)
    }

    /// The value of the path, with `root` as `$`.
    pub fn evaluate_on(&self, root: &Value) -> Result<Value, PathError> {
        evaluate::value(self, root)
    }

    fn error(&self, detail: String) -> PathError {
        PathError { path: Arc::clone(&self.source), detail }
    }
}

/// Jayway's format of a path: `$['a'][0]`.
impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("$")?;
        self.steps.iter().try_for_each(|step| write!(f, "{step}"))
    }
}

impl fmt::Display for PathSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Property(name) => write!(f, "['{name}']"),
            Self::Properties(names) => write!(f, "['{}']", names.join("','")),
            Self::Wildcard => f.write_str("[*]"),
            Self::Index(index) => write!(f, "[{index}]"),
            Self::Indexes(indexes) => {
                let texts: Vec<String> = indexes.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", texts.join(","))
            }
            Self::Slice { from, to } => {
                let bound = |bound: &Option<i64>| bound.map(|at| at.to_string()).unwrap_or_default();
                write!(f, "[{}:{}]", bound(from), bound(to))
            }
            Self::Filter(_) => f.write_str("[?]"),
            Self::Descend(step) => write!(f, "..{step}"),
            Self::Function(function) => write!(f, ".{function}()"),
        }
    }
}

#[cfg(test)]
mod tests;
