//! Validation rules as data: a state (or a machine) and its expected diagnostics.

use super::*;
use crate::definition::{DataFlow, PathField, ResultPath, StateKind, Transition};

mod states;

fn errors_of(text: &str, machine_type: StateMachineType) -> Vec<String> {
    match compile(text, machine_type) {
        Ok(_) => Vec::new(),
        Err(rejection) => rejection.diagnostics.iter().map(ToString::to_string).collect(),
    }
}

/// A machine with one state `X`, in JSONPath.
fn around(state: &str) -> String {
    format!(r#"{{"StartAt":"X","States":{{"X":{state}}}}}"#)
}

#[track_caller]
fn state(state: &str, expect: &[&str]) {
    assert_eq!(errors_of(&around(state), StateMachineType::Standard), expect, "{state}");
}

/// The same in JSONata.
#[track_caller]
fn jsonata(state: &str, expect: &[&str]) {
    let text = format!(r#"{{"QueryLanguage":"JSONata","StartAt":"X","States":{{"X":{state}}}}}"#);
    assert_eq!(errors_of(&text, StateMachineType::Standard), expect, "{state}");
}

#[track_caller]
fn machine(text: &str, expect: &[&str]) {
    assert_eq!(errors_of(text, StateMachineType::Standard), expect, "{text}");
}

fn compiled(text: &str) -> StateMachine {
    compile(text, StateMachineType::Standard).expect("a sound definition")
}

#[test]
fn text_that_is_no_definition() {
    let not_an_object = ["SCHEMA_VALIDATION_FAILED: Definition must be a valid JSON object at null"];
    for text in ["", " ", "null", "[]", "1", "\"x\""] {
        machine(text, &not_an_object);
    }
    let broken = &errors_of("{\n  \"StartAt\" 1}", StateMachineType::Standard)[0];
    assert!(
        broken.starts_with("INVALID_JSON_DESCRIPTION: Unexpected character ('1' (code 49)): "),
        "{broken}"
    );
    let at = " at [Source: (String)\"{\n  \"StartAt\" 1}\"; line: 2, column: 14]";
    assert!(broken.ends_with(at) && broken.matches("[Source:").count() == 1, "{broken}");
    machine("{}", &["SCHEMA_VALIDATION_FAILED: These fields are required: [StartAt, States] at /"]);
}

#[test]
fn a_problem_is_reported_once() {
    machine(
        r#"{"Comment":5,"StartAt":"X","States":{"X":{"Type":"Succeed"}}}"#,
        &["SCHEMA_VALIDATION_FAILED: Expected value of type String at /Comment"],
    );
}

#[test]
fn a_variable_belongs_to_one_scope() {
    let nested = |processor: &str| {
        format!(
            r#"{{"StartAt":"A","States":{{
                "A":{{"Type":"Pass","Assign":{{"v.$":"$.x"}},"Next":"M"}},
                "M":{{"Type":"Map","End":true,"ItemProcessor":{{{processor}"StartAt":"I","States":{{
                    "I":{{"Type":"Choice","Choices":[
                        {{"Variable":"$.a","IsNull":true,"Assign":{{"w":1}},"Next":"E"}},
                        {{"Variable":"$.b","IsNull":true,"Assign":{{"v":1}},"Next":"E"}}],"Default":"E"}},
                    "E":{{"Type":"Succeed"}}}}}}}}}}}}"#
        )
    };
    machine(
        &nested(""),
        &["INVALID_VARIABLE_NAME: The variable name 'v' was already defined in a parent scope. at \
           /States/M/ItemProcessor/States/I/Choices[1]/Assign"],
    );
    machine(&nested(r#""ProcessorConfig":{"Mode":"DISTRIBUTED","ExecutionType":"STANDARD"},"#), &[]);
}

#[test]
fn top_level_fields_are_checked() {
    machine(
        r#"{"StartAt":1,"States":{"X":{"Type":"Succeed"}},"Coment":"","TimeoutSeconds":-1,"QueryLanguage":"jq"}"#,
        &[
            "SCHEMA_VALIDATION_FAILED: Value should be one of the following: [JSONPath, JSONata] at /QueryLanguage",
            "SCHEMA_VALIDATION_FAILED: Minimum value is 0 at /TimeoutSeconds",
            "SCHEMA_VALIDATION_FAILED: Field 'Coment' is not supported at /",
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
    // The query language of a Map does not apply to its children.
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
fn transitions_are_checked() {
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
fn unreachable_states_and_missing_targets_are_found() {
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
    // Choice, Default and Catch also have targets.
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
    // A branch has no transitions to states outside.
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
        StateMachineType::Standard,
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
            StateMachineType::Standard,
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
    let StateKind::Pass(pass) = &state.kind else { panic!("Pass") };
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
        assert_eq!(errors_of(&text, StateMachineType::Standard), [expect]);
    }
    state(
        r#"{"Type":"Pass","Assign":{"states":1},"End":true}"#,
        &["RESERVED_VARIABLE_NAME: Cannot assign to reserved variable '$states'. at /States/X/Assign"],
    );
}

#[test]
fn a_state_alone() {
    let lone = r#"{"Type":"Task","Resource":"arn:aws:states:::lambda:invoke","Parameters":{"FunctionName":"f"},
        "Catch":[{"ErrorEquals":["A"],"Next":"Elsewhere"}],"Next":"There"}"#;
    let machine = compile_state(lone, "It").expect("a sound state");
    let state = machine.state_named("It").expect("the state");
    assert_eq!(state.next, Transition::Outside("There".into()));
    assert_eq!(state.catch[0].next, Transition::Outside("Elsewhere".into()));
    let inside = r#"{"Type":"Parallel","Next":"There","Branches":[{"StartAt":"A","States":{"A":{"Type":"Pass","Next":"B"}}}]}"#;
    let dangling = compile_state(inside, "It").expect_err("a branch is whole in itself");
    let first = "MISSING_TRANSITION_TARGET: Missing 'Next' target: B at /Branches[0]/States/A/Next";
    assert_eq!(dangling.diagnostics[0].to_string(), first);
    let broken = compile_state(r#"{"Type":"Task","End":true}"#, "It").expect_err("no resource");
    assert_eq!(
        broken.message(),
        "Invalid State Machine Definition: 'SCHEMA_VALIDATION_FAILED: These fields are required: [Resource] \
         at /'"
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
    assert!(compile(&nested(FLOW_DEPTH_MAX), StateMachineType::Standard).is_ok());
    for depth in [FLOW_DEPTH_MAX + 1, 90, 500] {
        let rejection = compile(&nested(depth), StateMachineType::Standard).expect_err("too deep");
        assert!(
            rejection.diagnostics.iter().all(|error| {
                matches!(error.code, DiagnosticCode::TooDeeplyNested | DiagnosticCode::InvalidJsonDescription)
            }),
            "{depth}: {rejection}"
        );
    }
}

#[test]
fn all_problems_at_once() {
    let rejection = compile(
        r#"{"StartAt":"A","States":{"A":{"Type":"Task","Next":"B"},"B":{"Type":"Wait","Seconds":"x","End":true}}}"#,
        StateMachineType::Standard,
    )
    .expect_err("two problems");
    assert_eq!(
        rejection.message(),
        "Invalid State Machine Definition: 'SCHEMA_VALIDATION_FAILED: These fields are required: [Resource] \
         at /States/A, SCHEMA_VALIDATION_FAILED: Expected value of type Integer at /States/B/Seconds'"
    );
}

#[test]
fn warnings_are_reported() {
    let doubts = |text: &str| -> Vec<String> {
        crate::validate::check(text, StateMachineType::Standard, |resource| resource.contains(":::sqs:"))
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
    // Services with a configured endpoint, and integrations that Mayfly implements.
    for reached in ["sqs:sendMessage", "aws-sdk:s3:getObject", "aws-sdk:sfn:listStateMachines"] {
        let task = format!(
            r#"{{"Type":"Task","Resource":"arn:aws:states:::{reached}","End":true,
            "Parameters":{{"QueueUrl":"q","MessageBody":"m","Bucket":"b","Key":"k"}}}}"#
        );
        assert_eq!(doubts(&around(&task)), [""; 0], "{reached}");
    }
    assert_eq!(
        doubts(&around(
            r#"{"Type":"Task","Resource":"arn:aws:states:::http:invoke","End":true,
                "Parameters":{"ApiEndpoint":"https://h","Method":"GET","Authentication":{"ConnectionArn":"a"}}}"#
        )),
        ["UNSUPPORTED_INTEGRATION /States/X/Parameters/Authentication"]
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

#[test]
fn missing_targets_are_found_beside_invalid_fields() {
    let text = r#"{"StartAt":"Gone","States":{
        "A":{"Type":"Pass","Next":"Missing","Bogus":1},
        "B":{"Type":"Bogus","Next":"A"},
        "C":{"Type":"Parallel","End":true,"Branches":[{"StartAt":"D","States":{"D":{"Type":"Wait","Next":"E"}}}]}}}"#;
    let found = crate::validate::missing_targets(text, StateMachineType::Standard);
    let found: Vec<_> = found.iter().map(|one| one.location.as_deref().unwrap_or_default()).collect();
    assert_eq!(found, ["/StartAt", "/States/A/Next", "/States/C/Branches[0]/States/D/Next"]);
    let fields = crate::validate::check(text, StateMachineType::Standard, |_| false);
    assert!(fields.iter().all(|one| one.code == DiagnosticCode::SchemaValidationFailed), "{fields:?}");
}
