//! Rules as data: a state (or a machine) and what is said about it.

use super::*;
use crate::definition::{
    DataFlow, Jitter, Kind, MapMode, PathField, Quantity, Resource, ResultPath, TimestampField, Transition,
    Wait,
};

fn errors_of(text: &str, machine_type: MachineType) -> Vec<String> {
    match compile(text, machine_type) {
        Ok(_) => Vec::new(),
        Err(rejection) => rejection.diagnostics.iter().map(ToString::to_string).collect(),
    }
}

/// A machine of one state `X`, in JSONPath.
fn around(state: &str) -> String {
    format!(r#"{{"StartAt":"X","States":{{"X":{state}}}}}"#)
}

#[track_caller]
fn state(state: &str, expect: &[&str]) {
    assert_eq!(errors_of(&around(state), MachineType::Standard), expect, "{state}");
}

/// The same in JSONata.
#[track_caller]
fn jsonata(state: &str, expect: &[&str]) {
    let text = format!(r#"{{"QueryLanguage":"JSONata","StartAt":"X","States":{{"X":{state}}}}}"#);
    assert_eq!(errors_of(&text, MachineType::Standard), expect, "{state}");
}

#[track_caller]
fn machine(text: &str, expect: &[&str]) {
    assert_eq!(errors_of(text, MachineType::Standard), expect, "{text}");
}

fn compiled(text: &str) -> StateMachine {
    compile(text, MachineType::Standard).expect("a sound definition")
}

#[test]
fn text_that_is_no_definition() {
    let not_an_object = ["SCHEMA_VALIDATION_FAILED: Definition must be a valid JSON object at null"];
    for text in ["", " ", "null", "[]", "1", "\"x\""] {
        machine(text, &not_an_object);
    }
    let broken = &errors_of("{\n  \"StartAt\" 1}", MachineType::Standard)[0];
    assert!(
        broken.starts_with("INVALID_JSON_DESCRIPTION: Unexpected character ('1' (code 49)): "),
        "{broken}"
    );
    assert!(broken.contains("; line: 2, column: "), "{broken}");
    machine("{}", &["SCHEMA_VALIDATION_FAILED: These fields are required: [StartAt, States] at "]);
}

#[test]
fn heads() {
    machine(
        r#"{"StartAt":1,"States":{"X":{"Type":"Succeed"}},"Coment":"","TimeoutSeconds":-1,"QueryLanguage":"jq"}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: Value should be one of the following: [JSONPath, JSONata] at /QueryLanguage",
            "SCHEMA_VALIDATION_FAILED: Minimum value is 0 at /TimeoutSeconds",
            "SCHEMA_VALIDATION_FAILED: Field 'Coment' is not supported at ",
            "SCHEMA_VALIDATION_FAILED: Expected value of type String at /StartAt",
        ],
    );
    let machine = compiled(
        r#"{"Comment":"c","Version":"1.0","TimeoutSeconds":60,"StartAt":"X","States":{"X":{"Type":"Succeed"}}}"#,
    );
    assert_eq!((machine.comment.as_deref(), machine.version.as_deref()), (Some("c"), Some("1.0")));
    assert_eq!((machine.timeout_seconds, machine.query_language), (Some(60), QueryLanguage::JsonPath));
    assert_eq!(&*machine.state(machine.flow(machine.root()).start_at).name, "X");
}

#[test]
fn types_and_fields() {
    state(r#"{"End":true}"#, &["SCHEMA_VALIDATION_FAILED: These fields are required: [Type] at /States/X"]);
    state(
        r#"{"Type":"Nap","End":true}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: The field 'Type' should have one of these values: [Task, Wait, Pass, Succeed, \
           Fail, Choice, Parallel, Map] at /States/X/Type",
        ],
    );
    state("[]", &["SCHEMA_VALIDATION_FAILED: Expected value of type Object at /States/X"]);
    for (field, value) in [("TimeoutSeconds", "1"), ("Retry", "[]"), ("Catch", "[]"), ("Resource", "\"x\"")] {
        for body in
            [r#""Type":"Pass","End":true"#, r#""Type":"Succeed""#, r#""Type":"Wait","Seconds":1,"End":true"#]
        {
            state(
                &format!(r#"{{{body},"{field}":{value}}}"#),
                &[&format!("SCHEMA_VALIDATION_FAILED: Field '{field}' is not supported at /States/X")],
            );
        }
    }
}

#[test]
fn query_languages() {
    let foreign = |language: &str, field: &str, only: &str| {
        format!(
            "SCHEMA_VALIDATION_FAILED: The QueryLanguage is set to '{language}', but field '{field}' is only \
             supported for the '{only}' QueryLanguage at /States/X"
        )
    };
    state(r#"{"Type":"Pass","Output":1,"End":true}"#, &[&foreign("JSONPath", "Output", "JSONata")]);
    jsonata(r#"{"Type":"Pass","InputPath":"$","End":true}"#, &[&foreign("JSONata", "InputPath", "JSONPath")]);
    state(r#"{"Type":"Pass","QueryLanguage":"JSONata","Output":1,"End":true}"#, &[]);
    jsonata(
        r#"{"Type":"Pass","QueryLanguage":"JSONPath","End":true}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: 'QueryLanguage' can not be 'JSONPath' if set to 'JSONata' for whole state \
           machine at /States/X",
        ],
    );
    // A Map's own language is not its children's.
    state(
        r#"{"Type":"Map","QueryLanguage":"JSONata","End":true,
            "ItemProcessor":{"StartAt":"P","States":{"P":{"Type":"Pass","Output":1,"End":true}}}}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: The QueryLanguage is set to 'JSONPath', but field 'Output' is only supported for \
           the 'JSONata' QueryLanguage at /States/X/ItemProcessor/States/P",
        ],
    );
    state(
        r#"{"Type":"Map","End":true,"ItemProcessor":
            {"QueryLanguage":"JSONata","StartAt":"P","States":{"P":{"Type":"Pass","End":true}}}}"#,
        &["SCHEMA_VALIDATION_FAILED: Field 'QueryLanguage' is not supported at /States/X/ItemProcessor"],
    );
}

#[test]
fn onward() {
    state(
        r#"{"Type":"Pass"}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: This object should have only one of the following fields: [Next, End] at /States/X",
        ],
    );
    state(
        r#"{"Type":"Pass","End":true,"Next":"X"}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: There should only be one of the following fields: [Next, End] at /States/X",
        ],
    );
    state(
        r#"{"Type":"Pass","End":"yes"}"#,
        &["SCHEMA_VALIDATION_FAILED: Expected value of type Boolean at /States/X/End"],
    );
}

