//! Label selectors: as query strings (`app=web,tier in (a,b),!old`) and as `LabelSelector` objects.

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

/// Why a text is not a label selector.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unable to parse requirement: {0}")]
pub struct InvalidSelector(String);

impl Selector {
    /// Parses the query-string form (upstream: `apimachinery/pkg/labels/selector.go`).
    pub fn parse(text: &str) -> Result<Self, InvalidSelector> {
        let mut requirements = Vec::new();
        for part in split_outside_parentheses(text) {
            let part = part.trim();
            if part.is_empty() {
                if text.trim().is_empty() {
                    break;
                }
                return Err(InvalidSelector("found ',', expected: identifier".into()));
            }
            requirements.push(parse_requirement(part)?);
        }
        Ok(Self { requirements })
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
                        "operator {operator:?} with {} values on key {key:?}",
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

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0u32, 0);
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn parse_requirement(text: &str) -> Result<Requirement, InvalidSelector> {
    let invalid = || InvalidSelector(format!("{text:?}"));
    if let Some(key) = text.strip_prefix('!') {
        return Ok(Requirement::DoesNotExist(checked_key(key.trim()).ok_or_else(invalid)?));
    }
    if let Some((head, list)) = text.split_once('(') {
        let values = list.strip_suffix(')').ok_or_else(invalid)?;
        let values: Vec<_> = values.split(',').map(|v| v.trim().to_owned()).collect();
        let (key, operator) = head.trim().rsplit_once(char::is_whitespace).ok_or_else(invalid)?;
        let key = checked_key(key.trim()).ok_or_else(invalid)?;
        return match operator {
            "in" => Ok(Requirement::In(key, values)),
            "notin" => Ok(Requirement::NotIn(key, values)),
            _ => Err(invalid()),
        };
    }
    for (symbol, make) in [
        ("!=", Requirement::NotIn as fn(String, Vec<String>) -> Requirement),
        ("==", Requirement::In),
        ("=", Requirement::In),
    ] {
        if let Some((key, value)) = text.split_once(symbol) {
            let value = value.trim();
            if value.contains(['=', '!', ' ']) {
                return Err(invalid());
            }
            return Ok(make(checked_key(key.trim()).ok_or_else(invalid)?, vec![value.to_owned()]));
        }
    }
    for (symbol, make) in
        [(">", Requirement::GreaterThan as fn(String, i64) -> Requirement), ("<", Requirement::LessThan)]
    {
        if let Some((key, value)) = text.split_once(symbol) {
            let bound = value.trim().parse().map_err(|_| invalid())?;
            return Ok(make(checked_key(key.trim()).ok_or_else(invalid)?, bound));
        }
    }
    Ok(Requirement::Exists(checked_key(text).ok_or_else(invalid)?))
}

fn checked_key(key: &str) -> Option<String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    (!key.is_empty() && key.chars().all(allowed)).then(|| key.to_owned())
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
        ] {
            assert_eq!(Selector::parse(text).unwrap().matches(&web), expected, "{text}");
        }
        for bad in ["a=b=c", ",", "a in b", "a in (b", "in (a)", "a>x", "=b", "a b"] {
            assert!(Selector::parse(bad).is_err(), "{bad}");
        }
    }
}
