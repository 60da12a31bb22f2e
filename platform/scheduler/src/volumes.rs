//! The constraints of a pod's claims on its node. Pure. (Behaviour: upstream
//! `pkg/scheduler/framework/plugins/{volumebinding,volumezone,volumerestrictions}`.)
//!
//! A bound claim brings the node affinity of its volume. A claim that waits for its first consumer is bound after the
//! node is chosen: the scheduler names the node on the claim, and the pod is placed when the claim is bound.

use std::sync::Arc;

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{NodeSelector, PersistentVolume, PersistentVolumeClaim, Pod, TopologySelectorTerm},
        storage::v1::StorageClass,
    },
    node_fit::NodeFacts,
    volume_claims::{
        ANNOTATION_SELECTED_NODE, NO_PROVISIONER, PodClaim, bound_volume, claims_of, class_of_claim,
        is_owned_by, mismatch,
    },
};

const AFFINITY_CONFLICT: &str = "node(s) didn't match PersistentVolume's node affinity";
const NOTHING_TO_BIND: &str = "node(s) didn't find available persistent volumes to bind";
const IN_USE: &str =
    "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode";

/// The source of claims, volumes and classes.
pub trait VolumeObjects {
    fn claim(&self, key: &ObjectKey) -> Option<Arc<PersistentVolumeClaim>>;
    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>>;
    fn class(&self, name: &str) -> Option<Arc<StorageClass>>;
    fn volumes(&self) -> Vec<Arc<PersistentVolume>>;
    /// Whether another pod that runs or will run uses the claim.
    fn is_used(&self, claim: &ObjectKey, except: &ObjectKey) -> bool;
}

/// The constraints by all of a pod's claims.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VolumeNeeds {
    /// The reason why no node fits until a claim changes.
    pub blocked: Option<String>,
    /// The node affinities of bound volumes: all must match.
    pub affinities: Vec<NodeSelector>,
    /// Claims that are bound once a node is chosen.
    pub unbound: Vec<UnboundClaim>,
}

/// A claim that waits for its first consumer.
#[derive(Clone, Debug, PartialEq)]
pub struct UnboundClaim {
    pub key: ObjectKey,
    /// The node that was chosen already.
    pub selected_node: Option<String>,
    /// The topologies in which a volume can be made; `None`: in none, as the class has no provisioner. An empty list
    /// is everywhere.
    pub provisioned_in: Option<Vec<TopologySelectorTerm>>,
    /// The node affinity of each volume that exists and satisfies it.
    pub existing: Vec<Option<NodeSelector>>,
}

impl VolumeNeeds {
    /// The current constraints by the pod's claims.
    pub fn of(pod: &Pod, objects: &impl VolumeObjects) -> Self {
        let mut needs = Self::default();
        for claim in claims_of(pod) {
            if let Err(why) = needs.add(pod, &claim, objects) {
                needs.blocked = Some(why);
                break;
            }
        }
        needs
    }