#[test]
fn the_graph() {
    machine(
        r#"{"StartAt":"pass1","States":{"pass1":{"Type":"Pass","Next":"pass3"},"pass2":{"Type":"Pass","End":true}}}"#,
        &[
            "MISSING_TRANSITION_TARGET: Missing 'Next' target: pass3 at /States/pass1/Next",
            "MISSING_TRANSITION_TARGET: State \"pass2\" is not reachable. at /States/pass2",
        ],
    );
    machine(
        r#"{"StartAt":"Y","States":{"X":{"Type":"Succeed"}}}"#,
        &[
            "MISSING_TRANSITION_TARGET: Missing 'Next' target: Y at /StartAt",
            "MISSING_TRANSITION_TARGET: State \"X\" is not reachable. at /States/X",
        ],
    );
    machine(
        r#"{"StartAt":"A","States":{"A":{"Type":"Pass","Next":"B"},"B":{"Type":"Pass","Next":"A"},
            "C":{"Type":"Pass","Next":"A"}}}"#,
        &["MISSING_END_STATE: Workflow has no terminal state at null"],
    );
    // Choice, Default and Catch lead somewhere too.
    machine(
        r#"{"StartAt":"C","States":{
            "C":{"Type":"Choice","Choices":[{"Variable":"$.x","IsNull":true,"Next":"no"}],"Default":"nor"},
            "T":{"Type":"Task","Resource":"arn:aws:states:::sns:publish","End":true,
                 "Catch":[{"ErrorEquals":["States.ALL"],"Next":"never"}]}}}"#,
        &[
            "MISSING_TRANSITION_TARGET: Missing 'Next' target: no at /States/C/Choices[0]/Next",
            "MISSING_TRANSITION_TARGET: Missing 'Next' target: nor at /States/C/Default",
            "MISSING_TRANSITION_TARGET: Missing 'Next' target: never at /States/T/Catch[0]/Next",
            "MISSING_TRANSITION_TARGET: State \"T\" is not reachable. at /States/T",
        ],
    );
    // A branch cannot lead out of itself.
    machine(
        r#"{"StartAt":"P","States":{"P":{"Type":"Parallel","Next":"S","Branches":[
            {"StartAt":"A","States":{"A":{"Type":"Pass","Next":"S"},"B":{"Type":"Succeed"}}}]},"S":{"Type":"Succeed"}}}"#,
        &[
            "MISSING_TRANSITION_TARGET: Missing 'Next' target: S at /States/P/Branches[0]/States/A/Next",
            "MISSING_TRANSITION_TARGET: State \"B\" is not reachable. at /States/P/Branches[0]/States/B",
        ],
    );
}

