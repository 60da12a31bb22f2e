//! The parser under bad input: for any text it returns soon and without a panic, and `compile` and `check` agree.

use std::time::{Duration, Instant};

use mayfly_workflows_language::definition::{StateMachineType, variable_references};
use mayfly_workflows_language::parse::{DEFINITION_BYTES_MAX, compile, compile_state};
use mayfly_workflows_language::validate::{Severity, check};
use mayfly_workflows_language::value::{Map, Value};
use proptest::prelude::*;

/// The maximum time for one text, on a slow machine without optimisation.
const PATIENCE: Duration = Duration::from_secs(5);

fn answer(text: &str) {
    let begun = Instant::now();
    for machine_type in [StateMachineType::Standard, StateMachineType::Express] {
        let diagnostics = check(text, machine_type, |_| false);
        let sound = diagnostics.iter().all(|found| found.severity == Severity::Warning);
        match compile(text, machine_type) {
            Ok(machine) => {
                assert!(sound, "compiled in spite of {diagnostics:?}");
                assert!(machine.states().iter().enumerate().all(|(at, state)| state.id.0 as usize == at));
                variable_references(&machine);
            }
            Err(rejection) => {
                assert!(!sound, "refused without a reason: {text}");
                assert!(!rejection.diagnostics.is_empty() && !rejection.message().is_empty());
            }
        }
    }
    let _ = compile_state(text, "alone");
    assert!(begun.elapsed() < PATIENCE, "{:?} for {} bytes", begun.elapsed(), text.len());
}

/// Definitions that use all features, which the tests then modify.
const SOUND: &[&str] = &[
    r#"{"Comment":"c","StartAt":"T","TimeoutSeconds":9,"States":{
        "T":{"Type":"Task","Resource":"arn:aws:states:::lambda:invoke.waitForTaskToken","HeartbeatSecondsPath":"$.h",
             "Parameters":{"FunctionName":"f","Payload":{"t.$":"$$.Task.Token","n.$":"States.MathAdd($.a, 1)"}},
             "ResultSelector":{"x.$":"$.y"},"ResultPath":"$.r.s","Assign":{"v.$":"$.z[0]"},
             "Retry":[{"ErrorEquals":["A","B"],"IntervalSeconds":2,"JitterStrategy":"FULL"}],
             "Catch":[{"ErrorEquals":["States.ALL"],"ResultPath":"$.e","Next":"F"}],"Next":"C"},
        "C":{"Type":"Choice","Default":"W","Choices":[
             {"And":[{"Variable":"$.a","NumericGreaterThan":1},{"Not":{"Variable":"$v","IsPresent":true}}],"Next":"P"},
             {"Or":[{"Variable":"$.b","StringMatches":"a*"}],"Next":"F","Assign":{"w":1}}]},
        "W":{"Type":"Wait","SecondsPath":"$.s","Next":"M"},
        "P":{"Type":"Pass","Result":{"a":[1,2.5,null]},"Next":"M"},
        "M":{"Type":"Map","ItemsPath":"$.items","ItemSelector":{"i.$":"$$.Map.Item.Value"},"MaxConcurrencyPath":"$.m",
             "Label":"label","ItemReader":{"Resource":"arn:aws:states:::s3:getObject","Parameters":{"Bucket":"b"},
               "ReaderConfig":{"InputType":"CSV","CSVHeaderLocation":"GIVEN","CSVHeaders":["a"],"MaxItems":3}},
             "ItemBatcher":{"MaxItemsPerBatchPath":"$.k","BatchInput":{"q.$":"$.q"}},
             "ResultWriter":{"Resource":"arn:aws:states:::s3:putObject","Parameters":{"Bucket":"b","Prefix":"p"}},
             "ItemProcessor":{"ProcessorConfig":{"Mode":"DISTRIBUTED","ExecutionType":"EXPRESS"},"StartAt":"I",
               "States":{"I":{"Type":"Succeed"}}},"Next":"B"},
        "B":{"Type":"Parallel","Branches":[{"StartAt":"X","States":{"X":{"Type":"Pass","End":true}}}],"End":true},
        "F":{"Type":"Fail","ErrorPath":"$.e","CausePath":"States.Format('{}', $.c)"}}}"#,
    r#"{"QueryLanguage":"JSONata","StartAt":"T","States":{
        "T":{"Type":"Task","Resource":"arn:aws:states:::states:startExecution.sync:2","TimeoutSeconds":"{% 1 + $n %}",
             "Arguments":{"StateMachineArn":"a","Input":"{% $merge([$states.input, {'a': 1}]) %}"},
             "Output":"{% $states.result.Output %}","Assign":{"v":"{% $uuid() %}"},
             "Catch":[{"ErrorEquals":["States.ALL"],"Output":"{% $states.errorOutput %}","Next":"F"}],"Next":"C"},
        "C":{"Type":"Choice","Choices":[{"Condition":"{% $v = 'x' and $count($states.input.l) > 2 %}","Next":"W"}],
             "Default":"F"},
        "W":{"Type":"Wait","Timestamp":"{% $now() %}","Next":"M"},
        "M":{"Type":"Map","Items":"{% $range(1, 9, 2) %}","ItemSelector":{"i":"{% $states.context.Map.Item.Value %}"},
             "ToleratedFailurePercentage":"{% 5 %}","ItemProcessor":{"StartAt":"I","States":{"I":{"Type":"Succeed"}}},
             "End":true},
        "F":{"Type":"Fail","Error":"{% $v %}","Cause":"plain"}}}"#,
];

