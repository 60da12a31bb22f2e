use super::*;
use crate::dataflow::{Ambient, Context, Variables};

fn run(call: &str, input: &str) -> Result<String, String> {
    let call = Intrinsic::parse(call).unwrap_or_else(|problem| panic!("{call}: {problem}"));
    let input = Value::parse(input).expect("valid JSON");
    let (variables, ambient) = (Variables::new(), Ambient::new(0, 1));
    let context = Value::empty_object();
    let scope = EvaluationScope {
        input: &input,
        result: None,
        error_output: None,
        context: Context::Ready(&context),
        variables: &variables,
        ambient: &ambient,
    };
    call.evaluate(&scope)
        .map(|value| value.to_text())
        .map_err(|error| format!("{}: {}", error.error, error.cause))
}

#[test]
fn values_as_aws_gives_them() {
    let input =
        r#"{"n":[1,2,3,3,4],"o":{"Arg1":1,"Arg2":[]},"s":"a,b;c","f":1.1,"d":[1,1.0,"1",{"a":1},{"a":1}]}"#;
    for (call, expected) in [
        ("States.Format('x={}.', $.o)", r#""x={Arg1=1, Arg2=[]}.""#),
        ("States.Format('{} {} {}', $.f, null, true)", r#""1.1 null true""#),
        (r"States.Format('it\'s \{\} {}', 'ok')", r#""it's {} ok""#),
        ("States.Array('a', 1, $.f)", r#"["a",1,1.1]"#),
        ("States.Array()", "[]"),
        ("States.ArrayPartition($.n, 2)", "[[1,2],[3,3],[4]]"),
        ("States.ArrayContains($.n, 4)", "true"),
        ("States.ArrayContains($.n, '4')", "false"),
        ("States.ArrayRange(1, 9, 2)", "[1,3,5,7,9]"),
        ("States.ArrayRange(5, 1, -2)", "[5,3,1]"),
        ("States.ArrayRange(1, 5, -1)", "[]"),
        ("States.ArrayRange(3, 3, 1)", "[3]"),
        ("States.ArrayGetItem($.n, 1)", "2"),
        ("States.ArrayLength($.n)", "5"),
        ("States.ArrayUnique($.d)", r#"[1,1.0,"1",{"a":1}]"#),
        ("States.ArrayContains($.n, 4.0)", "false"),
        ("States.Base64Encode('Data to encode')", r#""RGF0YSB0byBlbmNvZGU=""#),
        ("States.Base64Decode('RGF0YSB0byBlbmNvZGU=')", r#""Data to encode""#),
        ("States.Hash('input data', 'SHA-1')", r#""aaff4a450a104cd177d28d18d74485e8cae074b7""#),
        ("States.Hash('', 'MD5')", r#""d41d8cd98f00b204e9800998ecf8427e""#),
        (
            "States.JsonMerge(States.StringToJson('{\"a\":1,\"b\":2}'), $.o, false)",
            r#"{"a":1,"b":2,"Arg2":[],"Arg1":1}"#,
        ),
        ("States.JsonToString($.o)", r#""{\"Arg1\":1,\"Arg2\":[]}""#),
        ("States.MathAdd(-1.5, -1.51)", "-3"),
        ("States.MathAdd(States.MathAdd(1, 2), 3)", "6"),
        ("States.MathRandom(1, 999, 42)", "255"),
        ("States.StringSplit($.s, ',;')", r#"["a","b","c"]"#),
        ("States.StringSplit('Hello\nWorld', '\n')", r#"["Hello","World"]"#),
    ] {
        assert_eq!(run(call, input).as_deref(), Ok(expected), "{call}");
    }
}

#[test]
fn failures_quote_the_call() {
    assert_eq!(
        run("States.Format('{}', $.no)", r#"{"a":1}"#),
        Err(r#"States.Runtime: The function 'States.Format('{}', $.no)' had the following error: The JsonPath argument for the field '$.no' could not be found in the input '{"a":1}'"#.to_owned())
    );
    for call in [
        "States.Format('{} {}', 1)",
        "States.Format('{}', 1, 2)",
        "States.StringToJson('nope')",
        "States.MathAdd(States.UUID(), 1)",
        "States.ArrayLength(States.UUID())",
        "States.StringSplit(States.Array(), ',')",
        "States.JsonMerge(States.Array(), States.Array(), false)",
        "States.ArrayPartition(States.Array(1), 0)",
        "States.ArrayRange(1, 1001, 1)",
        "States.ArrayRange(1, 10, 0)",
        "States.ArrayRange(-9223372036854775808, 9223372036854775807, 1)",
        "States.ArrayGetItem(States.Array(1), 1)",
        "States.ArrayGetItem(States.Array(1), -1)",
        "States.Base64Decode('*')",
        "States.Hash('x', 'CRC32')",
        "States.JsonMerge(States.StringToJson('{}'), States.StringToJson('{}'), true)",
        "States.MathRandom(2, 2)",
        "States.MathAdd(9223372036854775807, 1)",
    ] {
        let failure = run(call, "{}").expect_err(call);
        assert!(
            failure.starts_with(&format!("States.IntrinsicFailure: The function '{call}' had")),
            "{failure}"
        );
    }
    assert!(run("States.ArrayRange(1, 1000, 1)", "{}").is_ok());
    let long = format!("{{\"s\":\"{}\"}}", "x".repeat(10_001));
    assert!(run("States.Base64Encode($.s)", &long).is_err());
    assert!(run("States.Hash($.s, 'MD5')", &long).is_err());
}

#[test]
fn random_values_are_in_range_and_repeat() {
    for seed in 0..200 {
        let call = format!("States.MathRandom(-3, 4, {seed})");
        let value: i64 = run(&call, "{}").expect("in range").parse().expect("whole");
        assert!((-3..4).contains(&value), "{value}");
        assert_eq!(run(&call, "{}"), run(&call, "{}"));
    }
    let uuid = run("States.UUID()", "{}").expect("a uuid");
    assert_eq!(uuid.len(), 38);
    assert_eq!(Ok(uuid), run("States.UUID()", "{}"));
}

#[test]
fn bad_calls_are_refused() {
    for call in [
        "States.Nope()",
        "States.UUID",
        "States.UUID(1)",
        "States.Format()",
        "States.Format('a",
        "States.Format('{}', )",
        "States.Format('{}' 1)",
        "States.MathAdd(1, 2) x",
        "States.MathAdd(1,2",
        "States.MathAdd($.a b, 2)",
        "States.Array(a)",
        "States.MathAdd(1, '-1')",
        "States.ArrayPartition('x', 2)",
        "States.JsonMerge(1, 2, false)",
        "States.StringSplit(1, ',')",
        "States.ArrayLength(1)",
    ] {
        assert!(Intrinsic::parse(call).is_err(), "{call}");
    }
    let nested = |depth: usize| "States.Array(".repeat(depth) + &")".repeat(depth);
    assert!(Intrinsic::parse(&nested(NESTING_MAX)).is_ok());
    assert!(Intrinsic::parse(&nested(NESTING_MAX + 1)).is_err());
}
