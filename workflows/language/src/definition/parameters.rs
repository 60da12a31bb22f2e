//! The parameters of the integrations that Mayfly implements itself.

use super::Resource;
use crate::value::Value;

/// The parameters of one integration.
#[derive(Debug, PartialEq, Eq)]
pub struct ParametersShape {
    /// Those that it cannot do without.
    pub required: &'static [&'static str],
    /// Those that are text.
    texts: &'static [&'static str],
    /// Those that are any JSON.
    values: &'static [&'static str],
}

/// The request of Lambda's Invoke without what only a client sends.
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
    /// The parameters of this integration, where they are known.
    pub fn parameters(&self) -> Option<&'static ParametersShape> {
        match self {
            Resource::LambdaInvoke(_) => Some(&INVOKE),
            Resource::StartExecution { .. } => Some(&START_EXECUTION),
            _ => None,
        }
    }
}

impl ParametersShape {
    /// Whether a parameter has this name.
    pub fn has(&self, name: &str) -> bool {
        self.texts.contains(&name) || self.values.contains(&name)
    }

    /// Why a task cannot be started with these arguments; nothing when it can.
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

/// AWS's sentence about a parameter that an integration does not take, with its quotes.
pub fn unsupported(field: &str) -> String {
    format!("The field \"{field}\" is not supported by Step Functions")
}
