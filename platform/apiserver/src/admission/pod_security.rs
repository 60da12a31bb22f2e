//! Pod security levels of namespaces: `pod-security.kubernetes.io/enforce` refuses pods, `warn` warns of them and of
//! the templates of workloads. The labels' rules and all messages are upstream's (`k8s.io/pod-security-admission`).

use serde_json::Value;

use super::pod_security_rules::{SecurityLevel, Violation, violations};
use crate::{object::Object, registry::Kind, server::ServerState, status::ApiError, verbs::WriteRequest};
use mayfly_api::validation::FieldError;

const PREFIX: &str = "pod-security.kubernetes.io/";
const MODES: [&str; 3] = ["enforce", "audit", "warn"];
const VERSION_LATEST: &str = "latest";
/// Maximum number of existing pods that a changed level is checked against (upstream's
/// `defaultNamespaceMaxPodsToCheck`).
const EXISTING_PODS_MAX: usize = 3000;

/// A level with the version of its rules, as a namespace names it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SecurityPolicy {
    level: SecurityLevel,
    /// Shown in messages. The rules are always those of the latest version.
    version: String,
}

impl SecurityPolicy {
    /// The policy of a mode; `privileged` where the namespace names none. A level that does not exist counts as
    /// `restricted`, as upstream: only objects written before the check of labels have one.
    fn of(namespace: &Object, mode: &str) -> Self {
        let label = |name: &str| namespace.str_at(&["metadata", "labels", &format!("{PREFIX}{name}")]);
        let level = match label(mode) {
            "" => SecurityLevel::Privileged,
            text => SecurityLevel::parse(text).unwrap_or(SecurityLevel::Restricted),
        };
        let version = match label(&format!("{mode}-version")) {
            "" => VERSION_LATEST.to_owned(),
            version => version.to_owned(),
        };
        Self { level, version }
    }

    fn violations(&self, template: &Value) -> Vec<Violation> {
        violations(self.level, &template["metadata"], &template["spec"])
    }

    fn shown(&self) -> String {
        format!("{:?}", format!("{}:{}", self.level.name(), self.version))
    }
}

/// The pod or the pod template in an object.
fn template_of(kind: &Kind, object: &Object) -> Option<Value> {
    let path: &[&str] = match (kind.group, kind.plural) {
        ("", "pods") => return Some(Value::Object(object.0.clone())),
        ("", "podtemplates") => &["template"],
        ("", "replicationcontrollers")
        | ("apps", "deployments" | "replicasets" | "statefulsets" | "daemonsets")
        | ("batch", "jobs") => &["spec", "template"],
        ("batch", "cronjobs") => &["spec", "jobTemplate", "spec", "template"],
        _ => return None,
    };
    object.at(path).cloned()
}

fn with_details(violations: &[Violation]) -> String {
    let texts = violations.iter().map(|violation| match violation.detail.as_str() {
        "" => violation.reason.clone(),
        detail => format!("{} ({detail})", violation.reason),
    });
    texts.collect::<Vec<_>>().join(", ")
}

impl ServerState {
    /// Refuses a pod that violates the level of its namespace. Returns the warnings about a pod that is admitted.
    pub(crate) fn check_pod_security(
        &self,
        request: &WriteRequest,
        new: &Object,
        old: Option<&Object>,
    ) -> Result<Vec<String>, ApiError> {
        let kind = request.kind;
        if (kind.group, kind.plural) == ("", "namespaces") {
            return self.check_security_labels(kind, new, old);
        }
        let is_pod = (kind.group, kind.plural) == ("", "pods");
        let Some(template) = template_of(kind, new) else { return Ok(Vec::new()) };
        let Some(namespace) = self.object("", "namespaces", "", &request.namespace) else {
            return Ok(Vec::new());
        };
        let enforced = SecurityPolicy::of(&namespace, "enforce");
        let found = if is_pod { enforced.violations(&template) } else { Vec::new() };
        if !found.is_empty() {
            let why = format!("violates PodSecurity {}: {}", enforced.shown(), with_details(&found));
            return Err(ApiError::forbidden(kind, new.name(), &why));
        }
        let warned = SecurityPolicy::of(&namespace, "warn");
        let found = warned.violations(&template);
        let warning = format!("would violate PodSecurity {}: {}", warned.shown(), with_details(&found));
        Ok(if found.is_empty() { Vec::new() } else { vec![warning] })
    }

    /// Checks the labels of a namespace, and warns of pods in it that a stricter level would refuse.
    fn check_security_labels(
        &self,
        kind: &Kind,
        new: &Object,
        old: Option<&Object>,
    ) -> Result<Vec<String>, ApiError> {
        let errors = label_errors(new);
        if !errors.is_empty() && old.is_none_or(|old| label_errors(old).is_empty()) {
            return Err(ApiError::invalid(kind, new.name(), &errors));
        }
        let Some(old) = old else { return Ok(Vec::new()) };
        let (before, policy) = (SecurityPolicy::of(old, "enforce"), SecurityPolicy::of(new, "enforce"));
        if policy == before || policy.level <= before.level {
            return Ok(Vec::new());
        }
        let mut pods = self.objects("", "pods", new.name());
        pods.truncate(EXISTING_PODS_MAX);
        Ok(existing_pod_warnings(new.name(), &policy, pods))
    }
}

