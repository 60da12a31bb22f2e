//! The account and region of a request, and refusals of ARNs and names that are well formed.

use std::fmt;

use super::error::StepFunctionsError;
use mayfly_workflows_engine::engine::{ACCOUNT_DEFAULT, REGION_DEFAULT};
use mayfly_workflows_language::arn::{ArnQualifier, StateMachineArn};

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

    /// The ARN of the state machine with this name.
    pub fn state_machine(&self, name: &str) -> StateMachineArn {
        StateMachineArn::from_trusted(self.arn(format_args!("stateMachine:{name}")))
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

/// Refuses `…:stateMachine:<name>/<label>`, a state machine that is a Distributed Map state's: it is neither started
/// nor described nor changed (API reference of those operations; the wording is Mayfly's own).
pub(crate) fn not_of_map(arn: &StateMachineArn) -> Result<(), StepFunctionsError> {
    if !arn.name().contains('/') {
        return Ok(());
    }
    Err(StepFunctionsError::validation(format!(
        "The qualified state machine ARN refers to a Distributed Map state: '{arn}'"
    )))
}

/// Refuses the ARN of a version or an alias where an operation takes a state machine's only; `instead` tells the caller
/// what to do.
pub(crate) fn unqualified_only(arn: &StateMachineArn, instead: &str) -> Result<(), StepFunctionsError> {
    let what = match arn.qualifier() {
        None => return Ok(()),
        Some(ArnQualifier::Version(_)) => "a state machine version",
        Some(ArnQualifier::Alias(_)) => "a state machine alias",
    };
    Err(StepFunctionsError::invalid_arn(format_args!("ARN is of {what}: {arn}; {instead}")))
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
    fn a_scope_makes_arns() {
        let scope = CredentialScope::default();
        assert_eq!(scope.arn(format_args!("activity:a")), "arn:aws:states:us-east-1:000000000000:activity:a");
    }

    #[test]
    fn a_rejected_arn_is_an_error_with_the_reason() {
        let refused =
            StateMachineArn::parse("nonsense").map_err(StepFunctionsError::from).expect_err("refused");
        assert_eq!(refused.message.as_deref(), Some("Invalid Arn: 'Invalid ARN prefix: nonsense'"));
    }

    #[test]
    fn a_qualified_arn_is_refused_with_what_it_names() {
        let machine = StateMachineArn::from_trusted("arn:aws:states:us-east-1:000000000000:stateMachine:a");
        assert_eq!(unqualified_only(&machine, ""), Ok(()));
        for (qualifier, what) in [("7", "version"), ("live", "alias")] {
            let refused = unqualified_only(&machine.qualified(qualifier), "do that").expect_err("refused");
            let expected =
                format!("Invalid Arn: 'ARN is of a state machine {what}: {machine}:{qualifier}; do that'");
            assert_eq!(refused.message, Some(expected));
        }
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
