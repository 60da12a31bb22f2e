//! The fields that all states share, and the simple states: Pass, Wait, Succeed, Fail, Parallel.

use std::sync::Arc;

use crate::definition::{
    DataFlow, FailState, ParallelState, PassState, PathField, QueryLanguage, ResultPath, SECONDS_MAX, State,
    StateKind, Text, TimestampField, Transition, WaitState,
};
use crate::path::Path;
use crate::value::Value;

use super::allowed;
use super::fields::{EMPTY, Fields, list};
use super::flow::{Compiler, FlowContext, StateCursor};

impl Compiler {
    /// Compiles one state; `None` if its type is missing or invalid. Other problems are only reported.
    pub(super) fn state(
        &mut self,
        value: &Value,
        at: &str,
        name: Arc<str>,
        here: StateCursor,
    ) -> Option<State> {
        let fields = Fields::of(value, at, self.machine_language, &mut self.report)?;
        let language = self.language(&fields);
        let fields = Fields { language, ..fields };
        fields.required("Type", &mut self.report)?;
        let kind = fields.word("Type", allowed::TYPES, &mut self.report)?;
        fields.only_of_state(kind, &mut self.report);
        let comment = fields.string("Comment", &mut self.report);
        let data = match kind {
            "Fail" => without_data(language),
            "Map" => fields.data_flow(&mut self.report).without_parameters(),
            _ => fields.data_flow(&mut self.report),
        };
        let assign = match kind {
            "Fail" | "Succeed" => None,
            _ => fields.assign(&mut self.report),
        };
        let next = match kind {
            "Choice" => Transition::End,
            "Succeed" | "Fail" => self.ends(here),
            _ => self.onward(&fields, here),
        };
        let works = matches!(kind, "Task" | "Parallel" | "Map");
        let (retry, catch) = match works {
            true => (self.retry(&fields), self.catch(&fields, here)),
            false => (Vec::new(), Vec::new()),
        };
        let kind = match kind {
            "Task" => StateKind::Task(self.task(&fields)?),
            "Pass" => StateKind::Pass(PassState { result: fields.get("Result").cloned() }),
            "Choice" => StateKind::Choice(self.choice(&fields, here)?),
            "Wait" => StateKind::Wait(self.wait(&fields)?),
            "Fail" => StateKind::Fail(self.fail(&fields)),
            "Parallel" => StateKind::Parallel(self.parallel(&fields, here)?),
            "Map" => StateKind::Map(Box::new(self.map(&fields, here)?)),
            _ => StateKind::Succeed,
        };
        let (id, flow) = (here.state, here.flow);
        Some(State {
            id,
            name,
            comment,
            flow,
            query_language: language,
            data,
            assign,
            retry,
            catch,
            next,
            kind,
        })
    }

    /// The state's own language, or else the machine's; that of an enclosing Map or Parallel does not apply.
    fn language(&mut self, fields: &Fields<'_>) -> QueryLanguage {
        let own = match fields.word("QueryLanguage", &["JSONPath", "JSONata"], &mut self.report) {
            Some("JSONata") => Some(QueryLanguage::Jsonata),
            Some(_) => Some(QueryLanguage::JsonPath),
            None => None,
        };
        let barred = self.machine_language == QueryLanguage::Jsonata && !self.distributed;
        if own == Some(QueryLanguage::JsonPath) && barred {
            let message = "'QueryLanguage' can not be 'JSONPath' if set to 'JSONata' for whole state machine";
            self.report.schema(&fields.at, message);
        }
        own.unwrap_or(self.machine_language)
    }

    fn wait(&mut self, fields: &Fields<'_>) -> Option<WaitState> {
        let report = &mut self.report;
        let names: &[&str] = match fields.jsonata() {
            true => &["Seconds", "Timestamp"],
            false => &["SecondsPath", "Seconds", "TimestampPath", "Timestamp"],
        };
        match fields.one_of(names, report)? {
            "Seconds" | "SecondsPath" => {
                fields.quantity("Seconds", 0, SECONDS_MAX, report).map(WaitState::Seconds)
            }
            "TimestampPath" => {
                let text = fields.string("TimestampPath", report)?;
                fields.reference_path("TimestampPath", report)?;
                Path::parse(&text).ok().map(TimestampField::Path).map(WaitState::Timestamp)
            }
            _ => self.timestamp(fields).map(WaitState::Timestamp),
        }
    }

    fn timestamp(&mut self, fields: &Fields<'_>) -> Option<TimestampField> {
        let text = fields.string("Timestamp", &mut self.report)?;
        if fields.jsonata() && text.starts_with("{%") {
            return fields.expression("Timestamp", &mut self.report).map(TimestampField::Expression);
        }
        let instant = rfc3339(&text);
        if instant.is_none() {
            self.report.schema(&fields.place("Timestamp"), "String does not match RFC3339 timestamp");
        }
        Some(TimestampField::Value(instant?, text))
    }

