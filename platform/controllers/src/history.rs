//! ControllerRevisions: the templates that a StatefulSet or DaemonSet had, numbered.
//!
//! The data of a revision is a strategic merge patch that puts the template back; `kubectl rollout undo` applies it.
//! (Behaviour: upstream `pkg/controller/history`.)

use std::{collections::BTreeSet, sync::Arc};

use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::{
    api::{apps::v1::ControllerRevision, core::v1::PodTemplateSpec},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};
use serde_json::{Value, json};

use crate::{
    metadata::{is_gone, only, uid},
    ownership::controller_reference,
    template_hash::safe_encoded,
};

/// The label of pods with the revision whose template they are made from.
pub(crate) const LABEL_REVISION_HASH: &str = "controller-revision-hash";
/// The label of a StatefulSet's revision with the hash in its name.
const LABEL_DATA_HASH: &str = "controller.kubernetes.io/hash";

/// The revisions of one object, oldest first.
pub(crate) struct RevisionHistory {
    revisions: Vec<Arc<ControllerRevision>>,
}

/// The steps that make the current template the newest revision.
#[derive(Debug)]
pub(crate) enum Newest {
    Known(Arc<ControllerRevision>),
    /// An older revision has the template again: it gets the highest number.
    Renumber(Arc<ControllerRevision>, i64),
    Create(Box<ControllerRevision>),
}

/// The value of [`LABEL_REVISION_HASH`] of a revision's pods: the hash, of a StatefulSet the revision's name.
pub(crate) fn revision_label(revision: &ControllerRevision) -> String {
    revision.labels().get(LABEL_REVISION_HASH).cloned().unwrap_or_else(|| revision.name_any())
}

/// The template that a revision holds.
pub(crate) fn template(revision: &ControllerRevision) -> Option<PodTemplateSpec> {
    let mut value = revision.data.as_ref()?.0.get("spec")?.get("template")?.clone();
    value.as_object_mut()?.remove("$patch");
    serde_json::from_value(value).ok()
}

/// The data of a template, as Go writes it: a strategic merge patch that replaces the whole template, and a null for
/// the zero time of its metadata.
fn data(template: &PodTemplateSpec) -> Value {
    let mut data = json!({"spec": {"template": template}});
    complete(&mut data);
    data
}

/// Adds what Go writes in a template and the types here leave out. Revisions of earlier versions lack it.
fn complete(data: &mut Value) {
    let Some(template) = data.pointer_mut("/spec/template").and_then(Value::as_object_mut) else { return };
    template.insert("$patch".into(), json!("replace"));
    let metadata = template.entry("metadata").or_insert_with(|| json!({}));
    if let Some(metadata) = metadata.as_object_mut() {
        metadata.entry("creationTimestamp").or_insert(Value::Null);
    }
}

/// The hash of a revision's data, equal to upstream's (`history.HashControllerRevision`): FNV-1 over the JSON text
/// that Go writes (sorted keys, HTML characters escaped), followed by the count of collisions.
fn revision_hash(data: &Value, collisions: Option<i32>) -> String {
    let text =
        sorted(data).to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026");
    let text = format!("{text}{}", collisions.unwrap_or(0));
    safe_encoded(fnv1(text.as_bytes()))
}

/// The value with the keys of its objects in order, independent of serde_json's map type.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            entries.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect()
        }
        Value::Array(list) => list.iter().map(sorted).collect(),
        other => other.clone(),
    }
}

/// FNV-1 with 32 bits.
fn fnv1(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash: u32, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(*byte))
}

