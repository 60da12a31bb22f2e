//! The context object: `$$` and `$states.context`.

use std::sync::Arc;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use mayfly_workflows_language::value::Value;

use super::state::{Facts, Item};

/// The fields that a state adds to the context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateContext<'a> {
    /// The state's name.
    pub name: &'a Arc<str>,
    /// The time of entry, in milliseconds since the epoch.
    pub entered_ms: i64,
    /// The number of retries; `None` for states without retriers.
    pub retries: Option<u32>,
    /// The innermost enclosing iteration.
    pub item: Option<&'a Item>,
    /// The state's task token.
    pub token: Option<&'a Arc<str>>,
}

/// Builds the context object.
pub(crate) fn context_object(
    facts: &Facts,
    redrive_count: u32,
    redrive_ms: Option<i64>,
    state: StateContext<'_>,
) -> Value {
    let mut execution: Vec<(&str, Value)> = vec![
        ("Id", Value::String(facts.arn.clone().into())),
        ("Input", facts.input.clone()),
        ("StartTime", Value::from(time_text(facts.start_ms))),
        ("Name", Value::String(facts.name.clone())),
        ("RoleArn", Value::String(facts.role_arn.clone())),
    ];
    if !facts.express {
        execution.push(("RedriveCount", Value::from(redrive_count)));
        if let Some(at_ms) = redrive_ms {
            execution.push(("RedriveTime", Value::from(time_text(at_ms))));
        }
    }
    let mut here: Vec<(&str, Value)> = vec![
        ("Name", Value::String(state.name.clone())),
        ("EnteredTime", Value::from(time_text(state.entered_ms))),
    ];
    if let Some(retries) = state.retries {
        here.push(("RetryCount", Value::from(retries)));
    }
    let mut all = vec![
        ("Execution", Value::object(execution)),
        (
            "StateMachine",
            Value::object([
                ("Id", Value::String(facts.machine_arn.clone().into())),
                ("Name", Value::String(facts.machine_name.clone())),
            ]),
        ),
        ("State", Value::object(here)),
    ];
    if let Some(token) = state.token {
        all.push(("Task", Value::object([("Token", Value::String(token.clone()))])));
    }
    if let Some(item) = state.item {
        let item = Value::object([("Index", Value::from(item.index)), ("Value", item.value.clone())]);
        all.push(("Map", Value::object([("Item", item)])));
    }
    Value::object(all)
}

/// `2026-01-31T12:00:00.000Z`, AWS's format of times in data.
pub fn time_text(at_ms: i64) -> String {
    match Timestamp::from_millisecond(at_ms) {
        Ok(at) => at.to_zoned(TimeZone::UTC).strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string(),
        Err(_) => at_ms.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_have_three_decimals() {
        assert_eq!(super::time_text(1_700_000_000_000), "2023-11-14T22:13:20.000Z");
        assert_eq!(super::time_text(1_700_000_000_056), "2023-11-14T22:13:20.056Z");
    }
}
