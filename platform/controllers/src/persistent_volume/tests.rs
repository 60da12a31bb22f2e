use std::sync::Arc;

use mayfly_api::{
    k8s::api::{
        core::v1::{PersistentVolume, PersistentVolumeClaim, Pod},
        storage::v1::StorageClass,
    },
    node_fit::NodeFacts,
};
use serde_json::{Value, json};

use super::{
    LocalVolumes,
    plan::{Step, VolumeState, plan},
};

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

fn state() -> VolumeState {
    let local = LocalVolumes { node: "here".into(), folder: "/data/volumes".into() };
    let state = VolumeState { local: Some(local), ..VolumeState::default() };
    with_class(state, "local", "mayfly.dev/local", "WaitForFirstConsumer")
}

fn with_class(mut state: VolumeState, name: &str, provisioner: &str, mode: &str) -> VolumeState {
    let class = json!({"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode,
        "allowVolumeExpansion": true});
    let class: StorageClass = serde_json::from_value(class).unwrap();
    state.classes.insert(name.into(), Arc::new(class));
    state
}

impl VolumeState {
    fn claim(mut self, name: &str, more: Value) -> Self {
        let mut claim = json!({"metadata": {"name": name, "namespace": "n", "uid": format!("u-{name}"), "annotations": {}},
            "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": "Pending"}});
        merge(&mut claim, more);
        self.claims.push(Arc::new(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap()));
        self
    }

    fn volume(mut self, name: &str, more: Value) -> Self {
        let mut volume = json!({"metadata": {"name": name, "annotations": {}},
            "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Delete", "hostPath": {"path": "/v"}},
            "status": {"phase": "Available"}});
        merge(&mut volume, more);
        self.volumes.push(Arc::new(serde_json::from_value::<PersistentVolume>(volume).unwrap()));
        self
    }

    fn pod(mut self, spec: Value) -> Self {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u-p"}, "spec": spec});
        self.pods.push(Arc::new(serde_json::from_value::<Pod>(pod).unwrap()));
        self
    }

    /// The steps in short.
    fn steps(&self) -> Vec<String> {
        plan(self).iter().map(short).collect()
    }
}

fn name<K: kube::Resource>(object: &Arc<K>) -> &str {
    object.meta().name.as_deref().unwrap_or_default()
}

fn short(step: &Step) -> String {
    match step {
        Step::Reserve { volume, claim } => format!("reserve {} {}", name(volume), name(claim)),
        Step::Unreserve { volume } => format!("unreserve {}", name(volume)),
        Step::Bind { claim, volume, by_controller } => {
            format!("bind {} {}{}", name(claim), name(volume), if *by_controller { " chosen" } else { "" })
        }
        Step::ShowBound { claim, volume } => format!("bound {} {}", name(claim), name(volume)),
        Step::ClaimPhase { claim, phase } => format!("claim {} {phase}", name(claim)),
        Step::VolumePhase { volume, phase, .. } => format!("volume {} {phase}", name(volume)),
        Step::Provision { claim, class } => format!("provision {} {}", name(claim), name(class)),
        Step::AskProvisioner { claim, provisioner } => format!("ask {provisioner} {}", name(claim)),
        Step::RejectNode { claim, node } => format!("reject {node} {}", name(claim)),
        Step::Expand { volume, size, .. } => format!("expand {} {}", name(volume), size.0),
        Step::Reclaim { volume } => format!("reclaim {}", name(volume)),
        Step::UnprotectClaim { claim } => format!("unprotect {}", name(claim)),
        Step::UnprotectVolume { volume } => format!("unprotect {}", name(volume)),
        Step::CreateClaim { pod, volume } => format!("create {} {volume}", name(pod)),
        Step::Notice { claim, reason, .. } => format!("say {} {reason}", name(claim)),
    }
}

fn claim_ref(name: &str) -> Value {
    json!({"spec": {"claimRef": {"namespace": "n", "name": name, "uid": format!("u-{name}")}}})
}

fn bound(volume: &str) -> Value {
    json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
        "spec": {"volumeName": volume},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}})
}

fn phase(phase: &str) -> Value {
    json!({"status": {"phase": phase}})
}

fn both(mut first: Value, second: Value) -> Value {
    merge(&mut first, second);
    first
}

fn selected(node: &str) -> Value {
    json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": node}}})
}

