//! TestState and an execution agree about a state: both run the machine's stages.

use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::service::CredentialScope;
use crate::test_state::{DataStage, InspectionLevel, StateConfiguration, TestState, TestStatus};

/// A field with one of these values, or without it.
fn field(values: Vec<serde_json::Value>) -> impl Strategy<Value = Option<serde_json::Value>> {
    proptest::option::of(select(values))
}

/// The object with those members that are there.
fn members(fields: Vec<(&'static str, Option<serde_json::Value>)>) -> serde_json::Value {
    let there = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    there.collect::<serde_json::Map<_, _>>().into()
}

fn assigns() -> Vec<serde_json::Value> {
    vec![json!({"v.$": "$.a"}), json!({"w.$": "$$.State.Name", "v": 1}), json!({"v.$": "$.missing"})]
}

/// The work of a state: its type and the fields that belong to it.
fn work() -> impl Strategy<Value = serde_json::Value> {
    let catcher = |catch: serde_json::Value| with(task("fail"), json!({"Catch": [catch]}));
    let rule = |variable: &str| json!({"Variable": variable, "NumericEquals": 1, "Next": "N"});
    select(vec![
        json!({"Type": "Pass"}),
        json!({"Type": "Pass", "Result": {"r": [1, {"s": 2}]}}),
        json!({"Type": "Pass", "Parameters": {"x.$": "$.a", "k": "v"}}),
        json!({"Type": "Pass", "Parameters": {"x.$": "States.Format('{}!', $.b)"}}),
        json!({"Type": "Succeed"}),
        json!({"Type": "Wait", "Seconds": 0}),
        json!({"Type": "Wait", "SecondsPath": "$.a"}),
        json!({"Type": "Wait", "TimestampPath": "$.b"}),
        json!({"Type": "Fail", "ErrorPath": "$.b", "Cause": "c"}),
        json!({"Type": "Fail", "Error": "e", "CausePath": "$.a"}),
        json!({"Type": "Choice", "Choices": [rule("$.a")], "Default": "N"}),
        json!({"Type": "Choice", "Choices": [rule("$.c.d"), with(rule("$.a"), json!({"Assign": {"y.$": "$.c"}}))]}),
        task("echo"),
        with(task("echo"), json!({"Parameters": {"x.$": "$.c"}, "ResultSelector": {"y.$": "$.x"}})),
        with(task("echo"), json!({"ResultSelector": {"y.$": "$.missing"}})),
        task("fail"),
        catcher(json!({"ErrorEquals": ["Broken"], "Next": "N"})),
        catcher(
            json!({"ErrorEquals": ["States.ALL"], "ResultPath": "$.e", "Next": "N", "Assign": {"f.$": "$.Error"}}),
        ),
        catcher(json!({"ErrorEquals": ["Other"], "Next": "N"})),
    ])
}

/// A JSONPath state.
fn jsonpath() -> impl Strategy<Value = serde_json::Value> {
    let input = field(vec![json!("$"), json!("$.c"), json!("$.missing"), json!(null)]);
    let result = field(vec![json!("$"), json!("$.r"), json!("$.a.b"), json!(null)]);
    let output = field(vec![json!("$"), json!("$.a"), json!("$.r"), json!(null)]);
    (work(), input, result, output, field(assigns())).prop_map(|(work, input, result, output, assign)| {
        let kind = work["Type"].as_str().unwrap_or_default().to_owned();
        let result = result.filter(|_| matches!(kind.as_str(), "Pass" | "Task"));
        let (input, output) = match kind.as_str() {
            "Fail" => (None, None),
            _ => (input, output),
        };
        let assign = assign.filter(|_| !matches!(kind.as_str(), "Fail" | "Succeed"));
        let data = [("InputPath", input), ("ResultPath", result), ("OutputPath", output), ("Assign", assign)];
        with(work, members(data.into()))
    })
}

/// A JSONata state.
fn jsonata() -> impl Strategy<Value = serde_json::Value> {
    let rule = |condition: &str| json!({"Condition": condition, "Next": "N"});
    let work = select(vec![
        json!({"Type": "Pass"}),
        json!({"Type": "Succeed"}),
        json!({"Type": "Wait", "Seconds": "{% $states.input.a - 1 %}"}),
        json!({"Type": "Fail", "Error": "{% $states.input.b %}", "Cause": "{% $states.input.a %}"}),
        json!({"Type": "Choice", "Choices": [rule("{% $states.input.a > 3 %}")], "Default": "N"}),
        json!({"Type": "Choice", "Choices": [with(rule("{% $states.input.a < 3 %}"),
            json!({"Output": "{% $states.input.c %}", "Assign": {"y": 1}}))]}),
        task("echo"),
        with(task("echo"), json!({"Arguments": {"x": "{% $states.input.b %}"}})),
        with(
            task("fail"),
            json!({"Catch": [{"ErrorEquals": ["States.ALL"], "Next": "N",
            "Output": "{% $states.errorOutput.Error & '!' %}", "Assign": {"f": "{% $states.errorOutput %}"}}]}),
        ),
    ]);
    let output = field(vec![
        json!("{% $states.input.a %}"),
        json!({"r": "{% $states.result %}", "k": 1}),
        json!("{% $v %}"),
        json!("{% $states.input.missing.deeper + 'x' %}"),
    ]);
    let assign = field(vec![json!({"v": "{% $states.input.c.d %}"}), json!({"v": "{% $states.result %}"})]);
    (work, output, assign).prop_map(|(work, output, assign)| {
        let kind = work["Type"].as_str().unwrap_or_default().to_owned();
        let output = output.filter(|_| kind != "Fail");
        let assign = assign.filter(|_| !matches!(kind.as_str(), "Fail" | "Succeed"));
        let data =
            members(vec![("QueryLanguage", Some(json!("JSONata"))), ("Output", output), ("Assign", assign)]);
        with(work, data)
    })
}

fn inputs() -> impl Strategy<Value = serde_json::Value> {
    select(vec![
        json!({"a": 1, "b": "two", "c": {"d": 1}}),
        json!({"a": "text", "b": "2023-11-14T22:13:20Z", "c": [1, 2]}),
        json!({"a": {"b": 5}, "b": null}),
        json!({}),
    ])
}

/// The visible results of a state.
#[derive(Debug, PartialEq)]
struct StateResult {
    output: Option<serde_json::Value>,
    error: Option<String>,
    /// The state that follows.
    next: Option<String>,
    /// The assigned variables.
    variables: serde_json::Value,
}

fn json_of(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("JSON")
}

/// Runs the state as the first one of an execution. Also returns the cause of an error.
async fn executed(
    world: &TestEngine,
    definition: &serde_json::Value,
    input: &str,
) -> (StateResult, Option<String>) {
    let arn = world.start(&machine(definition.clone(), StateMachineType::Standard), input).await;
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    let all = HistoryQuery { reverse: false, include_data: true, limit: 1_000, from: None };
    let events = world.engine.history(&arn, all).await.expect("read").expect("there").items;
    let left = events.iter().find(|event| event["stateExitedEventDetails"]["name"] == "S");
    let left = left.map(|event| &event["stateExitedEventDetails"]);
    let entered = events.iter().filter_map(|event| event["stateEnteredEventDetails"]["name"].as_str());
    let variables = left.and_then(|left| left["assignedVariables"].as_object());
    let variables = variables.into_iter().flatten();
    let variables: serde_json::Map<_, _> =
        variables.map(|(name, text)| (name.clone(), json_of(text.as_str().expect("text")))).collect();
    let result = StateResult {
        output: left.map(|left| json_of(left["output"].as_str().expect("text"))),
        error: ended.error,
        next: entered.skip(1).map(str::to_owned).next(),
        variables: variables.into(),
    };
    (result, ended.cause)
}

/// Tests the state alone. Also returns the cause of an error.
async fn tested(
    world: &TestEngine,
    definition: &serde_json::Value,
    input: &str,
) -> (StateResult, Option<String>) {
    let request = TestState {
        scope: CredentialScope::default(),
        definition: definition.to_string(),
        state_name: Some("S".to_owned()),
        role_arn: Some("arn:aws:iam::000000000000:role/r".to_owned()),
        input: Some(input.to_owned()),
        level: InspectionLevel::Debug,
        reveal_secrets: false,
        variables: None,
        context: None,
        mock: None,
        configuration: StateConfiguration::default(),
    };
    let service = WorkflowService::new(world.engine.clone());
    let tested = service.test_state(&request).await.expect("a state that can be tested");
    let failed = tested.status == TestStatus::Failed;
    let inspection = tested.inspection.expect("the data between the stages");
    let variables = inspection.stages.get(&DataStage::Variables).filter(|_| !failed);
    let result = StateResult {
        output: tested.output.as_deref().map(json_of),
        // The error that a catcher takes is not the execution's.
        error: tested.error.filter(|_| failed),
        next: tested.next_state,
        variables: variables.map_or_else(|| json!({}), |text| json_of(text)),
    };
    (result, tested.cause.filter(|_| failed))
}

async fn check(state: &serde_json::Value, input: &serde_json::Value) -> Result<(), TestCaseError> {
    let state = match state["Type"].as_str() {
        Some("Choice" | "Succeed" | "Fail") => state.clone(),
        _ => with(state.clone(), json!({"Next": "N"})),
    };
    // A definition has no unreachable states.
    let mut states = json!({"S": state});
    if state.to_string().contains(r#""N""#) {
        states["N"] = json!({"Type": "Pass", "End": true});
    }
    let definition = json!({"StartAt": "S", "States": states});
    if parse::compile(&definition.to_string(), StateMachineType::Standard).is_err() {
        return Err(TestCaseError::reject("not a definition"));
    }
    let world = TestEngine::new().await;
    let input = input.to_string();
    let (executed, full_cause) = executed(&world, &definition, &input).await;
    let (tested, cause) = tested(&world, &definition, &input).await;
    prop_assert_eq!(&executed, &tested, "{} with {}", definition, input);
    // An execution adds the state's name and the number of an event to an error of the state's data.
    let (full_cause, cause) = (full_cause.unwrap_or_default(), cause.unwrap_or_default());
    prop_assert!(full_cause.ends_with(&cause), "{} is not the end of {}", cause, full_cause);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 10_000, ..ProptestConfig::with_cases(200) })]
    #[test]
    fn a_test_of_a_state_shows_what_an_execution_does(
        state in prop_oneof![jsonpath(), jsonata()],
        input in inputs(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(check(&state, &input))?;
    }
}