/// Strings that the parser has rules for.
fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => proptest::sample::select(WORDS).prop_map(str::to_string),
        1 => "\\PC{0,12}",
        1 => "\\$[.\\[\\]a-z0-9'*:@?()=<>-]{0,16}",
        1 => "\\{% [ -~]{0,16} %\\}",
        1 => "States\\.[A-Za-z]{1,9}\\([ -~]{0,12}\\)",
    ]
}

const WORDS: &[&str] = &[
    "StartAt",
    "States",
    "Type",
    "Next",
    "End",
    "Task",
    "Pass",
    "Map",
    "Choice",
    "Choices",
    "Parallel",
    "Branches",
    "Wait",
    "Fail",
    "Succeed",
    "Resource",
    "Parameters",
    "Arguments",
    "Output",
    "Assign",
    "ResultPath",
    "InputPath",
    "ItemProcessor",
    "ProcessorConfig",
    "Mode",
    "DISTRIBUTED",
    "Retry",
    "Catch",
    "ErrorEquals",
    "States.ALL",
    "QueryLanguage",
    "JSONata",
    "JSONPath",
    "Variable",
    "And",
    "Not",
    "Condition",
    "Seconds",
    "Timestamp",
    "$",
    "$.a",
    "$$.Task.Token",
    "{% $states.input %}",
    "{%",
    "a.$",
    "Credentials",
    "Label",
    "ItemReader",
    "2016-03-14T01:59:00Z",
    "arn:aws:states:::lambda:invoke",
    "arn:aws:lambda:us-east-1:123456789012:function:f",
    "A",
    "B",
    "",
];

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word().prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 64, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::vec((word(), inner), 0..6).prop_map(Value::object),
        ]
    })
}

