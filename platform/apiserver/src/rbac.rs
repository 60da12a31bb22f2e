//! Role-based access control: the rights of a user by the roles that are bound to it. The rules are upstream's
//! (`plugin/pkg/auth/authorizer/rbac`, `pkg/registry/rbac/validation`).
//!
//! An [`RbacIndex`] is built from the stored roles and bindings and kept until one of them is written.

mod aggregation;
mod bootstrap;
mod escalation;

pub(crate) use aggregation::run as run_aggregation;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use mayfly_store::{ListOptions, Range, Store};
use parking_lot::RwLock;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    access::{GROUP_NODES, User},
    expressions::Authorizer,
    object::Object,
    registry::Kind,
    server::ServerState,
};

pub(crate) const GROUP: &str = "rbac.authorization.k8s.io";

/// One rule of a role.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PolicyRule {
    #[serde(deserialize_with = "list")]
    pub(crate) api_groups: Vec<String>,
    #[serde(deserialize_with = "list")]
    pub(crate) resources: Vec<String>,
    #[serde(deserialize_with = "list")]
    pub(crate) verbs: Vec<String>,
    #[serde(deserialize_with = "list")]
    pub(crate) resource_names: Vec<String>,
    #[serde(rename = "nonResourceURLs", deserialize_with = "list")]
    pub(crate) non_resource_urls: Vec<String>,
}

fn list<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::<Vec<String>>::deserialize(deserializer)?.unwrap_or_default())
}

/// The attributes of a request that are authorized.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attributes<'a> {
    pub(crate) verb: &'a str,
    /// The path of a non-resource request; the fields below are then empty.
    pub(crate) path: Option<&'a str>,
    pub(crate) group: &'a str,
    pub(crate) resource: &'a str,
    pub(crate) subresource: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
}

impl PolicyRule {
    pub(crate) fn allows(&self, asked: &Attributes<'_>) -> bool {
        if !matches_any(&self.verbs, asked.verb) {
            return false;
        }
        if let Some(path) = asked.path {
            return self.non_resource_urls.iter().any(|url| matches_path(url, path));
        }
        let resource = || match asked.subresource {
            "" => matches_any(&self.resources, asked.resource),
            subresource => {
                let full = format!("{}/{subresource}", asked.resource);
                let any = format!("*/{subresource}");
                self.resources.iter().any(|one| *one == "*" || *one == full || *one == any)
            }
        };
        matches_any(&self.api_groups, asked.group)
            && resource()
            && (self.resource_names.is_empty() || self.resource_names.iter().any(|name| name == asked.name))
    }
}

fn matches_any(list: &[String], asked: &str) -> bool {
    list.iter().any(|one| one == "*" || one == asked)
}

fn matches_path(url: &str, path: &str) -> bool {
    url == "*" || url == path || url.strip_suffix('*').is_some_and(|prefix| path.starts_with(prefix))
}

/// The rules of one role, bound to one subject.
#[derive(Clone, Debug)]
struct Grant {
    /// `None`: in every namespace and outside of them.
    namespace: Option<Arc<str>>,
    rules: Arc<[PolicyRule]>,
    /// The text for the reason of a decision.
    reason: Arc<str>,
}

/// A binding to a role that does not exist.
#[derive(Clone, Debug)]
struct Dangling {
    namespace: Option<Arc<str>>,
    error: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    User(String),
    Group(String),
}

/// Roles and bindings, by subject.
#[derive(Debug, Default)]
pub(crate) struct RbacIndex {
    grants: HashMap<Subject, Vec<Grant>>,
    dangling: HashMap<Subject, Vec<Dangling>>,
    /// The rules of roles (by namespace and name) and of cluster roles (with an empty namespace).
    roles: HashMap<(String, String), Arc<[PolicyRule]>>,
}

/// The reason for an allowed request, or the errors met before it was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AccessDecision {
    Allowed { reason: String },
    Refused { errors: Vec<String> },
}

impl AccessDecision {
    pub(crate) fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed { .. })
    }

    /// The decision that needs no roles: that about a member of `system:masters`.
    fn of_master(user: &User) -> Option<Self> {
        user.is_master().then(|| Self::Allowed { reason: String::new() })
    }
}

impl RbacIndex {
    /// Reads all roles and bindings. An object that cannot be decoded grants nothing.
    fn load(store: &Store) -> Self {
        let objects = |plural: &str| -> Vec<Object> {
            let range = Range::resource(format!("{plural}.{GROUP}"));
            let list =
                store.list(&range, &ListOptions::default()).map(|list| list.entries).unwrap_or_default();
            list.iter().filter_map(|entry| Object::from_entry(entry).ok()).collect()
        };
        Self::of(
            [objects("roles"), objects("clusterroles")].concat(),
            [objects("rolebindings"), objects("clusterrolebindings")].concat(),
        )
    }

    pub(crate) fn of(roles: Vec<Object>, bindings: Vec<Object>) -> Self {
        let mut index = Self::default();
        for role in &roles {
            let key = (role.meta_str("namespace").to_owned(), role.name().to_owned());
            index.roles.insert(key, rules_of(role).into());
        }
        for binding in &bindings {
            index.bind(binding);
        }
        index
    }

