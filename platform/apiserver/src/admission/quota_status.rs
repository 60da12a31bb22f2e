//! The status of ResourceQuotas: the usage of each limited resource (upstream's resourcequota controller). One
//! level-triggered task counts again after writes to the store, at most once per interval.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use mayfly_store::{ListOptions, Range};
use serde_json::{Map, Value, json};

use super::quota::{QuotaUsage, add, counts, in_scopes, shown, usage_of};
use crate::{
    object::Object,
    registry::{Kind, registry},
    server::ServerState,
    status::ApiError,
    verbs::{ObjectUpdate, Part},
};

/// The shortest pause between two counts. Admission does not depend on the status.
const INTERVAL: Duration = Duration::from_millis(500);
/// The pause after a count, as a multiple of its duration: a count decodes the objects of all namespaces with quotas,
/// and a steady stream of writes must not cost more than a tenth of a core, however many objects there are.
const PAUSE_PER_COUNT: u32 = 9;
/// The number of objects that are decoded before other tasks of the thread have a turn: requests must not wait until
/// a large namespace is counted.
const OBJECTS_PER_TURN: usize = 64;

/// Runs until the server stops.
pub(crate) async fn run(server: Arc<ServerState>) {
    let stop = server.shutdown.clone();
    let mut counted = None;
    let mut pause = INTERVAL;
    while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
        let revision = server.store.revision();
        pause = INTERVAL;
        if counted != Some(revision) {
            let took = server.update_quotas().await;
            pause = pause.max(took * PAUSE_PER_COUNT);
            counted = Some(revision);
        }
    }
}

/// The turns of a count on the thread that it shares with requests.
struct CountingTurns {
    objects: usize,
    busy: Duration,
    since: Instant,
}

impl CountingTurns {
    fn begin() -> Self {
        Self { objects: 0, busy: Duration::ZERO, since: Instant::now() }
    }

    /// Must be called before each object. Gives other tasks a turn now and then.
    async fn object(&mut self) {
        self.objects += 1;
        if self.objects.is_multiple_of(OBJECTS_PER_TURN) {
            self.busy += self.since.elapsed();
            tokio::task::yield_now().await;
            self.since = Instant::now();
        }
    }

    /// The time that the count itself took.
    fn end(self) -> Duration {
        self.busy + self.since.elapsed()
    }
}

/// The status of a quota for this usage. `used` leaves out resources that are not counted.
fn plan_status(quota: &Object, used: &QuotaUsage, counted: impl Fn(&str) -> bool) -> Value {
    let hard = quota.at(&["spec", "hard"]).and_then(Value::as_object).cloned().unwrap_or_default();
    let amounts = hard.keys().filter(|name| counted(name));
    let amounts = amounts.map(|name| {
        let amount = used.get(name).copied().unwrap_or(0);
        (name.clone(), Value::from(shown(name, amount)))
    });
    let amounts: Map<String, Value> = amounts.collect();
    let mut status = Map::new();
    for (field, map) in [("hard", hard), ("used", amounts)] {
        if !map.is_empty() {
            status.insert(field.into(), map.into());
        }
    }
    Value::Object(status)
}

impl ServerState {
    /// Writes the statuses that are out of date. Returns how long counting took.
    async fn update_quotas(&self) -> Duration {
        let mut turns = CountingTurns::begin();
        let outdated = self.outdated_quotas(&mut turns).await;
        let took = turns.end();
        for (namespace, name, status) in outdated {
            if let Err(error) = self.write_quota_status(&namespace, &name, status).await
                && !error.has_reason("NotFound")
            {
                tracing::warn!(%error, namespace, name, "cannot write the status of a quota");
            }
        }
        took
    }

