//! Plans the route of a function from objects.

use std::sync::Arc;

use mayfly_api::{
    Function, ObjectKey, Revision,
    egress::EgressRule,
    env::{self, EnvSources},
    function::{Sticky, TrafficTarget},
    quantity, revision_number,
};
use mayfly_runtime::HostedSpec;

use crate::refusal::{Refusal, RefusalCode};

/// A planned route, before its targets are created.
#[derive(Debug)]
pub(crate) struct RoutePlan {
    pub(crate) targets: Vec<PlannedTarget>,
    /// The revision that a target `latest: true` resolves to, even if there is no such target.
    pub(crate) latest: Option<Arc<Revision>>,
    pub(crate) sticky: Option<Sticky>,
}

#[derive(Debug)]
pub(crate) struct PlannedTarget {
    /// The revision, or the reason why there is none.
    pub(crate) revision: Result<Arc<Revision>, Refusal>,
    /// The value that identifies the target in a sticky client's cookie: the name of a revision, or `latest`.
    pub(crate) identity: String,
    pub(crate) percent: u32,
    pub(crate) tag: Option<String>,
}

/// The identity of the target `latest: true`; not a revision's name, since those have a number.
pub(super) const LATEST: &str = "latest";

/// Plans the route. `revisions`: those whose owner is the function.
pub(crate) fn plan(function: &Function, revisions: &[Arc<Revision>]) -> RoutePlan {
    let own: Vec<_> = revisions.iter().filter(|revision| belongs(revision, function)).collect();
    let everything = [TrafficTarget { latest: Some(true), percent: Some(100), ..TrafficTarget::default() }];
    let traffic = match function.spec.traffic.as_slice() {
        [] => everything.as_slice(),
        traffic => traffic,
    };
    let name = ObjectKey::of(function).to_string();
    let targets = traffic.iter().map(|target| {
        let (identity, revision) = match &target.revision {
            Some(wanted) => {
                let found = own.iter().find(|revision| revision.metadata.name.as_ref() == Some(wanted));
                let missing = || Refusal::revision_missing(&name, wanted);
                (wanted.clone(), found.map(|found| Arc::clone(found)).ok_or_else(missing))
            }
            None => {
                let latest = latest(function, &own).ok_or_else(|| Refusal::no_revision(&name));
                (LATEST.to_owned(), latest)
            }
        };
        PlannedTarget {
            revision,
            identity,
            percent: target.percent.unwrap_or(0).min(100),
            tag: target.tag.clone(),
        }
    });
    let (targets, latest) = (targets.collect(), latest(function, &own));
    RoutePlan { targets, latest, sticky: function.spec.sticky.clone() }
}

impl PlannedTarget {
    /// Whether the traffic target refers to a revision that does not exist.
    fn is_missing(&self) -> bool {
        self.identity != LATEST && self.revision.is_err()
    }
}

impl RoutePlan {
    /// Whether any traffic target refers to a revision that does not exist.
    pub(crate) fn lacks_revision(&self) -> bool {
        self.targets.iter().any(PlannedTarget::is_missing)
    }

    /// Replaces missing revisions by the latest one, if there is one: a wrong name must not take a function down. The
    /// function's condition reports the wrong name.
    pub(crate) fn with_latest(mut self) -> Self {
        if let Some(latest) = &self.latest {
            for target in self.targets.iter_mut().filter(|target| target.is_missing()) {
                target.revision = Ok(latest.clone());
                target.identity = LATEST.to_owned();
            }
        }
        self
    }
}

/// Whether a revision belongs to this function: not to an earlier function of the same name, and not being deleted.
fn belongs(revision: &Revision, function: &Function) -> bool {
    let meta = &revision.metadata;
    let mut owners = meta.owner_references.iter().flatten().filter(|owner| owner.kind == "Function");
    Some(revision.spec.function.as_str()) == function.metadata.name.as_deref()
        && meta.deletion_timestamp.is_none()
        && owners.all(|owner| Some(owner.uid.as_str()) == function.metadata.uid.as_deref())
}

/// The newest ready revision according to the function's status, or a newer one whose own status is ready: the function
/// reports it only once requests are routed to it. If none is ready, the newest one. Age is compared by revision
/// number, as in the function's controller: after the clock was set back, creation times would give different answers.
fn latest(function: &Function, own: &[&Arc<Revision>]) -> Option<Arc<Revision>> {
    let named = function.status.as_ref().and_then(|status| status.latest_ready_revision.as_ref());
    let number = |revision: &&&Arc<Revision>| {
        revision_number(function.metadata.name.as_deref()?, revision.metadata.name.as_deref()?)
    };
    let can_answer = |revision: &&&Arc<Revision>| {
        (named.is_some() && revision.metadata.name.as_ref() == named) || is_ready(revision)
    };
    let ready = own.iter().filter(can_answer).max_by_key(number);
    ready.or_else(|| own.iter().max_by_key(number)).map(|found| Arc::clone(found))
}