    fn bind(&mut self, binding: &Object) {
        let own = binding.meta_str("namespace");
        let namespace: Option<Arc<str>> = Some(own).filter(|own| !own.is_empty()).map(Into::into);
        let role = binding.str_at(&["roleRef", "name"]);
        let is_role = binding.str_at(&["roleRef", "kind"]) == "Role";
        let key = (if is_role { own.to_owned() } else { String::new() }, role.to_owned());
        let rules = self.roles.get(&key).cloned();
        let subjects = binding.at(&["subjects"]).and_then(Value::as_array);
        for subject in subjects.into_iter().flatten() {
            let Some((key, shown)) = subject_of(subject, own) else { continue };
            match &rules {
                Some(rules) => {
                    let reason = reason(binding, is_role, role, own, &shown);
                    let rules = Arc::clone(rules);
                    let grant = Grant { namespace: namespace.clone(), rules, reason: reason.into() };
                    self.grants.entry(key).or_default().push(grant);
                }
                None => {
                    let plural = if is_role { "role" } else { "clusterrole" };
                    let error = format!("{plural}.{GROUP} {role:?} not found").into();
                    let dangling = Dangling { namespace: namespace.clone(), error };
                    self.dangling.entry(key).or_default().push(dangling);
                }
            }
        }
    }

    /// The nodes' group counts only for users that are named as a node: what a node may write depends on its name
    /// (upstream's node authorizer has the same condition).
    fn subjects_of(user: &User) -> impl Iterator<Item = Subject> {
        let is_unknown_node = user.node() == Some("");
        let groups = user.groups.iter().filter(move |group| !(is_unknown_node && *group == GROUP_NODES));
        let groups = groups.map(|group| Subject::Group(group.clone()));
        std::iter::once(Subject::User(user.name.clone())).chain(groups)
    }

    /// Whether a user may do something. Members of `system:masters` may do everything.
    pub(crate) fn authorize(&self, user: &User, asked: &Attributes<'_>) -> AccessDecision {
        AccessDecision::of_master(user).unwrap_or_else(|| self.decide(user, asked))
    }

    pub(crate) fn decide(&self, user: &User, asked: &Attributes<'_>) -> AccessDecision {
        let here = |namespace: &Option<Arc<str>>| match namespace {
            None => true,
            Some(namespace) => asked.path.is_none() && **namespace == *asked.namespace,
        };
        let mut errors = Vec::new();
        for subject in Self::subjects_of(user) {
            let grants = self.grants.get(&subject).map_or(&[][..], Vec::as_slice);
            if let Some(grant) = grants
                .iter()
                .filter(|grant| here(&grant.namespace))
                .find(|grant| grant.rules.iter().any(|rule| rule.allows(asked)))
            {
                return AccessDecision::Allowed { reason: grant.reason.to_string() };
            }
            let dangling = self.dangling.get(&subject).map_or(&[][..], Vec::as_slice);
            errors.extend(dangling.iter().filter(|d| here(&d.namespace)).map(|d| d.error.to_string()));
        }
        AccessDecision::Refused { errors }
    }

    /// All rules of a user in a namespace; an empty one: those that hold everywhere.
    pub(crate) fn rules_for(&self, user: &User, namespace: &str) -> Vec<PolicyRule> {
        let here = |grant: &&Grant| grant.namespace.as_deref().is_none_or(|own| own == namespace);
        let mut rules = Vec::new();
        for subject in Self::subjects_of(user) {
            let grants = self.grants.get(&subject).map_or(&[][..], Vec::as_slice);
            rules.extend(grants.iter().filter(here).flat_map(|grant| grant.rules.iter().cloned()));
        }
        rules
    }

    /// The rules of the role that a binding in `namespace` refers to.
    pub(crate) fn role(&self, kind: &str, name: &str, namespace: &str) -> Option<Arc<[PolicyRule]>> {
        let namespace = if kind == "Role" { namespace } else { "" };
        self.roles.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
}

pub(crate) fn rules_of(role: &Object) -> Vec<PolicyRule> {
    let rules = role.0.get("rules").cloned().unwrap_or_default();
    serde_json::from_value::<Option<Vec<PolicyRule>>>(rules).ok().flatten().unwrap_or_default()
}

/// The subject of a binding. `own`: the binding's namespace, for a service account without one.
fn subject_of(subject: &Value, own: &str) -> Option<(Subject, String)> {
    let text = |field: &str| subject[field].as_str().unwrap_or("");
    let name = text("name");
    match text("kind") {
        "User" => Some((Subject::User(name.to_owned()), format!("User {name:?}"))),
        "Group" => Some((Subject::Group(name.to_owned()), format!("Group {name:?}"))),
        "ServiceAccount" => {
            let namespace = Some(text("namespace")).filter(|namespace| !namespace.is_empty()).unwrap_or(own);
            let user = format!("system:serviceaccount:{namespace}:{name}");
            Some((Subject::User(user), format!("ServiceAccount \"{name}/{namespace}\"")))
        }
        _ => None,
    }
}

fn reason(binding: &Object, is_role: bool, role: &str, namespace: &str, subject: &str) -> String {
    let name = binding.name();
    let role = format!("{} {role:?}", if is_role { "Role" } else { "ClusterRole" });
    match namespace {
        "" => format!("RBAC: allowed by ClusterRoleBinding {name:?} of {role} to {subject}"),
        namespace => format!("RBAC: allowed by RoleBinding \"{name}/{namespace}\" of {role} to {subject}"),
    }
}

/// The index, rebuilt after a write of a role or a binding.
#[derive(Default)]
pub(crate) struct Rbac {
    written: AtomicU64,
    index: RwLock<(u64, Arc<RbacIndex>)>,
    pub(crate) changed: tokio::sync::Notify,
}

impl Rbac {
    /// Must be called after a write of `kind`, before its response.
    pub(crate) fn wrote(&self, kind: &Kind) {
        if kind.group == GROUP {
            self.written.fetch_add(1, Ordering::AcqRel);
            self.changed.notify_one();
        }
    }