#[test]
fn a_consumer_on_another_node_gets_no_volume_of_this_one() {
    let here = json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": ["here"]}]}]}}}});
    let with_nodes = |mut state: VolumeState| {
        for name in ["here", "there"] {
            let node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}});
            state.nodes.insert(name.into(), NodeFacts::of(&serde_json::from_value(node).unwrap()));
        }
        state
    };
    let state = |node: &str| state().volume("v", here.clone()).claim("c", selected(node));
    assert_eq!(with_nodes(state("here")).steps(), ["reserve v c"]);
    assert_eq!(with_nodes(state("there")).steps(), ["reject there c"]);
    assert_eq!(state("unknown").steps(), ["reject unknown c"]);
    let anywhere = self::state().volume("v", json!({})).claim("c", selected("unknown"));
    assert_eq!(anywhere.steps(), ["reserve v c"]);
}

#[test]
fn a_claim_waits_for_its_consumer_and_then_gets_a_local_volume() {
    assert_eq!(state().claim("c", json!({})).steps(), ["say c WaitForFirstConsumer"]);
    assert_eq!(state().claim("c", selected("here")).steps(), ["provision c local"]);
    assert_eq!(state().claim("c", selected("there")).steps(), ["reject there c"]);
    let made = both(
        claim_ref("c"),
        json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": "mayfly.dev/local"}}}),
    );
    let provisioned =
        state().claim("c", selected("here")).volume("pvc-u-c", both(made.clone(), phase("Pending")));
    assert_eq!(provisioned.steps(), ["bind c pvc-u-c chosen"]);
    let named = json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}, "spec": {"volumeName": "pvc-u-c"}});
    let named = state().claim("c", named).volume("pvc-u-c", both(made.clone(), phase("Pending")));
    assert_eq!(named.steps(), ["bound c pvc-u-c", "volume pvc-u-c Bound"]);
    let done = state().claim("c", bound("pvc-u-c")).volume("pvc-u-c", both(made, phase("Bound")));
    assert_eq!(done.steps(), [""; 0]);
}

#[test]
fn a_local_volume_is_a_filesystem_of_one_node() {
    let many = both(selected("here"), json!({"spec": {"accessModes": ["ReadWriteMany"]}}));
    assert_eq!(state().claim("c", many).steps(), ["say c ProvisioningFailed"]);
    let block = both(selected("here"), json!({"spec": {"volumeMode": "Block"}}));
    assert_eq!(state().claim("c", block).steps(), ["say c ProvisioningFailed"]);
}

#[test]
fn two_claims_never_reserve_one_volume() {
    let class = json!({"spec": {"storageClassName": ""}});
    let two = state().claim("a", class.clone()).claim("b", class.clone()).volume("v", class);
    assert_eq!(two.steps(), ["reserve v a", "say b FailedBinding"]);
}

#[test]
fn a_volume_or_a_claim_may_name_the_other_beforehand() {
    let by_volume = json!({"spec": {"claimRef": {"namespace": "n", "name": "c"}}});
    let reserved = state().claim("c", json!({})).volume("v", by_volume);
    assert_eq!(reserved.steps(), ["reserve v c"]);
    let by_claim = json!({"spec": {"volumeName": "v"}});
    assert_eq!(state().claim("c", by_claim.clone()).volume("v", json!({})).steps(), ["reserve v c"]);
    assert_eq!(state().claim("c", by_claim.clone()).steps(), [""; 0]);
    let taken = state().claim("c", by_claim.clone()).claim("x", bound("v"));
    let taken = taken.volume("v", both(claim_ref("x"), phase("Bound")));
    assert_eq!(taken.steps(), ["say c FailedBinding"]);
    let small = state().claim("c", by_claim).volume("v", json!({"spec": {"capacity": {"storage": "1Mi"}}}));
    assert_eq!(small.steps(), ["say c VolumeMismatch"]);
}

#[test]
fn other_provisioners_are_asked() {
    let external = with_class(state(), "fast", "example.com/disk", "Immediate");
    let class = json!({"spec": {"storageClassName": "fast"}});
    assert_eq!(external.claim("c", class).steps(), ["ask example.com/disk c", "say c ExternalProvisioning"]);
    let none = json!({"spec": {"storageClassName": "none"}});
    assert_eq!(state().claim("c", none).steps(), ["say c ProvisioningFailed"]);
}

