//! Rollouts against a model of ReplicaSets that follow their size, proportional scaling, history and conditions.

use std::sync::Arc;

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::apps::v1::{Deployment, ReplicaSet, ReplicaSetStatus},
    jiff::{SignedDuration, Timestamp},
};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    plan::{DeploymentPlan, plan},
    revisions::{ANNOTATION_DESIRED, ANNOTATION_MAX, ANNOTATION_REVISION, Sets},
    scaling::{Bounds, available, proportional, replicas},
    status::{AVAILABLE, PROGRESSING, creation_failed, find, is_complete},
};
use crate::scaled_value::resolve;

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn deployment(change: Value) -> Deployment {
    let mut object = json!({"metadata": {"name": "web", "uid": "web", "generation": 1},
        "spec": {"replicas": 3, "progressDeadlineSeconds": 600, "revisionHistoryLimit": 10,
            "strategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "one"}]}}}});
    merge(&mut object, change);
    serde_json::from_value(object).unwrap()
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            change.into_iter().for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value));
        }
        (into, change) => *into = change,
    }
}

fn with_image(mut deployment: Deployment, image: &str) -> Deployment {
    let spec = deployment.spec.as_mut().unwrap();
    spec.template.spec.as_mut().unwrap().containers[0].image = Some(image.into());
    deployment
}

/// Simulated ReplicaSets that apply each change at once; at most `ready_max` pods of each become available.
#[derive(Default)]
struct Model {
    sets: Vec<ReplicaSet>,
}

impl Model {
    fn sets(&self, deployment: &Deployment) -> Sets {
        Sets::of(deployment, self.sets.iter().cloned().map(Arc::new).collect())
    }

    fn plan(&self, deployment: &Deployment) -> DeploymentPlan {
        plan(deployment, &self.sets(deployment), |_| false, now())
    }

    fn apply(&mut self, deployment: &mut Deployment, plan: DeploymentPlan) {
        let bounds = Bounds::of(deployment);
        if let Some((set, annotations)) = plan.annotate {
            self.set(&set.name_any()).metadata.annotations = Some(annotations);
        }
        if let Some(mut set) = plan.create {
            let age = i64::try_from(self.sets.len()).unwrap();
            let created = now().checked_add(SignedDuration::from_secs(age)).unwrap();
            set.metadata.creation_timestamp =
                Some(mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time(created));
            self.sets.push(set);
        }
        for (set, size) in plan.resize {
            let set = self.set(&set.name_any());
            set.spec.as_mut().unwrap().replicas = Some(size);
            let annotations = set.annotations_mut();
            annotations.insert(ANNOTATION_DESIRED.into(), bounds.replicas.to_string());
            annotations.insert(ANNOTATION_MAX.into(), bounds.max().to_string());
        }
        let deleted: Vec<_> = plan.delete.iter().map(|set| set.name_any()).collect();
        self.sets.retain(|set| !deleted.contains(&set.name_any()));
        if let Some(revision) = plan.revision {
            deployment.annotations_mut().insert(ANNOTATION_REVISION.into(), revision);
        }
        deployment.status = Some(plan.status);
    }

    fn set(&mut self, name: &str) -> &mut ReplicaSet {
        self.sets.iter_mut().find(|set| set.name_any() == name).unwrap()
    }

    /// Lets pods start and end.
    fn settle(&mut self) {
        for set in &mut self.sets {
            let count = replicas(set);
            set.status = Some(ReplicaSetStatus {
                replicas: count,
                ready_replicas: Some(count),
                available_replicas: Some(count),
                ..ReplicaSetStatus::default()
            });
        }
    }

    /// Plans, applies and settles until nothing changes.
    fn run(&mut self, deployment: &mut Deployment, mut check: impl FnMut(&Self, Bounds)) {
        for _ in 0..200 {
            let plan = self.plan(deployment);
            let at_rest = plan.create.is_none()
                && plan.resize.is_empty()
                && plan.annotate.is_none()
                && plan.delete.is_empty()
                && deployment.status.as_ref() == Some(&plan.status);
            if at_rest {
                return;
            }
            self.apply(deployment, plan);
            check(self, Bounds::of(deployment));
            self.settle();
        }
        panic!("the rollout does not come to rest");
    }