    pub(crate) fn index(&self, store: &Store) -> Arc<RbacIndex> {
        // Numbers start at 1, so that an index that was never built counts as outdated.
        let current = self.written.load(Ordering::Acquire) + 1;
        {
            let index = self.index.read();
            if index.0 == current {
                return Arc::clone(&index.1);
            }
        }
        let mut index = self.index.write();
        if index.0 < current {
            *index = (current, Arc::new(RbacIndex::load(store)));
        }
        Arc::clone(&index.1)
    }
}

impl ServerState {
    /// Whether a user may do something. Members of `system:masters` may do everything.
    pub(crate) fn authorize(&self, user: &User, asked: &Attributes<'_>) -> AccessDecision {
        AccessDecision::of_master(user).unwrap_or_else(|| self.rbac.index(&self.store).decide(user, asked))
    }

    /// The authorizer of a user's requests, for expressions.
    pub(crate) fn authorizer(&self, user: &User) -> Authorizer {
        Authorizer::new(user.clone(), self.rbac.index(&self.store))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Object {
        Object(value.as_object().unwrap().clone())
    }

    fn index() -> RbacIndex {
        let reader = json!({"metadata": {"name": "reader", "namespace": "a"},
            "rules": [{"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}]});
        let one = json!({"metadata": {"name": "one"},
            "rules": [{"apiGroups": ["apps"], "resources": ["*/scale"], "resourceNames": ["web"], "verbs": ["*"]},
                      {"nonResourceURLs": ["/health*"], "verbs": ["get"]}]});
        let subjects = json!([{"kind": "User", "name": "u"},
            {"kind": "ServiceAccount", "name": "s", "namespace": "a"}]);
        let binding = json!({"metadata": {"name": "b", "namespace": "a"}, "subjects": subjects,
            "roleRef": {"kind": "Role", "name": "reader"}});
        let everywhere = json!({"metadata": {"name": "c"}, "subjects": [{"kind": "Group", "name": "g"}],
            "roleRef": {"kind": "ClusterRole", "name": "one"}});
        let dangling = json!({"metadata": {"name": "d"}, "subjects": [{"kind": "User", "name": "u"}],
            "roleRef": {"kind": "ClusterRole", "name": "gone"}});
        RbacIndex::of(
            vec![object(reader), object(one)],
            vec![object(binding), object(everywhere), object(dangling)],
        )
    }

    #[test]
    fn what_is_bound_is_allowed_and_nothing_else() {
        let index = index();
        let user = |name: &str, group: &str| User::named(name, vec![group.to_owned()]);
        let pods = |verb, namespace| Attributes { verb, resource: "pods", namespace, ..Default::default() };
        assert_eq!(
            index.decide(&user("u", ""), &pods("get", "a")),
            AccessDecision::Allowed {
                reason: "RBAC: allowed by RoleBinding \"b/a\" of Role \"reader\" to User \"u\"".into()
            }
        );
        assert!(index.decide(&user("system:serviceaccount:a:s", ""), &pods("list", "a")).is_allowed());
        let errors = vec!["clusterrole.rbac.authorization.k8s.io \"gone\" not found".to_owned()];
        assert_eq!(index.decide(&user("u", ""), &pods("get", "b")), AccessDecision::Refused { errors });
        assert!(!index.decide(&user("u", ""), &pods("delete", "a")).is_allowed());
        let scale = |name| Attributes {
            verb: "patch",
            group: "apps",
            resource: "deployments",
            subresource: "scale",
            name,
            namespace: "z",
            ..Default::default()
        };
        assert!(index.decide(&user("x", "g"), &scale("web")).is_allowed());
        assert!(!index.decide(&user("x", "g"), &scale("other")).is_allowed());
        let path = |path| Attributes { verb: "get", path: Some(path), ..Default::default() };
        assert!(index.decide(&user("x", "g"), &path("/healthz")).is_allowed());
        assert!(!index.decide(&user("x", "g"), &path("/metrics")).is_allowed());
        assert_eq!(index.rules_for(&user("u", "g"), "a").len(), 3);
    }
}