/// Replaces the `at`th part of `value` (in text order).
fn replaced(value: &Value, at: &mut usize, by: &Value) -> Value {
    if *at == 0 {
        *at = usize::MAX;
        return by.clone();
    }
    *at = at.saturating_sub(usize::from(*at != usize::MAX));
    match value {
        Value::Array(items) => items.iter().map(|item| replaced(item, at, by)).collect(),
        Value::Object(map) => {
            let members: Map = map.iter().map(|(key, item)| (key.clone(), replaced(item, at, by))).collect();
            Value::from(members)
        }
        scalar => scalar.clone(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_text(text in "\\PC{0,200}") {
        answer(&text);
    }

    #[test]
    fn any_json(value in json()) {
        answer(&value.to_text());
        answer(&format!(r#"{{"StartAt":"A","States":{{"A":{}}}}}"#, value.to_text()));
    }

    #[test]
    fn sound_definitions_with_a_part_replaced(
        which in 0..SOUND.len(),
        at in 0_usize..160,
        by in json(),
    ) {
        let sound = Value::parse(SOUND[which]).expect("JSON");
        answer(&replaced(&sound, &mut { at }, &by).to_text());
    }

    #[test]
    fn sound_definitions_with_a_byte_changed(
        which in 0..SOUND.len(),
        at in any::<proptest::sample::Index>(),
        letter in any::<char>(),
    ) {
        let mut letters: Vec<char> = SOUND[which].chars().collect();
        let at = at.index(letters.len());
        letters[at] = letter;
        answer(&letters.iter().collect::<String>());
        letters.truncate(at);
        answer(&letters.iter().collect::<String>());
    }
}

#[test]
fn fuzz_seed_definitions_are_valid() {
    for text in SOUND {
        let compiled = compile(text, StateMachineType::Standard);
        assert!(compiled.is_ok(), "{}", compiled.expect_err("refused"));
    }
}

#[test]
fn deep_and_large_texts() {
    for depth in [10, 200, 1_000, 100_000, 1_000_000] {
        answer(&"[".repeat(depth));
        answer(&format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth)));
        let template = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        answer(&format!(
            r#"{{"StartAt":"A","States":{{"A":{{"Type":"Pass","Parameters":{template},"End":true}}}}}}"#
        ));
    }
    for depth in [5, 50, 150, 1_000] {
        let not = format!(
            r#"{}{{"Variable":"$.a","IsNull":true}}{}"#,
            r#"{"Not":"#.repeat(depth),
            "}".repeat(depth)
        );
        let choice = format!(r#"[{{"Not":{not},"Next":"B"}}]"#);
        answer(&format!(
            r#"{{"StartAt":"A","States":{{"A":{{"Type":"Choice","Choices":{choice}}},"B":{{"Type":"Succeed"}}}}}}"#
        ));
        let expression = format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
        answer(&format!(
            r#"{{"QueryLanguage":"JSONata","StartAt":"A",
                "States":{{"A":{{"Type":"Pass","Output":"{{% {expression} %}}","End":true}}}}}}"#
        ));
        let call = format!("{}1{}", "States.Array(".repeat(depth), ")".repeat(depth));
        let parameters = format!(r#"{{"a.$":"{call}","b.$":"$.a{}"}}"#, "[?(@.b)]".repeat(depth));
        answer(&format!(
            r#"{{"StartAt":"A","States":{{"A":{{"Type":"Pass","Parameters":{parameters},"End":true}}}}}}"#
        ));
    }
    for length in [1_000, DEFINITION_BYTES_MAX, 2 * DEFINITION_BYTES_MAX] {
        let long = "a".repeat(length);
        answer(&format!(r#"{{"StartAt":"{long}","States":{{"{long}":{{"Type":"Succeed"}}}}}}"#));
        answer(&format!(
            r#"{{"StartAt":"A","States":{{"A":{{"Type":"Pass","InputPath":"$.{long}","End":true}}}}}}"#
        ));
    }
}

#[test]
fn many_states() {
    let count = 5_000;
    let states: Vec<String> = (0..count)
        .map(|n| format!(r#""S{n}":{{"Type":"Pass","Next":"S{}"}}"#, n + 1))
        .chain([format!(r#""S{count}":{{"Type":"Succeed"}}"#)])
        .collect();
    answer(&format!(r#"{{"StartAt":"S0","States":{{{}}}}}"#, states.join(",")));
}