    fn add(&mut self, pod: &Pod, wanted: &PodClaim, objects: &impl VolumeObjects) -> Result<(), String> {
        let name = &wanted.name;
        let key = ObjectKey::new(pod.metadata.namespace.as_deref().unwrap_or_default(), name);
        let claim = objects.claim(&key);
        let claim = claim.ok_or_else(|| match wanted.ephemeral {
            true => {
                format!(
                    "waiting for ephemeral volume controller to create the persistentvolumeclaim {name:?}"
                )
            }
            false => format!("persistentvolumeclaim {name:?} not found"),
        })?;
        if wanted.ephemeral && !is_owned_by(&claim, pod) {
            let pod = &key.namespace;
            return Err(format!("PVC {pod}/{name} was not created for the pod (pod is not owner)"));
        }
        let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
        if phase == Some("Lost") {
            let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
            return Err(format!(
                "persistentvolumeclaim {name:?} bound to non-existent persistentvolume {volume:?}"
            ));
        }
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(format!("persistentvolumeclaim {name:?} is being deleted"));
        }
        let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.as_ref());
        if modes.into_iter().flatten().any(|mode| mode == "ReadWriteOncePod")
            && objects.is_used(&key, &ObjectKey::of(pod))
        {
            return Err(IN_USE.into());
        }
        match bound_volume(&claim) {
            Some(volume) => {
                let known = objects.volume(volume);
                let known = known.ok_or_else(|| format!("persistentvolume {volume:?} not found"))?;
                self.affinities.extend(affinity_of(&known));
                Ok(())
            }
            None => self.add_unbound(key, &claim, objects),
        }
    }

    fn add_unbound(
        &mut self,
        key: ObjectKey,
        claim: &PersistentVolumeClaim,
        objects: &impl VolumeObjects,
    ) -> Result<(), String> {
        let class = objects.class(class_of_claim(claim));
        let waits =
            |class: &Arc<StorageClass>| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
        let names_volume = claim
            .spec
            .as_ref()
            .and_then(|spec| spec.volume_name.as_ref())
            .is_some_and(|name| !name.is_empty());
        let Some(class) = class.filter(|class| waits(class) && !names_volume) else {
            return Err("pod has unbound immediate PersistentVolumeClaims".into());
        };
        let annotations = claim.metadata.annotations.as_ref();
        let selected = annotations.and_then(|all| all.get(ANNOTATION_SELECTED_NODE)).cloned();
        let free = objects.volumes().into_iter().filter(|volume| {
            volume.spec.as_ref().is_some_and(|spec| spec.claim_ref.is_none())
                && volume.metadata.deletion_timestamp.is_none()
                && mismatch(claim, volume).is_none()
        });
        let provisioned_in = (class.provisioner != NO_PROVISIONER)
            .then(|| class.allowed_topologies.clone().unwrap_or_default());
        self.unbound.push(UnboundClaim {
            key,
            selected_node: selected.filter(|node| !node.is_empty()),
            provisioned_in,
            existing: free.map(|volume| affinity_of(&volume)).collect(),
        });
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The reason why the volumes cannot be used on a node.
    pub fn misfit(&self, node: &NodeFacts) -> Option<&'static str> {
        if !self.affinities.iter().all(|affinity| node.matches_selector(affinity)) {
            return Some(AFFINITY_CONFLICT);
        }
        self.unbound.iter().find_map(|claim| claim.misfit(node))
    }
}

impl UnboundClaim {
    fn misfit(&self, node: &NodeFacts) -> Option<&'static str> {
        if self.selected_node.as_ref().is_some_and(|selected| *selected != node.name) {
            return Some(AFFINITY_CONFLICT);
        }
        let matches = |affinity: &Option<NodeSelector>| {
            affinity.as_ref().is_none_or(|affinity| node.matches_selector(affinity))
        };
        let makes = |terms: &Vec<TopologySelectorTerm>| {
            terms.is_empty() || terms.iter().any(|term| is_within(node, term))
        };
        let fits = self.existing.iter().any(matches) || self.provisioned_in.as_ref().is_some_and(makes);
        (!fits).then_some(NOTHING_TO_BIND)
    }
}

fn is_within(node: &NodeFacts, term: &TopologySelectorTerm) -> bool {
    term.match_label_expressions.iter().flatten().all(|expression| {
        node.labels.get(&expression.key).is_some_and(|value| expression.values.contains(value))
    })
}