impl RevisionHistory {
    pub(crate) fn of(mut revisions: Vec<Arc<ControllerRevision>>) -> Self {
        revisions.sort_by_key(|revision| (revision.revision, revision.name_any()));
        Self { revisions }
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Arc<ControllerRevision>> {
        self.revisions.iter().find(|revision| revision.name_any() == name)
    }

    /// The revision of an owner's template. `full_name`: the pods' label has the revision's name, not its hash alone.
    pub(crate) fn newest<O: Resource<DynamicType = ()>>(
        &self,
        owner: &O,
        template: &PodTemplateSpec,
        collisions: Option<i32>,
        full_name: bool,
    ) -> Newest {
        let data = data(template);
        let next = self.revisions.last().map_or(1, |last| last.revision.saturating_add(1));
        let equal = |revision: &&Arc<ControllerRevision>| {
            let mut known = revision.data.as_ref().map_or(Value::Null, |data| data.0.clone());
            complete(&mut known);
            known == data
        };
        match self.revisions.iter().rev().find(equal) {
            Some(known) if known.revision.saturating_add(1) == next => Newest::Known(known.clone()),
            Some(known) => Newest::Renumber(known.clone(), next),
            None => {
                let hash = revision_hash(&data, collisions);
                let name = format!("{}-{hash}", owner.meta().name.as_deref().unwrap_or_default());
                let mut labels = template
                    .metadata
                    .as_ref()
                    .and_then(|metadata| metadata.labels.clone())
                    .unwrap_or_default();
                let label = if full_name { LABEL_DATA_HASH } else { LABEL_REVISION_HASH };
                labels.insert(label.into(), hash);
                Newest::Create(Box::new(ControllerRevision {
                    metadata: ObjectMeta {
                        name: Some(name),
                        namespace: owner.meta().namespace.clone(),
                        labels: Some(labels),
                        // `kubectl rollout history` shows the cause of a change, which is one of them.
                        annotations: owner.meta().annotations.clone(),
                        owner_references: controller_reference(owner).map(|owner| vec![owner]),
                        ..ObjectMeta::default()
                    },
                    data: Some(RawExtension(data)),
                    revision: next,
                }))
            }
        }
    }

    /// The revisions past `limit` that are not in `used`, oldest first.
    pub(crate) fn surplus(
        &self,
        limit: Option<i32>,
        used: &BTreeSet<String>,
    ) -> Vec<Arc<ControllerRevision>> {
        let limit = usize::try_from(limit.unwrap_or(10)).unwrap_or(0);
        let is_used = |revision: &ControllerRevision| {
            used.contains(&revision.name_any()) || used.contains(&revision_label(revision))
        };
        let unused: Vec<_> = self.revisions.iter().filter(|revision| !is_used(revision)).collect();
        let count = unused.len().saturating_sub(limit);
        unused.into_iter().take(count).cloned().collect()
    }
}

/// Carries [`Newest`] out. `None`: other data has the name, so the caller counts a collision.
pub(crate) async fn ensure(
    client: &Client,
    namespace: &str,
    newest: Newest,
) -> kube::Result<Option<Arc<ControllerRevision>>> {
    let api: Api<ControllerRevision> = Api::namespaced(client.clone(), namespace);
    match newest {
        Newest::Known(revision) => Ok(Some(revision)),
        Newest::Renumber(revision, number) => {
            let metadata = json!({"resourceVersion": revision.metadata.resource_version});
            let patch = Patch::Merge(json!({"metadata": metadata, "revision": number}));
            Ok(Some(Arc::new(api.patch(&revision.name_any(), &PatchParams::default(), &patch).await?)))
        }
        Newest::Create(revision) => match api.create(&PostParams::default(), &revision).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                let known = api.get(&revision.name_any()).await?;
                let same = known.data == revision.data
                    && known
                        .metadata
                        .owner_references
                        .as_ref()
                        .map(|owners| owners.iter().map(|owner| &owner.uid).collect::<Vec<_>>())
                        == revision
                            .metadata
                            .owner_references
                            .as_ref()
                            .map(|owners| owners.iter().map(|owner| &owner.uid).collect());
                Ok(same.then(|| Arc::new(known)))
            }
            result => Ok(Some(Arc::new(result?))),
        },
    }
}

pub(crate) async fn delete(
    client: &Client,
    namespace: &str,
    surplus: &[Arc<ControllerRevision>],
) -> kube::Result<()> {
    let api: Api<ControllerRevision> = Api::namespaced(client.clone(), namespace);
    for revision in surplus {
        let result = api.delete(&revision.name_any(), &only(uid(&**revision))).await;
        if !is_gone(&result) {
            result?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::api::apps::v1::StatefulSet;

    use super::*;

    #[test]
    fn the_hash_of_a_revision_is_upstreams() {
        // Recorded from kube-controller-manager 1.28.
        let template = json!({
            "metadata": {"creationTimestamp": null, "labels": {"app": "a"}},
            "spec": {
                "containers": [{
                    "name": "c", "image": "i", "resources": {}, "terminationMessagePath": "/dev/termination-log",
                    "terminationMessagePolicy": "File", "imagePullPolicy": "Always"
                }],
                "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
                "securityContext": {}, "schedulerName": "rec-none"
            },
            "$patch": "replace"
        });
        assert_eq!(revision_hash(&json!({"spec": {"template": template}}), None), "55456797c8");
    }

    fn set(template: &PodTemplateSpec) -> StatefulSet {
        let metadata = json!({"name": "web", "namespace": "a", "uid": "u",
            "annotations": {"kubernetes.io/change-cause": "a new image"}});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"template": template}})).unwrap()
    }

    fn created(history: &RevisionHistory, template: &PodTemplateSpec, full_name: bool) -> ControllerRevision {
        match history.newest(&set(template), template, None, full_name) {
            Newest::Create(revision) => *revision,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_revision_has_upstreams_form() {
        let template = PodTemplateSpec {
            metadata: Some(ObjectMeta {
                labels: Some([("app".into(), "a".into())].into()),
                ..Default::default()
            }),
            ..Default::default()
        };
        let none = RevisionHistory::of(Vec::new());
        let revision = created(&none, &template, true);
        let data = revision.data.as_ref().unwrap().0.clone();
        let expected =
            json!({"$patch": "replace", "metadata": {"creationTimestamp": null, "labels": {"app": "a"}}});
        assert_eq!(data, json!({"spec": {"template": expected}}));
        assert_eq!(self::template(&revision), Some(template.clone()));
        let name = revision.name_any();
        let hash = name.strip_prefix("web-").unwrap();
        assert_eq!(revision.labels()["app"], "a");
        assert_eq!((&*revision.labels()[LABEL_DATA_HASH], revision_label(&revision)), (hash, name.clone()));
        assert_eq!(revision.annotations()["kubernetes.io/change-cause"], "a new image");
        let of_daemons = created(&none, &template, false);
        assert_eq!((&*of_daemons.labels()[LABEL_REVISION_HASH], &*revision_label(&of_daemons)), (hash, hash));
        assert_eq!(of_daemons.labels().get(LABEL_DATA_HASH), None);
        // A revision of an earlier version has the same template.
        let mut earlier = revision.clone();
        earlier.data = Some(RawExtension(json!({"spec": {"template":
            {"$patch": "replace", "metadata": {"labels": {"app": "a"}}}}})));
        let history = RevisionHistory::of(vec![Arc::new(earlier)]);
        let newest = history.newest(&set(&template), &template, None, true);
        assert!(matches!(newest, Newest::Known(_)), "{newest:?}");
    }
}
