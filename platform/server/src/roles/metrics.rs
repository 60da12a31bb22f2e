//! Metrics of components with their own counters: the object store, the workflow engine, the process.

use std::fmt;

use jiff::Timestamp;
use mayfly_kubelet::process;
use mayfly_store::Store;
use mayfly_workflows_engine::engine::Engine;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter},
};

/// Reads the counters at a scrape.
pub(super) struct ServerCounts {
    store: Store,
    workflows: Engine,
    started_at: Timestamp,
}

impl fmt::Debug for ServerCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerCounts").finish_non_exhaustive()
    }
}

impl Collector for ServerCounts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.gauges(&mut encoder)?;
        self.counters(&mut encoder)?;
        self.executions(&mut encoder)?;
        self.process(&mut encoder)
    }
}

impl ServerCounts {
    /// Creates the metrics of a server that starts now.
    pub(super) fn new(store: Store, workflows: Engine) -> Self {
        Self { store, workflows, started_at: Timestamp::now() }
    }

    fn gauges(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let store = self.store.stats();
        let (executions, timers) = self.workflows.load();
        let healthy = self.workflows.health().is_ok();
        for (name, help, value) in [
            ("mayfly_store_revision", "The revision of the newest write.", store.revision.0),
            ("mayfly_store_objects", "Objects in the store.", store.objects as u64),
            ("mayfly_store_history_events", "Events kept for watches.", store.history_events as u64),
            ("mayfly_store_history_bytes", "Bytes of values kept for watches.", store.history_bytes as u64),
            ("mayfly_store_writes_waiting", "Writes that wait for the disk.", store.queued as u64),
            (
                "mayfly_workflows_executions_open",
                "Running executions, in memory or evicted.",
                self.workflows.open_executions() as u64,
            ),
            (
                "mayfly_workflows_executions_loaded",
                "Executions in memory; the others are evicted.",
                executions as u64,
            ),
            ("mayfly_workflows_timers", "Pending timers.", timers as u64),
            ("mayfly_workflows_journal_healthy", "1 while the journal can be written.", u64::from(healthy)),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            metric.encode_gauge(&value)?;
        }
        Ok(())
    }

    fn counters(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let store = self.store.stats();
        for (name, help, value) in [
            ("mayfly_store_writes", "Writes acknowledged.", store.writes),
            ("mayfly_store_commits", "Transactions, each with one fsync.", store.commits),
            ("mayfly_store_checkpoints", "Checkpoints of the write-ahead log.", store.checkpoints),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok(())
    }

    fn executions(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let so_far = self.workflows.executions_so_far();
        let (name, help) = ("mayfly_workflows_executions_started", "Started executions, by type.");
        let mut started = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for executions in &so_far {
            let labels = [("type", executions.kind.as_str())];
            ConstCounter::new(executions.started).encode(started.encode_family(&labels)?)?;
        }
        let (name, help) = ("mayfly_workflows_executions_ended", "Ended executions, by type and status.");
        let mut ended = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for executions in &so_far {
            for (status, count) in executions.ended {
                let labels = [("type", executions.kind.as_str()), ("status", status.as_str())];
                ConstCounter::new(count).encode(ended.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// With the standard names of Prometheus client libraries.
    fn process(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (name, help) = ("process_cpu_seconds", "Total user and system CPU time.");
        let cpu = process::cpu_time().as_secs_f64();
        encoder
            .encode_descriptor(name, help, None, MetricType::Counter)?
            .encode_counter::<NoLabelSet, _, u64>(&cpu, None)?;
        for (name, help, value) in [
            ("process_resident_memory_bytes", "Resident memory size.", process::resident_bytes()),
            ("process_open_fds", "Open file descriptors.", process::open_files()),
        ] {
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
        let started_at = self.started_at.as_duration().as_secs_f64();
        let (name, help) = ("process_start_time_seconds", "When the process started, in seconds since 1970.");
        encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&started_at)?;
        let (name, help) = ("mayfly_build_info", "The running version.");
        let mut build = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        build.encode_family(&[("version", env!("CARGO_PKG_VERSION"))])?.encode_gauge(&1_u64)
    }
}
