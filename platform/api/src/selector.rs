//! Label selectors: as query strings (`app=web,tier in (a,b),!old`) and as `LabelSelector` objects.

mod parse;

use std::collections::BTreeMap;

use crate::k8s::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// A parsed label selector. Empty: everything matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    DoesNotExist(String),
    GreaterThan(String, i64),
    LessThan(String, i64),
}

/// The reason why a text is not a label selector.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct InvalidSelector(String);

impl Selector {
    /// Parses the query-string form (upstream: `apimachinery/pkg/labels/selector.go`).
    pub fn parse(text: &str) -> Result<Self, InvalidSelector> {
        parse::requirements(text).map(|requirements| Self { requirements })
    }

    /// From the object form. An absent selector matches nothing upstream; callers decide that.
    pub fn from_object(selector: &LabelSelector) -> Result<Self, InvalidSelector> {
        let mut requirements: Vec<_> = selector
            .match_labels
            .iter()
            .flatten()
            .map(|(key, value)| Requirement::In(key.clone(), vec![value.clone()]))
            .collect();
        for expression in selector.match_expressions.iter().flatten() {
            let key = expression.key.clone();
            let values = expression.values.clone().unwrap_or_default();
            requirements.push(match (expression.operator.as_str(), values.is_empty()) {
                ("In", false) => Requirement::In(key, values),
                ("NotIn", false) => Requirement::NotIn(key, values),
                ("Exists", true) => Requirement::Exists(key),
                ("DoesNotExist", true) => Requirement::DoesNotExist(key),
                (operator, _) => {
                    return Err(InvalidSelector(format!(
                        "unable to parse requirement: operator {operator:?} with {} values on key {key:?}",
                        values.len()
                    )));
                }
            });
        }
        Ok(Self { requirements })
    }

    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => labels.get(key).is_some_and(|v| values.contains(v)),
            Requirement::NotIn(key, values) => labels.get(key).is_none_or(|v| !values.contains(v)),
            Requirement::Exists(key) => labels.contains_key(key),
            Requirement::DoesNotExist(key) => !labels.contains_key(key),
            Requirement::GreaterThan(key, bound) => number(labels, key).is_some_and(|n| n > *bound),
            Requirement::LessThan(key, bound) => number(labels, key).is_some_and(|n| n < *bound),
        })
    }
}

fn number(labels: &BTreeMap<String, String>, key: &str) -> Option<i64> {
    labels.get(key)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()
    }

    #[test]
    fn selects_as_upstream_does() {
        let web = labels(&[("app", "web"), ("tier", "a"), ("n", "7")]);
        for (text, expected) in [
            ("", true),
            ("app=web", true),
            ("app==web,tier in (a, b)", true),
            ("app!=web", false),
            ("missing!=x", true),
            ("tier notin (a)", false),
            ("missing notin (a)", true),
            ("app", true),
            ("!app", false),
            ("!missing", true),
            ("n>6", true),
            ("n<7", false),
            ("app in (,web)", true),
            ("app in ()", false),
            ("app=", false),
            ("in in (notin)", false),
        ] {
            assert_eq!(Selector::parse(text).unwrap().matches(&web), expected, "{text}");
        }
        for (bad, why) in [
            ("a=b=c", "found '=', expected: ',' or 'end of string'"),
            (",", "found ',', expected: !, identifier, or 'end of string'"),
            ("a,", "found '', expected: identifier after ','"),
            ("a in b", "unable to parse requirement: found 'b' expected: '('"),
            ("a in (b", "unable to parse requirement: found '', expected: ',' or ')'"),
            ("a in (!b)", "unable to parse requirement: found '!', expected: ',', ')' or identifier"),
            ("!=a", "found '!=', expected: !, identifier, or 'end of string'"),
            ("=b", "found '=', expected: !, identifier, or 'end of string'"),
            ("a b", "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt"),
            ("x=not ok!", "found 'ok', expected: ',' or 'end of string'"),
            (
                "a>x",
                "unable to parse requirement: values[0]: Invalid value: \"x\": for 'Gt', 'Lt' operators, the value must \
                 be an integer",
            ),
            (
                "-a",
                "unable to parse requirement: <nil>: Invalid value: \"-a\": name part must consist of alphanumeric \
                 characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or \
                 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')",
            ),
            (
                "/a=b",
                "unable to parse requirement: <nil>: Invalid value: \"/a\": prefix part must be non-empty",
            ),
            (
                "a in (c, b/b)",
                "unable to parse requirement: values[0][a]: Invalid value: \"b/b\": a valid label must be an empty string \
                 or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric \
                 character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is \
                 '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')",
            ),
        ] {
            assert_eq!(Selector::parse(bad).unwrap_err().to_string(), why, "{bad}");
        }
    }
}
