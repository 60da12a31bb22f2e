//! The load of followers: each reports the requests that it serves from its own clients, and the leader adds them to
//! those that it knows itself, since one autoscaler decides for all nodes.
//!
//! The leader reads each node with ready replicas once a second, and none while there are no such nodes.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::join_all;
use http::Request;
use mayfly_runtime::BodyError;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{NodeForwarder, replicas::PeerNode, wire};
use crate::{
    body,
    load::Reading,
    target::{DemandSignal, Targets},
};

/// The interval of readings, which is that of the autoscaler's decisions.
const READ_EVERY: Duration = Duration::from_secs(1);
/// The timeout of one reading.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// The time after which the last report of an unreachable node has no effect any more.
const REPORT_VALID: Duration = Duration::from_secs(10);
/// The size limit of a report: about 100 bytes for each revision with traffic.
const REPORT_BYTES_MAX: usize = 16 << 20;

/// The requests of a node's own clients.
#[derive(Serialize, Deserialize)]
pub(super) struct LoadReport {
    /// Changes when the gateway restarts and its counters begin again.
    instance: String,
    revisions: Vec<RevisionLoad>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RevisionLoad {
    uid: String,
    /// Running and waiting now.
    requests: u32,
    /// The total time of all requests, modulo the range of a [`Reading`].
    spent_us: u64,
}

impl LoadReport {
    pub(super) fn of(targets: &Targets, instance: &str, now: Instant) -> Self {
        let of = |reading: Reading| (reading.count(), reading.spent_us());
        let revisions = targets.with_traffic().into_iter().map(|target| {
            let (requests, spent_us) = of(target.own_demand(now));
            RevisionLoad { uid: target.uid.clone(), requests, spent_us }
        });
        Self {
            instance: instance.to_owned(),
            revisions: revisions.filter(|load| load.requests > 0 || load.spent_us > 0).collect(),
        }
    }
}

/// The change of a revision's load on one node.
#[derive(Debug, PartialEq, Eq)]
struct LoadChange {
    uid: String,
    requests: u32,
    /// The time that requests spent since the last report.
    spent: Duration,
}

/// The last report of each node. Without a clock and without IO.
#[derive(Default)]
struct FollowerLoads {
    by_node: HashMap<Arc<str>, LastReport>,
}

struct LastReport {
    instance: String,
    at: Instant,
    readings: HashMap<String, Reading>,
}

impl FollowerLoads {
    /// Records a report; returns the load of each revision in it or in the last one.
    fn reported(&mut self, node: &Arc<str>, report: LoadReport, now: Instant) -> Vec<LoadChange> {
        let before = self.by_node.remove(node);
        let continues = before.as_ref().is_some_and(|before| before.instance == report.instance);
        let mut known = before.map(|before| before.readings).unwrap_or_default();
        let mut changes = Vec::new();
        let mut readings = HashMap::new();
        for RevisionLoad { uid, requests, spent_us } in report.revisions {
            let reading = Reading::new(requests, spent_us);
            let earlier = known.remove(&uid);
            // The first report of a process says nothing about the time since the last one.
            let spent = match continues {
                true => reading.spent_since(earlier.unwrap_or(Reading::ZERO)),
                false => Duration::ZERO,
            };
            changes.push(LoadChange { uid: uid.clone(), requests, spent });
            readings.insert(uid, reading);
        }
        changes.extend(ended(known));
        let report = LastReport { instance: report.instance, at: now, readings };
        self.by_node.insert(node.clone(), report);
        changes
    }

    /// Removes the reports of nodes that have given none for too long; returns the load of their revisions.
    fn expire(&mut self, now: Instant) -> Vec<(Arc<str>, Vec<LoadChange>)> {
        let is_old = |report: &LastReport| now.saturating_duration_since(report.at) > REPORT_VALID;
        let old = self.by_node.extract_if(|_, report| is_old(report));
        old.map(|(node, report)| (node, ended(report.readings))).collect()
    }
}

fn ended(readings: HashMap<String, Reading>) -> Vec<LoadChange> {
    readings.into_keys().map(|uid| LoadChange { uid, requests: 0, spent: Duration::ZERO }).collect()
}

/// Reads the loads of followers, as the leader.
pub(crate) struct LoadReader {
    pub(crate) nodes: Arc<NodeForwarder>,
    pub(crate) targets: Arc<Targets>,
    pub(crate) demand: Arc<DemandSignal>,
}

impl LoadReader {
    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let reading = async {
            let mut loads = FollowerLoads::default();
            loop {
                let nodes = self.nodes.peers.list();
                if nodes.is_empty() {
                    self.nodes.peers.appeared().await;
                    continue;
                }
                let next = Instant::now() + READ_EVERY;
                let reports = join_all(nodes.iter().map(|node| self.read(node))).await;
                let now = Instant::now();
                for (node, report) in nodes.iter().zip(reports) {
                    if let Some(report) = report {
                        self.apply(&node.name, loads.reported(&node.name, report, now));
                    }
                }
                for (node, changes) in loads.expire(now) {
                    self.apply(&node, changes);
                }
                tokio::time::sleep_until(next).await;
            }
        };
        let _: Option<()> = stop.run_until_cancelled(reading).await;
    }

