//! Which node a pod is bound to.

use crate::script::check;

#[test]
fn the_emptier_node_is_taken_until_nothing_fits() {
    check(
        "node a cpu=2 memory=4Gi
         node b cpu=4 memory=8Gi
         pod p1 cpu=1 memory=1Gi
         pod p2 cpu=3 memory=1Gi
         pod p3 cpu=1 memory=1Gi
         pod p4 cpu=1 memory=1Gi
         decide",
        "p1 -> b
         p2 -> b
         p3 -> a
         p4 -> a",
    );
    check(
        "node a cpu=1 memory=1Gi pods=1
         node b cpu=1 memory=1Gi cordoned
         node c cpu=4 memory=1Gi taint:team=red:NoSchedule
         pod p cpu=2 memory=2Gi
         decide",
        "p: 0/3 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 1 node(s) had untolerated taint \
         {team: red}, 1 node(s) were unschedulable.",
    );
}

#[test]
fn selectors_taints_classes_ports_and_devices() {
    check(
        "node a cpu=8 memory=8Gi label:disk=hdd
         node b cpu=2 memory=2Gi label:disk=ssd label:runtime.mayfly.dev/wasm=true \
         label:runtime.mayfly.dev/oci=true taint:x=y:NoSchedule
         node g cpu=2 memory=2Gi gpu=1
         pod ssd select:disk=ssd tolerate:x
         pod wasm class=wasm tolerate:x
         pod gpu gpu=1
         pod gpu2 gpu=1
         pod web1 port=80 select:disk=hdd
         pod web2 port=80 select:disk=hdd
         decide",
        "ssd -> b
         wasm -> b
         gpu -> g
         gpu2: 0/3 nodes are available: 1 node(s) had untolerated taint {x: y}, 2 Insufficient nvidia.com/gpu.
         web1 -> a
         web2: 0/3 nodes are available: 1 node(s) didn't have free ports for the requested pod ports, \
         1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint {x: y}.",
    );
}

#[test]
fn a_pod_without_a_class_waits_for_a_node_that_runs_containers() {
    check(
        "node w cpu=8 memory=8Gi label:runtime.mayfly.dev/wasm=true
         pod component class=wasm
         pod image
         pod gvisor class=gvisor
         decide
         node c cpu=8 memory=8Gi label:runtime.mayfly.dev/oci=true
         after 60
         decide",
        "component -> w
         image: 0/1 nodes are available: 1 node(s) run no OCI containers (components have \
         spec.runtimeClassName: wasm).
         gvisor: 0/1 nodes are available: 1 node(s) had no runtime of class \"gvisor\".
         image -> c
         gvisor -> c",
    );
}

#[test]
fn replicas_stay_with_their_revision_and_priority_goes_first() {
    check(
        "node a cpu=8 memory=8Gi
         node b cpu=8 memory=8Gi
         pod r1 revision=hello-00001 memory=64Mi
         pod r2 revision=hello-00001 memory=64Mi
         pod late
         pod urgent priority=10
         decide",
        "urgent -> a
         r1 -> b
         r2 -> b
         late -> a",
    );
}

#[test]
fn a_pod_that_fits_nowhere_waits_for_a_change_and_its_pause() {
    check(
        "node a cpu=1 memory=1Gi
         pod one cpu=1
         pod two cpu=1
         decide
         decide
         gone one
         decide
         after 1
         decide
         drop-node a
         pod three
         decide
         after 301
         decide",
        "one -> a
         two: 0/1 nodes are available: 1 Insufficient cpu.
         two -> a
         three: no nodes available to schedule pods
         three: no nodes available to schedule pods",
    );
}

const ZONES: &str = "node a1 cpu=8 memory=8Gi label:zone=a label:host=a1
     node a2 cpu=8 memory=8Gi label:zone=a label:host=a2
     node b1 cpu=8 memory=8Gi label:zone=b label:host=b1
     node x cpu=8 memory=8Gi";

#[test]
fn affinity_places_pods_in_the_domain_of_others() {
    check(
        &format!(
            "{ZONES}
             pod alone near:app=db@zone
             pod first label:app=web near:app=web@zone
             decide
             pod db label:app=db cpu=6
             decide
             after 10
             decide
             pod second label:app=web near:app=web@zone
             decide"
        ),
        // A pod that matches its own term starts the group; one that does not waits for another pod. Node x has no
        // zone.
        "alone: 0/4 nodes are available: 4 node(s) didn't match pod affinity rules.
         first -> a1
         db -> a2
         alone -> a1
         second -> a1",
    );
}

#[test]
fn anti_affinity_holds_for_the_pod_and_against_it() {
    check(
        &format!(
            "{ZONES}
             pod w1 label:app=web apart:app=web@zone
             pod w2 label:app=web apart:app=web@zone
             pod w3 label:app=web apart:app=web@zone
             pod w4 label:app=web apart:app=web@zone select:zone=a
             pod plain label:app=web select:zone=a
             decide"
        ),
        // A node without the label is in no domain, so that any number of such pods may share it (as upstream).
        "w1 -> a1
         w2 -> b1
         w3 -> x
         w4: 0/4 nodes are available: 2 node(s) didn't match Pod's node affinity/selector, 2 node(s) didn't match pod \
         anti-affinity rules.
         plain: 0/4 nodes are available: 2 node(s) didn't match Pod's node affinity/selector, 2 node(s) didn't satisfy \
         existing pods anti-affinity rules.",
    );
}

#[test]
fn preferred_terms_attract_and_repel_both_ways() {
    check(
        "node a cpu=8 memory=8Gi label:host=a
         node b cpu=8 memory=8Gi label:host=b
         pod cache label:app=cache
         decide
         pod web likes:app=cache@host cpu=1
         decide
         pod shy label:app=shy dislikes:app=cache@host cpu=1
         decide
         pod cache2 label:app=cache
         decide",
        "cache -> a
         web -> a
         shy -> b
         cache2 -> a",
    );
}

#[test]
fn required_spread_keeps_the_skew_and_ignores_pods_that_end() {
    check(
        "node a cpu=8 memory=8Gi label:zone=a
         node b cpu=1 memory=8Gi label:zone=b
         node x cpu=8 memory=8Gi
         pod p1 cpu=1 label:app=web spread:1@zone
         pod p2 cpu=1 label:app=web spread:1@zone
         pod p3 cpu=1 label:app=web spread:1@zone
         pod p4 cpu=1 label:app=web spread:1@zone
         decide
         ends p1
         after 10
         decide",
        "p1 -> a
         p2 -> b
         p3 -> a
         p4: 0/3 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match pod topology spread constraints, \
         1 node(s) didn't match pod topology spread constraints (missing required label).
         p4 -> a",
    );
}

#[test]
fn replicas_of_one_owner_prefer_different_nodes() {
    check(
        "node a cpu=64 memory=64Gi label:kubernetes.io/hostname=a
         node b cpu=8 memory=8Gi label:kubernetes.io/hostname=b
         pod r1 owner=rs cpu=1
         pod r2 owner=rs cpu=1
         pod r3 owner=other cpu=1
         decide",
        "r1 -> a
         r2 -> b
         r3 -> a",
    );
}
