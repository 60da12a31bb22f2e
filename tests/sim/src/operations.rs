//! The random operations of the user.

mod storage;

use std::sync::Arc;

use mayfly_store::Key;
use serde_json::{Value, json};

use crate::{
    model::{finalizers, is_terminating, text, uid},
    random::Random,
    simulation_state::SimulationState,
    user::{POLICIES, UserClient},
    workloads::{USER_FINALIZER, WORKLOADS_MAX, Workloads, reference},
};

const NAMESPACES: [&str; 3] = ["default", "team-a", "team-b"];
const WORKLOADS: [&str; 6] = [
    "cronjobs.batch",
    "daemonsets.apps",
    "deployments.apps",
    "jobs.batch",
    "replicasets.apps",
    "statefulsets.apps",
];
/// Names are few, so that an object is created again while its predecessor is going.
const NAMES: u64 = 12;

/// The user, with the random numbers of the operations.
pub struct Operations {
    simulation: Arc<SimulationState>,
    user: UserClient,
    random: Random,
}

impl std::fmt::Debug for Operations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operations").finish_non_exhaustive()
    }
}

/// A workload that the user made, or one that a deletion has left without an owner.
type Found = (Key, Value);

impl Operations {
    pub fn new(simulation: Arc<SimulationState>, user: UserClient, random: Random) -> Self {
        Self { simulation, user, random }
    }

    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    fn objects(&self, resources: &[&str], is: impl Fn(&Value) -> bool) -> Vec<Found> {
        let oracle = self.simulation.oracle.lock();
        let all = resources.iter().flat_map(|resource| oracle.model.of(resource));
        let ours = all.filter(|(key, object)| NAMESPACES.contains(&&*key.namespace) && is(object));
        ours.map(|(key, object)| (key.clone(), object.clone())).collect()
    }

    fn any(&mut self, resources: &[&str], is: impl Fn(&Value) -> bool) -> Option<Found> {
        let found = self.objects(resources, is);
        self.random.pick(&found).cloned()
    }

    fn nodes(&self) -> Vec<String> {
        let oracle = self.simulation.oracle.lock();
        oracle.model.of("nodes").map(|(key, _)| key.name.to_string()).collect()
    }

    fn done(&self, what: &str, key: &Key, result: kube::Result<Value>) {
        let outcome = match result {
            Ok(_) => "done".into(),
            Err(kube::Error::Api(status)) => format!("{} {}", status.code, status.reason),
            Err(_) => "no answer".to_owned(),
        };
        self.simulation.trace(format_args!("user: {what} {key}: {outcome}"));
    }

    async fn create(&self, object: Value) {
        let key = Key::new(
            text(&object, "/kind"),
            text(&object, "/metadata/namespace"),
            text(&object, "/metadata/name"),
        );
        let result = self.user.create(&object).await;
        self.done("create", &key, result);
    }

    async fn patch(&self, what: &str, key: &Key, change: Value) {
        let result = self.user.patch(key, &change).await;
        self.done(what, key, result);
    }

    async fn delete(&self, key: &Key, object: &Value, policy: &str, grace_seconds: Option<i64>) {
        self.expect_deletion(object);
        let result = self.user.delete(key, policy, grace_seconds).await;
        self.done(&format!("delete ({policy})"), key, result);
    }

    fn expect_deletion(&self, object: &Value) {
        let hints = &mut self.simulation.oracle.lock().hints;
        *hints.deleted_by_user.entry(uid(object).into()).or_default() += 1;
    }

    /// Makes the namespaces and the volumes of the run.
    pub async fn prepare(&mut self) {
        self.create_volumes().await;
        for namespace in NAMESPACES {
            self.create_namespace(namespace).await;
        }
    }

    async fn create_namespace(&self, name: &str) {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        self.create(namespace).await;
        self.create_quota(name).await;
    }

    /// One operation at random.
    pub async fn next(&mut self) {
        self.simulation.disturb();
        match self.random.below(0..100) {
            0..=23 => self.create_workload().await,
            24..=33 => self.scale().await,
            34..=43 => self.update_template().await,
            44..=46 => self.pause_or_resume().await,
            47..=54 => self.delete_workload().await,
            55..=61 => self.create_dependent().await,
            62..=64 => self.delete_dependent().await,
            65..=69 => self.delete_pod().await,
            70..=75 => self.evict().await,
            76..=80 => self.lose_or_return_node().await,
            81..=82 => self.delete_node().await,
            83..=85 => self.delete_namespace().await,
            86..=95 => self.create_or_delete_storage().await,
            _ => self.create_service_or_budget().await,
        }
        self.simulation.disturb();
    }