#[test]
fn names() {
    machine(
        r#"{"StartAt":"P","States":{"P":{"Type":"Parallel","End":true,
            "Branches":[{"StartAt":"P","States":{"P":{"Type":"Succeed"}}}]}}}"#,
        &["DUPLICATE_STATE_NAME: Duplicate State name: P at /States/P/Branches[0]/States/P"],
    );
    let long = "n".repeat(81);
    let error = &errors_of(
        &format!(r#"{{"StartAt":"{long}","States":{{"{long}":{{"Type":"Succeed"}}}}}}"#),
        MachineType::Standard,
    )[0];
    assert!(error.starts_with("INVALID_STATE_NAME: State name 'nnn"), "{error}");
}

#[test]
fn paths_and_templates() {
    state(
        r#"{"Type":"Pass","ResultPath":"x","End":true}"#,
        &["SCHEMA_VALIDATION_FAILED: Value must be a valid JSONPath. at /States/X/ResultPath"],
    );
    for wrong in ["$.a[*]", "$$.Execution", "$variable", "$..a"] {
        let found = errors_of(
            &around(&format!(r#"{{"Type":"Pass","ResultPath":"{wrong}","End":true}}"#)),
            MachineType::Standard,
        );
        assert!(
            found.len() == 1 && found[0].contains("Value is not a Reference Path: "),
            "{wrong}: {found:?}"
        );
    }
    state(
        r#"{"Type":"Pass","Parameters":{"a":{"lorem.$":"ipsum"}},"End":true}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: The value for the field 'lorem.$' must be a valid JSONPath or a valid intrinsic \
           function call at /States/X/Parameters/a",
        ],
    );
    let machine = compiled(&around(
        r#"{"Type":"Pass","InputPath":"$.a","OutputPath":null,"ResultPath":null,"Result":[1],"End":true}"#,
    ));
    let state = machine.state_named("X").expect("the state");
    let DataFlow::JsonPath { input_path, output_path, result_path, parameters, .. } = &state.data else {
        panic!("JSONPath");
    };
    assert!(matches!(input_path, PathField::Path(path) if path.source() == "$.a"));
    assert!(matches!((output_path, result_path), (PathField::Nothing, ResultPath::Discard)));
    assert!(parameters.is_none());
    let Kind::Pass(pass) = &state.kind else { panic!("Pass") };
    assert_eq!(pass.result.as_ref().map(Value::to_text).as_deref(), Some("[1]"));
}

#[test]
fn variables_have_names() {
    state(r#"{"Type":"Pass","Assign":{"a":1,"b_2.$":"$.x"},"End":true}"#, &[]);
    for wrong in ["1a", "a-b", "", "_a", "a b"] {
        let text = around(&format!(r#"{{"Type":"Pass","Assign":{{"{wrong}":1}},"End":true}}"#));
        let expect = format!(
            "INVALID_VARIABLE_NAME: Invalid variable name '{wrong}': the variable name contains invalid characters. \
             at /States/X/Assign"
        );
        assert_eq!(errors_of(&text, MachineType::Standard), [expect]);
    }
    state(
        r#"{"Type":"Pass","Assign":{"states":1},"End":true}"#,
        &["RESERVED_VARIABLE_NAME: Cannot assign to reserved variable '$states'. at /States/X/Assign"],
    );
}

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
        let found =
            errors_of(&around(&format!(r#"{{"Type":"Wait",{body},"End":true}}"#)), MachineType::Standard);
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
    let Kind::Wait(Wait::Timestamp(TimestampField::Value(instant, text))) = &machine.states()[0].kind else {
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
        let found = errors_of(&task(&format!("{arn},{body}")), MachineType::Standard);
        assert_eq!(found.is_empty(), right, "{body}: {found:?}");
    }
    assert_eq!(
        errors_of(&task(r#""Resource":"arn:aws:states:::sns:unpublish""#), MachineType::Standard),
        [
            "SCHEMA_VALIDATION_FAILED: The resource provided arn:aws:states:::sns:unpublish is not recognized. The value \
          is not a valid resource ARN, or the resource is not available in this region. at /States/X/Resource"
        ]
    );
    let machine = compiled(&task(&format!("{arn},\"TimeoutSeconds\":7")));
    let Kind::Task(task) = &machine.states()[0].kind else { panic!("Task") };
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
    let express = |resource: &str| errors_of(&task(resource), MachineType::Express);
    let integration = |pattern: &str| not(&format!("'.{pattern}' service integration "));
    assert_eq!(express("arn:aws:states:::sns:publish"), Vec::<String>::new());
    assert_eq!(express("arn:aws:states:::sns:publish.waitForTaskToken"), integration("waitForTaskToken"));
    assert_eq!(express("arn:aws:states:::batch:submitJob.sync"), integration("sync"));
    assert_eq!(express("arn:aws:states:us-east-1:123456789012:activity:a"), not("Activity ARN"));
    // The items of a distributed Map can be Express while the machine is not.
    let child = r#""StartAt":"T","States":{"T":{"Type":"Task","End":true,
        "Resource":"arn:aws:states:::sns:publish.waitForTaskToken"}}"#;
    let config = r#""ProcessorConfig":{"Mode":"DISTRIBUTED","ExecutionType":"EXPRESS"}"#;
    let map = around(&format!(r#"{{"Type":"Map","End":true,"ItemProcessor":{{{config},{child}}}}}"#));
    assert_eq!(errors_of(&map, MachineType::Standard).len(), 1);
    assert_eq!(errors_of(&map.replace("\"EXPRESS\"", "\"STANDARD\""), MachineType::Standard).len(), 0);
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
        let found = errors_of(&task(body), MachineType::Standard);
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
        let found = errors_of(&map(&body), MachineType::Standard);
        assert_eq!(found.is_empty(), right, "{body}: {found:?}");
    }
    let machine = compiled(&map(distributed));
    let Kind::Map(made) = &machine.state_named("X").expect("the state").kind else { panic!("Map") };
    assert!(matches!(made.mode, MapMode::Distributed(crate::definition::ExecutionType::Standard)));
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
        let rejection = compile(&text, MachineType::Standard).expect_err("a bad label");
        let expect = format!("Error=ValueError Args={shown} in definition '{text}'.");
        assert_eq!(rejection.message(), expect.replace("Args=[[", "Args=["));
    }
    assert!(compile(&text("fine_label-1"), MachineType::Standard).is_ok());
    assert!(compile(&text(&"l".repeat(41)), MachineType::Standard).is_err());
}

#[test]
fn a_state_alone() {
    let lone = r#"{"Type":"Task","Resource":"arn:aws:states:::lambda:invoke","Parameters":{"FunctionName":"f"},
        "Catch":[{"ErrorEquals":["A"],"Next":"Elsewhere"}],"Next":"There"}"#;
    let machine = compile_state(lone, "It").expect("a sound state");
    let state = machine.state_named("It").expect("the state");
    assert_eq!(state.next, Transition::Outside("There".into()));
    assert_eq!(state.catch[0].next, Transition::Outside("Elsewhere".into()));
    let broken = compile_state(r#"{"Type":"Task","End":true}"#, "It").expect_err("no resource");
    assert_eq!(
        broken.message(),
        "Invalid State Machine Definition: 'SCHEMA_VALIDATION_FAILED: These fields are required: [Resource] \
         at '"
    );
}

#[test]
fn flows_nest_up_to_the_limit() {
    let nested = |depth: usize| {
        let mut text = r#"{"StartAt":"S0","States":{"S0":{"Type":"Succeed"}}}"#.to_string();
        for level in 1..depth {
            text = format!(
                r#"{{"StartAt":"S{level}","States":{{"S{level}":{{"Type":"Parallel","End":true,"Branches":[{text}]}}}}}}"#
            );
        }
        text
    };
    assert!(compile(&nested(FLOW_DEPTH_MAX), MachineType::Standard).is_ok());
    for depth in [FLOW_DEPTH_MAX + 1, 90, 500] {
        let rejection = compile(&nested(depth), MachineType::Standard).expect_err("too deep");
        assert!(
            rejection
                .diagnostics
                .iter()
                .all(|error| { matches!(error.code, Code::TooDeeplyNested | Code::InvalidJsonDescription) }),
            "{depth}: {rejection}"
        );
    }
}

#[test]
fn all_problems_at_once() {
    let rejection = compile(
        r#"{"StartAt":"A","States":{"A":{"Type":"Task","Next":"B"},"B":{"Type":"Wait","Seconds":"x","End":true}}}"#,
        MachineType::Standard,
    )
    .expect_err("two problems");
    assert_eq!(
        rejection.message(),
        "Invalid State Machine Definition: 'SCHEMA_VALIDATION_FAILED: These fields are required: [Resource] \
         at /States/A, SCHEMA_VALIDATION_FAILED: Expected value of type Integer at /States/B/Seconds'"
    );
}

#[test]
fn doubts() {
    let doubts = |text: &str| -> Vec<String> {
        crate::validate::check(text, MachineType::Standard)
            .iter()
            .map(|found| {
                assert_eq!(found.severity, Severity::Warning, "{found}");
                format!("{} {}", found.code.as_str(), found.location.as_deref().unwrap_or_default())
            })
            .collect()
    };
    assert_eq!(
        doubts(&around(
            r#"{"Type":"Pass","Parameters":{"a":"$.b","c":{"d":"States.UUID()"},"e.$":"$"},"End":true}"#
        )),
        ["NO_DOLLAR /States/X/Parameters/a", "NO_DOLLAR /States/X/Parameters/c/d"]
    );
    assert_eq!(
        doubts(&around(r#"{"Type":"Pass","Result":{"a.$":"$.b"},"End":true}"#)),
        ["PASS_RESULT_IS_STATIC /States/X/Result/a.$"]
    );
    assert_eq!(
        doubts(&around(r#"{"Type":"Task","Resource":"arn:aws:states:::sns:publish","End":true}"#)),
        ["UNSUPPORTED_INTEGRATION /States/X/Resource"]
    );
    assert_eq!(doubts(&around(r#"{"Type":"Fail","Cause":"$.cause"}"#)), ["NO_PATH /States/X/Cause"]);
    let looping = r#"{"StartAt":"C","States":{
        "C":{"Type":"Choice","Choices":[{"Variable":"$.x","IsNull":true,"Next":"A"}],"Default":"S"},
        "A":{"Type":"Pass","Next":"B"},"B":{"Type":"Pass","Next":"A"},"S":{"Type":"Succeed"}}}"#;
    assert_eq!(doubts(looping), ["ENDLESS_LOOP /States/A", "ENDLESS_LOOP /States/B"]);
    assert_eq!(
        doubts(
            &looping
                .replace(r#","Default":"S""#, "")
                .replace(r#""B":{"Type":"Pass","Next":"A"}"#, r#""B":{"Type":"Pass","Next":"S"}"#)
        ),
        ["MISSING_DEFAULT /States/C"]
    );
    assert_eq!(doubts(&around(r#"{"Type":"Pass","End":true}"#)), Vec::<String>::new());
}