    async fn read(&self, node: &PeerNode) -> Option<LoadReport> {
        let reading = async {
            let request = Request::get(wire::LOAD_PATH).body(body::empty())?;
            let response = (self.nodes.caller)(&node.name, request).await?;
            if !response.status().is_success() {
                return Err(BodyError::from(format!("it answered with status {}", response.status())));
            }
            let text = body::collect(response.into_body(), REPORT_BYTES_MAX).await?;
            Ok(serde_json::from_slice(&text)?)
        };
        let error = match tokio::time::timeout(READ_TIMEOUT, reading).await {
            Ok(Ok(report)) => {
                node.answered();
                return Some(report);
            }
            Ok(Err(error)) => error,
            Err(late) => late.into(),
        };
        node.avoid();
        tracing::debug!(node = %node.name, %error, "cannot read the load of a node");
        None
    }

    fn apply(&self, node: &str, changes: Vec<LoadChange>) {
        for LoadChange { uid, requests, spent } in changes {
            let Some(target) = self.targets.get(&uid) else { continue };
            target.replicas.report(node, requests, spent);
            if requests > 0 || !spent.is_zero() {
                self.demand.raise(&target);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(instance: &str, revisions: &[(&str, u32, u64)]) -> LoadReport {
        let load = |(uid, requests, spent_us): &(&str, u32, u64)| RevisionLoad {
            uid: (*uid).to_owned(),
            requests: *requests,
            spent_us: *spent_us,
        };
        LoadReport { instance: instance.to_owned(), revisions: revisions.iter().map(load).collect() }
    }

    fn shown(mut changes: Vec<LoadChange>) -> Vec<(String, u32, u64)> {
        changes.sort_by(|a, b| a.uid.cmp(&b.uid));
        let micros = |spent: Duration| u64::try_from(spent.as_micros()).unwrap();
        changes.into_iter().map(|change| (change.uid, change.requests, micros(change.spent))).collect()
    }

    #[test]
    fn time_is_counted_from_report_to_report() {
        let (mut loads, node, now) = (FollowerLoads::default(), Arc::from("two"), Instant::now());
        let mut reported =
            |instance, revisions: &[_]| shown(loads.reported(&node, report(instance, revisions), now));
        let expected = |changes: &[(&str, u32, u64)]| -> Vec<(String, u32, u64)> {
            changes.iter().map(|(uid, requests, us)| ((*uid).to_owned(), *requests, *us)).collect()
        };
        // What was before the first report is unknown.
        assert_eq!(reported("x", &[("a", 2, 500)]), expected(&[("a", 2, 0)]));
        assert_eq!(reported("x", &[("a", 1, 800), ("b", 3, 40)]), expected(&[("a", 1, 300), ("b", 3, 40)]));
        // The counter passes the end of its range.
        let last = (1 << 44) - 1;
        reported("x", &[("a", 1, last), ("b", 0, 40)]);
        assert_eq!(reported("x", &[("a", 1, 9), ("b", 0, 40)]), expected(&[("a", 1, 10), ("b", 0, 0)]));
        // The gateway was restarted.
        assert_eq!(reported("y", &[("b", 1, 70)]), expected(&[("a", 0, 0), ("b", 1, 0)]));
    }

    #[test]
    fn a_node_that_is_silent_for_long_has_no_load() {
        let (mut loads, now) = (FollowerLoads::default(), Instant::now());
        loads.reported(&Arc::from("two"), report("x", &[("a", 2, 500)]), now);
        assert!(loads.expire(now + REPORT_VALID).is_empty());
        let expired = loads.expire(now + REPORT_VALID + Duration::from_millis(1));
        assert_eq!(expired.len(), 1);
        assert_eq!(&*expired[0].0, "two");
        assert_eq!(expired[0].1, [LoadChange { uid: "a".into(), requests: 0, spent: Duration::ZERO }]);
        assert!(loads.expire(now + 2 * REPORT_VALID).is_empty());
    }
}