/// A line about all pods, then one for each set of reasons.
fn existing_pod_warnings(namespace: &str, policy: &SecurityPolicy, pods: Vec<Object>) -> Vec<String> {
    let mut by_reasons: Vec<(String, Vec<String>)> = Vec::new();
    for pod in pods {
        let name = pod.name().to_owned();
        let found = policy.violations(&Value::Object(pod.0));
        if found.is_empty() {
            continue;
        }
        let reasons: Vec<_> = found.into_iter().map(|violation| violation.reason).collect();
        let reasons = reasons.join(", ");
        match by_reasons.iter_mut().find(|(known, _)| *known == reasons) {
            Some((_, names)) => names.push(name),
            None => by_reasons.push((reasons, vec![name])),
        }
    }
    if by_reasons.is_empty() {
        return Vec::new();
    }
    let mut lines: Vec<_> = by_reasons
        .into_iter()
        .map(|(reasons, mut names)| {
            names.sort();
            match names.len() {
                1 => format!("{}: {reasons}", names[0]),
                2 => format!("{} (and 1 other pod): {reasons}", names[0]),
                count => format!("{} (and {} other pods): {reasons}", names[0], count - 1),
            }
        })
        .collect();
    lines.sort();
    let shown = policy.shown();
    let head =
        format!("existing pods in namespace {namespace:?} violate the new PodSecurity enforce level {shown}");
    std::iter::once(head).chain(lines).collect()
}

fn label_errors(namespace: &Object) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for mode in MODES {
        let label = format!("{PREFIX}{mode}");
        let level = namespace.str_at(&["metadata", "labels", &label]);
        if !level.is_empty() && SecurityLevel::parse(level).is_none() {
            let detail = "must be one of privileged, baseline, restricted";
            let path = format!("metadata.labels[{label}]");
            errors.push(FieldError::invalid(path, format!("{level:?}"), detail));
        }
        let label = format!("{label}-version");
        let version = namespace.str_at(&["metadata", "labels", &label]);
        if !version.is_empty() && !is_version(version) {
            let detail = "must be \"latest\" or \"v1.x\"";
            let path = format!("metadata.labels[{label}]");
            errors.push(FieldError::invalid(path, format!("{version:?}"), detail));
        }
    }
    errors
}

fn is_version(text: &str) -> bool {
    let minor = text.strip_prefix("v1.");
    let is_minor = |minor: &str| minor.parse::<u16>().is_ok_and(|number| number.to_string() == minor);
    text == VERSION_LATEST || minor.is_some_and(is_minor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Object {
        Object(value.as_object().unwrap().clone())
    }

    fn namespace(labels: &[(&str, &str)]) -> Object {
        let labels: serde_json::Map<_, _> =
            labels.iter().map(|(name, value)| (format!("{PREFIX}{name}"), json!(value))).collect();
        object(json!({"metadata": {"name": "n", "labels": labels}}))
    }

    #[test]
    fn labels_name_a_level_and_a_version() {
        let policy =
            SecurityPolicy::of(&namespace(&[("warn", "baseline"), ("warn-version", "v1.24")]), "warn");
        assert_eq!((policy.level, policy.shown().as_str()), (SecurityLevel::Baseline, "\"baseline:v1.24\""));
        assert_eq!(SecurityPolicy::of(&namespace(&[]), "enforce").level, SecurityLevel::Privileged);
        assert_eq!(
            SecurityPolicy::of(&namespace(&[("enforce", "x")]), "enforce").level,
            SecurityLevel::Restricted
        );
        let messages: Vec<_> = label_errors(&namespace(&[("enforce", "high"), ("audit-version", "v1.03")]))
            .iter()
            .map(FieldError::message)
            .collect();
        assert_eq!(messages.len(), 2, "{messages:?}");
        assert!(messages[0].ends_with("must be one of privileged, baseline, restricted"), "{messages:?}");
        assert!(
            label_errors(&namespace(&[("enforce", "baseline"), ("enforce-version", "latest")])).is_empty()
        );
    }

    #[test]
    fn existing_pods_are_grouped_by_reasons() {
        let pod = |name: &str, spec: Value| object(json!({"metadata": {"name": name}, "spec": spec}));
        let policy = SecurityPolicy { level: SecurityLevel::Baseline, version: "latest".into() };
        let host = || json!({"hostNetwork": true, "containers": []});
        let pods = vec![
            pod("b", host()),
            pod("a", host()),
            pod(
                "c",
                json!({"hostPID": true, "containers": [{"name": "x", "securityContext": {"privileged": true}}]}),
            ),
            pod("fine", json!({"containers": []})),
        ];
        assert_eq!(
            existing_pod_warnings("n", &policy, pods),
            [
                "existing pods in namespace \"n\" violate the new PodSecurity enforce level \"baseline:latest\"",
                "a (and 1 other pod): host namespaces",
                "c: host namespaces, privileged",
            ]
        );
    }
}
