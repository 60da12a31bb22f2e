//! Counters of requests, their results and their durations.

use std::time::Instant;

use http::{Method, StatusCode, Uri};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use crate::request::{RequestTarget, verb};

/// From 0.2 ms to 13 s, doubling. A function, because the family creates histograms on demand.
fn buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0002, 2.0, 17))
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Counted {
    verb: &'static str,
    resource: &'static str,
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Timed {
    verb: &'static str,
    resource: &'static str,
}

#[derive(Clone)]
pub(crate) struct Metrics {
    requests: Family<Counted, Counter>,
    seconds: Family<Timed, Histogram, fn() -> Histogram>,
    in_flight: Gauge,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            seconds: Family::new_with_constructor(buckets as fn() -> Histogram),
            in_flight: Gauge::default(),
        };
        registry.register(
            "mayfly_apiserver_requests",
            "API requests by verb, resource and status",
            metrics.requests.clone(),
        );
        let help = "Time until the answer began, watches and logs included";
        registry.register("mayfly_apiserver_request_duration_seconds", help, metrics.seconds.clone());
        registry.register(
            "mayfly_apiserver_requests_in_flight",
            "API requests being answered",
            metrics.in_flight.clone(),
        );
        metrics
    }

    pub(crate) fn start(&self, method: &Method, uri: &Uri, target: Option<&RequestTarget>) -> Measure {
        let verb = verb(method, uri, target);
        self.in_flight.inc();
        let resource = target.map_or("", |target| target.kind.plural);
        Measure { metrics: self.clone(), verb, resource, begun: Instant::now(), counted: false }
    }
}

/// A request being measured. One that is dropped before its end counts as 499: the client disconnected.
pub(crate) struct Measure {
    metrics: Metrics,
    verb: &'static str,
    resource: &'static str,
    begun: Instant,
    counted: bool,
}

impl Measure {
    pub(crate) fn end(mut self, code: StatusCode) {
        self.count(code.as_u16());
    }

    fn count(&mut self, code: u16) {
        self.counted = true;
        let (verb, resource) = (self.verb, self.resource);
        self.metrics.in_flight.dec();
        self.metrics.requests.get_or_create(&Counted { verb, resource, code }).inc();
        self.metrics
            .seconds
            .get_or_create(&Timed { verb, resource })
            .observe(self.begun.elapsed().as_secs_f64());
    }
}

impl Drop for Measure {
    fn drop(&mut self) {
        if !self.counted {
            self.count(499);
        }
    }
}