    fn sizes(&self) -> Vec<i32> {
        self.sets.iter().map(replicas).collect()
    }
}

proptest! {
    /// A rolling update never exceeds the surge, never goes below the availability, and completes.
    #[test]
    fn rolling_updates_keep_their_bounds(
        count in 0..20_i32, surge in 0..8_i32, unavailable in 0..8_i32, updates in 1..4_usize,
    ) {
        prop_assume!(surge + unavailable > 0);
        let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}});
        let mut web = deployment(json!({"spec": {"replicas": count, "strategy": strategy}}));
        let mut model = Model::default();
        model.run(&mut web, |_, _| {});
        for update in 0..updates {
            web = with_image(web, &format!("image-{update}"));
            model.run(&mut web, |model, bounds| {
                let total: i32 = model.sets.iter().map(replicas).sum();
                let available: i32 = model.sets.iter().map(|set| available(set).min(replicas(set))).sum();
                assert!(total <= bounds.max(), "{total} pods of at most {}", bounds.max());
                assert!(available >= bounds.replicas - bounds.unavailable, "{available} available");
            });
            prop_assert!(is_complete(&web, web.status.as_ref().unwrap()));
            prop_assert_eq!(model.sizes().iter().filter(|size| **size > 0).count(), usize::from(count > 0));
        }
    }

    /// Scaling in the middle of a rollout ends with exactly the allowed number of pods.
    #[test]
    fn proportional_scaling_adds_up(old in 1..30_i32, new in 1..30_i32, wanted in 0..60_i32) {
        let mut web = deployment(json!({"spec": {"replicas": old + new,
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}}}));
        let mut model = Model::default();
        model.run(&mut web, |_, _| {});
        web = with_image(web, "two");
        let first = model.plan(&web);
        model.apply(&mut web, first);
        for (at, size) in [(0, old), (1, new)] {
            model.sets[at].spec.as_mut().unwrap().replicas = Some(size);
        }
        model.settle();
        web.spec.as_mut().unwrap().replicas = Some(wanted);
        let bounds = Bounds::of(&web);
        let sizes = proportional(&web, &model.sets(&web), bounds);
        let total: i32 = sizes.iter().map(|(_, size)| *size).sum();
        prop_assert_eq!(total, if wanted == 0 { 0 } else { bounds.max() });
        prop_assert!(sizes.iter().all(|(_, size)| *size >= 0));
    }
}