    /// Namespace, name and new status of each quota whose status is out of date.
    async fn outdated_quotas(&self, turns: &mut CountingTurns) -> Vec<(String, String, Value)> {
        let mut by_namespace: BTreeMap<String, Vec<Object>> = BTreeMap::new();
        for quota in self.objects("", "resourcequotas", "") {
            by_namespace.entry(quota.meta_str("namespace").to_owned()).or_default().push(quota);
        }
        let mut outdated = Vec::new();
        for (namespace, quotas) in by_namespace {
            let statuses = self.quota_statuses(&namespace, &quotas, turns).await;
            outdated.extend(statuses.into_iter().map(|(name, status)| (namespace.clone(), name, status)));
        }
        outdated
    }

    /// Name and new status of each quota of a namespace whose status is out of date.
    async fn quota_statuses(
        &self,
        namespace: &str,
        quotas: &[Object],
        turns: &mut CountingTurns,
    ) -> Vec<(String, Value)> {
        let (served, now) = (self.custom.served(), self.now());
        let names = || quotas.iter().filter_map(|quota| quota.at(&["spec", "hard"])?.as_object());
        let names: Vec<&String> = names().flat_map(Map::keys).collect();
        let counted_kinds: Vec<&Kind> = served
            .kinds()
            .filter(|kind| kind.namespaced && names.iter().any(|name| counts(kind, name)))
            .collect();
        let mut used: Vec<QuotaUsage> = quotas.iter().map(|_| QuotaUsage::new()).collect();
        let mut stores = Vec::new();
        for kind in &counted_kinds {
            // A kind with two versions is stored once.
            let resource = registry().store_resource(kind);
            if stores.contains(&resource) {
                continue;
            }
            let range = Range::namespace(resource.clone(), namespace);
            stores.push(resource);
            let list = self.store.list(&range, &ListOptions::default()).map(|list| list.entries);
            for entry in list.unwrap_or_default() {
                turns.object().await;
                let Ok(object) = Object::from_entry(&entry) else { continue };
                let usage = usage_of(kind, &object, now);
                for (quota, used) in quotas.iter().zip(&mut used) {
                    if in_scopes(quota, kind, &object) {
                        add(used, &usage);
                    }
                }
            }
        }
        let counted = |name: &str| counted_kinds.iter().any(|kind| counts(kind, name));
        let planned =
            quotas.iter().zip(&used).map(|(quota, used)| (quota, plan_status(quota, used, counted)));
        planned
            .filter(|(quota, status)| quota.0.get("status").unwrap_or(&json!({})) != status)
            .map(|(quota, status)| (quota.name().to_owned(), status))
            .collect()
    }

    async fn write_quota_status(&self, namespace: &str, name: &str, status: Value) -> Result<(), ApiError> {
        let Some(kind) = registry().find("", "v1", "resourcequotas") else { return Ok(()) };
        let request = self.own_request_as("kube-controller-manager", kind, namespace);
        let written = self.change(&request, name, Part::Status, |current| {
            let mut object = current.clone();
            object.0.insert("status".into(), status.clone());
            Ok(ObjectUpdate::new(object))
        });
        written.await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_all_that_is_counted() {
        let hard = json!({"pods": "4", "requests.memory": "1Gi", "unknown": "1", "requests.cpu": "2"});
        let quota = Object(json!({"spec": {"hard": hard}}).as_object().unwrap().clone());
        let used = QuotaUsage::from([
            ("pods".to_owned(), 2000),
            ("requests.memory".to_owned(), (256 << 20) * 1000),
            ("requests.cpu".to_owned(), 1500),
            ("services".to_owned(), 1000),
        ]);
        assert_eq!(
            plan_status(&quota, &used, |name| name != "unknown"),
            json!({"hard": hard, "used": {"pods": "2", "requests.memory": "256Mi", "requests.cpu": "1500m"}})
        );
        assert_eq!(
            plan_status(&quota, &QuotaUsage::new(), |name| name == "pods")["used"],
            json!({"pods": "0"})
        );
        let empty = Object(json!({"spec": {}}).as_object().unwrap().clone());
        assert_eq!(plan_status(&empty, &used, |_| true), json!({}));
    }
}
