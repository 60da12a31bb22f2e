//! The audit policy: which requests are recorded, and how much of them. Pure. (Format and rules: upstream's
//! `audit.k8s.io/v1`, `apiserver/pkg/audit/policy`.)

use serde::Deserialize;

use crate::{access::User, rbac::Attributes};

/// The extent to which a request is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(crate) enum AuditLevel {
    None,
    Metadata,
    Request,
    RequestResponse,
}

impl AuditLevel {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Metadata => "Metadata",
            Self::Request => "Request",
            Self::RequestResponse => "RequestResponse",
        }
    }
}

/// A point in the handling of a request at which an event is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum AuditStage {
    RequestReceived,
    /// The head of the response of a long-running request (a watch, a followed log) is sent.
    ResponseStarted,
    ResponseComplete,
    Panic,
}

impl AuditStage {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::RequestReceived => "RequestReceived",
            Self::ResponseStarted => "ResponseStarted",
            Self::ResponseComplete => "ResponseComplete",
            Self::Panic => "Panic",
        }
    }
}

/// The reason why a policy is not accepted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AuditPolicyError {
    #[error("the audit policy cannot be read: {0}")]
    Malformed(String),
    #[error("the audit policy is a {0}, and not a Policy of audit.k8s.io/v1")]
    Kind(String),
    #[error("the audit policy has no rules: it would record nothing")]
    NoRules,
    #[error("rules[{rule}] of the audit policy: {why}")]
    Rule { rule: usize, why: String },
}

/// The file of a policy.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PolicyFile {
    api_version: String,
    kind: String,
    #[serde(default, rename = "metadata")]
    _metadata: serde_json::Value,
    #[serde(default)]
    rules: Vec<AuditRule>,
    #[serde(default)]
    omit_stages: Vec<AuditStage>,
    #[serde(default)]
    omit_managed_fields: bool,
}

/// A rule; empty lists match everything.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AuditRule {
    level: AuditLevel,
    #[serde(default)]
    users: Vec<String>,
    #[serde(default)]
    user_groups: Vec<String>,
    #[serde(default)]
    verbs: Vec<String>,
    #[serde(default)]
    resources: Vec<GroupResources>,
    #[serde(default)]
    namespaces: Vec<String>,
    #[serde(default, rename = "nonResourceURLs")]
    non_resource_urls: Vec<String>,
    #[serde(default)]
    omit_stages: Vec<AuditStage>,
    omit_managed_fields: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GroupResources {
    #[serde(default)]
    group: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    resource_names: Vec<String>,
}

/// A valid policy.
#[derive(Debug)]
pub(crate) struct AuditPolicy(PolicyFile);

/// The recording of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AuditDecision {
    pub(crate) level: AuditLevel,
    pub(crate) omit_stages: Vec<AuditStage>,
    pub(crate) omit_managed_fields: bool,
}

impl AuditPolicy {
    /// Reads a policy in YAML or JSON.
    ///
    /// # Errors
    /// The policy is malformed, or has a rule without a meaning.
    pub(crate) fn parse(text: &str) -> Result<Self, AuditPolicyError> {
        let file: PolicyFile =
            serde_saphyr::from_str(text).map_err(|error| AuditPolicyError::Malformed(error.to_string()))?;
        if (file.api_version.as_str(), file.kind.as_str()) != ("audit.k8s.io/v1", "Policy") {
            return Err(AuditPolicyError::Kind(format!("{} of {}", file.kind, file.api_version)));
        }
        if file.rules.is_empty() {
            return Err(AuditPolicyError::NoRules);
        }
        for (at, rule) in file.rules.iter().enumerate() {
            rule.check().map_err(|why| AuditPolicyError::Rule { rule: at, why })?;
        }
        Ok(Self(file))
    }

    /// The recording of a request, by the first rule that matches; nothing is recorded without one. `user`: `None` if
    /// the authentication failed; no rule about users or groups matches then.
    pub(crate) fn decide(&self, user: Option<&User>, asked: &Attributes<'_>) -> AuditDecision {
        let Some(rule) = self.0.rules.iter().find(|rule| rule.matches(user, asked)) else {
            return AuditDecision {
                level: AuditLevel::None,
                omit_stages: self.0.omit_stages.clone(),
                omit_managed_fields: self.0.omit_managed_fields,
            };
        };
        AuditDecision {
            level: rule.level,
            omit_stages: self.0.omit_stages.iter().chain(&rule.omit_stages).copied().collect(),
            omit_managed_fields: rule.omit_managed_fields.unwrap_or(self.0.omit_managed_fields),
        }
    }
}

impl AuditRule {
    fn check(&self) -> Result<(), String> {
        let of_resources = !self.resources.is_empty() || !self.namespaces.is_empty();
        if of_resources && !self.non_resource_urls.is_empty() {
            return Err("a rule cannot be about both resources and nonResourceURLs".into());
        }
        for url in &self.non_resource_urls {
            let stars = url.matches('*').count();
            if url != "*" && (!url.starts_with('/') || stars > usize::from(url.ends_with('*'))) {
                return Err(format!("nonResourceURLs: {url:?} is not a path, or has a `*` before its end"));
            }
        }
        for group in &self.resources {
            if group.resources.is_empty() && !group.resource_names.is_empty() {
                return Err("resourceNames need resources".into());
            }
        }
        Ok(())
    }

