//! Prevention of privilege escalation: a user can only grant rights that the user has (upstream's
//! `pkg/registry/rbac/*/policybased`).

use super::{Attributes, GROUP, PolicyRule};
use crate::{access::User, object::Object, registry::Kind, server::ServerState, status::ApiError};

impl ServerState {
    /// Refuses to write a role, or a binding to one, that grants more than its writer holds.
    pub(crate) fn check_escalation(
        &self,
        kind: &Kind,
        user: &User,
        new: &Object,
        old: Option<&Object>,
    ) -> Result<(), ApiError> {
        if kind.group != GROUP || user.is_master() {
            return Ok(());
        }
        let namespace = new.meta_str("namespace");
        let asked = |verb, resource, name| Attributes {
            verb,
            group: GROUP,
            resource,
            namespace,
            name,
            ..Default::default()
        };
        let granted = match kind.kind {
            "Role" | "ClusterRole" => {
                let same = old.is_some_and(|old| {
                    old.0.get("rules") == new.0.get("rules")
                        && old.0.get("aggregationRule") == new.0.get("aggregationRule")
                });
                if same || self.authorize(user, &asked("escalate", kind.plural, new.name())).is_allowed() {
                    return Ok(());
                }
                if new.0.get("aggregationRule").is_some_and(serde_json::Value::is_object) {
                    vec![everything()]
                } else {
                    super::rules_of(new)
                }
            }
            _ => {
                if old.is_some_and(|old| {
                    old.0.get("roleRef") == new.0.get("roleRef")
                        && old.0.get("subjects") == new.0.get("subjects")
                }) {
                    return Ok(());
                }
                let (role_kind, role) = (new.str_at(&["roleRef", "kind"]), new.str_at(&["roleRef", "name"]));
                let plural = if role_kind == "Role" { "roles" } else { "clusterroles" };
                if self.authorize(user, &asked("bind", plural, role)).is_allowed() {
                    return Ok(());
                }
                match self.rbac.index(&self.store).role(role_kind, role, namespace) {
                    Some(rules) => rules.to_vec(),
                    None => {
                        let found = crate::registry::registry().find(GROUP, "v1", plural);
                        return Err(
                            found.map_or_else(ApiError::no_resource, |kind| ApiError::not_found(kind, role))
                        );
                    }
                }
            }
        };
        let held = self.rbac.index(&self.store).rules_for(user, namespace);
        let missing: Vec<_> =
            granted.iter().flat_map(atoms).filter(|rule| !is_covered(&held, rule)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let groups: Vec<_> = user.groups.iter().map(|group| format!("{group:?}")).collect();
        let list: Vec<_> = compact(missing).iter().map(shown).collect();
        let why = format!(
            "user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
            user.name,
            groups.join(" "),
            list.join("\n")
        );
        Err(ApiError::forbidden(kind, new.name(), &why))
    }
}

/// Whether `held` allow everything that a rule allows.
pub(super) fn covers(held: &[PolicyRule], rule: &PolicyRule) -> bool {
    atoms(rule).iter().all(|atom| is_covered(held, atom))
}

fn everything() -> PolicyRule {
    let all = || vec!["*".to_owned()];
    PolicyRule { api_groups: all(), resources: all(), verbs: all(), ..Default::default() }
}

/// A rule as rules with one value for each of its lists.
fn atoms(rule: &PolicyRule) -> Vec<PolicyRule> {
    let mut atoms = Vec::new();
    let one = |text: &String| vec![text.clone()];
    for verb in &rule.verbs {
        for group in &rule.api_groups {
            for resource in &rule.resources {
                let base = PolicyRule {
                    verbs: one(verb),
                    api_groups: one(group),
                    resources: one(resource),
                    ..Default::default()
                };
                if rule.resource_names.is_empty() {
                    atoms.push(base);
                    continue;
                }
                let named = rule.resource_names.iter();
                atoms.extend(named.map(|name| PolicyRule { resource_names: one(name), ..base.clone() }));
            }
        }
        for url in &rule.non_resource_urls {
            atoms.push(PolicyRule { verbs: one(verb), non_resource_urls: one(url), ..Default::default() });
        }
    }
    atoms
}

/// Whether one of the rules held allows all that an atom allows.
fn is_covered(held: &[PolicyRule], atom: &PolicyRule) -> bool {
    let has = |list: &[String], one: &[String]| {
        one.iter().all(|one| list.iter().any(|held| held == "*" || held == one))
    };
    held.iter().any(|rule| {
        let resources = || {
            atom.resources.iter().all(|one| {
                rule.resources.iter().any(|held| {
                    held == "*"
                        || held == one
                        || held
                            .strip_prefix("*/")
                            .is_some_and(|sub| one.split_once('/').is_some_and(|(_, own)| own == sub))
                })
            })
        };
        let names = || {
            rule.resource_names.is_empty()
                || (!atom.resource_names.is_empty()
                    && atom.resource_names.iter().all(|one| rule.resource_names.contains(one)))
        };
        let urls = || {
            atom.non_resource_urls.iter().all(|one| {
                rule.non_resource_urls.iter().any(|held| {
                    held == one || held.strip_suffix('*').is_some_and(|prefix| one.starts_with(prefix))
                })
            })
        };
        has(&rule.verbs, &atom.verbs)
            && match atom.non_resource_urls.is_empty() {
                true => has(&rule.api_groups, &atom.api_groups) && resources() && names(),
                false => urls(),
            }
    })
}

/// Merges atoms that differ only in their verb.
fn compact(atoms: Vec<PolicyRule>) -> Vec<PolicyRule> {
    let mut rules: Vec<PolicyRule> = Vec::new();
    for atom in atoms {
        let same = |rule: &&mut PolicyRule| {
            rule.api_groups == atom.api_groups
                && rule.resources == atom.resources
                && rule.resource_names == atom.resource_names
                && rule.non_resource_urls == atom.non_resource_urls
        };
        match rules.iter_mut().find(same) {
            Some(rule) => rule.verbs.extend(atom.verbs),
            None => rules.push(atom),
        }
    }
    rules.sort_by_key(shown);
    rules
}

/// `{APIGroups:[""], Resources:["pods"], Verbs:["get"]}`
fn shown(rule: &PolicyRule) -> String {
    let list = |name: &str, texts: &[String]| {
        let quoted: Vec<_> = texts.iter().map(|text| format!("{text:?}")).collect();
        (!texts.is_empty()).then(|| format!("{name}:[{}]", quoted.join(", ")))
    };
    let parts = [
        list("APIGroups", &rule.api_groups),
        list("Resources", &rule.resources),
        list("ResourceNames", &rule.resource_names),
        list("NonResourceURLs", &rule.non_resource_urls),
        list("Verbs", &rule.verbs),
    ];
    format!("{{{}}}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rule(value: Value) -> PolicyRule {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn covered_is_what_is_held_piece_by_piece() {
        let held = [
            rule(json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]})),
            rule(json!({"apiGroups": ["apps"], "resources": ["*"], "resourceNames": ["a"], "verbs": ["*"]})),
            rule(json!({"nonResourceURLs": ["/a/*"], "verbs": ["get"]})),
        ];
        let covered = |value: Value| atoms(&rule(value)).iter().all(|atom| is_covered(&held, atom));
        assert!(covered(json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "get"]})));
        assert!(!covered(json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "watch"]})));
        assert!(!covered(json!({"apiGroups": ["*"], "resources": ["pods"], "verbs": ["get"]})));
        assert!(covered(
            json!({"apiGroups": ["apps"], "resources": ["x"], "resourceNames": ["a"], "verbs": ["get"]})
        ));
        assert!(!covered(json!({"apiGroups": ["apps"], "resources": ["x"], "verbs": ["get"]})));
        assert!(covered(json!({"nonResourceURLs": ["/a/b"], "verbs": ["get"]})));
        assert!(!covered(json!({"nonResourceURLs": ["/b"], "verbs": ["get"]})));
    }

    #[test]
    fn rules_are_shown_as_upstream_shows_them() {
        let atoms = atoms(&rule(json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]})));
        let shown: Vec<_> = compact(atoms).iter().map(shown).collect();
        assert_eq!(shown, ["{APIGroups:[\"\"], Resources:[\"pods\"], Verbs:[\"get\", \"list\"]}"]);
    }
}