#[test]
fn percentages_are_rounded_as_upstream_rounds_them() {
    use mayfly_api::k8s::apimachinery::pkg::util::intstr::IntOrString;
    let percent = IntOrString::String("25%".into());
    assert_eq!((resolve(Some(&percent), 10, true), resolve(Some(&percent), 10, false)), (3, 2));
    assert_eq!(resolve(Some(&IntOrString::Int(4)), 10, true), 4);
    let strategy = json!({"spec": {"replicas": 1, "strategy": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": "10%"}}}});
    assert_eq!(Bounds::of(&deployment(strategy)).unavailable, 1, "two zeros would never move");
}

#[test]
fn an_undo_gives_the_old_set_the_next_number() {
    let (mut web, mut model) = (deployment(json!({})), Model::default());
    model.run(&mut web, |_, _| {});
    assert_eq!(web.annotations()[ANNOTATION_REVISION], "1");
    web = with_image(web, "two");
    model.run(&mut web, |_, _| {});
    assert_eq!(web.annotations()[ANNOTATION_REVISION], "2");
    web = with_image(web, "one");
    model.run(&mut web, |_, _| {});
    assert_eq!((web.annotations()[ANNOTATION_REVISION].as_str(), model.sets.len()), ("3", 2));
    let first = &model.sets[0];
    assert_eq!(first.annotations()[ANNOTATION_REVISION], "3");
    assert_eq!(first.annotations()["deployment.kubernetes.io/revision-history"], "1");
    assert_eq!(model.sizes(), [3, 0]);
}

#[test]
fn history_is_limited_and_a_pause_creates_nothing() {
    let mut web = deployment(json!({"spec": {"revisionHistoryLimit": 1}}));
    let mut model = Model::default();
    for image in ["one", "two", "three", "four"] {
        web = with_image(web, image);
        model.run(&mut web, |_, _| {});
    }
    assert_eq!(model.sizes(), [0, 3]);
    web = with_image(web, "five");
    let spec = web.spec.as_mut().unwrap();
    (spec.paused, spec.replicas) = (Some(true), Some(9));
    // The pods that the pause still adds do not become ready: both conditions change.
    let paused = model.plan(&web).status;
    let order: Vec<_> =
        paused.conditions.iter().flatten().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(order, [PROGRESSING, "Available"]);
    web.spec.as_mut().unwrap().replicas = Some(3);
    model.run(&mut web, |_, _| {});
    assert_eq!(
        model.sizes(),
        [3],
        "no new ReplicaSet; the active one counts as history, as upstream counts it"
    );
    let reason = find(web.status.as_ref().unwrap(), PROGRESSING).unwrap().reason.clone();
    assert_eq!(reason.as_deref(), Some("DeploymentPaused"));
    web.spec.as_mut().unwrap().paused = None;
    model.run(&mut web, |_, _| {});
    assert_eq!(*model.sizes().last().unwrap(), 3);
}

#[test]
fn a_change_of_the_readiness_time_reaches_the_new_set_without_a_rollout() {
    let (mut web, mut model) = (deployment(json!({})), Model::default());
    model.run(&mut web, |_, _| {});
    web.spec.as_mut().unwrap().min_ready_seconds = Some(30);
    let step = model.plan(&web);
    assert_eq!(step.annotate.map(|(set, _)| set.name_any()), Some(model.sets[0].name_any()));
    assert!(step.create.is_none());
    model.sets[0].spec.as_mut().unwrap().min_ready_seconds = Some(30);
    assert!(model.plan(&web).annotate.is_none());
}

#[test]
fn recreate_waits_until_the_old_pods_are_gone() {
    let mut web = deployment(json!({"spec": {"strategy": {"type": "Recreate"}}}));
    let mut model = Model::default();
    model.run(&mut web, |_, _| {});
    web = with_image(web, "two");
    let step = model.plan(&web);
    assert!(step.create.is_none() && step.resize.len() == 1 && step.resize[0].1 == 0);
    model.apply(&mut web, step);
    model.settle();
    let waiting = plan(&web, &model.sets(&web), |_| true, now());
    assert!(waiting.create.is_none() && waiting.resize.is_empty());
    assert!(model.plan(&web).create.is_some());
}

#[test]
fn a_rollout_without_progress_times_out() {
    let (mut web, mut model) = (deployment(json!({})), Model::default());
    let first = model.plan(&web);
    model.apply(&mut web, first);
    assert_eq!(find(web.status.as_ref().unwrap(), AVAILABLE).unwrap().status, "False");
    let sets = model.sets(&web);
    let at = |seconds: i64| {
        let time = now().checked_add(SignedDuration::from_secs(seconds)).unwrap();
        plan(&web, &sets, |_| false, time)
    };
    assert_eq!(at(599).again.map(|left| left.as_secs()), Some(1));
    let late = at(600);
    let condition = find(&late.status, PROGRESSING).unwrap();
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_deref()),
        ("False", Some("ProgressDeadlineExceeded"))
    );
    assert_eq!(late.again, None);
}

#[test]
fn a_new_set_that_cannot_be_created_is_shown_once() {
    let mut web = deployment(json!({}));
    let conditions = creation_failed(&web, "exceeded quota", now()).unwrap();
    let shown: Vec<_> = conditions.iter().map(|one| (one.type_.as_str(), one.reason.as_deref())).collect();
    assert_eq!(shown, [(PROGRESSING, Some("ReplicaSetCreateError"))]);
    web.status.get_or_insert_default().conditions = Some(conditions);
    assert!(creation_failed(&web, "exceeded quota", now()).is_none());
    // The next success starts the progress anew.
    let created = Model::default().plan(&web);
    let progressing = find(&created.status, PROGRESSING).unwrap();
    assert_eq!(
        (progressing.status.as_str(), progressing.reason.as_deref()),
        ("True", Some("NewReplicaSetCreated"))
    );
}