fn is_ready(revision: &Revision) -> bool {
    let mut conditions = revision.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The reason why a revision cannot run.
#[derive(Debug)]
pub(crate) enum HostedSpecError {
    /// A source of the environment is missing. A revision that was prepared before keeps running.
    Environment(Refusal),
    Revision(Refusal),
}

impl From<Refusal> for HostedSpecError {
    fn from(refusal: Refusal) -> Self {
        Self::Revision(refusal)
    }
}

/// The host's specification of a revision.
///
/// # Errors
/// The reason why it cannot run, as a sentence for clients.
pub(crate) fn hosted_spec(
    revision: &Revision,
    sources: &impl EnvSources,
) -> Result<HostedSpec, HostedSpecError> {
    let key = ObjectKey::of(revision);
    let spec = &revision.spec;
    let name = key.to_string();
    let not_ready = |why: &str| Refusal::revision_not_ready(&name, why);
    if let Some(why) = unready(revision) {
        return Err(not_ready(&why).into());
    }
    let Some(component) = spec.source.component else {
        return Err(not_ready("this server runs uploaded components (spec.source.component) and container images (spec.source.image) only").into());
    };
    let invalid = |why: String| Refusal { code: RefusalCode::ComponentInvalid, ..not_ready(&why) };
    let egress: Result<Vec<EgressRule>, _> = spec.egress.iter().map(|rule| rule.parse()).collect();
    Ok(HostedSpec {
        function: spec.function.clone(),
        component,
        env: env::resolve(&key.namespace, &spec.env, &[], sources)
            .map_err(|why| HostedSpecError::Environment(not_ready(&why.to_string())))?,
        memory_bytes_max: quantity::whole(&spec.limits.memory).map_err(|why| invalid(why.to_string()))?,
        timeout: spec.limits.timeout.0,
        response_bytes_max: quantity::whole(&spec.limits.response).map_err(|why| invalid(why.to_string()))?,
        log_bytes_per_second: spec
            .limits
            .log_rate
            .as_ref()
            .map(quantity::whole)
            .transpose()
            .map_err(|why| invalid(why.to_string()))?,
        isolation: spec.isolation,
        egress: egress.map_err(|why| invalid(why.to_string()))?,
        files: spec.files,
        revision: key,
    })
}

/// Temporary reasons: requests are routed although the revision's status, which may be out of date, is not ready. The
/// host waits for a component that is being compiled and looks for a missing one, and the environment is computed here
/// from the newest values. A client that has seen a function become ready must not be refused right after.
const TRANSIENT_REASONS: [&str; 3] = ["Compiling", COMPONENT_MISSING, "EnvironmentMissing"];
const COMPONENT_MISSING: &str = "ComponentMissing";

/// Whether a revision's status reports that its component is not in the artifact store.
pub(crate) fn lacks_component(revision: &Revision) -> bool {
    let mut conditions = revision.status.iter().flat_map(|status| &status.conditions);
    let ready = conditions.find(|condition| condition.type_ == "Ready");
    ready.is_some_and(|ready| ready.status == "False" && ready.reason == COMPONENT_MISSING)
}

/// The refusal for an image revision that cannot run.
pub(crate) fn image_refusal(revision: &Revision) -> Option<Refusal> {
    unready(revision).map(|why| Refusal::revision_not_ready(&ObjectKey::of(revision).to_string(), &why))
}

/// The reason in a revision's status why it cannot answer; `None` while there is no status.
fn unready(revision: &Revision) -> Option<String> {
    let conditions = revision.status.as_ref().map(|status| status.conditions.as_slice())?;
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready")?;
    let refuses = ready.status == "False" && !TRANSIENT_REASONS.contains(&ready.reason.as_str());
    refuses.then(|| match ready.message.as_str() {
        "" => ready.reason.clone(),
        message => message.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn function(spec: Value, latest_ready: Option<&str>) -> Function {
        let mut spec = spec;
        spec["source"] = json!({});
        serde_json::from_value(json!({
            "apiVersion": "mayfly.dev/v1", "kind": "Function",
            "metadata": {"name": "hello", "namespace": "ns", "uid": "f-1"},
            "spec": spec, "status": {"latestReadyRevision": latest_ready},
        }))
        .unwrap()
    }

    fn revision(name: &str, minute: u8, owner: &str) -> Arc<Revision> {
        Arc::new(
            serde_json::from_value(json!({
                "apiVersion": "mayfly.dev/v1", "kind": "Revision",
                "metadata": {"name": name, "namespace": "ns",
                    "creationTimestamp": format!("2026-01-01T00:{minute:02}:00Z"),
                    "ownerReferences": [{"apiVersion": "mayfly.dev/v1", "kind": "Function",
                        "name": "hello", "uid": owner}]},
                "spec": {"function": "hello", "source": {}},
            }))
            .unwrap(),
        )
    }

    /// `name percent tag` for each target.
    fn check(spec: Value, latest_ready: Option<&str>, revisions: &[Arc<Revision>], expected: &[&str]) {
        let plan = plan(&function(spec, latest_ready), revisions);
        let shown = plan.targets.iter().map(|target| {
            let name = match &target.revision {
                Ok(revision) => revision.metadata.name.clone().unwrap(),
                Err(refusal) => format!("<{}>", refusal.code.as_str()),
            };
            format!("{name} {} {} {:?}", target.identity, target.percent, target.tag.as_deref().unwrap_or(""))
        });
        assert_eq!(shown.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn traffic_finds_its_revisions() {
        let old = revision("hello-00001", 1, "f-1");
        let new = revision("hello-00002", 2, "f-1");
        let foreign = revision("hello-00009", 9, "f-0");
        let all = [old.clone(), new, foreign];
        check(json!({}), Some("hello-00001"), &all, &["hello-00001 latest 100 \"\""]);
        check(json!({}), None, &all, &["hello-00002 latest 100 \"\""]);
        check(json!({}), Some("hello-00003"), &all, &["hello-00002 latest 100 \"\""]);
        check(json!({}), None, &[], &["<not_ready> latest 100 \"\""]);
        let split = json!({"traffic": [
            {"revision": "hello-00001", "percent": 90},
            {"latest": true, "percent": 10, "tag": "canary"},
            {"revision": "hello-00009", "tag": "gone"},
        ]});
        check(
            split,
            Some("hello-00002"),
            &all,
            &[
                "hello-00001 hello-00001 90 \"\"",
                "hello-00002 latest 10 \"canary\"",
                "<not_ready> hello-00009 0 \"gone\"",
            ],
        );
    }

    /// The function's status is updated only once requests are routed there.
    #[test]
    fn a_newer_revision_that_can_answer_is_the_latest() {
        let with = |name: &str, minute: u8, status: &str| {
            let mut value = serde_json::to_value(&*revision(name, minute, "f-1")).unwrap();
            let condition = json!({"type": "Ready", "status": status, "reason": "x", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            value["status"] = json!({"conditions": [condition]});
            Arc::new(serde_json::from_value::<Revision>(value).unwrap())
        };
        let old = with("hello-00001", 1, "True");
        for (newer, expected) in
            [("True", "hello-00002 latest 100 \"\""), ("False", "hello-00001 latest 100 \"\"")]
        {
            let both = [old.clone(), with("hello-00002", 2, newer)];
            check(json!({}), Some("hello-00001"), &both, &[expected]);
            check(json!({}), None, &both, &[expected]);
        }
        // The clock was set back between the two.
        let both = [with("hello-00001", 9, "True"), with("hello-00002", 2, "True")];
        check(json!({}), Some("hello-00001"), &both, &["hello-00002 latest 100 \"\""]);
    }

    struct NoSources;

    impl EnvSources for NoSources {
        fn config_map(&self, _: &str, _: &str) -> Option<Arc<mayfly_api::k8s::api::core::v1::ConfigMap>> {
            None
        }
        fn secret(&self, _: &str, _: &str) -> Option<Arc<mayfly_api::k8s::api::core::v1::Secret>> {
            None
        }
    }

    #[test]
    fn what_cannot_run_says_why() {
        let base = revision("hello-00001", 1, "f-1");
        for (change, expected) in [
            (json!({"spec": {"source": {"oci": "x:1"}}}), "(spec.source.image) only"),
            (
                json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "Broken",
                    "message": "imports wasi:foo", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}),
                "imports wasi:foo",
            ),
            (
                json!({"spec": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                    "source": {"component": mayfly_api::Digest::of(b"x")}}}),
                "secret ns/s not found",
            ),
        ] {
            let mut value = serde_json::to_value(&*base).unwrap();
            json_patch::merge(&mut value, &change);
            let revision: Revision = serde_json::from_value(value).unwrap();
            let (HostedSpecError::Environment(refusal) | HostedSpecError::Revision(refusal)) =
                hosted_spec(&revision, &NoSources).unwrap_err();
            assert!(refusal.message.contains(expected), "{refusal}");
        }
    }

    #[test]
    fn what_is_being_compiled_may_be_called() {
        let base = revision("hello-00001", 1, "f-1");
        let component = json!({"source": {"component": mayfly_api::Digest::of(b"x")}});
        for (reason, called) in [
            ("Compiling", true),
            ("ComponentMissing", true),
            ("EnvironmentMissing", true),
            ("ComponentInvalid", false),
            ("RuntimeMissing", false),
        ] {
            let condition = json!({"type": "Ready", "status": "False", "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let mut value = serde_json::to_value(&*base).unwrap();
            json_patch::merge(&mut value, &json!({"spec": component, "status": {"conditions": [condition]}}));
            let revision: Revision = serde_json::from_value(value).unwrap();
            assert_eq!(hosted_spec(&revision, &NoSources).is_ok(), called, "{reason}");
        }
    }
}
