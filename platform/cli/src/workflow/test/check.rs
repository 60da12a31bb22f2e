//! Compares the expected with the actual result.

use serde::Serialize;
use serde_json::Value;

use super::file::Expect;
use super::run::CaseResult;

/// A difference between the expected and the actual result.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Difference {
    /// The field, such as `status`, `output.total`, `retries.Charge`.
    pub(super) what: String,
    pub(super) expected: Value,
    pub(super) got: Value,
}

/// All differences, in the order of the expectation.
pub(super) fn compare(expect: &Expect, ran: &CaseResult) -> Vec<Difference> {
    let mut found = Vec::new();
    if expect.nothing {
        return found;
    }
    let mut same = |what: &str, expected: Value, got: Value| {
        if expected != got {
            found.push(Difference { what: what.to_owned(), expected, got });
        }
    };
    let status = expect.status.as_deref().or(expect.error.is_none().then_some("SUCCEEDED"));
    if let Some(status) = status {
        same("status", status.into(), ran.status.as_str().into());
    }
    if let Some(error) = &expect.error {
        same("error", error.as_str().into(), ran.error.as_deref().into());
    }
    if let Some(cause) = &expect.cause {
        same("cause", cause.as_str().into(), ran.cause.as_deref().into());
    }
    if let Some(part) = &expect.cause_includes
        && !ran.cause.as_deref().is_some_and(|cause| cause.contains(part))
    {
        same("causeIncludes", part.as_str().into(), ran.cause.as_deref().into());
    }
    if let Some(path) = &expect.path {
        same("path", path.clone().into(), ran.path.clone().into());
    }
    for (state, retries) in &expect.retries {
        same(
            &format!("retries.{state}"),
            (*retries).into(),
            ran.retries.get(state).copied().unwrap_or(0).into(),
        );
    }
    for (state, calls) in &expect.calls {
        let came = ran.calls.get(state).map_or(0, Vec::len);
        same(&format!("calls.{state}"), (*calls).into(), came.into());
    }
    if let Some(elapsed) = expect.elapsed
        && elapsed.0 != ran.elapsed
    {
        same("elapsed", seconds(elapsed.0).into(), seconds(ran.elapsed).into());
    }
    let output = ran.output.as_ref().unwrap_or(&Value::Null);
    if let Some(expected) = &expect.output {
        differ("output", expected, output, false, &mut found);
    }
    if let Some(expected) = &expect.output_includes {
        differ("output", expected, output, true, &mut found);
    }
    for (state, expected) in &expect.arguments {
        let last = ran.calls.get(state).and_then(|calls| calls.last()).unwrap_or(&Value::Null);
        differ(&format!("arguments.{state}"), expected, last, true, &mut found);
    }
    found
}

/// A duration in its written form.
pub(super) fn seconds(time: std::time::Duration) -> String {
    let whole = time.as_secs();
    let (days, hours, minutes, rest) = (whole / 86_400, whole / 3_600 % 24, whole / 60 % 60, whole % 60);
    let mut parts = Vec::new();
    for (number, unit) in [(days, "d"), (hours, "h"), (minutes, "m")] {
        if number > 0 {
            parts.push(format!("{number}{unit}"));
        }
    }
    match time.subsec_millis() {
        0 if rest == 0 && !parts.is_empty() => {}
        0 => parts.push(format!("{rest}s")),
        millis => parts
            .push(format!("{}s", f64::from(millis) / 1_000.0 + f64::from(u32::try_from(rest).unwrap_or(0)))),
    }
    parts.join(" ")
}

/// Whether `whole` contains `part`. Objects may have more members; arrays must have the same items.
pub(super) fn includes(whole: &Value, part: &Value) -> bool {
    let mut found = Vec::new();
    differ("", part, whole, true, &mut found);
    found.is_empty()
}

/// Adds each difference of two values with its path.
fn differ(place: &str, expected: &Value, got: &Value, in_part: bool, found: &mut Vec<Difference>) {
    match (expected, got) {
        (Value::Object(wanted), Value::Object(there)) => {
            for (name, expected) in wanted {
                let place = format!("{place}.{name}");
                match there.get(name) {
                    Some(got) => differ(&place, expected, got, in_part, found),
                    None => {
                        found.push(Difference { what: place, expected: expected.clone(), got: Value::Null })
                    }
                }
            }
            for (name, got) in there.iter().filter(|(name, _)| !in_part && !wanted.contains_key(*name)) {
                found.push(Difference {
                    what: format!("{place}.{name}"),
                    expected: Value::Null,
                    got: got.clone(),
                });
            }
        }
        (Value::Array(wanted), Value::Array(there)) if wanted.len() == there.len() => {
            for (at, (expected, got)) in wanted.iter().zip(there).enumerate() {
                differ(&format!("{place}[{at}]"), expected, got, in_part, found);
            }
        }
        (Value::Number(wanted), Value::Number(there)) if wanted.as_f64() == there.as_f64() => {}
        (expected, got) if expected == got => {}
        _ => found.push(Difference { what: place.to_owned(), expected: expected.clone(), got: got.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    #[test]
    fn values_differ_where_they_differ() {
        let places = |expected: Value, got: Value, in_part: bool| {
            let mut found = Vec::new();
            differ("output", &expected, &got, in_part, &mut found);
            found.into_iter().map(|one| one.what).collect::<Vec<_>>()
        };
        let got = json!({"a": 1.0, "b": [1, {"c": 2}], "d": null});
        assert!(places(json!({"a": 1, "b": [1, {"c": 2}], "d": null}), got.clone(), false).is_empty());
        assert!(places(json!({"b": [1, {}]}), got.clone(), true).is_empty());
        assert_eq!(
            places(json!({"b": [1, {"c": 3}]}), got.clone(), false),
            ["output.b[1].c", "output.a", "output.d"]
        );
        assert_eq!(places(json!({"b": [1]}), got.clone(), true), ["output.b"]);
        assert_eq!(places(json!({"e": null}), got, true), ["output.e"]);
    }

    #[test]
    fn success_is_expected_unless_an_error_is() {
        let ran = CaseResult { status: "FAILED".into(), error: Some("E".into()), ..CaseResult::default() };
        assert_eq!(compare(&Expect::default(), &ran)[0].what, "status");
        assert!(compare(&Expect { error: Some("E".into()), ..Expect::default() }, &ran).is_empty());
        assert!(compare(&Expect::nothing(), &ran).is_empty());
    }

    #[test]
    fn spans_read_as_they_are_written() {
        for (millis, text) in
            [(0, "0s"), (7_000, "7s"), (7_207_000, "2h 7s"), (86_400_000, "1d"), (1_500, "1.5s")]
        {
            assert_eq!(seconds(Duration::from_millis(millis)), text);
        }
    }
}