    fn matches(&self, user: Option<&User>, asked: &Attributes<'_>) -> bool {
        let has = |list: &[String], text: &str| list.iter().any(|one| one == text);
        if !self.users.is_empty() && !user.is_some_and(|user| has(&self.users, &user.name)) {
            return false;
        }
        let in_group = |user: &User| user.groups.iter().any(|group| has(&self.user_groups, group));
        if !self.user_groups.is_empty() && !user.is_some_and(in_group) {
            return false;
        }
        if !self.verbs.is_empty() && !has(&self.verbs, asked.verb) {
            return false;
        }
        if !self.resources.is_empty() || !self.namespaces.is_empty() {
            return asked.path.is_none()
                && (self.namespaces.is_empty() || has(&self.namespaces, asked.namespace))
                && (self.resources.is_empty() || self.resources.iter().any(|group| group.matches(asked)));
        }
        if self.non_resource_urls.is_empty() {
            return true;
        }
        let Some(path) = asked.path else { return false };
        self.non_resource_urls.iter().any(|url| match url.strip_suffix('*') {
            Some(prefix) => path.starts_with(prefix),
            None => path == url,
        })
    }
}

impl GroupResources {
    fn matches(&self, asked: &Attributes<'_>) -> bool {
        if self.group != asked.group {
            return false;
        }
        if !self.resource_names.is_empty() && !self.resource_names.iter().any(|name| name == asked.name) {
            return false;
        }
        let is_it = |resource: &String| match (resource.split_once('/'), asked.subresource) {
            _ if resource == "*" => true,
            (None, "") => resource == asked.resource,
            (None, _) => false,
            (Some((of, subresource)), asked_subresource) => {
                !asked_subresource.is_empty()
                    && (of == "*" || of == asked.resource)
                    && (subresource == "*" || subresource == asked_subresource)
            }
        };
        // As upstream: `pods/*` is about the pods themselves, too.
        let with_all = |resource: &String| resource.strip_suffix("/*").is_some_and(|of| of == asked.resource);
        self.resources.is_empty()
            || self.resources.iter().any(|resource| is_it(resource) || with_all(resource))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &str) -> Result<AuditPolicy, AuditPolicyError> {
        AuditPolicy::parse(&format!("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules:\n{rules}"))
    }

    fn resource<'a>(
        verb: &'a str,
        resource: &'a str,
        subresource: &'a str,
        namespace: &'a str,
    ) -> Attributes<'a> {
        Attributes { verb, resource, subresource, namespace, name: "x", ..Attributes::default() }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let policy = policy(
            "- {level: None, users: [system:kube-proxy], verbs: [watch]}\n\
             - {level: None, nonResourceURLs: ['/healthz*', /version]}\n\
             - {level: Metadata, resources: [{group: '', resources: [secrets, pods/log]}]}\n\
             - {level: Request, namespaces: [kube-system], omitStages: [RequestReceived]}\n\
             - {level: RequestResponse, userGroups: [admins]}\n",
        )
        .unwrap();
        let user = |name: &str, group: &str| User::authenticated(name, vec![group.to_owned()]);
        let (proxy, admin, other) = (user("system:kube-proxy", "g"), user("a", "admins"), user("o", "g"));
        let path = |path| Attributes { verb: "get", path: Some(path), ..Attributes::default() };
        for (user, asked, level) in [
            (&proxy, resource("watch", "services", "", "default"), AuditLevel::None),
            (&admin, path("/healthz/etcd"), AuditLevel::None),
            (&admin, path("/version"), AuditLevel::None),
            (&admin, path("/metrics"), AuditLevel::RequestResponse),
            (&admin, resource("get", "secrets", "", "default"), AuditLevel::Metadata),
            (&other, resource("get", "pods", "log", "default"), AuditLevel::Metadata),
            (&other, resource("get", "pods", "", "default"), AuditLevel::None),
            (&other, resource("create", "pods", "", "kube-system"), AuditLevel::Request),
            (&admin, resource("create", "pods", "exec", "default"), AuditLevel::RequestResponse),
        ] {
            assert_eq!(policy.decide(Some(user), &asked).level, level, "{asked:?}");
        }
        let decision = policy.decide(Some(&other), &resource("create", "pods", "", "kube-system"));
        assert_eq!(decision.omit_stages, [AuditStage::RequestReceived]);
        let unknown = |asked: &Attributes<'_>| policy.decide(None, asked).level;
        assert_eq!(unknown(&resource("watch", "services", "", "default")), AuditLevel::None);
        assert_eq!(unknown(&resource("get", "secrets", "", "default")), AuditLevel::Metadata);
        assert_eq!(unknown(&path("/metrics")), AuditLevel::None, "of no group");
    }

    #[test]
    fn policies_without_a_meaning_are_refused() {
        for (rules, expected) in [
            ("- {level: Loud}", "cannot be read"),
            ("- {level: None, user: [x]}", "cannot be read"),
            ("- {level: None, nonResourceURLs: [healthz]}", "rules[0]"),
            ("- {level: None}\n- {level: None, nonResourceURLs: ['/a*b']}", "rules[1]"),
            ("- {level: None, resources: [{}], nonResourceURLs: [/a]}", "both"),
            ("- {level: None, resources: [{resourceNames: [a]}]}", "resourceNames"),
        ] {
            let error = policy(rules).unwrap_err().to_string();
            assert!(error.contains(expected), "{rules}: {error}");
        }
        let empty = AuditPolicy::parse("apiVersion: audit.k8s.io/v1\nkind: Policy").unwrap_err();
        assert_eq!(empty, AuditPolicyError::NoRules);
        let other = AuditPolicy::parse("apiVersion: v1\nkind: Pod\nrules: []").unwrap_err();
        assert_eq!(other, AuditPolicyError::Kind("Pod of v1".into()));
    }
}
