//! The variables of an application: their values, and the templates of components that use them.

use std::collections::{BTreeMap, BTreeSet};

use super::manifest::VariableDeclaration;
use crate::failure::{ErrorCode, Failure};

/// The prefix of environment variables with values: `SPIN_VARIABLE_` and the name in upper case.
const ENVIRONMENT_PREFIX: &str = "SPIN_VARIABLE_";

/// The values of all variables.
#[derive(Debug)]
pub(crate) struct VariableValues {
    values: BTreeMap<String, String>,
    secrets: BTreeSet<String>,
}

/// A template with its variables replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolvedTemplate {
    pub(crate) text: String,
    /// Whether it contains a secret variable.
    pub(crate) is_secret: bool,
}

impl VariableValues {
    /// The command's values have precedence, then the environment's, then the defaults.
    pub(crate) fn resolve(
        declared: &BTreeMap<String, VariableDeclaration>,
        given: &[(String, String)],
        environment: impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Self> {
        if let Some((name, _)) = given.iter().find(|(name, _)| !declared.contains_key(name)) {
            let known: Vec<_> = declared.keys().map(String::as_str).collect();
            let todo = match known.as_slice() {
                [] => "the application has no [variables]".to_owned(),
                known => format!("its variables are {}", known.join(", ")),
            };
            return Err(Failure::error(
                ErrorCode::Usage,
                format!("the application has no variable {name:?}"),
                todo,
            ));
        }
        let mut values = BTreeMap::new();
        let mut missing = Vec::new();
        for (name, declaration) in declared {
            let said = given.iter().rev().find(|(given, _)| given == name).map(|(_, value)| value.clone());
            let from_environment =
                || environment(&format!("{ENVIRONMENT_PREFIX}{}", name.to_ascii_uppercase()));
            match said.or_else(from_environment).or_else(|| declaration.default.clone()) {
                Some(value) => drop(values.insert(name.clone(), value)),
                None => missing.push(name.as_str()),
            }
        }
        if let [first, ..] = missing.as_slice() {
            let todo = format!(
                "give each a value: --variable {first}=VALUE, or the environment variable {ENVIRONMENT_PREFIX}{}",
                first.to_ascii_uppercase()
            );
            return Err(Failure::error(
                ErrorCode::Usage,
                format!("variables without a value: {}", missing.join(", ")),
                todo,
            ));
        }
        let secrets = declared.iter().filter(|(_, declaration)| declaration.secret);
        Ok(Self { values, secrets: secrets.map(|(name, _)| name.clone()).collect() })
    }

    /// Replaces each `{{ name }}`.
    pub(crate) fn template(&self, template: &str) -> anyhow::Result<ResolvedTemplate> {
        let (mut text, mut is_secret, mut rest) = (String::new(), false, template);
        while let Some((before, after)) = rest.split_once("{{") {
            let Some((name, after)) = after.split_once("}}") else {
                anyhow::bail!("{template:?} has an expression without its end: write {{{{ name }}}}");
            };
            let name = name.trim();
            let Some(value) = self.values.get(name) else {
                anyhow::bail!("{template:?} names the variable {name:?}, which [variables] does not declare");
            };
            text.push_str(before);
            text.push_str(value);
            is_secret |= self.secrets.contains(name);
            rest = after;
        }
        text.push_str(rest);
        Ok(ResolvedTemplate { text, is_secret })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared() -> BTreeMap<String, VariableDeclaration> {
        let plain =
            |default: &str| VariableDeclaration { default: Some(default.into()), ..Default::default() };
        let secret = VariableDeclaration { required: true, secret: true, ..Default::default() };
        [("who".into(), plain("Ada")), ("where".into(), plain("here")), ("token".into(), secret)].into()
    }

    #[test]
    fn values_come_from_the_command_then_the_environment_then_the_manifest() {
        let environment = |name: &str| match name {
            "SPIN_VARIABLE_WHERE" => Some("there".to_owned()),
            "SPIN_VARIABLE_TOKEN" => Some("t".to_owned()),
            _ => None,
        };
        let given = [("token".to_owned(), "x=1".to_owned())];
        let values = VariableValues::resolve(&declared(), &given, environment).unwrap();
        let resolved = |template: &str| values.template(template).unwrap();
        assert_eq!(resolved("{{who}} is {{ where }}").text, "Ada is there");
        assert!(!resolved("{{who}}").is_secret && resolved("a{{ token }}b").is_secret);
        assert_eq!(resolved("{{token}}").text, "x=1");
        assert_eq!(resolved("plain }} {").text, "plain }} {");
        for (template, expected) in [("{{ who", "without its end"), ("{{ none }}", "does not declare")] {
            let error = values.template(template).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn values_that_lack_or_are_unknown_are_named() {
        let nothing = |_: &str| None;
        let error = VariableValues::resolve(&declared(), &[], nothing).unwrap_err().to_string();
        assert!(error.contains("token") && error.contains("--variable token=VALUE"), "{error}");
        let given = [("typo".to_owned(), String::new())];
        let error = VariableValues::resolve(&declared(), &given, nothing).unwrap_err().to_string();
        assert!(error.contains("no variable \"typo\"") && error.contains("who"), "{error}");
    }
}