    fn fail(&mut self, fields: &Fields<'_>) -> FailState {
        FailState { error: self.text(fields, "Error"), cause: self.text(fields, "Cause") }
    }

    /// `name` as a literal string or a JSONata expression, or `<name>Path`.
    fn text(&mut self, fields: &Fields<'_>, name: &str) -> Option<Text> {
        let report = &mut self.report;
        if fields.jsonata() {
            let text = fields.string(name, report)?;
            let marked = text.starts_with("{%") || text.ends_with("%}");
            return match marked {
                true => fields.expression(name, report).map(Text::Expression),
                false => Some(Text::Literal(text)),
            };
        }
        let path_name = format!("{name}Path");
        if !fields.exclusive(&[name, &path_name], report) {
            return None;
        }
        match fields.has(&path_name) {
            true => fields.path_or_intrinsic(&path_name, report),
            false => fields.string(name, report).map(Text::Literal),
        }
    }

    fn parallel(&mut self, fields: &Fields<'_>, here: StateCursor) -> Option<ParallelState> {
        fields.required("Branches", &mut self.report)?;
        let branches = fields.array("Branches", &mut self.report)?;
        if branches.is_empty() {
            self.report.schema(&fields.place("Branches"), EMPTY);
        }
        let mut flows = Vec::new();
        for (position, branch) in branches.iter().enumerate() {
            let at = format!("{}[{position}]", fields.place("Branches"));
            flows.extend(self.flow(branch, FlowContext { at, parent: Some(here.state), more: &[] }));
        }
        (flows.len() == branches.len()).then_some(ParallelState { branches: flows })
    }

    /// Reports fields that exclude each other.
    pub(super) fn conflict(&mut self, fields: &Fields<'_>, names: &[&str]) {
        let message = format!("There should only be one of the following fields: {}", list(names));
        self.report.schema(&fields.at, message);
    }
}

/// A Fail state has no output.
fn without_data(language: QueryLanguage) -> DataFlow {
    match language {
        QueryLanguage::Jsonata => DataFlow::Jsonata { arguments: None, output: None },
        QueryLanguage::JsonPath => DataFlow::JsonPath {
            input_path: PathField::Whole,
            parameters: None,
            result_selector: None,
            result_path: ResultPath::Whole,
            output_path: PathField::Whole,
        },
    }
}

/// Parses an instant of RFC 3339 as the States Language restricts it: `T` and `Z` in upper case, a date, and a time
/// with an offset.
pub(crate) fn rfc3339(text: &str) -> Option<jiff::Timestamp> {
    let bytes = text.as_bytes();
    let digits = |range: std::ops::Range<usize>| {
        bytes.get(range).is_some_and(|digits| digits.iter().all(u8::is_ascii_digit))
    };
    let at = |position: usize| bytes.get(position).copied();
    let date = digits(0..4) && at(4) == Some(b'-') && digits(5..7) && at(7) == Some(b'-') && digits(8..10);
    let time = at(10) == Some(b'T')
        && digits(11..13)
        && at(13) == Some(b':')
        && digits(14..16)
        && at(16) == Some(b':')
        && digits(17..19);
    if !date || !time {
        return None;
    }
    let rest = &text[19..];
    let offset = match rest.strip_prefix('.') {
        Some(fraction) => {
            let offset = fraction.trim_start_matches(|digit: char| digit.is_ascii_digit());
            (offset.len() < fraction.len()).then_some(offset)?
        }
        None => rest,
    };
    let numeric = offset.len() == 6
        && offset.starts_with(['+', '-'])
        && offset.as_bytes()[3] == b':'
        && offset.bytes().enumerate().all(|(i, byte)| i == 0 || i == 3 || byte.is_ascii_digit());
    if offset != "Z" && !numeric {
        return None;
    }
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps() {
        for good in [
            "2016-03-14T01:59:00Z",
            "2016-03-14T01:59:00.123456789Z",
            "2016-03-14T01:59:00+02:00",
            "2016-12-31T23:59:59-11:30",
        ] {
            assert!(rfc3339(good).is_some(), "{good}");
        }
        for wrong in [
            "05-12-2016T21:29:29Z",
            "2016-13-05T21:29:29Z",
            "2016-03-14 01:59:00Z",
            "2016-03-14t01:59:00Z",
            "2016-03-14T01:59:00z",
            "2016-03-14T01:59:00",
            "2016-03-14T01:59:00.Z",
            "2016-03-14T01:59Z",
            "2016-03-14T01:59:00+0200",
            "2016-03-14T01:59:00Z ",
            "20é6-03-14T01:59:00Z",
            "",
        ] {
            assert!(rfc3339(wrong).is_none(), "{wrong}");
        }
    }
}
