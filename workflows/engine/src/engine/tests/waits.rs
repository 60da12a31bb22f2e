//! Waits at the bounds of what AWS documents: a year for an execution, whole seconds for a timestamp.

use super::*;

const YEAR_SECONDS: i64 = 31_536_000;

fn wait(field: &str, value: serde_json::Value) -> serde_json::Value {
    json!({"StartAt": "A", "States": {"A": {"Type": "Wait", field: value, "Next": "B"}, "B": {"Type": "Succeed"}}})
}

#[tokio::test]
async fn an_execution_that_would_wait_for_more_than_a_year_times_out() {
    let world = TestEngine::new().await;
    let start = 1_700_000_000;
    let at = |seconds: i64| json!(jiff::Timestamp::from_second(start + seconds).expect("a time").to_string());
    let looped = json!({"StartAt": "A", "States": {
        "A": {"Type": "Wait", "Seconds": 20_000_000, "Next": "B"},
        "B": {"Type": "Choice", "Choices": [{"Variable": "$.stop", "IsPresent": true, "Next": "C"}], "Default": "A"},
        "C": {"Type": "Succeed"}}});
    let definitions = [
        wait("Seconds", json!(99_999_999)),
        wait("Seconds", json!(YEAR_SECONDS + 1)),
        // The seconds of these do not fit into 31 bits.
        wait("Timestamp", at(24_855 * 86_400)),
        wait("Timestamp", at(24_856 * 86_400)),
        wait("Timestamp", json!("9998-12-31T23:59:59Z")),
        looped,
    ];
    let mut arns = Vec::new();
    let awake = world.engine.inner.busy();
    for definition in definitions {
        arns.push(world.start(&machine(definition, StateMachineType::Standard), "{}").await);
    }
    drop(awake);
    for arn in arns {
        let ended = world.engine.wait(&arn).await.expect("read").expect("there");
        assert_eq!(ended.status, RunStatus::TimedOut);
        let lasted = ended.stop_date.expect("ended").as_second() - ended.start_date.as_second();
        assert_eq!(lasted, YEAR_SECONDS);
        assert_eq!(
            world.lines(&arn).await.last().map(String::as_str).expect("events").rsplit(' ').next(),
            Some("ExecutionTimedOut")
        );
    }
}

#[tokio::test]
async fn a_wait_of_exactly_a_year_is_over_then() {
    let world = TestEngine::new().await;
    let (ended, _) = world.run(wait("Seconds", json!(YEAR_SECONDS)), "{}").await;
    assert_eq!(ended.status, RunStatus::Succeeded);
}

#[tokio::test]
async fn a_timestamp_counts_in_whole_seconds() {
    let world = TestEngine::new().await;
    let awake = world.engine.inner.busy();
    let arn = world
        .start(
            &machine(wait("Timestamp", json!("2023-11-14T22:13:25.999Z")), StateMachineType::Standard),
            "{}",
        )
        .await;
    drop(awake);
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.stop_date.expect("ended").as_millisecond(), 1_700_000_005_000);
}
