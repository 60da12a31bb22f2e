use super::*;
use crate::dataflow::{Ambient, Context, Variables};

fn check(rule: &str, input: &str) -> Result<bool, String> {
    let json = |text: &str| Value::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let rule = ChoiceTest::compile(&json(rule)).unwrap_or_else(|problems| panic!("{rule}: {problems:?}"));
    let (input, context) = (json(input), Value::empty_object());
    let variables = Variables::of([("limit".into(), Value::from(10_i64))].into_iter().collect());
    let ambient = Ambient::new(0, 1);
    let scope = EvaluationScope {
        input: &input,
        result: None,
        error_output: None,
        context: Context::Ready(&context),
        variables: &variables,
        ambient: &ambient,
    };
    rule.matches(&scope).map_err(|error| error.to_string())
}

/// The operator with its argument; `$.v` is the first value and `$.w` the second.
fn test(operator: &str, argument: &str, value: &str, other: &str) -> Result<bool, String> {
    check(
        &format!(r#"{{"Variable":"$.v","{operator}":{argument}}}"#),
        &format!(r#"{{"v":{value},"w":{other}}}"#),
    )
}

#[test]
fn every_comparison() {
    let orders = [
        ("Equals", [false, true, false]),
        ("LessThan", [true, false, false]),
        ("GreaterThan", [false, false, true]),
        ("LessThanEquals", [true, true, false]),
        ("GreaterThanEquals", [false, true, true]),
    ];
    let kinds = [
        ("String", [r#""a""#, r#""b""#, r#""c""#]),
        ("Numeric", ["1", "2.0", "3"]),
        (
            "Timestamp",
            [r#""2016-03-14T01:59:00Z""#, r#""2016-03-14T02:59:00+01:00""#, r#""2017-01-01T00:00:00Z""#],
        ),
    ];
    for (kind, mut values) in kinds {
        if kind == "Timestamp" {
            values[0] = r#""2015-01-01T00:00:00Z""#;
        }
        for (order, expected) in orders {
            for (value, expected) in values.iter().zip(expected) {
                let operator = format!("{kind}{order}");
                assert_eq!(test(&operator, values[1], value, "0"), Ok(expected), "{operator} {value}");
                let operator = format!("{operator}Path");
                assert_eq!(test(&operator, r#""$.w""#, value, values[1]), Ok(expected), "{operator} {value}");
                assert_eq!(
                    test(&operator, r#""$.w""#, "true", values[1]),
                    Ok(false),
                    "{operator} of another type"
                );
            }
        }
    }
    assert_eq!(test("BooleanEquals", "true", "true", "0"), Ok(true));
    assert_eq!(test("BooleanEquals", "true", "\"true\"", "0"), Ok(false));
    assert_eq!(test("BooleanEqualsPath", "\"$.w\"", "false", "false"), Ok(true));
    assert_eq!(test("NumericEqualsPath", "\"$limit\"", "10", "0"), Ok(true));
    assert_eq!(test("StringMatches", r#""log-*.t\\*t""#, r#""log-7.t*t""#, "0"), Ok(true));
    assert_eq!(test("StringMatches", r#""*""#, "5", "0"), Ok(false));
}

#[test]
fn every_test_of_type() {
    for (operator, value) in [
        ("IsNull", "null"),
        ("IsNumeric", "1.5"),
        ("IsString", r#""x""#),
        ("IsBoolean", "false"),
        ("IsTimestamp", r#""2016-03-14T01:59:00Z""#),
        ("IsPresent", "null"),
    ] {
        assert_eq!(test(operator, "true", value, "0"), Ok(true), "{operator}");
        assert_eq!(test(operator, "false", value, "0"), Ok(false), "{operator}");
        if operator != "IsPresent" {
            assert_eq!(test(operator, "true", "[]", "0"), Ok(false), "{operator}");
        }
    }
    assert_eq!(check(r#"{"Variable":"$.none.x","IsPresent":true}"#, "{}"), Ok(false));
    let past_the_end = |rule: &str| check(rule, r#"{"a":[1]}"#);
    assert_eq!(past_the_end(r#"{"Variable":"$.a[1]","IsPresent":true}"#), Ok(false));
    assert_eq!(past_the_end(r#"{"Variable":"$.a[0]","IsPresent":true}"#), Ok(true));
    assert_eq!(past_the_end(r#"{"Variable":"$.a[1]","IsNull":true}"#), Ok(true));
    assert_eq!(check(r#"{"Variable":"$.none.x","IsPresent":false}"#, "{}"), Ok(true));
}

#[test]
fn and_or_not_stop_early() {
    let present = r#"{"Variable":"$.a","IsPresent":true}"#;
    let equals = r#"{"Variable":"$.a","NumericEquals":1}"#;
    assert_eq!(check(&format!(r#"{{"And":[{present},{equals}],"Next":"X"}}"#), "{}"), Ok(false));
    assert_eq!(check(&format!(r#"{{"Or":[{present},{equals}],"Next":"X"}}"#), r#"{"a":2}"#), Ok(true));
    assert_eq!(check(&format!(r#"{{"Not":{equals},"Next":"X","Comment":"c"}}"#), r#"{"a":2}"#), Ok(true));
}

#[test]
fn a_variable_that_is_missing_is_an_error() {
    assert_eq!(
        check(r#"{"Variable":"$.type","StringEquals":"x"}"#, "{}"),
        Err("States.Runtime: Invalid path '$.type': The choice state's condition path references an invalid value."
            .to_owned())
    );
}

#[test]
fn problems_have_locations() {
    let places = |rule: &str| {
        let problems = ChoiceTest::compile(&Value::parse(rule).expect("valid JSON")).expect_err("refused");
        problems.into_iter().map(|problem| problem.location).collect::<Vec<_>>()
    };
    assert_eq!(places(r#"{"Variable":"x","StringEquals":1}"#), ["/Variable", "/StringEquals"]);
    assert_eq!(
        places(r#"{"And":[{"Variable":"$.a","IsNull":true},{"Variable":"$.a","IsNull":1}]}"#),
        ["/And[1]/IsNull"]
    );
    for rule in [
        "1",
        "{}",
        r#"{"Variable":"$.a"}"#,
        r#"{"StringEquals":"x"}"#,
        r#"{"Variable":"$.a","StringEquals":"x","IsNull":true}"#,
        r#"{"Variable":"$.a","BooleanLessThan":true}"#,
        r#"{"Variable":"$.a","NumericEqualsPath":1}"#,
        r#"{"Variable":"$.a","TimestampEquals":"yesterday"}"#,
        r#"{"And":[]}"#,
        r#"{"Not":[]}"#,
    ] {
        assert!(!places(rule).is_empty(), "{rule}");
    }
}
