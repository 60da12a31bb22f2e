//! The context object of a test: given by the caller and checked, or made up.

use mayfly_workflows_language::value::{Map, Value};

/// The objects that a given context may have, each with its fields and whether a field is a string.
const ALLOWED: [(&str, &[(&str, FieldType)]); 4] = [
    (
        "Execution",
        &[
            ("Id", FieldType::Text),
            ("Input", FieldType::Any),
            ("Name", FieldType::Text),
            ("RoleArn", FieldType::Text),
            ("StartTime", FieldType::Text),
            ("RedriveCount", FieldType::Integer),
            ("RedriveTime", FieldType::Text),
        ],
    ),
    (
        "State",
        &[("EnteredTime", FieldType::Text), ("Name", FieldType::Text), ("RetryCount", FieldType::Integer)],
    ),
    ("StateMachine", &[("Id", FieldType::Text), ("Name", FieldType::Text)]),
    ("Task", &[("Token", FieldType::Text)]),
];

#[derive(Clone, Copy, PartialEq)]
enum FieldType {
    Text,
    Integer,
    Any,
}

/// Reads a caller's context object. `waits`: the state is a Task that hands out a token.
///
/// # Errors
/// The message of the ValidationException: AWS's where it is recorded, else LocalStack's.
pub(super) fn parse_context(text: &str, waits: bool) -> Result<Value, String> {
    let refused = |what: String| Err(format!("Invalid Context object provided: {what}"));
    let Ok(context) = Value::parse(text) else { return refused("not a valid JSON".into()) };
    let Some(objects) = context.as_object() else { return refused("must be a JSON object".into()) };
    for (name, object) in objects.iter() {
        if &**name == "Map" {
            return refused("'Map' field is not supported when mocking a Context object".into());
        }
        let Some((_, fields)) = ALLOWED.iter().find(|(allowed, _)| *allowed == &**name) else {
            return refused(format!("Field '{name}' is not allowed"));
        };
        let Some(object) = object.as_object() else { return refused(format!("{name} must be a object")) };
        for (field, value) in object.iter() {
            let Some((_, form)) = fields.iter().find(|(allowed, _)| *allowed == &**field) else {
                return refused(format!("Field '{field}' is not allowed"));
            };
            match (form, value) {
                (FieldType::Text, Value::String(_))
                | (FieldType::Integer, Value::Number(_))
                | (FieldType::Any, _) => {}
                (FieldType::Text, _) => return refused(format!("{name}.{field} must be a string")),
                (FieldType::Integer, _) => return refused(format!("{name}.{field} must be a integer")),
            }
        }
    }
    if context.get("Task").is_some() && !waits {
        return Err(
            "Context object contains 'Task' when state is not a Task state with a '.sync' or '.waitForTaskToken' \
             service integration pattern"
                .into(),
        );
    }
    Ok(context)
}

/// The context of a test without one in its request.
pub(super) struct TestContext<'a> {
    pub execution_arn: String,
    pub execution_name: String,
    pub machine_arn: String,
    pub role_arn: &'a str,
    pub input: &'a Value,
    pub state: &'a str,
    /// RFC 3339 with milliseconds.
    pub now: String,
    /// Whether the state can be retried.
    pub retried: bool,
    /// For states that hand out a token.
    pub token: Option<String>,
}

impl TestContext<'_> {
    pub(super) fn context(&self) -> Value {
        let text = |text: &str| Value::from(text);
        let mut state = vec![("Name", text(self.state)), ("EnteredTime", text(&self.now))];
        if self.retried {
            state.push(("RetryCount", Value::from(0_i64)));
        }
        let mut context = vec![
            (
                "Execution",
                object([
                    ("Id", text(&self.execution_arn)),
                    ("Input", self.input.clone()),
                    ("Name", text(&self.execution_name)),
                    ("RoleArn", text(self.role_arn)),
                    ("StartTime", text(&self.now)),
                ]),
            ),
            ("StateMachine", object([("Id", text(&self.machine_arn)), ("Name", text("TestStateMachine"))])),
            ("State", object(state)),
        ];
        if let Some(token) = &self.token {
            context.push(("Task", object([("Token", text(token))])));
        }
        object(context)
    }
}

fn object<'a>(fields: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    Value::from(fields.into_iter().map(|(name, value)| (name.into(), value)).collect::<Map>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_given_context_is_checked() {
        let refused = |text: &str| parse_context(text, false).expect_err("refused");
        let begin = "Invalid Context object provided: ";
        assert_eq!(refused(r#"{"Execution": {"Id": 1}}"#), format!("{begin}Execution.Id must be a string"));
        assert_eq!(refused(r#"{"Pokedex": {}}"#), format!("{begin}Field 'Pokedex' is not allowed"));
        assert_eq!(
            refused(r#"{"Map": {}}"#),
            format!("{begin}'Map' field is not supported when mocking a Context object")
        );
        assert_eq!(refused(r#"{"State": {"Pokedex": 1}}"#), format!("{begin}Field 'Pokedex' is not allowed"));
        assert_eq!(
            refused(r#"{"State": {"RetryCount": "1"}}"#),
            format!("{begin}State.RetryCount must be a integer")
        );
        assert!(
            parse_context(r#"{"Execution": {"Id": "a", "Input": [1]}, "State": {"RetryCount": 0}}"#, false)
                .is_ok()
        );
        let token = r#"{"Task": {"Token": "t"}}"#;
        assert!(parse_context(token, false).is_err_and(|told| told.contains("'.waitForTaskToken'")));
        assert!(parse_context(token, true).is_ok());
    }
}