    fn builder(&mut self) -> Workloads<'_> {
        let namespace = *self.random.pick(&NAMESPACES).unwrap_or(&NAMESPACES[0]);
        let name = format!("app-{}", self.random.below(0..NAMES));
        Workloads { random: &mut self.random, namespace: namespace.into(), name }
    }

    async fn create_workload(&mut self) {
        // Jobs of CronJobs come and go by themselves.
        let is_own = |object: &Value| {
            object["metadata"]["ownerReferences"].is_null() || text(object, "/kind") != "Job"
        };
        if self.objects(&WORKLOADS, is_own).len() >= WORKLOADS_MAX {
            return self.delete_workload().await;
        }
        let kind = self.random.below(0..12);
        let mut builder = self.builder();
        let object = match kind {
            0..=3 => builder.deployment(),
            4 => builder.replica_set(),
            5..=6 => builder.stateful_set(),
            7 => builder.daemon_set(),
            8..=9 => builder.cron_job(),
            _ => builder.job(),
        };
        // Two workloads with the same selector would fight for each other's pods for ever.
        let (namespace, name) = (text(&object, "/metadata/namespace"), text(&object, "/metadata/name"));
        let rivals = self.objects(&WORKLOADS, |other| {
            text(other, "/metadata/namespace") == namespace
                && text(other, "/metadata/labels/app") == name
                && text(other, "/kind") != text(&object, "/kind")
        });
        if rivals.is_empty() {
            self.create(object).await;
        }
    }

    async fn create_service_or_budget(&mut self) {
        let is_service = self.random.chance(0.5);
        let mut builder = self.builder();
        let object = if is_service { builder.service() } else { builder.budget() };
        self.create(object).await;
    }

    async fn scale(&mut self) {
        let is_free = |object: &Value| object["metadata"]["ownerReferences"].is_null();
        let scalable = ["deployments.apps", "replicasets.apps", "statefulsets.apps"];
        let Some((key, _)) = self.any(&scalable, is_free) else { return };
        let replicas = self.builder().replicas();
        self.patch(&format!("scale to {replicas}"), &key, json!({"spec": {"replicas": replicas}})).await;
    }

    /// A new template, or an old one again, as `kubectl rollout undo` does.
    pub async fn update_template(&mut self) {
        let updatable = ["deployments.apps", "statefulsets.apps", "daemonsets.apps"];
        let Some((key, object)) = self.any(&updatable, |_| true) else { return };
        self.update(&key, &object).await;
    }

    /// A new template of a Deployment, without any other change of the cluster.
    pub async fn roll_out(&mut self) {
        let is_rolling = |object: &Value| text(object, "/spec/strategy/type") == "RollingUpdate";
        let Some((key, object)) = self.any(&["deployments.apps"], is_rolling) else { return };
        self.update(&key, &object).await;
    }

    async fn update(&mut self, key: &Key, object: &Value) {
        let owned = self.objects(&["replicasets.apps"], |set| {
            set["metadata"]["ownerReferences"][0]["uid"] == object["metadata"]["uid"]
        });
        let old = self.random.pick(&owned).cloned().filter(|_| self.random.chance(0.4));
        let (what, template) = match old {
            Some((_, mut set)) => {
                if let Some(labels) = set["spec"]["template"]["metadata"]["labels"].as_object_mut() {
                    labels.remove("pod-template-hash");
                }
                ("roll back", set["spec"]["template"].clone())
            }
            None => {
                let mut builder = self.builder();
                builder.name = text(object, "/spec/selector/matchLabels/app").into();
                let mut template = builder.template();
                template["spec"]["containers"] = object["spec"]["template"]["spec"]["containers"].clone();
                ("update", template)
            }
        };
        self.patch(what, key, json!({"spec": {"template": template}})).await;
    }

    async fn pause_or_resume(&mut self) {
        let Some((key, object)) = self.any(&["deployments.apps"], |_| true) else { return };
        let paused = object["spec"]["paused"] != true;
        self.patch(&format!("paused={paused}"), &key, json!({"spec": {"paused": paused}})).await;
    }

    async fn delete_workload(&mut self) {
        let Some((key, object)) = self.any(&WORKLOADS, |_| true) else { return };
        let policy = *self.random.pick(&POLICIES).unwrap_or(&POLICIES[0]);
        self.delete(&key, &object, policy, None).await;
    }

    async fn create_dependent(&mut self) {
        let Some((first, owner)) = self.any(&[&WORKLOADS[..], &["configmaps"]].concat(), |_| true) else {
            return;
        };
        let mut owners = vec![reference(&owner, self.random.chance(0.5))];
        let namespace = first.namespace.clone();
        let same =
            |object: &Value| text(object, "/metadata/namespace") == &*namespace && uid(object) != uid(&owner);
        if let Some((_, second)) = self.any(&[&WORKLOADS[..], &["configmaps"]].concat(), same)
            && self.random.chance(0.3)
        {
            owners.push(reference(&second, self.random.chance(0.5)));
        }
        let mut builder = self.builder();
        builder.namespace = namespace.to_string();
        let object = builder.dependent(&owners);
        self.create(object).await;
    }

    async fn delete_dependent(&mut self) {
        let is_dependent = |object: &Value| !object["metadata"]["ownerReferences"].is_null();
        let Some((key, object)) = self.any(&["configmaps"], is_dependent) else { return };
        let policy = *self.random.pick(&POLICIES).unwrap_or(&POLICIES[0]);
        self.delete(&key, &object, policy, None).await;
    }

    async fn delete_pod(&mut self) {
        let Some((key, object)) = self.any(&["pods"], |_| true) else { return };
        let grace = self.random.chance(0.3).then_some(0);
        self.delete(&key, &object, "Background", grace).await;
    }

    async fn evict(&mut self) {
        let Some((key, pod)) = self.any(&["pods"], |pod| !is_terminating(pod)) else { return };
        self.expect_deletion(&pod);
        let result = self.user.evict(&key).await;
        self.done("evict", &key, result);
    }

    async fn lose_or_return_node(&mut self) {
        if let Some(node) = self.simulation.lost_nodes().first() {
            return self.return_node(&node.clone()).await;
        }
        let nodes = self.nodes();
        let Some(node) = self.random.pick(&nodes).cloned() else { return };
        self.simulation.set_lost(&node, true);
        // A simulated node promises to renew its lease within an hour; a lost one shall be noticed earlier.
        let lease = Key::new("leases.coordination.k8s.io", "kube-node-lease", node.as_str());
        self.patch("lose the node of", &lease, json!({"spec": {"leaseDurationSeconds": 40}})).await;
    }

    async fn return_node(&self, node: &str) {
        self.simulation.set_lost(node, false);
        let now = mayfly_api::k8s::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string();
        let lease = Key::new("leases.coordination.k8s.io", "kube-node-lease", node);
        let change = json!({"spec": {"leaseDurationSeconds": 3600, "renewTime": now}});
        self.patch("return the node of", &lease, change).await;
    }

    async fn delete_node(&mut self) {
        let nodes = self.nodes();
        let Some(node) = self.random.pick(&nodes).cloned() else { return };
        // Half of them stay, so that there is room.
        if nodes.len() > 4 {
            let key = Key::new("nodes", "", node.as_str());
            self.delete(&key, &Value::Null, "Background", None).await;
        }
    }

    async fn delete_namespace(&mut self) {
        let namespace = *self.random.pick(&NAMESPACES[1..]).unwrap_or(&NAMESPACES[1]);
        let key = Key::new("namespaces", "", namespace);
        let exists = self.simulation.oracle.lock().get(&key).cloned();
        match exists {
            Some(object) => self.delete(&key, &object, "Background", None).await,
            None => self.create_namespace(namespace).await,
        }
    }

    /// Returns all nodes.
    pub async fn return_nodes(&self) {
        for node in self.simulation.lost_nodes() {
            self.return_node(&node).await;
        }
    }

    /// Undoes what would keep the cluster from coming to rest: lost nodes, paused rollouts, the user's finalizers,
    /// schedules, volumes that wait for their claims.
    pub async fn clean_up(&mut self) {
        self.simulation.disturb();
        self.return_nodes().await;
        for (key, _) in self.objects(&["deployments.apps"], |object| object["spec"]["paused"] == true) {
            self.patch("resume", &key, json!({"spec": {"paused": false}})).await;
        }
        let is_kept =
            |object: &Value| is_terminating(object) && finalizers(object).any(|name| name == USER_FINALIZER);
        for (key, object) in self.objects(&["configmaps"], is_kept) {
            let kept: Vec<&str> = finalizers(&object).filter(|name| *name != USER_FINALIZER).collect();
            self.patch("release", &key, json!({"metadata": {"finalizers": kept}})).await;
        }
        self.suspend_cron_jobs().await;
        self.release_deleted_volumes().await;
    }
}
