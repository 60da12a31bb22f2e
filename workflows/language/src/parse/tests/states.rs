//! Validation rules of single states.

use super::*;
use crate::definition::{
    Jitter, MapMode, Quantity, Resource, StateKind, StateMachineType, TimestampField, WaitState,
};

#[test]
fn waits() {
    for (body, right) in [
        (r#""Seconds":0"#, true),
        (r#""Seconds":1.5"#, false),
        (r#""Seconds":-1"#, false),
        (r#""Seconds":"1""#, false),
        (r#""SecondsPath":"$.n""#, true),
        (r#""SecondsPath":"$$.Execution.Input.n""#, true),
        (r#""SecondsPath":"n""#, false),
        (r#""Seconds":1,"SecondsPath":"$.n""#, false),
        (r#""Timestamp":"2016-03-14T01:59:00Z""#, true),
        (r#""Timestamp":"tomorrow""#, false),
        (r#""TimestampPath":"$.t""#, true),
    ] {
        let found = errors_of(
            &around(&format!(r#"{{"Type":"Wait",{body},"End":true}}"#)),
            StateMachineType::Standard,
        );
        assert_eq!(found.is_empty(), right, "{body}: {found:?}");
    }
    state(
        r#"{"Type":"Wait","End":true}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: This object should have only one of the following fields: [SecondsPath, Seconds, \
           TimestampPath, Timestamp] at /States/X",
        ],
    );
    jsonata(r#"{"Type":"Wait","Seconds":"{% 1 + 1 %}","End":true}"#, &[]);
    let machine = compiled(&around(r#"{"Type":"Wait","Timestamp":"1970-01-01T00:00:01Z","End":true}"#));
    let StateKind::Wait(WaitState::Timestamp(TimestampField::Value(instant, text))) =
        &machine.states()[0].kind
    else {
        panic!("a timestamp");
    };
    assert_eq!((instant.as_second(), &**text), (1, "1970-01-01T00:00:01Z"));
}

#[test]
fn tasks() {
    let task = |body: &str| around(&format!(r#"{{"Type":"Task","End":true,{body}}}"#));
    let arn = r#""Resource":"arn:aws:lambda:us-east-1:123456789012:function:f:live""#;
    for (body, right) in [
        (r#""TimeoutSeconds":10,"HeartbeatSeconds":5"#, true),
        (r#""TimeoutSeconds":10,"HeartbeatSeconds":10"#, false),
        (r#""TimeoutSeconds":0"#, false),
        (r#""TimeoutSecondsPath":"$.t","HeartbeatSecondsPath":"$.h""#, true),
        (r#""TimeoutSecondsPath":"$.t","TimeoutSeconds":1"#, false),
        (r#""Credentials":{"RoleArn":"arn:aws:iam::1:role/r"}"#, true),
        (r#""Credentials":{"RoleArn.$":"$.role"}"#, true),
        (r#""Credentials":{"Role":"r"}"#, false),
    ] {
        let found = errors_of(&task(&format!("{arn},{body}")), StateMachineType::Standard);
        assert_eq!(found.is_empty(), right, "{body}: {found:?}");
    }
    assert_eq!(
        errors_of(&task(r#""Resource":"arn:aws:states:::sns:unpublish""#), StateMachineType::Standard),
        [
            "SCHEMA_VALIDATION_FAILED: The resource provided arn:aws:states:::sns:unpublish is not recognized. The value \
          is not a valid resource ARN, or the resource is not available in this region. at /States/X/Resource"
        ]
    );
    let machine = compiled(&task(&format!("{arn},\"TimeoutSeconds\":7")));
    let StateKind::Task(task) = &machine.states()[0].kind else { panic!("Task") };
    assert!(
        matches!(&task.resource, Resource::Function(function) if function.qualifier.as_deref() == Some("live"))
    );
    assert!(matches!(task.timeout, Some(Quantity::Value(7))));
}

#[test]
fn choices() {
    let choice = |rules: &str| {
        format!(
            r#"{{"StartAt":"X","States":{{"X":{{"Type":"Choice","Choices":{rules},"Default":"S"}},
                "S":{{"Type":"Succeed"}}}}}}"#
        )
    };
    for (rules, expect) in [
        ("[]", "SCHEMA_VALIDATION_FAILED: Value cannot be empty at /States/X/Choices"),
        (
            r#"[{"Variable":"$.a","IsNull":true}]"#,
            "SCHEMA_VALIDATION_FAILED: These fields are required: [Next] at /States/X/Choices[0]",
        ),
        (
            r#"[{"Next":"S"}]"#,
            "SCHEMA_VALIDATION_FAILED: The object must have only one of the following fields, \
             [And, Or, Not, Variable, Condition] at /States/X/Choices[0]",
        ),
        (
            r#"[{"Condition":true,"Next":"S"}]"#,
            "SCHEMA_VALIDATION_FAILED: The QueryLanguage is set to 'JSONPath', but field 'Condition' is only \
             supported for the 'JSONata' QueryLanguage at /States/X/Choices[0]",
        ),
        (
            r#"[{"Variable":"a","IsNull":true,"Next":"S"}]"#,
            "SCHEMA_VALIDATION_FAILED: Value is not a Reference Path: Reference path didn't start with '$' \
             at /States/X/Choices[0]/Variable",
        ),
        (
            r#"[{"And":[{"Variable":"$.a","IsNull":true},{"Not":{"Variable":"$.a","IsNull":true,"Next":"S"}}],
                "Next":"S"}]"#,
            "SCHEMA_VALIDATION_FAILED: Field 'Next' is not supported at /States/X/Choices[0]/And[1]/Not",
        ),
    ] {
        machine(&choice(rules), &[expect]);
    }
    let jsonata = choice(r#"[{"Variable":"$.a","Condition":true,"Next":"S"}]"#).replacen(
        '{',
        r#"{"QueryLanguage":"JSONata","#,
        1,
    );
    machine(
        &jsonata,
        &[
            "SCHEMA_VALIDATION_FAILED: The QueryLanguage is set to 'JSONata', but field 'Variable' is only supported \
           for the 'JSONPath' QueryLanguage at /States/X/Choices[0]",
        ],
    );
}

#[test]
fn express_machines_do_not_wait_for_others() {
    let task = |resource: &str| around(&format!(r#"{{"Type":"Task","End":true,"Resource":"{resource}"}}"#));
    let not = |what: &str| {
        vec![format!(
            "SCHEMA_VALIDATION_FAILED: Express state machine does not support {what} at /States/X/Resource"
        )]
    };
    let express = |resource: &str| errors_of(&task(resource), StateMachineType::Express);
    let integration = |pattern: &str| not(&format!("'.{pattern}' service integration "));
    assert_eq!(express("arn:aws:states:::sns:publish"), Vec::<String>::new());
    assert_eq!(express("arn:aws:states:::sns:publish.waitForTaskToken"), integration("waitForTaskToken"));
    assert_eq!(express("arn:aws:states:::batch:submitJob.sync"), integration("sync"));
    assert_eq!(express("arn:aws:states:us-east-1:123456789012:activity:a"), not("Activity ARN"));
    // The children of a distributed Map may be Express in a Standard machine.
    let child = r#""StartAt":"T","States":{"T":{"Type":"Task","End":true,
        "Resource":"arn:aws:states:::sns:publish.waitForTaskToken"}}"#;
    let config = r#""ProcessorConfig":{"Mode":"DISTRIBUTED","ExecutionType":"EXPRESS"}"#;
    let map = around(&format!(r#"{{"Type":"Map","End":true,"ItemProcessor":{{{config},{child}}}}}"#));
    assert_eq!(errors_of(&map, StateMachineType::Standard).len(), 1);
    assert_eq!(errors_of(&map.replace("\"EXPRESS\"", "\"STANDARD\""), StateMachineType::Standard).len(), 0);
}

#[test]
fn retriers_and_catchers() {
    let task = |body: &str| {
        around(&format!(r#"{{"Type":"Task","Resource":"arn:aws:states:::sns:publish","End":true,{body}}}"#))
    };
    for (body, right) in [
        (r#""Retry":[]"#, true),
        (r#""Retry":[{"ErrorEquals":["States.Timeout","A"],"MaxAttempts":0}]"#, true),
        (r#""Retry":[{"ErrorEquals":["A"],"IntervalSeconds":-1}]"#, false),
        (r#""Retry":[{"ErrorEquals":["A"],"BackoffRate":0.5}]"#, false),
        (r#""Retry":[{"ErrorEquals":["A"],"JitterStrategy":"SOME"}]"#, false),
        (r#""Retry":[{"ErrorEquals":["A"],"MaxDelaySeconds":0}]"#, false),
        (r#""Retry":[{"ErrorEquals":["A"],"MaxDelaySeconds":1,"Comment":"not long"}]"#, true),
        (r#""Retry":[{"ErrorEquals":[]}]"#, false),
        (r#""Retry":[{}]"#, false),
        (r#""Retry":[{"ErrorEquals":["States.ALL","A"]}]"#, false),
        (r#""Retry":[{"ErrorEquals":["States.ALL"]},{"ErrorEquals":["A"]}]"#, false),
        (r#""Retry":[{"ErrorEquals":["A"]},{"ErrorEquals":["States.ALL"]}]"#, true),
        (r#""Catch":[{"ErrorEquals":[true],"Next":"X"}]"#, false),
        (r#""Catch":[{"ErrorEquals":["A"]}]"#, false),
        (r#""Catch":[{"ErrorEquals":["A"],"Next":"X","ResultPath":null,"Assign":{"e.$":"$.Error"}}]"#, true),
    ] {
        let found = errors_of(&task(body), StateMachineType::Standard);
        assert_eq!(found.is_empty(), right, "{body}: {found:?}");
    }
    let machine = compiled(&task(r#""Retry":[{"ErrorEquals":["A"]}]"#));
    let retrier = &machine.states()[0].retry[0];
    assert_eq!((retrier.interval_seconds, retrier.max_attempts, retrier.backoff_rate), (1, 3, 2.0));
    assert_eq!((retrier.max_delay_seconds, retrier.jitter), (None, Jitter::None));
}

#[test]
fn maps() {
    let map = |body: &str| around(&format!(r#"{{"Type":"Map","End":true,{body}}}"#));
    let processor = r#""ItemProcessor":{"StartAt":"P","States":{"P":{"Type":"Pass","End":true}}}"#;
    let distributed = r#""ItemProcessor":{"ProcessorConfig":{"Mode":"DISTRIBUTED","ExecutionType":"STANDARD"},
        "StartAt":"P","States":{"P":{"Type":"Pass","End":true}}}"#;
    for (body, right) in [
        (processor.to_string(), true),
        (processor.replace("ItemProcessor", "Iterator"), true),
        (format!("{processor},{}", processor.replace("ItemProcessor", "Iterator")), false),
        (r#""MaxConcurrency":1"#.to_string(), false),
        (format!(r#"{processor},"MaxConcurrency":-1"#), false),
        (format!(r#"{processor},"MaxConcurrencyPath":"$.n""#), true),
        (
            format!(r#"{distributed},"ToleratedFailurePercentage":100.0,"ToleratedFailureCountPath":"$.n""#),
            true,
        ),
        (format!(r#"{distributed},"ToleratedFailurePercentage":101"#), false),
        (format!(r#"{},"Label":"l""#, distributed.replace("DISTRIBUTED", "INLINE")), false),
        (format!(r#"{processor},"Label":"l""#), true),
        (format!(r#"{distributed},"ItemBatcher":{{"MaxItemsPerBatch":2,"BatchInput":{{"a":1}}}}"#), true),
        (
            format!(r#"{distributed},"ItemBatcher":{{"MaxItemsPerBatch":2,"MaxItemsPerBatchPath":"$.n"}}"#),
            false,
        ),
        (distributed.replace(r#","ExecutionType":"STANDARD""#, ""), false),
    ] {
        let found = errors_of(&map(&body), StateMachineType::Standard);
        assert_eq!(found.is_empty(), right, "{body}: {found:?}");
    }
    let machine = compiled(&map(distributed));
    let StateKind::Map(made) = &machine.state_named("X").expect("the state").kind else { panic!("Map") };
    assert!(matches!(made.mode, MapMode::Distributed(StateMachineType::Standard)));
    assert!(matches!(made.max_concurrency, Quantity::Value(0)));
    let inside = machine.flow(made.processor);
    assert_eq!(inside.parent, machine.state_named("X").map(|state| state.id));
    assert_eq!(machine.state(inside.start_at).flow, made.processor);
}

#[test]
fn labels_are_refused_with_the_service_s_own_exception() {
    let text = |label: &str| {
        let config = r#"{"Mode":"DISTRIBUTED","ExecutionType":"STANDARD"}"#;
        around(&format!(
            r#"{{"Type":"Map","End":true,"Label":"{label}","ItemProcessor":{{"ProcessorConfig":{config},
                "StartAt":"P","States":{{"P":{{"Type":"Pass","End":true}}}}}}}}"#
        ))
    };
    for (label, shown) in [
        ("a:b", r#"["Label contains invalid character: ':'"]"#),
        ("a\\u0019b", r#"["Label contains invalid character: '\\x19'"]"#),
        ("a\\rb", r#"["Label contains invalid character: '\\r'"]"#),
        ("a\\\"b", r#"['Label contains invalid character: \'"\'']"#),
        ("a\\\\b", r#"["Label contains invalid character: '\\\\'"]"#),
    ] {
        let text = text(label);
        let rejection = compile(&text, StateMachineType::Standard).expect_err("a bad label");
        let expect = format!("Error=ValueError Args={shown} in definition '{text}'.");
        assert_eq!(rejection.message(), expect.replace("Args=[[", "Args=["));
    }
    assert!(compile(&text("fine_label-1"), StateMachineType::Standard).is_ok());
    let long = text(&"l".repeat(41));
    let rejection = compile(&long, StateMachineType::Standard).expect_err("a long label");
    let expect =
        format!("Error=ValueError Args=['Label cannot exceed 40 characters'] in definition '{long}'.");
    assert_eq!(rejection.message(), expect);
}

#[test]
fn fields_of_the_other_language_are_named_as_such() {
    let task = r#""Type":"Task","Resource":"arn:aws:states:::sns:publish","End":true"#;
    jsonata(
        &format!(r#"{{{task},"Catch":[{{"ErrorEquals":["A"],"ResultPath":"$.e","Next":"X"}}]}}"#),
        &[
            "SCHEMA_VALIDATION_FAILED: The QueryLanguage is set to 'JSONata', but field 'ResultPath' is only supported \
           for the 'JSONPath' QueryLanguage at /States/X/Catch[0]",
        ],
    );
    state(
        &format!(
            r#"{{{task},"Catch":[{{"ErrorEquals":["A"],"Output":1,"Next":"X"}}],"Retry":[{{"ErrorEquals":["A"],"Max":1}}]}}"#
        ),
        &[
            "SCHEMA_VALIDATION_FAILED: Field 'Max' is not supported at /States/X/Retry[0]",
            "SCHEMA_VALIDATION_FAILED: The QueryLanguage is set to 'JSONPath', but field 'Output' is only supported \
             for the 'JSONata' QueryLanguage at /States/X/Catch[0]",
        ],
    );
}

/// A map's numbers (measured: floci-io/floci#3733; the rest of the message about `$$` is that of `ResultPath`).
#[test]
fn numbers_of_a_map() {
    let map = |body: &str| {
        format!(
            r#"{{"Type":"Map","End":true,{body},"ItemProcessor":{{"ProcessorConfig":
                {{"Mode":"DISTRIBUTED","ExecutionType":"STANDARD"}},
                "StartAt":"P","States":{{"P":{{"Type":"Pass","End":true}}}}}}}}"#
        )
    };
    let outside = "Value is not a Reference Path: Reference path didn't start with '$.' or '$['";
    for (body, message, place) in [
        (r#""MaxConcurrencyPath":"$$.Execution.Input.n""#, outside, "MaxConcurrencyPath"),
        (r#""ToleratedFailureCountPath":"$$.Execution.Input.n""#, outside, "ToleratedFailureCountPath"),
        (r#""ToleratedFailurePercentagePath":"$$.n""#, outside, "ToleratedFailurePercentagePath"),
        (r#""ItemBatcher":{"MaxItemsPerBatchPath":"$$.n"}"#, outside, "ItemBatcher/MaxItemsPerBatchPath"),
        (r#""ToleratedFailurePercentage":101"#, "Maximum value is 100.0", "ToleratedFailurePercentage"),
        (r#""ToleratedFailurePercentage":-1"#, "Minimum value is 0.0", "ToleratedFailurePercentage"),
        (r#""ToleratedFailureCount":-1"#, "Minimum value is 0", "ToleratedFailureCount"),
        (r#""MaxConcurrency":-1"#, "Minimum value is 0", "MaxConcurrency"),
        (r#""ItemBatcher":{"MaxItemsPerBatch":-1}"#, "Minimum value is 0", "ItemBatcher/MaxItemsPerBatch"),
    ] {
        state(&map(body), &[&format!("SCHEMA_VALIDATION_FAILED: {message} at /States/X/{place}")]);
    }
    for right in [
        r#""ItemsPath":"$$.Execution.Input""#,
        r#""MaxConcurrencyPath":"$.n""#,
        r#""MaxConcurrencyPath":"$n""#,
    ] {
        state(&map(right), &[]);
    }
}

/// The readable members of `$states`, and the codes of invalid expressions (from the recordings of rejected
/// expressions).
#[test]
fn expressions_have_codes_of_their_own() {
    let unsupported = "UNSUPPORTED_JSONATA_EXPRESSION";
    for (body, expect) in [
        (r#""Output":"{% $states.result %}""#, Some("Field '$states.result' does not exist.")),
        (r#""Output":"{% $states.errorOutput %}""#, Some("Field '$states.errorOutput' does not exist.")),
        (r#""Output":"{% $states.nope %}""#, Some("Field '$states.nope' does not exist.")),
        (r#""Output":"{% field %}""#, Some("Reference to 'field' at the top level is not supported.")),
        (r#""Output":"{% $states.input.field %}""#, None),
        (r#""Output":"{% $states.context %}""#, None),
    ] {
        let found = errors_of(
            &around(&format!(r#"{{"Type":"Pass","QueryLanguage":"JSONata","End":true,{body}}}"#)),
            StateMachineType::Standard,
        );
        let expect: Vec<String> =
            expect.iter().map(|expect| format!("{unsupported}: {expect} at /States/X/Output")).collect();
        assert_eq!(found, expect, "{body}");
    }
    let task = |more: &str| {
        format!(r#"{{"Type":"Task","Resource":"arn:aws:states:::sns:publish","End":true{more}}}"#)
    };
    jsonata(&task(r#","Output":"{% $states.result %}""#), &[]);
    jsonata(
        &task(r#","Catch":[{"ErrorEquals":["States.ALL"],"Output":"{% $states.errorOutput %}","Next":"X"}]"#),
        &[],
    );
    let found = errors_of(
        &around(r#"{"Type":"Pass","QueryLanguage":"JSONata","Output":"{% 1 + %}","End":true}"#),
        StateMachineType::Standard,
    );
    assert!(
        found.len() == 1
            && found[0].starts_with("INVALID_JSONATA_EXPRESSION: ")
            && found[0].ends_with(" at /States/X/Output"),
        "{found:?}"
    );
}

/// The message, with its quotes, is quoted by users whose definition AWS rejected; values from a path are only checked
/// at run time, as they also report.
#[test]
fn integrations_take_their_own_parameters() {
    let task = |resource: &str, given: &str| {
        let resource = format!("arn:aws:states:::{resource}");
        around(&format!(r#"{{"Type":"Task","End":true,"Resource":"{resource}",{given}}}"#))
    };
    let refused = |field: &str, given: &str| {
        format!(
            "SCHEMA_VALIDATION_FAILED: The field \"{field}\" is not supported by Step Functions at /States/X/{given}"
        )
    };
    let missing = |field: &str| {
        format!(
            "SCHEMA_VALIDATION_FAILED: The field '{field}' is required but was missing at /States/X/Parameters"
        )
    };
    let cases = [
        (
            "lambda:invoke",
            r#""Parameters":{"FunctionName":"f","Payload.$":"$","ClientContext":"c","InvocationType":"Event",
            "LogType":"None","Qualifier":"1"}"#,
            vec![],
        ),
        ("lambda:invoke", r#""Parameters":{"FunctionName":"f","Foo":1}"#, vec![refused("Foo", "Parameters")]),
        ("lambda:invoke", r#""Parameters":{"FunctionName":"f","Foo.$":"$"}"#, vec![]),
        (
            "lambda:invoke.waitForTaskToken",
            r#""QueryLanguage":"JSONata","Arguments":{"FunctionName":"f","TaskToken":"{% $states.context.Task.Token %}"}"#,
            vec![refused("TaskToken", "Arguments")],
        ),
        ("lambda:invoke", r#""QueryLanguage":"JSONata","Arguments":"{% $states.input %}""#, vec![]),
        (
            "states:startExecution",
            r#""Parameters":{"StateMachineArn":"a","Name":"n","Input":{"any":1},"TraceHeader":"t"}"#,
            vec![],
        ),
        (
            "states:startExecution.sync:2",
            r#""Parameters":{"Foo":1}"#,
            vec![missing("StateMachineArn"), refused("Foo", "Parameters")],
        ),
        // AWS does not document the parameters of the others.
        ("sns:publish", r#""Parameters":{"Foo":1}"#, vec![]),
    ];
    for (resource, given, expected) in cases {
        let text = task(resource, given);
        assert_eq!(errors_of(&text, StateMachineType::Standard), expected, "{text}");
        // Definitions that an earlier version accepted still compile.
        let accepted = crate::parse::compile_accepted(&text, StateMachineType::Standard);
        let missing = expected.iter().any(|error| error.contains("required"));
        assert_eq!(accepted.is_ok(), !missing, "{text}");
    }
}
