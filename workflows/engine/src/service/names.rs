//! Names and roles of requests, and refusals of ARNs that are well formed.

use std::fmt;

use mayfly_workflows_language::arn::{ActivityArn, ArnQualifier, StateMachineArn};

use super::ServiceError;
use crate::engine::{ACCOUNT_DEFAULT, REGION_DEFAULT};

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
    /// The scope in which the state machine with this ARN was created.
    pub fn of(arn: &StateMachineArn) -> CredentialScope {
        let mut fields = arn.as_str().split(':').skip(3);
        let mut next = || fields.next().unwrap_or_default().to_owned();
        CredentialScope { region: next(), account: next() }
    }

    /// `arn:<partition>:states:<region>:<account>:<rest>`.
    pub fn arn(&self, rest: fmt::Arguments<'_>) -> String {
        format!("arn:{}:states:{}:{}:{rest}", self.partition(), self.region, self.account)
    }

    /// The ARN of the state machine with this name.
    pub fn state_machine(&self, name: &ResourceName) -> StateMachineArn {
        StateMachineArn::from_trusted(self.arn(format_args!("stateMachine:{name}")))
    }

    /// The ARN of the activity with this name.
    pub fn activity(&self, name: &ResourceName) -> ActivityArn {
        ActivityArn::from_trusted(self.arn(format_args!("activity:{name}")))
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

/// The longest name, in UTF-16 code units (service model).
const NAME_LENGTH_MAX: usize = 80;

/// A name that a state machine, an execution or an activity may have: without white space, brackets, wildcards, control
/// characters and any of `" # % \ ^ | ~ ` $ & , ; : /`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceName(String);

impl ResourceName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`ServiceError::Length`] or [`ServiceError::InvalidName`].
    pub fn parse(name: &str) -> Result<ResourceName, ServiceError> {
        let length = name.encode_utf16().count();
        ServiceError::check_length("name", Some(name), length, 1..=NAME_LENGTH_MAX)?;
        let bad = |c: char| c.is_whitespace() || c.is_control() || "<>{}[]?*\"#%\\^|~`$&,;:/".contains(c);
        match name.chars().any(bad) {
            true => Err(ServiceError::InvalidName(name.to_owned())),
            false => Ok(ResourceName(name.to_owned())),
        }
    }

    /// The name's text.
    pub fn into_string(self) -> String {
        self.0
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Checks a role, which is stored as it is named: it only has to be an ARN.
pub fn check_role(arn: &str) -> Result<String, ServiceError> {
    match arn.starts_with("arn:") && arn.split(':').count() >= 6 {
        true => Ok(arn.to_owned()),
        false => Err(ServiceError::InvalidRoleArn(arn.to_owned())),
    }
}

/// Refuses `…:stateMachine:<name>/<label>`, a state machine that is a Distributed Map state's: it is neither started
/// nor described nor changed (API reference of those operations; the wording is Mayfly's own).
pub(super) fn not_of_map(arn: &StateMachineArn) -> Result<(), ServiceError> {
    if !arn.name().contains('/') {
        return Ok(());
    }
    Err(ServiceError::validation(format!(
        "The qualified state machine ARN refers to a Distributed Map state: '{arn}'"
    )))
}

/// Refuses the ARN of a version or an alias where an operation takes a state machine's only; `instead` tells the caller
/// what to do.
pub(super) fn unqualified_only(arn: &StateMachineArn, instead: &str) -> Result<(), ServiceError> {
    let what = match arn.qualifier() {
        None => return Ok(()),
        Some(ArnQualifier::Version(_)) => "a state machine version",
        Some(ArnQualifier::Alias(_)) => "a state machine alias",
    };
    Err(ServiceError::InvalidArn(format!("ARN is of {what}: {arn}; {instead}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_makes_arns_and_is_read_from_one() {
        let scope = CredentialScope::default();
        assert_eq!(scope.arn(format_args!("activity:a")), "arn:aws:states:us-east-1:000000000000:activity:a");
        let china = CredentialScope { region: "cn-north-1".into(), account: "123456789012".into() };
        let machine = china.state_machine(&ResourceName::parse("m").expect("a name"));
        assert_eq!(machine, "arn:aws-cn:states:cn-north-1:123456789012:stateMachine:m");
        assert_eq!(CredentialScope::of(&machine), china);
    }

    #[test]
    fn a_qualified_arn_is_refused_with_what_it_names() {
        let machine = StateMachineArn::from_trusted("arn:aws:states:us-east-1:000000000000:stateMachine:a");
        assert_eq!(unqualified_only(&machine, ""), Ok(()));
        for (qualifier, what) in [("7", "version"), ("live", "alias")] {
            let refused = unqualified_only(&machine.qualified(qualifier), "do that").expect_err("refused");
            let expected =
                format!("Invalid Arn: 'ARN is of a state machine {what}: {machine}:{qualifier}; do that'");
            assert_eq!(refused.to_string(), expected);
        }
    }

    #[test]
    fn names_have_no_special_characters() {
        for bad in ["a b", "a/b", "a*b", "a{b", "a$b", "a\u{7f}b", "a\u{9b}b", "a\tb"] {
            assert_eq!(ResourceName::parse(bad), Err(ServiceError::InvalidName(bad.to_owned())));
        }
        let long = ResourceName::parse(&"n".repeat(81)).expect_err("too long").to_string();
        assert!(long.ends_with(
            "at 'name' failed to satisfy constraint: Member must have length less than or equal to 80"
        ));
        for good in ["Activity1", "activity-name_123", "activity.name.v2", "a!b'(c)=@+", "é"] {
            assert_eq!(ResourceName::parse(good).expect(good).to_string(), good);
        }
    }
}
