//! Endpoints by pods, and how they are spread over slices.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::k8s::api::{
    core::v1::{Endpoints, Pod, Service},
    discovery::v1::EndpointSlice,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    addresses::{from_legacy, from_pods, selects},
    legacy,
    slices::{self, SliceOwner, SlicePlan},
};

fn service(spec: Value) -> Service {
    let object = json!({"metadata": {"name": "web", "namespace": "ns", "uid": "web"}, "spec": spec});
    serde_json::from_value(object).unwrap()
}

fn web() -> Service {
    service(json!({"selector": {"app": "web"}, "clusterIP": "10.96.0.1",
        "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}))
}

fn pod(number: usize, ready: bool, change: Value) -> Arc<Pod> {
    let ip = format!("10.0.{}.{}", number / 200, number % 200 + 1);
    let mut pod = json!({"metadata": {"name": format!("p{number}"), "namespace": "ns", "uid": format!("u{number}"),
            "labels": {"app": "web"}},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}});
    for (name, value) in change.as_object().unwrap() {
        for (field, value) in value.as_object().unwrap() {
            pod[name][field] = value.clone();
        }
    }
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn planned(service: &Service, known: &[Arc<EndpointSlice>], pods: &[Arc<Pod>]) -> SlicePlan {
    slices::plan(
        &SliceOwner::of_service(service, true),
        known,
        from_pods(service, pods, |_| Some("z".into())),
        100,
    )
}

fn applied(known: &[Arc<EndpointSlice>], plan: &SlicePlan) -> Vec<Arc<EndpointSlice>> {
    let mut all: BTreeMap<_, _> = known.iter().map(|slice| (slice.name_any(), slice.clone())).collect();
    for slice in &plan.delete {
        all.remove(&slice.name_any());
    }
    for slice in plan.create.iter().chain(&plan.update) {
        all.insert(slice.name_any(), Arc::new(slice.clone()));
    }
    all.into_values().collect()
}

/// Pod, ready, serving, terminating.
fn conditions(slice: &EndpointSlice) -> Vec<(String, bool, bool, bool)> {
    let tell = |endpoint: &mayfly_api::k8s::api::discovery::v1::Endpoint| {
        let is = endpoint.conditions.clone().unwrap_or_default();
        let name = endpoint.target_ref.as_ref().and_then(|target| target.name.clone()).unwrap_or_default();
        let is_true = |value: Option<bool>| value == Some(true);
        (name, is_true(is.ready), is_true(is.serving), is_true(is.terminating))
    };
    slice.endpoints.iter().map(tell).collect()
}

#[test]
fn readiness_termination_and_ports() {
    let going = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    let pods = [
        pod(0, true, json!({})),
        pod(1, false, json!({})),
        pod(2, true, going),
        pod(3, true, json!({"status": {"phase": "Failed"}})),
        pod(4, true, json!({"status": {"podIP": null, "podIPs": null}})),
    ];
    let plan = planned(&web(), &[], &pods);
    let slice = &plan.create[0];
    assert_eq!((plan.create.len(), slice.ports.as_ref().unwrap()[0].port), (1, Some(8080)));
    let expected = [("p0", true, true, false), ("p1", false, false, false), ("p2", false, true, true)];
    assert_eq!(conditions(slice), expected.map(|(name, a, b, c)| (name.to_owned(), a, b, c)));
    assert_eq!(slice.endpoints[0].zone.as_deref(), Some("z"));
    let endpoints = legacy::endpoints(&web(), &pods, None);
    let subset = &endpoints.subsets.as_ref().unwrap()[0];
    let names = |list: &Option<Vec<mayfly_api::k8s::api::core::v1::EndpointAddress>>| {
        let all = list.iter().flatten().filter_map(|address| address.target_ref.as_ref()?.name.clone());
        all.collect::<Vec<_>>()
    };
    assert_eq!(
        (names(&subset.addresses), names(&subset.not_ready_addresses)),
        (vec!["p0".into()], vec!["p1".into()])
    );
    assert_eq!(subset.ports.as_ref().unwrap()[0].port, 8080);
    let again = legacy::endpoints(&web(), &pods, Some(&endpoints));
    assert_eq!(again, endpoints, "the same pods change nothing");
}

#[test]
fn headless_services_name_their_pods_and_may_publish_them_early() {
    let headless =
        service(json!({"selector": {"app": "web"}, "clusterIP": "None", "publishNotReadyAddresses": true}));
    let named = json!({"spec": {"hostname": "p0", "subdomain": "web"}});
    let plan = planned(&headless, &[], &[pod(0, false, named)]);
    let slice = &plan.create[0];
    assert_eq!(conditions(slice), [("p0".to_owned(), true, false, false)]);
    assert_eq!(slice.endpoints[0].hostname.as_deref(), Some("p0"));
    assert_eq!(slice.labels()["service.kubernetes.io/headless"], "");
    let endpoints = legacy::endpoints(&headless, &[pod(0, false, json!({}))], None);
    assert_eq!(endpoints.subsets.unwrap()[0].addresses.as_ref().unwrap().len(), 1);
}

#[test]
fn mirrored_slices_have_the_metadata_of_their_endpoints() {
    let endpoints: Endpoints = serde_json::from_value(json!({
        "metadata": {"name": "db", "namespace": "a", "uid": "e", "labels": {"tier": "data"},
            "annotations": {"note": "n", "kubectl.kubernetes.io/last-applied-configuration": "{}"}},
        "subsets": [{"addresses": [{"ip": "10.0.0.1"}], "ports": [{"port": 5432}]}]}))
    .unwrap();
    let mirrored = |endpoints: &Endpoints, known: &[Arc<EndpointSlice>]| {
        slices::plan(&SliceOwner::of_endpoints(endpoints), known, from_legacy(endpoints), 100)
    };
    let plan = mirrored(&endpoints, &[]);
    let slice = &plan.create[0];
    let expected = json!({"tier": "data", "kubernetes.io/service-name": "db",
        "endpointslice.kubernetes.io/managed-by": "endpointslicemirroring-controller.k8s.io"});
    assert_eq!(json!(slice.labels()), expected);
    assert_eq!(json!(slice.annotations()), json!({"note": "n"}));
    let owner = &slice.owner_references()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str(), owner.controller), ("Endpoints", "e", Some(true)));
    let known = applied(&[], &plan);
    let mut changed = endpoints.clone();
    changed.metadata.labels = Some([("tier".to_owned(), "other".to_owned())].into());
    assert_eq!(mirrored(&changed, &known).update[0].labels()["tier"], "other");
    assert!(mirrored(&endpoints, &known).update.is_empty());
}

#[test]
fn a_service_without_pods_has_one_empty_slice() {
    let plan = planned(&web(), &[], &[]);
    assert_eq!((plan.create.len(), plan.create[0].endpoints.len()), (1, 0));
    let known = applied(&[], &plan);
    let plan = planned(&web(), &known, &[]);
    assert!(plan.create.is_empty() && plan.update.is_empty() && plan.delete.is_empty());
    let plan = planned(&web(), &known, &[pod(0, true, json!({}))]);
    assert_eq!(applied(&known, &plan).len(), 1, "the empty slice goes");
    let external = service(json!({"type": "ExternalName", "selector": {"app": "web"}}));
    assert!(!selects(&external, pod(0, true, json!({})).labels()));
}

proptest! {
    /// After any change of the pods, the slices hold exactly the endpoints, at most 100 each, and a second plan
    /// has nothing to do; a change of few pods rewrites few slices.
    #[test]
    fn slices_hold_exactly_the_endpoints(
        first in prop::collection::btree_set(0..500_usize, 0..350),
        second in prop::collection::btree_set(0..500_usize, 0..350),
    ) {
        let mut known = Vec::new();
        for numbers in [&first, &second] {
            let pods: Vec<_> = numbers.iter().map(|number| pod(*number, true, json!({}))).collect();
            known = applied(&known, &planned(&web(), &known, &pods));
            let mut held: Vec<_> = known.iter().flat_map(|slice| conditions(slice)).map(|(name, ..)| name).collect();
            held.sort();
            let mut wanted: Vec<_> = pods.iter().map(|pod| pod.name_any()).collect();
            wanted.sort();
            prop_assert_eq!(held, wanted);
            prop_assert!(known.iter().all(|slice| slice.endpoints.len() <= 100));
            let again = planned(&web(), &known, &pods);
            prop_assert!(again.create.is_empty() && again.update.is_empty() && again.delete.is_empty());
            let mut fewer = pods.clone();
            fewer.pop();
            let plan = planned(&web(), &known, &fewer);
            prop_assert!(plan.create.len() + plan.update.len() + plan.delete.len() <= 2);
        }
    }
}
