//! `Retry` and `Catch`.

use std::sync::Arc;

use crate::definition::{Catcher, Jitter, Retrier, SECONDS_MAX};
use crate::value::Value;

use super::allowed;
use super::fields::{EMPTY, Fields};
use super::flow::{Compiler, StateCursor};

/// The maximum of `MaxDelaySeconds`.
const DELAY_SECONDS_MAX: u64 = 31_622_400;
/// The name that matches every error.
const ALL: &str = "States.ALL";
const NOT_LAST: &str = "States.ALL must appear alone and at end of list";

impl Compiler {
    pub(super) fn retry(&mut self, fields: &Fields<'_>) -> Vec<Retrier> {
        let entries = self.entries(fields, "Retry");
        entries.iter().filter_map(|entry| self.retrier(entry)).collect()
    }

    pub(super) fn catch(&mut self, fields: &Fields<'_>, here: StateCursor) -> Vec<Catcher> {
        let entries = self.entries(fields, "Catch");
        let entries = entries.into_iter().map(|entry| Fields { in_catch: true, ..entry });
        entries.filter_map(|entry| self.catcher(&entry, here)).collect()
    }

    fn entries<'a>(&mut self, fields: &Fields<'a>, name: &str) -> Vec<Fields<'a>> {
        let list = fields.array(name, &mut self.report).unwrap_or_default();
        let mut entries = Vec::new();
        for (position, value) in list.iter().enumerate() {
            let at = format!("{}[{position}]", fields.place(name));
            let Some(entry) = Fields::of(value, &at, fields.language, &mut self.report) else { continue };
            let catches_all = |names: &Value| {
                names.as_array().is_some_and(|all| all.iter().any(|one| one.as_str() == Some(ALL)))
            };
            if position + 1 < list.len() && entry.get("ErrorEquals").is_some_and(catches_all) {
                self.report.schema(&entry.place("ErrorEquals"), NOT_LAST);
            }
            entries.push(entry);
        }
        entries
    }

    fn error_equals(&mut self, entry: &Fields<'_>) -> Option<Vec<Arc<str>>> {
        let at = entry.place("ErrorEquals");
        let list = entry.array("ErrorEquals", &mut self.report)?;
        if list.is_empty() {
            self.report.schema(&at, EMPTY);
        }
        let mut names = Vec::new();
        for (position, name) in list.iter().enumerate() {
            match name {
                Value::String(name) => names.push(name.clone()),
                _ => self.report.schema(&format!("{at}[{position}]"), "Expected value of type String"),
            }
        }
        if names.len() > 1 && names.iter().any(|name| &**name == ALL) {
            self.report.schema(&at, NOT_LAST);
        }
        Some(names)
    }

    fn retrier(&mut self, entry: &Fields<'_>) -> Option<Retrier> {
        entry.only(allowed::RETRIER, &mut self.report);
        entry.require(&["ErrorEquals"], &mut self.report);
        let error_equals = self.error_equals(entry)?;
        let report = &mut self.report;
        let jitter = match entry.word("JitterStrategy", &["NONE", "FULL"], report) {
            Some("FULL") => Jitter::Full,
            _ => Jitter::None,
        };
        Some(Retrier {
            error_equals,
            interval_seconds: entry.integer("IntervalSeconds", 0, SECONDS_MAX, report).unwrap_or(1),
            max_attempts: entry.integer("MaxAttempts", 0, SECONDS_MAX, report).unwrap_or(3),
            backoff_rate: entry.number("BackoffRate", 1.0, f64::MAX, report).unwrap_or(2.0),
            max_delay_seconds: entry.integer("MaxDelaySeconds", 1, DELAY_SECONDS_MAX, report),
            jitter,
            comment: entry.string("Comment", report),
        })
    }

    fn catcher(&mut self, entry: &Fields<'_>, here: StateCursor) -> Option<Catcher> {
        entry.only(allowed::CATCHER, &mut self.report);
        entry.require(&["ErrorEquals", "Next"], &mut self.report);
        let error_equals = self.error_equals(entry);
        let next =
            entry.string("Next", &mut self.report).map(|name| self.leads_to(here, name, entry.place("Next")));
        let report = &mut self.report;
        let result_path = match entry.jsonata() {
            true => crate::definition::ResultPath::Whole,
            false => entry.result_path(report),
        };
        let output = if entry.jsonata() { entry.template("Output", report) } else { None };
        let assign = entry.assign(report);
        let comment = entry.string("Comment", report);
        Some(Catcher { error_equals: error_equals?, next: next?, result_path, assign, output, comment })
    }
}
