//! Counters of connections, by port.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PortLabel {
    port: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    port: &'static str,
    reason: &'static str,
}

/// The counters for all ports of a process.
#[derive(Clone, Debug, Default)]
pub struct ConnectionMetrics {
    open: Family<PortLabel, Gauge>,
    refused: Family<ReasonLabels, Counter>,
    closed: Family<ReasonLabels, Counter>,
}

impl ConnectionMetrics {
    /// Registers the counters; once in a process.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("mayfly_connections", "Open connections", metrics.open.clone());
        let help = "Connections closed when they were accepted, because of a limit";
        registry.register("mayfly_connections_refused", help, metrics.refused.clone());
        let help = "Connections closed by the server: timeouts, and those replaced by new ones at a limit";
        registry.register("mayfly_connections_closed", help, metrics.closed.clone());
        metrics
    }

    pub(crate) fn of(&self, port: &'static str) -> PortMetrics {
        PortMetrics { open: self.open.get_or_create(&PortLabel { port }).clone(), port, all: self.clone() }
    }
}

/// The counters of one port.
#[derive(Clone, Debug)]
pub(crate) struct PortMetrics {
    pub(crate) open: Gauge,
    port: &'static str,
    all: ConnectionMetrics,
}

impl PortMetrics {
    pub(crate) fn refused(&self, reason: &'static str) {
        self.all.refused.get_or_create(&ReasonLabels { port: self.port, reason }).inc();
    }

    pub(crate) fn closed(&self, reason: &'static str) {
        self.all.closed.get_or_create(&ReasonLabels { port: self.port, reason }).inc();
    }
}
