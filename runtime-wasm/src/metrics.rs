//! The metrics of the wasm host. Labels name functions, not revisions, and are removed with the last revision, so
//! that their number is bounded by the number of deployed functions.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use mayfly_runtime::{CallError, Timings};
use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeLabelValue, EncodeMetric as _},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::ConstGauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

use crate::host::HostContext;

/// All metrics of one host.
pub(crate) struct HostMetrics {
    calls: Family<CallLabels, Counter>,
    /// Functions that count calls, by namespace and name.
    functions: Mutex<HashMap<(String, String), Weak<FunctionCalls>>>,
    phases: Phases,
    memory_peak: Histogram,
    compile: Histogram,
    pub(crate) recycled: Counter,
    pub(crate) log_lines_dropped: Counter,
}

struct Phases {
    queue: Histogram,
    load: Histogram,
    instantiate: Histogram,
    run: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    namespace: String,
    function: String,
    outcome: CallOutcome,
}

/// The result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(crate) enum CallOutcome {
    Answered,
    Cancelled,
    Overloaded,
    Missing,
    NotReady,
    Invalid,
    Trapped,
    OutOfMemory,
    TimedOut,
    NoAnswer,
    GuestError,
    TooLarge,
    ShuttingDown,
    Internal,
}

impl CallOutcome {
    const ALL: [Self; 14] = [
        Self::Answered,
        Self::Cancelled,
        Self::Overloaded,
        Self::Missing,
        Self::NotReady,
        Self::Invalid,
        Self::Trapped,
        Self::OutOfMemory,
        Self::TimedOut,
        Self::NoAnswer,
        Self::GuestError,
        Self::TooLarge,
        Self::ShuttingDown,
        Self::Internal,
    ];

    /// The label; the same word as the gateway's refusal reason where there is one.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Cancelled => "cancelled",
            Self::Overloaded => "overloaded",
            Self::Missing => "component_missing",
            Self::NotReady => "not_ready",
            Self::Invalid => "component_invalid",
            Self::Trapped => "trapped",
            Self::OutOfMemory => "out_of_memory",
            Self::TimedOut => "timed_out",
            Self::NoAnswer => "no_answer",
            Self::GuestError => "guest_error",
            Self::TooLarge => "response_too_large",
            Self::ShuttingDown => "shutting_down",
            Self::Internal => "internal",
        }
    }
}

impl From<&CallError> for CallOutcome {
    fn from(error: &CallError) -> Self {
        match error {
            CallError::Overloaded { .. } | CallError::NoSlot { .. } => Self::Overloaded,
            CallError::ComponentMissing(_) => Self::Missing,
            CallError::ComponentUnavailable { .. } => Self::NotReady,
            CallError::ComponentInvalid(_) => Self::Invalid,
            CallError::Trapped(_) => Self::Trapped,
            CallError::OutOfMemory { .. } => Self::OutOfMemory,
            CallError::TimedOut { .. } => Self::TimedOut,
            CallError::NoAnswer => Self::NoAnswer,
            CallError::GuestError(_) => Self::GuestError,
            CallError::ResponseTooLarge { .. } => Self::TooLarge,
            CallError::ShuttingDown => Self::ShuttingDown,
            CallError::Internal(_) => Self::Internal,
        }
    }
}

