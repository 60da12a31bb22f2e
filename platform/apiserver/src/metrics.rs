//! Counters of requests, their results and their durations, under the names of kube-apiserver's metrics
//! (`apiserver/pkg/endpoints/metrics`), so that its dashboards and alerts apply.

use std::time::Instant;

use http::{Method, StatusCode, Uri, header};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::request::{RequestTarget, verb};

/// Seconds: upstream's buckets, and some below them, where most answers are.
const BUCKETS: [f64; 26] = [
    0.0005, 0.001, 0.0025, 0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0,
    6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
];

/// A function, because the family creates histograms on demand.
fn buckets() -> Histogram {
    Histogram::new(BUCKETS)
}

/// The subresources that are named in labels: a client may ask for any other text.
const SUBRESOURCES: [&str; 14] = [
    "approval",
    "attach",
    "binding",
    "ephemeralcontainers",
    "eviction",
    "exec",
    "finalize",
    "log",
    "portforward",
    "proxy",
    "resize",
    "scale",
    "status",
    "token",
];

/// A kind of request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    component: &'static str,
    verb: &'static str,
    group: &'static str,
    version: &'static str,
    resource: &'static str,
    subresource: &'static str,
    scope: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    component: &'static str,
    verb: &'static str,
    group: &'static str,
    version: &'static str,
    resource: &'static str,
    subresource: &'static str,
    scope: &'static str,
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InFlightLabels {
    request_kind: &'static str,
}

#[derive(Clone)]
pub(crate) struct Metrics {
    requests: Family<ResultLabels, Counter>,
    seconds: Family<RequestLabels, Histogram, fn() -> Histogram>,
    reading: Gauge,
    writing: Gauge,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let in_flight: Family<InFlightLabels, Gauge> = Family::default();
        let of = |request_kind| in_flight.get_or_create(&InFlightLabels { request_kind }).clone();
        let metrics = Self {
            requests: Family::default(),
            seconds: Family::new_with_constructor(buckets as fn() -> Histogram),
            reading: of("readOnly"),
            writing: of("mutating"),
        };
        let help = "API requests by verb, resource and status";
        registry.register("apiserver_request", help, metrics.requests.clone());
        let help = "Time until the answer began, watches and logs included";
        registry.register("apiserver_request_duration_seconds", help, metrics.seconds.clone());
        let help = "API requests being answered";
        registry.register("apiserver_current_inflight_requests", help, in_flight);
        metrics
    }

    pub(crate) fn start(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &http::HeaderMap,
        target: Option<&RequestTarget>,
    ) -> Measure {
        let is_applied =
            headers.get(header::CONTENT_TYPE).is_some_and(|form| form.as_bytes().starts_with(APPLY));
        let verb = metric_verb(verb(method, uri, target), target, is_applied);
        let in_flight = if matches!(verb, "GET" | "LIST" | "WATCH") { &self.reading } else { &self.writing };
        in_flight.inc();
        let subresource = target.and_then(|target| target.subresource.as_deref());
        let labels = RequestLabels {
            component: "apiserver",
            verb,
            group: target.map_or("", |target| target.kind.group),
            version: target.map_or("", |target| target.kind.version),
            resource: target.map_or("", |target| target.kind.plural),
            subresource: SUBRESOURCES
                .into_iter()
                .find(|known| Some(*known) == subresource)
                .unwrap_or_default(),
            scope: target.map_or("", scope),
        };
        let in_flight = in_flight.clone();
        Measure { metrics: self.clone(), in_flight, labels, begun: Instant::now(), counted: false }
    }
}

const APPLY: &[u8] = b"application/apply-patch";

/// The verb as upstream's metrics name it: mostly the method.
fn metric_verb(verb: &'static str, target: Option<&RequestTarget>, is_applied: bool) -> &'static str {
    if target.is_some_and(RequestTarget::is_proxied) {
        return "CONNECT";
    }
    match verb {
        "get" => "GET",
        "list" => "LIST",
        "watch" => "WATCH",
        "create" => "POST",
        "update" => "PUT",
        "patch" if is_applied => "APPLY",
        "patch" => "PATCH",
        "delete" => "DELETE",
        "deletecollection" => "DELETECOLLECTION",
        _ => "other",
    }
}

fn scope(target: &RequestTarget) -> &'static str {
    match (&target.name, target.namespace.is_empty()) {
        (Some(_), _) => "resource",
        (None, false) => "namespace",
        (None, true) => "cluster",
    }
}

/// A request being measured. One that is dropped before its end counts as 499: the client disconnected.
pub(crate) struct Measure {
    metrics: Metrics,
    in_flight: Gauge,
    labels: RequestLabels,
    begun: Instant,
    counted: bool,
}

impl Measure {
    pub(crate) fn end(mut self, code: StatusCode) {
        self.count(code.as_u16());
    }

    fn count(&mut self, code: u16) {
        self.counted = true;
        self.in_flight.dec();
        self.metrics.seconds.get_or_create(&self.labels).observe(self.begun.elapsed().as_secs_f64());
        let RequestLabels { component, verb, group, version, resource, subresource, scope } =
            self.labels.clone();
        let labels = ResultLabels { component, verb, group, version, resource, subresource, scope, code };
        self.metrics.requests.get_or_create(&labels).inc();
    }
}

impl Drop for Measure {
    fn drop(&mut self) {
        if !self.counted {
            self.count(499);
        }
    }
}
