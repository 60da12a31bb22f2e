//! `spec.successPolicy`: when an indexed Job has succeeded before all of its indexes have. Pure.

use std::collections::BTreeSet;

use mayfly_api::k8s::api::batch::v1::JobSpec;

use super::indexes;

/// Upstream's message of the condition `SuccessCriteriaMet`, if a rule is met.
pub(super) fn met(spec: &JobSpec, completed: &BTreeSet<i32>) -> Option<String> {
    let rules = spec.success_policy.iter().flat_map(|policy| &policy.rules);
    let completions = spec.completions.unwrap_or(0);
    let mut met = rules.map(|rule| {
        let listed = rule.succeeded_indexes.as_deref().map(|text| indexes::parse(text, completions));
        let succeeded = match &listed {
            Some(listed) => listed.intersection(completed).count(),
            None => completed.len(),
        };
        let wanted = rule.succeeded_count.and_then(|count| usize::try_from(count).ok());
        let wanted = wanted.or_else(|| listed.as_ref().map(BTreeSet::len));
        wanted.is_some_and(|wanted| wanted > 0 && succeeded >= wanted)
    });
    met.position(|met| met).map(|at| format!("Matched rules at index {at}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_first_rule_that_is_met_counts() {
        let met = |rules: Value, completed: &[i32]| {
            let spec = json!({"completions": 5, "template": {}, "successPolicy": {"rules": rules}});
            let spec: JobSpec = serde_json::from_value(spec).unwrap();
            met(&spec, &completed.iter().copied().collect())
        };
        let leader = json!([{"succeededIndexes": "0"}]);
        assert_eq!(met(leader.clone(), &[1, 2]), None);
        assert_eq!(met(leader, &[0]).as_deref(), Some("Matched rules at index 0"));
        let two_of = json!([{"succeededIndexes": "1-3", "succeededCount": 2}, {"succeededCount": 4}]);
        assert_eq!(met(two_of.clone(), &[0, 1, 4]), None);
        assert_eq!(met(two_of.clone(), &[1, 3]).as_deref(), Some("Matched rules at index 0"));
        assert_eq!(met(two_of, &[0, 1, 4, 2]).as_deref(), Some("Matched rules at index 0"));
        assert_eq!(met(json!([{"succeededIndexes": "7"}]), &[0, 1, 2, 3, 4]), None, "no such index");
    }
}