fn affinity_of(volume: &PersistentVolume) -> Option<NodeSelector> {
    volume.spec.as_ref()?.node_affinity.as_ref()?.required.clone()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;

    #[derive(Default)]
    struct Objects {
        claims: BTreeMap<String, Arc<PersistentVolumeClaim>>,
        volumes: BTreeMap<String, Arc<PersistentVolume>>,
        classes: BTreeMap<String, Arc<StorageClass>>,
        used: bool,
    }

    impl VolumeObjects for Objects {
        fn claim(&self, key: &ObjectKey) -> Option<Arc<PersistentVolumeClaim>> {
            self.claims.get(&key.name).cloned()
        }
        fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
            self.volumes.get(name).cloned()
        }
        fn class(&self, name: &str) -> Option<Arc<StorageClass>> {
            self.classes.get(name).cloned()
        }
        fn volumes(&self) -> Vec<Arc<PersistentVolume>> {
            self.volumes.values().cloned().collect()
        }
        fn is_used(&self, _claim: &ObjectKey, _except: &ObjectKey) -> bool {
            self.used
        }
    }

    impl Objects {
        fn claim(mut self, more: Value) -> Self {
            let mut claim = json!({"metadata": {"name": "c", "namespace": "n"},
                "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"]}});
            merge(&mut claim, more);
            self.claims.insert("c".into(), Arc::new(serde_json::from_value(claim).unwrap()));
            self
        }

        fn volume(mut self, name: &str, node: &str) -> Self {
            let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "host", "operator": "In", "values": [node]}]}]}});
            let volume = json!({"metadata": {"name": name}, "spec": {"storageClassName": "local",
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "nodeAffinity": affinity}});
            self.volumes.insert(name.into(), Arc::new(serde_json::from_value(volume).unwrap()));
            self
        }

        fn class(mut self, more: Value) -> Self {
            let mut class = json!({"metadata": {"name": "local"}, "provisioner": "mayfly.dev/local",
                "volumeBindingMode": "WaitForFirstConsumer"});
            merge(&mut class, more);
            self.classes.insert("local".into(), Arc::new(serde_json::from_value(class).unwrap()));
            self
        }

        fn needs(&self) -> VolumeNeeds {
            let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}});
            VolumeNeeds::of(&serde_json::from_value(pod).unwrap(), self)
        }
    }

    fn merge(into: &mut Value, more: Value) {
        match (into, more) {
            (Value::Object(into), Value::Object(more)) => {
                for (key, value) in more {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, more) => *into = more,
        }
    }

    fn node(name: &str) -> NodeFacts {
        let labels = [("host".to_owned(), name.to_owned())].into();
        NodeFacts { name: name.into(), labels, ..NodeFacts::default() }
    }

    #[test]
    fn a_bound_claim_brings_the_affinity_of_its_volume() {
        let bound = json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
            "spec": {"volumeName": "v"}});
        let needs = Objects::default().claim(bound.clone()).volume("v", "a").needs();
        assert_eq!((needs.misfit(&node("a")), needs.misfit(&node("b"))), (None, Some(AFFINITY_CONFLICT)));
        let gone = Objects::default().claim(bound).needs();
        assert_eq!(gone.blocked.as_deref(), Some("persistentvolume \"v\" not found"));
    }

    #[test]
    fn a_waiting_claim_needs_a_volume_or_a_place_to_make_one() {
        let topology = json!([{"matchLabelExpressions": [{"key": "host", "values": ["a"]}]}]);
        let made = Objects::default().claim(json!({})).class(json!({"allowedTopologies": topology})).needs();
        assert_eq!((made.misfit(&node("a")), made.misfit(&node("b"))), (None, Some(NOTHING_TO_BIND)));
        let by_hand = json!({"provisioner": "kubernetes.io/no-provisioner"});
        let by_hand = Objects::default().claim(json!({})).class(by_hand).volume("v", "b").needs();
        assert_eq!((by_hand.misfit(&node("a")), by_hand.misfit(&node("b"))), (Some(NOTHING_TO_BIND), None));
        let chosen = json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": "b"}}});
        let chosen = Objects::default().claim(chosen).class(json!({})).needs();
        assert_eq!((chosen.misfit(&node("a")), chosen.misfit(&node("b"))), (Some(AFFINITY_CONFLICT), None));
    }

    #[test]
    fn what_no_node_can_help_with_is_named() {
        let blocked = |objects: Objects| objects.needs().blocked.unwrap_or_default();
        assert_eq!(blocked(Objects::default()), "persistentvolumeclaim \"c\" not found");
        let immediate = Objects::default().claim(json!({})).class(json!({"volumeBindingMode": "Immediate"}));
        assert_eq!(blocked(immediate), "pod has unbound immediate PersistentVolumeClaims");
        let going = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        assert!(blocked(Objects::default().claim(going)).contains("being deleted"));
        let only = json!({"spec": {"accessModes": ["ReadWriteOncePod"]}});
        let used = Objects { used: true, ..Objects::default() }.claim(only.clone()).class(json!({}));
        assert_eq!(blocked(used), IN_USE);
        assert_eq!(blocked(Objects::default().claim(only).class(json!({}))), "");
    }
}
