//! Encodes the metrics at a scrape.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};

use super::{CLASSES, LatencyHistogram, NodeCallCounters, NodeCallOutcome, RevisionCounters};
use crate::{
    refusal::RefusalCode,
    target::{RevisionTarget, Targets},
};

/// Counters of the gateway as a whole.
#[derive(Default)]
pub(crate) struct GatewayCounts {
    pub(crate) connections: AtomicUsize,
    pub(crate) routes: AtomicUsize,
    /// Hosts that two functions claim.
    pub(crate) conflicts: AtomicUsize,
    /// The duration of applying one batch of changes to the table.
    pub(crate) route_update: LatencyHistogram,
    refusals: [AtomicU64; RefusalCode::ALL.len()],
    /// Revisions that the autoscaler evaluates.
    pub(crate) watched: AtomicUsize,
    /// The leader's calls of other nodes.
    pub(crate) calls_of_nodes: NodeCallCounters,
    /// A follower's calls of the leader.
    pub(crate) calls_of_leader: NodeCallCounters,
    pub(crate) scale_writes: AtomicU64,
    pub(crate) scale_write_failures: AtomicU64,
}

impl GatewayCounts {
    pub(crate) fn refused(&self, code: RefusalCode) {
        self.refusals[code as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Reads the metrics of the gateway and of every revision that was called since the start.
pub(crate) struct GatewayCollector {
    pub(crate) targets: Arc<Targets>,
    pub(crate) counts: Arc<GatewayCounts>,
}

impl fmt::Debug for GatewayCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayCollector").finish_non_exhaustive()
    }
}

type Outcome = Result<(), fmt::Error>;

fn labels(target: &RevisionTarget) -> [(&str, &str); 3] {
    [
        ("namespace", target.key.namespace.as_str()),
        ("function", target.function.as_str()),
        ("revision", target.key.name.as_str()),
    ]
}

impl Collector for GatewayCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Outcome {
        let targets = self.targets.with_traffic();
        requests(&targets, &mut encoder)?;
        for (name, help, of) in [
            (
                "mayfly_gateway_request_duration_seconds",
                "Time from a request's arrival to the end of its response.",
                (|counts: &RevisionCounters| &counts.total) as fn(&RevisionCounters) -> &LatencyHistogram,
            ),
            (
                "mayfly_gateway_queue_duration_seconds",
                "Time that requests waited for admission, of those that had to wait.",
                |counts| &counts.queue,
            ),
            (
                "mayfly_gateway_cold_start_duration_seconds",
                "Time to load a component and create its first instance.",
                |counts| &counts.cold,
            ),
        ] {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
            for target in &targets {
                let Some(counts) = target.traffic.get() else { continue };
                let (sum, count, buckets) = of(counts).read();
                let labels = labels(target);
                let mut metric = family.encode_family(&labels)?;
                metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
            }
        }
        for (name, help, of) in [
            (
                "mayfly_gateway_requests_running",
                "Requests that are running now.",
                (|target: &RevisionTarget| target.gate.running()) as fn(&RevisionTarget) -> u32,
            ),
            ("mayfly_gateway_requests_waiting", "Requests that are waiting for admission now.", |target| {
                target.gate.waiting()
            }),
            ("mayfly_autoscaler_desired_replicas", "Replicas that the autoscaler requests.", |target| {
                target.desired_replicas.load(Ordering::Relaxed)
            }),
            ("mayfly_autoscaler_ready_replicas", "Replicas that run.", |target| {
                target.ready_replicas.load(Ordering::Relaxed)
            }),
        ] {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for target in &targets {
                family.encode_family(&labels(target))?.encode_gauge(&of(target))?;
            }
        }
        self.gateway(&mut encoder)
    }
}

fn requests(targets: &[Arc<RevisionTarget>], encoder: &mut DescriptorEncoder<'_>) -> Outcome {
    let help = "Requests that ended, by the first digit of their status.";
    let mut family = encoder.encode_descriptor("mayfly_gateway_requests", help, None, MetricType::Counter)?;
    for target in targets {
        let Some(counts) = target.traffic.get() else { continue };
        let [namespace, function, revision] = labels(target);
        for (class, count) in CLASSES.iter().zip(&counts.by_class) {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                let labels = [namespace, function, revision, ("code", class)];
                family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
            }
        }
    }
    Ok(())
}

impl GatewayCollector {
    fn gateway(&self, encoder: &mut DescriptorEncoder<'_>) -> Outcome {
        let counts = &self.counts;
        let help = "Requests that got no response from a function, by cause.";
        let name = "mayfly_gateway_refusals";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for code in RefusalCode::ALL {
            let count = counts.refusals[code as usize].load(Ordering::Relaxed);
            let labels = [("code", code.as_str())];
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
        }
        let help = "Requests sent to the gateways of other nodes, by their result.";
        let name = "mayfly_gateway_node_calls";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (to, counters) in [("node", &counts.calls_of_nodes), ("server", &counts.calls_of_leader)] {
            for outcome in NodeCallOutcome::ALL {
                let count = counters.read(outcome);
                if count > 0 {
                    let labels = [("to", to), ("outcome", outcome.as_str())];
                    family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
                }
            }
        }
        for (name, help, value) in [
            ("mayfly_gateway_connections", "Open connections.", &counts.connections),
            ("mayfly_gateway_routes", "Functions in the route table.", &counts.routes),
            ("mayfly_gateway_route_conflicts", "Hosts that two functions claim.", &counts.conflicts),
            ("mayfly_autoscaler_watched", "Revisions that are not at rest.", &counts.watched),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            metric.encode_gauge(&value.load(Ordering::Relaxed))?;
        }
        for (name, help, value) in [
            ("mayfly_autoscaler_writes", "Changes of replicas written.", &counts.scale_writes),
            (
                "mayfly_autoscaler_write_failures",
                "Changes of replicas that could not be written (they are retried).",
                &counts.scale_write_failures,
            ),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&value.load(Ordering::Relaxed), None)?;
        }
        let (sum, count, buckets) = counts.route_update.read();
        let help = "Time to apply a batch of changes to the route table.";
        let name = "mayfly_gateway_route_update_duration_seconds";
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }
}