impl HostMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Arc<Self> {
        // 2 µs to 17 s.
        let seconds = || Histogram::new(exponential_buckets(2e-6, 4.0, 12));
        let metrics = Self {
            calls: Family::default(),
            functions: Mutex::default(),
            phases: Phases { queue: seconds(), load: seconds(), instantiate: seconds(), run: seconds() },
            // 64 KiB to 4 GiB.
            memory_peak: Histogram::new(exponential_buckets(65536.0, 4.0, 9)),
            compile: Histogram::new(exponential_buckets(0.01, 2.0, 14)),
            recycled: Counter::default(),
            log_lines_dropped: Counter::default(),
        };
        let dropped = metrics.log_lines_dropped.clone();
        registry.register(
            "mayfly_log_lines_dropped",
            "Lines that functions wrote beyond their rate",
            dropped,
        );
        let registry = registry.sub_registry_with_prefix("mayfly_wasm");
        registry.register("calls", "Calls of functions, by how they ended", metrics.calls.clone());
        let phases = [
            ("queue", "Waiting for an instance slot", &metrics.phases.queue),
            ("load", "Mapping or compiling the component, of cold calls", &metrics.phases.load),
            ("instantiate", "Making the instance, where one was made", &metrics.phases.instantiate),
            ("run", "The guest's time until it answered", &metrics.phases.run),
        ];
        for (name, help, metric) in phases {
            registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
        }
        let peak = metrics.memory_peak.clone();
        registry.register_with_unit("memory_peak", "Memory of an instance at its end", Unit::Bytes, peak);
        let compile = metrics.compile.clone();
        registry.register_with_unit("compile", "Compiling a component", Unit::Seconds, compile);
        let recycled = metrics.recycled.clone();
        registry.register(
            "instances_recycled",
            "Reused instances replaced for their age, calls, or retained handles",
            recycled,
        );
        Arc::new(metrics)
    }

    /// The counters of a function, shared by all its revisions. They exist as long as a returned value is held.
    pub(crate) fn function(self: &Arc<Self>, namespace: &str, function: &str) -> Arc<FunctionCalls> {
        let mut functions = self.functions.lock();
        let name = (namespace.to_owned(), function.to_owned());
        if let Some(calls) = functions.get(&name).and_then(Weak::upgrade) {
            return calls;
        }
        let calls = Arc::new(FunctionCalls { metrics: self.clone(), name: name.clone() });
        functions.insert(name, Arc::downgrade(&calls));
        calls
    }

    pub(crate) fn timings(&self, timings: &Timings) {
        let phases = &self.phases;
        phases.run.observe(timings.run.as_secs_f64());
        for (metric, time) in [
            (&phases.queue, timings.queue),
            (&phases.load, timings.load),
            (&phases.instantiate, timings.instantiate),
        ] {
            if !time.is_zero() {
                metric.observe(time.as_secs_f64());
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a histogram's buckets are coarser than the loss")]
    pub(crate) fn memory_peak(&self, bytes: u64) {
        self.memory_peak.observe(bytes as f64);
    }

    pub(crate) fn compiled(&self, took: Duration) {
        self.compile.observe(took.as_secs_f64());
    }
}

/// The call counters of one function, removed from the metrics on drop.
pub(crate) struct FunctionCalls {
    metrics: Arc<HostMetrics>,
    /// Namespace and name.
    name: (String, String),
}

impl FunctionCalls {
    /// The counter of one outcome.
    pub(crate) fn counter(&self, outcome: CallOutcome) -> Counter {
        self.metrics.calls.get_or_create(&self.labels(outcome)).clone()
    }

    fn labels(&self, outcome: CallOutcome) -> CallLabels {
        let (namespace, function) = self.name.clone();
        CallLabels { namespace, function, outcome }
    }
}

impl Drop for FunctionCalls {
    fn drop(&mut self) {
        let mut functions = self.metrics.functions.lock();
        // A new value of this name may exist already, and continues the counters.
        if functions.get(&self.name).is_none_or(|calls| calls.strong_count() > 0) {
            return;
        }
        functions.remove(&self.name);
        for outcome in CallOutcome::ALL {
            self.metrics.calls.remove(&self.labels(outcome));
        }
    }
}

/// Values that are read from the host at scrape time.
struct Gauges(Weak<HostContext>);

impl std::fmt::Debug for Gauges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gauges").finish_non_exhaustive()
    }
}

pub(crate) fn register_gauges(registry: &mut Registry, host: &Arc<HostContext>) {
    let long_calls = host.cpu.spawned.clone();
    let wasm = registry.sub_registry_with_prefix("mayfly_wasm");
    wasm.register("long_calls", "Guests that took longer than a time slice, or were expected to", long_calls);
    registry.register_collector(Box::new(Gauges(Arc::downgrade(host))));
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let Some(host) = self.0.upgrade() else { return Ok(()) };
        let (cache, budget) = (&host.cache, &host.budget);
        let gauges: [(&str, &str, u64); 5] = [
            ("components_loaded", "Components in memory", cache.len() as u64),
            ("components_loaded_bytes", "Machine code in memory", cache.bytes()),
            ("memory_used_bytes", "Memory of all instances, and what the host holds for them", budget.used()),
            ("instances", "Instances that exist, idle ones included", cache.instances()),
            ("instances_idle", "Instances kept for their function's next call", host.instances_idle() as u64),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let name = format!("mayfly_wasm_{name}");
            let encoder = encoder.encode_descriptor(&name, help, None, gauge.metric_type())?;
            gauge.encode(encoder)?;
        }
        Ok(())
    }
}
