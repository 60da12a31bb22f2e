//! STANDARD and EXPRESS.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

// The doc comments are descriptions in the OpenAPI document, and `WorkflowType` is its name there. The aliases are
// the spelling of early journals.
/// STANDARD or EXPRESS.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[schemars(rename = "WorkflowType")]
pub enum StateMachineType {
    /// Every step is journalled.
    #[default]
    #[serde(rename = "STANDARD", alias = "Standard")]
    Standard,
    /// Runs in memory, five minutes at most.
    #[serde(rename = "EXPRESS", alias = "Express")]
    Express,
}

impl StateMachineType {
    const ALL: [StateMachineType; 2] = [StateMachineType::Standard, StateMachineType::Express];

    /// The name of the type in the Kubernetes API and in the Step Functions API.
    pub fn as_str(self) -> &'static str {
        match self {
            StateMachineType::Standard => "STANDARD",
            StateMachineType::Express => "EXPRESS",
        }
    }

    /// The inverse of [`StateMachineType::as_str`]; `None` for other words, also in another case.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.as_str() == word)
    }

    /// Parses the name of a type, ignoring case.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.as_str().eq_ignore_ascii_case(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_apis_and_early_journals_are_read() {
        for (word, early, it) in [
            ("STANDARD", "Standard", StateMachineType::Standard),
            ("EXPRESS", "Express", StateMachineType::Express),
        ] {
            assert_eq!(serde_json::to_value(it).unwrap(), word);
            for read in [word, early] {
                assert_eq!(serde_json::from_value::<StateMachineType>(read.into()).unwrap(), it);
            }
            assert_eq!((StateMachineType::parse(word), StateMachineType::parse(early)), (Some(it), None));
            assert_eq!(StateMachineType::from_word(early), Some(it));
        }
        assert!(serde_json::from_value::<StateMachineType>("express".into()).is_err());
    }
}
