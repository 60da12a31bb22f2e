//! What `/metrics` says of the parts that count for themselves: the object store and the workflow engine.

use std::fmt;

use mayfly_store::Store;
use mayfly_workflows_engine::engine::Engine;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};

/// Reads the counts when Prometheus asks.
pub(super) struct Counts {
    pub(super) store: Store,
    pub(super) workflows: Engine,
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counts").finish_non_exhaustive()
    }
}

impl Collector for Counts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let store = self.store.stats();
        let (executions, timers) = self.workflows.load();
        let healthy = self.workflows.health().is_ok();
        for (name, help, value) in [
            ("mayfly_store_revision", "The revision of the newest write.", store.revision.0),
            ("mayfly_store_objects", "Objects there are.", store.objects as u64),
            ("mayfly_store_history_events", "Events kept for watches.", store.history_events as u64),
            ("mayfly_store_history_bytes", "Bytes of values kept for watches.", store.history_bytes as u64),
            ("mayfly_store_writes_waiting", "Writes that wait for the disk.", store.queued as u64),
            (
                "mayfly_workflows_executions_loaded",
                "Executions in memory; the others sleep.",
                executions as u64,
            ),
            ("mayfly_workflows_timers", "Timers that wait.", timers as u64),
            ("mayfly_workflows_journal_healthy", "1 while the journal can be written.", u64::from(healthy)),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            metric.encode_gauge(&value)?;
        }
        for (name, help, value) in [
            ("mayfly_store_writes", "Writes acknowledged.", store.writes),
            ("mayfly_store_commits", "Transactions, each with one fsync.", store.commits),
            ("mayfly_store_checkpoints", "Times the write-ahead log was folded.", store.checkpoints),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok(())
    }
}
