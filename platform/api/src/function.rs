//! `Function`: code that answers HTTP requests, and the rules under which it runs.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Digest,
    duration::Span,
    invocation::AsyncInvocation,
    k8s::{
        api::core::v1::EnvVar,
        apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::Condition},
    },
    wellknown,
    workflow::{Trigger, TriggerStatus},
};

/// The labels of a revision and of all that is made for it: those by which NetworkPolicies and Services select its pods.
#[must_use]
pub fn replica_labels(function: &str, revision: &str) -> BTreeMap<String, String> {
    [(wellknown::LABEL_FUNCTION, function), (wellknown::LABEL_REVISION, revision)]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

/// A function: a component (or, as a fallback, a container image) that answers HTTP requests, and the
/// rules it runs under. Each change of what runs makes a new immutable Revision.
#[derive(CustomResource, Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "mayfly.dev",
    version = "v1",
    kind = "Function",
    doc = "A function: code that answers HTTP requests, and the rules it runs under. Each change of what runs makes a new Revision.",
    plural = "functions",
    shortname = "fn",
    namespaced,
    status = "FunctionStatus",
    derive = "Default",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct FunctionSpec {
    /// The source of the code. Exactly one of its fields is set.
    pub source: Source,
    /// Environment variables; `valueFrom` takes secretKeyRef and configMapKeyRef.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
    /// The limits of one instance, and of the function as a whole.
    #[serde(default)]
    pub limits: Limits,
    /// The bounds of the number of replicas, and the rules for adding and removing them.
    #[serde(default)]
    pub scaling: Scaling,
    /// Whether instances are shared between requests.
    #[serde(default)]
    pub isolation: Isolation,
    /// Outbound HTTP is denied unless listed: `https://api.example.com`, `http://10.0.0.5:8080`,
    /// `https://*.example.com`. Private and link-local addresses must be named themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// Files that instances read: a tar archive in the artifact store, which they see as the folder `/`, read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Digest>,
    /// The clients that may call the function at its own address. A change creates no revision.
    #[serde(default, skip_serializing_if = "Visibility::is_public")]
    pub visibility: Visibility,
    /// The revisions that answer, with their shares of the traffic. Empty: all to the latest ready revision.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub traffic: Vec<TrafficTarget>,
    /// Session affinity for split traffic: a client stays with the revision that answered it first. Exactly one of
    /// its fields is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sticky: Option<Sticky>,
    /// The rules of asynchronous invocations (header `mayfly-invocation: async`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub async_invocation: Option<AsyncInvocation>,
    /// The triggers of asynchronous invocations: by time (`schedule`) or by events (`event`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<Trigger>,
}

/// The source of the code. Exactly one field is set.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// A component uploaded to the artifact store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<Digest>,
    /// A wasm component in an OCI registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oci: Option<String>,
    /// A container image with an HTTP server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The port the image's server listens on. Default 8080.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The program to run instead of the image's entrypoint, as a container's `command`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The program's arguments instead of the image's, as a container's `args`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
}

/// The clients that may call a function.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[serde(rename_all = "lowercase")]
pub enum Visibility {
    /// All clients that reach the gateway.
    #[default]
    Public,
    /// Services over the function, Ingresses that name it, workflows and triggers. At its own address
    /// (`/fn/<namespace>/<name>`) it is not found.
    Private,
}

impl Visibility {
    pub fn is_public(&self) -> bool {
        *self == Self::Public
    }
}

/// The limits of one instance, and of the function as a whole.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Limits {
    /// Memory of one instance, over all its linear memories. Default 64Mi.
    pub memory: Quantity,
    /// Wall-clock time from the request's admission to the end of the response. Default 30s.
    pub timeout: Span,
    /// Requests that one replica handles at the same time. Default 100.
    pub concurrency: u32,
    /// Bytes of one response's body. Default 256Mi.
    pub response: Quantity,
    /// Bytes per second that the function may write to its log on one node. Lines beyond it are dropped and counted
    /// (`mayfly_log_lines_dropped_total`). Default 4Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_rate: Option<Quantity>,
}

impl Limits {
    pub const MEMORY_DEFAULT: &str = "64Mi";
    pub const TIMEOUT_DEFAULT: Span = Span::from_secs(30);
    pub const CONCURRENCY_DEFAULT: u32 = 100;
    pub const RESPONSE_DEFAULT: &str = "256Mi";
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: Quantity(Self::MEMORY_DEFAULT.into()),
            timeout: Self::TIMEOUT_DEFAULT,
            concurrency: Self::CONCURRENCY_DEFAULT,
            response: Quantity(Self::RESPONSE_DEFAULT.into()),
            log_rate: None,
        }
    }
}

/// The bounds of the number of replicas, and the rules for adding and removing them. The terms are those of Knative's
/// pod autoscaler.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Scaling {
    /// Replicas that are kept without requests. Default 0.
    pub min: u32,
    /// The maximum number of replicas. Default 100.
    pub max: u32,
    /// Requests in flight that one replica should have, on average. Default 80.
    pub target: u32,
    /// The stable window, over which demand is averaged. Default 60s.
    pub window: Span,
    /// The panic window's share of the stable window, in percent. Default 10.
    pub panic_window_percent: u32,
    /// Demand in the panic window over capacity at which panic starts, in percent. Default 200.
    pub panic_threshold_percent: u32,
    /// The time for which demand must stay lower before a replica is removed. Default 0s.
    pub scale_down_delay: Span,
    /// The time without a request after which the last replica is removed. Default 60s.
    pub idle_after: Span,
}

impl Default for Scaling {
    fn default() -> Self {
        Self {
            min: 0,
            max: 100,
            target: 80,
            window: Span::from_secs(60),
            panic_window_percent: 10,
            panic_threshold_percent: 200,
            scale_down_delay: Span::from_secs(0),
            idle_after: Span::from_secs(60),
        }
    }
}

/// Whether instances are shared between requests.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// A new instance for each request.
    #[default]
    Fresh,
    /// Instances answer many requests of the same revision.
    Reuse,
}

/// A share of the traffic.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TrafficTarget {
    /// A revision's name; or `latest: true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The latest ready revision, whichever that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latest: Option<bool>,
    /// The share; all shares together are 100. Without one the target is reached by its tag only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u32>,
    /// Reaches this target directly: header `mayfly-tag: <tag>`, or host
    /// `<tag>-<name>.<namespace>.fn.localhost`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Session affinity: a client stays with one revision. Exactly one field is set.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Sticky {
    /// Requests with the same value of this header go to the same revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// Requests with the same value of this cookie go to the same revision. A client without the cookie gets one,
    /// unless the function sets it itself: then a second one, `mayfly-revision`, names the revision that answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cookie: Option<String>,
}

/// The observed state of a function.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FunctionStatus {
    /// The URL of the function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The newest revision, ready or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latest_revision: Option<String>,
    /// The newest revision that can answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latest_ready_revision: Option<String>,
    /// Replicas that are running, over all revisions.
    #[serde(default)]
    pub ready_replicas: i32,
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`: every traffic target can answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The triggers, each with its last start and its next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<TriggerStatus>,
}
