//! Reads the fields of one JSON object of a definition by type: a field of the wrong type becomes a diagnostic at its
//! path, and reading continues.

use std::sync::Arc;

use crate::definition::{Quantity, QueryLanguage, Text};
use crate::jsonata::{Available, Expression};
use crate::path::{Path, ReferencePath, Root};
use crate::template::Template;
use crate::validate::ProblemReport;
use crate::value::{Map, Number, Value};

use super::expressions;

/// One object, and its path (`/States/Name`).
pub(crate) struct Fields<'a> {
    pub(crate) map: &'a Map,
    pub(crate) at: String,
    pub(crate) language: QueryLanguage,
    /// Whether this is an entry of `Catch`, where `$states.errorOutput` exists.
    pub(crate) in_catch: bool,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map, at: impl Into<String>, language: QueryLanguage) -> Fields<'a> {
        Fields { map, at: at.into(), language, in_catch: false }
    }

    /// `value` as an object; reports a diagnostic otherwise.
    pub(crate) fn of(
        value: &'a Value,
        at: &str,
        language: QueryLanguage,
        report: &mut ProblemReport,
    ) -> Option<Fields<'a>> {
        match value.as_object() {
            Some(map) => Some(Fields::new(map, at, language)),
            None => {
                report.schema(at, "Expected value of type Object");
                None
            }
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    pub(crate) fn names(&self) -> impl ExactSizeIterator<Item = &'a Arc<str>> + use<'a> {
        self.map.keys()
    }

    pub(crate) fn place(&self, name: &str) -> String {
        format!("{}/{name}", self.at)
    }

    pub(crate) fn jsonata(&self) -> bool {
        self.language == QueryLanguage::Jsonata
    }

    /// The field; reports a diagnostic if it is missing.
    pub(crate) fn required(&self, name: &str, report: &mut ProblemReport) -> Option<&'a Value> {
        self.require(&[name], report);
        self.get(name)
    }

    /// Reports one diagnostic for all missing fields.
    pub(crate) fn require(&self, names: &[&str], report: &mut ProblemReport) {
        let missing: Vec<&str> = names.iter().copied().filter(|name| !self.has(name)).collect();
        if !missing.is_empty() {
            report.schema(&self.at, format!("These fields are required: {}", list(&missing)));
        }
    }

    /// Checks that at most one of the fields exists; returns whether that is true.
    pub(crate) fn exclusive(&self, names: &[&str], report: &mut ProblemReport) -> bool {
        let sole = names.iter().filter(|name| self.has(name)).count() <= 1;
        if !sole {
            report.schema(
                &self.at,
                format!("There should only be one of the following fields: {}", list(names)),
            );
        }
        sole
    }

    /// Checks that exactly one of the fields exists, and returns it.
    pub(crate) fn one_of<'n>(&self, names: &[&'n str], report: &mut ProblemReport) -> Option<&'n str> {
        let found = names.iter().find(|name| self.has(name)).copied();
        if found.is_none() {
            report.schema(&self.at, neither(names));
        }
        self.exclusive(names, report).then_some(found).flatten()
    }

    pub(crate) fn object(&self, name: &str, report: &mut ProblemReport) -> Option<Fields<'a>> {
        Fields::of(self.get(name)?, &self.place(name), self.language, report)
    }

    pub(crate) fn array(&self, name: &str, report: &mut ProblemReport) -> Option<&'a [Value]> {
        let value = self.get(name)?;
        if value.as_array().is_none() {
            report.schema(&self.place(name), "Expected value of type Array");
        }
        value.as_array()
    }

    pub(crate) fn string(&self, name: &str, report: &mut ProblemReport) -> Option<Arc<str>> {
        match self.get(name)? {
            Value::String(text) => Some(text.clone()),
            _ => {
                report.schema(&self.place(name), "Expected value of type String");
                None
            }
        }
    }

    pub(crate) fn bool(&self, name: &str, report: &mut ProblemReport) -> Option<bool> {
        let value = self.get(name)?;
        if value.as_bool().is_none() {
            report.schema(&self.place(name), "Expected value of type Boolean");
        }
        value.as_bool()
    }

    /// One of the given words, as written.
    pub(crate) fn word(
        &self,
        name: &str,
        words: &[&'static str],
        report: &mut ProblemReport,
    ) -> Option<&'static str> {
        let text = self.string(name, report)?;
        let found = words.iter().find(|word| **word == &*text).copied();
        if found.is_none() {
            let message = match name {
                "Type" => format!("The field '{name}' should have one of these values: {}", list(words)),
                _ => format!("Value should be one of the following: {}", list(words)),
            };
            report.schema(&self.place(name), message);
        }
        found
    }

    /// An integer between `min` and `max`.
    pub(crate) fn integer(&self, name: &str, min: u64, max: u64, report: &mut ProblemReport) -> Option<u64> {
        let value = self.get(name)?;
        let whole = value.as_number().and_then(Number::to_i64);
        let Some(whole) = whole else {
            report.schema(&self.place(name), "Expected value of type Integer");
            return None;
        };
        match u64::try_from(whole) {
            Ok(whole) if whole > max => {
                report.schema(&self.place(name), format!("Maximum value is {max}"));
                None
            }
            Ok(whole) if whole >= min => Some(whole),
            _ => {
                report.schema(&self.place(name), format!("Minimum value is {min}"));
                None
            }
        }
    }

    /// A number not less than `min` (and not more than `max`).
    pub(crate) fn number(&self, name: &str, min: f64, max: f64, report: &mut ProblemReport) -> Option<f64> {
        let value = self.get(name)?;
        let Some(number) = value.as_f64() else {
            report.schema(&self.place(name), "Expected value of type Number");
            return None;
        };
        if (min..=max).contains(&number) {
            return Some(number);
        }
        // The bounds of a fraction have Java's format of doubles: 100.0 (floci-io/floci#3733).
        let message = if number > max {
            format!("Maximum value is {max:?}")
        } else {
            format!("Minimum value is {min:?}")
        };
        report.schema(&self.place(name), message);
        None
    }

    /// A path or an intrinsic call, as in `ErrorPath`.
    pub(crate) fn path_or_intrinsic(&self, name: &str, report: &mut ProblemReport) -> Option<Text> {
        let text = self.string(name, report)?;
        match Template::compile_text(&text) {
            Ok(template) => Some(Text::Template(template)),
            Err(_) => {
                report.schema(&self.place(name), NOT_A_PATH);
                None
            }
        }
    }

    /// A path to a single location: no wildcards, slices or filters.
    pub(crate) fn reference_path(&self, name: &str, report: &mut ProblemReport) -> Option<ReferencePath> {
        let text = self.string(name, report)?;
        match ReferencePath::parse(&text) {
            Ok(path) => Some(path),
            Err(error) => {
                report.schema(&self.place(name), not_a_reference(&text, &error.message));
                None
            }
        }
    }

    /// `name` as a literal integer or a JSONata expression, or `<name>Path`.
    pub(crate) fn quantity(
        &self,
        name: &str,
        min: u64,
        max: u64,
        report: &mut ProblemReport,
    ) -> Option<Quantity<u64>> {
        self.any_quantity(name, report, |fields, report| fields.integer(name, min, max, report))
    }

    /// `name` as a literal number or a JSONata expression, or `<name>Path`.
    pub(crate) fn fraction(
        &self,
        name: &str,
        min: f64,
        max: f64,
        report: &mut ProblemReport,
    ) -> Option<Quantity<f64>> {
        self.any_quantity(name, report, |fields, report| fields.number(name, min, max, report))
    }

    fn any_quantity<T>(
        &self,
        name: &str,
        report: &mut ProblemReport,
        literal: impl FnOnce(&Self, &mut ProblemReport) -> Option<T>,
    ) -> Option<Quantity<T>> {
        let path_name = format!("{name}Path");
        if !self.jsonata() && !self.exclusive(&[name, &path_name], report) {
            return None;
        }
        if !self.jsonata() && self.has(&path_name) {
            let text = self.string(&path_name, report)?;
            let path = self.reference_path(&path_name, report)?;
            // A Map's numbers cannot be read from the context object (measured: floci-io/floci#3733).
            let serves_all = matches!(name, "Seconds" | "TimeoutSeconds" | "HeartbeatSeconds");
            if *path.as_path().root() == Root::Context && !serves_all {
                report.schema(&self.place(&path_name), NOT_IN_THE_INPUT);
                return None;
            }
            return Path::parse(&text).ok().map(Quantity::Path);
        }
        match self.get(name)? {
            Value::String(text) if self.jsonata() && (text.starts_with("{%") || text.ends_with("%}")) => {
                self.expression(name, report).map(Quantity::Expression)
            }
            _ => literal(self, report).map(Quantity::Value),
        }
    }

    /// The optional members of `$states` that an expression in the field may read: the result in `Output` and `Assign`
    /// of states that have one, the error in those of a catcher.
    pub(crate) fn available(&self, name: &str) -> Available {
        let late = matches!(name, "Output" | "Assign");
        let kind = self.get("Type").and_then(Value::as_str);
        Available {
            result: late && matches!(kind, Some("Task" | "Parallel" | "Map")),
            error_output: late && self.in_catch,
        }
    }

    /// A string that is a JSONata expression.
    pub(crate) fn expression(&self, name: &str, report: &mut ProblemReport) -> Option<Expression> {
        let text = self.string(name, report)?;
        match expressions::whole(&text) {
            Ok(Some(body)) => expressions::compile(body, self.available(name), &self.place(name), report),
            Ok(None) => {
                report.schema(&self.place(name), expressions::UNMARKED);
                None
            }
            Err(message) => {
                report.schema(&self.place(name), message);
                None
            }
        }
    }
}

/// AWS's message about an empty array or object.
pub(crate) const EMPTY: &str = "Value cannot be empty";

/// AWS's message about a path that must refer to the state's input but does not.
pub(crate) const NOT_IN_THE_INPUT: &str =
    "Value is not a Reference Path: Reference path didn't start with '$.' or '$['";

/// AWS's message about a text that is not a path.
pub(crate) const NOT_A_PATH: &str = "Value must be a valid JSONPath.";

/// AWS's message about an object that has none of the alternatively required fields.
pub(crate) fn neither(names: &[&str]) -> String {
    format!("This object should have only one of the following fields: {}", list(names))
}

/// AWS's message about a path that does not refer to a single location.
pub(crate) fn not_a_reference(text: &str, error: &str) -> String {
    match text.starts_with('$') {
        true => format!("Value is not a Reference Path: {error}"),
        false => NOT_A_PATH.to_string(),
    }
}

/// AWS's format of a list of names: `[A, B]`.
pub(crate) fn list(names: &[&str]) -> String {
    format!("[{}]", names.join(", "))
}
