use super::*;

#[test]
fn errors_read_as_jackson_writes_them() {
    for (text, expected) in [
        ("", "No content to map due to end-of-input\n at [Source: (String)\"\"; line: 1, column: 1]"),
        (
            "{a}",
            "Unexpected character ('a' (code 97)): was expecting double-quote to start field name\n at [Source: (String)\"{a}\"; line: 1, column: 3]",
        ),
        (
            "not json",
            "Unrecognized token 'not': was expecting (JSON String, Number, Array, Object or token 'null', 'true' or 'false')\n at [Source: (String)\"not json\"; line: 1, column: 4]",
        ),
        (
            "{",
            "Unexpected end-of-input: expected close marker for Object (start marker at [Source: (String)\"{\"; line: 1, column: 1])\n at [Source: (String)\"{\"; line: 1, column: 2]",
        ),
        (
            "{\"a\":",
            "Unexpected end-of-input within/between Object entries\n at [Source: (String)\"{\"a\":\"; line: 1, column: 6]",
        ),
        ("{\"a", "Unexpected end-of-input in field name\n at [Source: (String)\"{\"a\"; line: 1, column: 4]"),
        (
            "[1,",
            "Unexpected end-of-input within/between Array entries\n at [Source: (String)\"[1,\"; line: 1, column: 4]",
        ),
        (
            "[1 2]",
            "Unexpected character ('2' (code 50)): was expecting comma to separate Array entries\n at [Source: (String)\"[1 2]\"; line: 1, column: 5]",
        ),
        (
            "{\n\"a\" 1}",
            "Unexpected character ('1' (code 49)): was expecting a colon to separate field name and value\n at [Source: (String)\"{\n\"a\" 1}\"; line: 2, column: 6]",
        ),
    ] {
        assert_eq!(Value::parse(text).expect_err("invalid").describe(text), expected);
    }
    for text in
        ["01", "1.", "1e", "-", "\"\\q\"", "\"\u{1}\"", "[1,]", "{\"a\":1,}", "nul", "\"a", "1e999", "{} x"]
    {
        assert!(Value::parse(text).is_err(), "{text}");
    }
}

#[test]
fn duplicates_count_last_or_are_refused() {
    let text = r#"{"a":1,"b":2,"a":3}"#;
    assert_eq!(Value::parse(text).expect("lenient").to_text(), r#"{"a":3,"b":2}"#);
    let error = Value::parse_strict(text).expect_err("strict");
    assert_eq!((error.kind, error.message.as_str()), (JsonErrorKind::DuplicateField, "Duplicate field 'a'"));
}

#[test]
fn limits_hold() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert!(Value::parse(&nested(DEPTH_MAX)).is_ok());
    assert_eq!(Value::parse(&nested(DEPTH_MAX + 1)).expect_err("deep").kind, JsonErrorKind::TooDeep);
    assert_eq!(Value::parse(&"[".repeat(1_000_000)).expect_err("deep").kind, JsonErrorKind::TooDeep);
    assert_eq!(Value::parse_bytes_max("[1,2]", 4).expect_err("large").kind, JsonErrorKind::TooLarge);
    assert!(Value::parse_bytes_max("[1,2]", 5).is_ok());
    assert!(Value::parse(&"9".repeat(1001)).is_err());
}

#[test]
fn escapes_and_surrogates() {
    let value = Value::parse(r#""\u00e9\ud83d\ude00\ud83d\n""#).expect("valid");
    assert_eq!(value.as_str(), Some("é😀\u{fffd}\n"));
}
