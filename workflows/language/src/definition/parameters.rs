//! The parameters of the integrations that Mayfly implements.

use super::Resource;
use crate::value::Value;

/// The parameters of one integration.
#[derive(Debug, PartialEq, Eq)]
pub struct ParametersShape {
    /// Required parameters.
    pub required: &'static [&'static str],
    /// Parameters of type string.
    texts: &'static [&'static str],
    /// Parameters of any JSON type.
    values: &'static [&'static str],
}

/// The request of Lambda's Invoke, without parameters that only a client sends.
static INVOKE: ParametersShape = ParametersShape {
    required: &["FunctionName"],
    texts: &["ClientContext", "FunctionName", "InvocationType", "LogType", "Qualifier"],
    values: &["Payload"],
};

/// The request of StartExecution.
static START_EXECUTION: ParametersShape = ParametersShape {
    required: &["StateMachineArn"],
    texts: &["Name", "StateMachineArn", "TraceHeader"],
    values: &["Input"],
};

impl Resource {
    /// The parameters of this integration, if they are known.
    pub fn parameters(&self) -> Option<&'static ParametersShape> {
        match self {
            Resource::LambdaInvoke(_) => Some(&INVOKE),
            Resource::StartExecution { .. } => Some(&START_EXECUTION),
            _ => None,
        }
    }
}

impl ParametersShape {
    /// Whether there is a parameter of this name.
    pub fn has(&self, name: &str) -> bool {
        self.texts.contains(&name) || self.values.contains(&name)
    }

    /// The reasons why a task cannot be started with these arguments; empty if it can.
    pub fn problems(&self, arguments: &Value) -> Vec<String> {
        let Some(given) = arguments.as_object() else {
            return vec!["The value must be an OBJECT".to_owned()];
        };
        let missing = self.required.iter().filter(|name| !given.contains_key(name));
        let missing = missing.map(|name| format!("The field '{name}' is required but was missing"));
        let wrong = given.iter().filter_map(|(name, value)| {
            if !self.has(name) {
                return Some(unsupported(name));
            }
            let is_text = value.as_str().is_some() || !self.texts.contains(&&**name);
            (!is_text).then(|| format!("The value for the field '{name}' must be a STRING"))
        });
        missing.chain(wrong).collect()
    }
}

/// AWS's message about an unsupported parameter of an integration, with its quotes.
pub fn unsupported(field: &str) -> String {
    format!("The field \"{field}\" is not supported by Step Functions")
}