#[test]
fn a_released_volume_is_kept_or_removed_as_its_policy_says() {
    let gone = both(claim_ref("c"), phase("Bound"));
    assert_eq!(state().volume("v", gone).steps(), ["volume v Released"]);
    let released = both(claim_ref("c"), phase("Released"));
    let local = json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": "mayfly.dev/local"}}});
    assert_eq!(state().volume("v", both(released.clone(), local.clone())).steps(), ["reclaim v"]);
    let retained = both(local, json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}));
    assert_eq!(state().volume("v", both(released.clone(), retained)).steps(), [""; 0]);
    let external =
        json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": "example.com/disk"}}});
    assert_eq!(state().volume("v", both(released.clone(), external)).steps(), [""; 0]);
    assert_eq!(state().volume("v", released).steps(), ["volume v Failed"]);
    // A claim of the same name that was made later is another one.
    let again = json!({"metadata": {"uid": "later"}});
    let later = state().claim("c", again).volume("v", both(claim_ref("c"), phase("Bound")));
    assert_eq!(later.steps(), ["say c WaitForFirstConsumer", "volume v Released"]);
}

#[test]
fn a_claim_without_its_volume_is_lost() {
    assert_eq!(state().claim("c", bound("v")).steps(), ["claim c Lost", "say c ClaimLost"]);
    let theirs = state().claim("c", bound("v")).claim("x", bound("v"));
    let theirs = theirs.volume("v", both(claim_ref("x"), phase("Bound")));
    assert_eq!(theirs.steps(), ["claim c Lost", "say c ClaimLost"]);
}

#[test]
fn a_volume_whose_claim_chose_another_is_free_again() {
    let by_controller = json!({"metadata": {"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}}});
    let other = state().claim("c", bound("w")).volume("w", both(claim_ref("c"), phase("Bound")));
    let other = other.volume("v", both(claim_ref("c"), by_controller));
    assert_eq!(other.steps(), ["unreserve v"]);
}

#[test]
fn a_local_volume_grows_with_its_claim() {
    let local = json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": "mayfly.dev/local"}}});
    let more = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
    let volume = both(both(claim_ref("c"), phase("Bound")), local);
    let grown = state().claim("c", both(bound("v"), more.clone())).volume("v", volume.clone());
    assert_eq!(grown.steps(), ["expand v 2Gi"]);
    let shown = both(volume.clone(), json!({"spec": {"capacity": {"storage": "2Gi"}}}));
    assert_eq!(state().claim("c", both(bound("v"), more.clone())).volume("v", shown).steps(), ["bound c v"]);
    let foreign = both(claim_ref("c"), phase("Bound"));
    assert_eq!(state().claim("c", both(bound("v"), more)).volume("v", foreign).steps(), [""; 0]);
}

/// The nodes call the driver of a FlexVolume; volumes of other types without a driver keep their size.
#[test]
fn a_flex_volume_is_expanded_by_the_nodes_if_its_class_allows_it() {
    let flex = json!({"spec": {"hostPath": null, "flexVolume": {"driver": "vendor/disk"}}});
    let more = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
    let volume = both(both(claim_ref("c"), phase("Bound")), flex);
    let state = state().claim("c", both(bound("v"), more)).volume("v", volume);
    let steps = plan(&state);
    let [Step::Expand { bytes, size, .. }] = steps.as_slice() else { panic!("{steps:?}") };
    assert_eq!((*bytes, size.0.as_str()), (Some(2 << 30), "2Gi"));
    let mut fixed = state;
    fixed.classes.values_mut().for_each(|class| Arc::make_mut(class).allow_volume_expansion = None);
    assert_eq!(fixed.steps(), [""; 0]);
}

#[test]
fn what_is_in_use_is_protected() {
    let going = |finalizer: &str| json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [finalizer]}});
    let claim = both(bound("v"), going("kubernetes.io/pvc-protection"));
    let volume = both(claim_ref("c"), phase("Bound"));
    let uses = |node: &str| {
        json!({"nodeName": node, "containers": [],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]})
    };
    let used = state().claim("c", claim.clone()).volume("v", volume.clone());
    assert_eq!(used.pod(uses("here")).steps(), [""; 0]);
    let unused = state().claim("c", claim).volume("v", volume);
    assert_eq!(unused.pod(uses("")).steps(), ["unprotect c"]);
    let volume = going("kubernetes.io/pv-protection");
    assert_eq!(state().volume("v", volume.clone()).steps(), ["unprotect v"]);
    let in_use = both(both(volume, claim_ref("c")), phase("Bound"));
    assert_eq!(state().claim("c", bound("v")).volume("v", in_use).steps(), [""; 0]);
}

#[test]
fn a_generic_ephemeral_volume_gets_its_claim() {
    let spec = json!({"containers": [], "volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]});
    assert_eq!(state().pod(spec.clone()).steps(), ["create p scratch"]);
    assert_eq!(
        state().pod(spec).claim("p-scratch", json!({})).steps(),
        ["say p-scratch WaitForFirstConsumer"]
    );
}
