//! Amazon resource names of the `states` service: read at the border, built in one place.

use std::fmt;

use super::error::StepFunctionsError;
use mayfly_workflows_engine::engine::{ACCOUNT_DEFAULT, REGION_DEFAULT};

/// The account and region of a request, from the credential scope of its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialScope {
    /// The AWS region of the credential scope.
    pub region: String,
    /// The account: the access key where it is an account number, else zeros.
    pub account: String,
}

impl Default for CredentialScope {
    fn default() -> CredentialScope {
        CredentialScope { region: REGION_DEFAULT.into(), account: ACCOUNT_DEFAULT.into() }
    }
}

impl CredentialScope {
    /// `arn:aws:states:<region>:<account>:<rest>`.
    pub fn arn(&self, rest: fmt::Arguments<'_>) -> String {
        format!("arn:{}:states:{}:{}:{rest}", self.partition(), self.region, self.account)
    }

    /// The partition that the region lies in.
    pub fn partition(&self) -> &'static str {
        match &self.region {
            region if region.starts_with("cn-") => "aws-cn",
            region if region.starts_with("us-gov-") => "aws-us-gov",
            _ => "aws",
        }
    }
}

/// An ARN of this service, split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arn<'a> {
    /// The whole text.
    pub(crate) text: &'a str,
    /// `stateMachine`, `execution`, `express`, `activity`, `mapRun`.
    pub(crate) resource: &'a str,
    /// The parts after the resource type, split at colons; never empty.
    pub(crate) parts: Vec<&'a str>,
    /// `arn:<partition>:states:<region>:<account>`.
    pub(crate) prefix: &'a str,
}

impl<'a> Arn<'a> {
    /// Splits an ARN of the `states` service, or says why it is none.
    pub(crate) fn parse(text: &'a str) -> Result<Arn<'a>, StepFunctionsError> {
        if !text.starts_with("arn:") {
            return Err(StepFunctionsError::invalid_arn(format_args!("Invalid ARN prefix: {text}")));
        }
        let fields: Vec<&str> = text.split(':').collect();
        if fields.len() < 7 || fields[1..].iter().any(|field| field.is_empty()) {
            return Err(StepFunctionsError::invalid_arn(format_args!("ARN is not valid: {text}")));
        }
        if fields[2] != "states" {
            return Err(StepFunctionsError::invalid_arn(format_args!(
                "Service name is invalid: {}",
                fields[2]
            )));
        }
        let prefix_len = fields[..5].iter().map(|field| field.len() + 1).sum::<usize>() - 1;
        let arn = Arn { text, resource: fields[5], parts: fields[6..].to_vec(), prefix: &text[..prefix_len] };
        let most = match arn.resource {
            "activity" => 1,
            "stateMachine" | "execution" => 2,
            "express" | "mapRun" => 3,
            other => {
                return Err(StepFunctionsError::invalid_arn(format_args!("Invalid resource type: {other}")));
            }
        };
        if arn.parts.len() > most {
            return Err(StepFunctionsError::invalid_arn(format_args!("ARN is not valid: {text}")));
        }
        Ok(arn)
    }

    /// Splits an ARN that has to name one of `resources`.
    pub(crate) fn of(text: &'a str, resources: &[&str]) -> Result<Arn<'a>, StepFunctionsError> {
        let arn = Arn::parse(text)?;
        if resources.contains(&arn.resource) { Ok(arn) } else { Err(arn.out_of_place()) }
    }

    /// The refusal of an ARN of a type that the operation does not accept.
    pub(crate) fn out_of_place(&self) -> StepFunctionsError {
        StepFunctionsError::invalid_arn(format_args!(
            "Resource type not valid in this context: {}",
            self.resource
        ))
    }

    /// The ARN of a state machine without version or alias: `…:stateMachine:<name>`.
    pub(crate) fn unqualified(&self) -> String {
        format!("{}:stateMachine:{}", self.prefix, self.parts[0])
    }

    /// Refuses `…:stateMachine:<name>/<label>`, a state machine that is a Distributed Map state's: it is neither started
    /// nor described nor changed (API reference of those operations; the wording is ours).
    pub(crate) fn not_of_map(&self) -> Result<(), StepFunctionsError> {
        if !self.parts[0].contains('/') {
            return Ok(());
        }
        Err(StepFunctionsError::validation(format!(
            "The qualified state machine ARN refers to a Distributed Map state: '{}'",
            self.text
        )))
    }

    /// The refusal of a version's or an alias's ARN where only a state machine will do.
    pub(crate) fn qualified(&self, instead: &str) -> StepFunctionsError {
        let what = match self.qualifier() {
            Some(Qualifier::Version(_)) => "a state machine version",
            _ => "a state machine alias",
        };
        StepFunctionsError::invalid_arn(format_args!("ARN is of {what}: {}; {instead}", self.text))
    }

    /// A state machine's version or alias, if the ARN has one.
    pub(crate) fn qualifier(&self) -> Option<Qualifier<'a>> {
        let qualifier = *self.parts.get(1)?;
        Some(match qualifier.parse() {
            Ok(number) => Qualifier::Version(number),
            Err(_) => Qualifier::Alias(qualifier),
        })
    }
}

/// The qualifier in a state machine ARN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Qualifier<'a> {
    /// A published version's number.
    Version(u64),
    /// An alias's name.
    Alias(&'a str),
}

/// Whether `name` may name a state machine, an execution or an activity: no white space, brackets,
/// wildcards, control characters, nor any of `" # % \ ^ | ~ ` $ & , ; : /`.
pub(crate) fn check_name(name: &str) -> Result<(), StepFunctionsError> {
    let bad = |c: char| c.is_whitespace() || c.is_control() || "<>{}[]?*\"#%\\^|~`$&,;:/".contains(c);
    if name.chars().any(bad) { Err(StepFunctionsError::invalid_name(name)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arns_are_split_and_put_together_again() {
        let text = "arn:aws:states:us-east-1:000000000000:stateMachine:orders:7";
        let arn = Arn::of(text, &["stateMachine"]).expect("an ARN");
        assert_eq!(arn.unqualified(), "arn:aws:states:us-east-1:000000000000:stateMachine:orders");
        assert_eq!(arn.qualifier(), Some(Qualifier::Version(7)));
        let scope = CredentialScope::default();
        assert_eq!(scope.arn(format_args!("activity:a")), "arn:aws:states:us-east-1:000000000000:activity:a");
    }

    #[test]
    fn what_is_no_arn_is_refused_with_its_reason() {
        let message = |text| Arn::of(text, &["execution"]).expect_err("refused").message.unwrap_or_default();
        assert_eq!(message("nonsense"), "Invalid Arn: 'Invalid ARN prefix: nonsense'");
        assert_eq!(
            message("arn:aws:states:us-east-1:000000000000:stateMachine:a"),
            "Invalid Arn: 'Resource type not valid in this context: stateMachine'"
        );
    }

    #[test]
    fn names_have_no_special_characters() {
        for bad in ["a b", "a/b", "a*b", "a{b", "a$b", "a\u{7f}b", "a\u{9b}", "a\tb"] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        for good in ["Activity1", "activity-name_123", "activity.name.v2", "a!b'(c)=@+", "é"] {
            assert!(check_name(good).is_ok(), "{good:?}");
        }
    }
}
