//! `Revision`: one immutable state of a function.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Digest,
    function::{FunctionSpec, Isolation, Limits, Scaling, Source},
    k8s::{api::core::v1::EnvVar, apimachinery::pkg::apis::meta::v1::Condition},
};

/// One immutable state of a function: what ran, and under which rules. Owned by its Function.
#[derive(CustomResource, Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "mayfly.dev",
    version = "v1",
    kind = "Revision",
    doc = "A state of a Function, never changed: what answers requests, as traffic is split between revisions.",
    plural = "revisions",
    shortname = "rev",
    namespaced,
    status = "RevisionStatus",
    derive = "Default",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct RevisionSpec {
    /// The function this is a state of.
    pub function: String,
    pub source: Source,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub scaling: Scaling,
    #[serde(default)]
    pub isolation: Isolation,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Digest>,
}

impl RevisionSpec {
    /// The part of a function's spec whose changes create a revision: what runs, and under which rules.
    pub fn from_function(name: &str, spec: &FunctionSpec) -> Self {
        Self {
            function: name.into(),
            source: spec.source.clone(),
            env: spec.env.clone(),
            limits: spec.limits.clone(),
            scaling: spec.scaling.clone(),
            isolation: spec.isolation,
            egress: spec.egress.clone(),
            files: spec.files,
        }
    }
}

/// The name of a function's revision.
pub fn revision_name(function: &str, number: u32) -> String {
    format!("{function}-{number:05}")
}

/// The number in the name of a function's revision. Of two revisions the one with the greater number is newer:
/// numbers are not reused, and clocks may be set back.
pub fn revision_number(function: &str, revision: &str) -> Option<u32> {
    revision.strip_prefix(function)?.strip_prefix('-')?.parse().ok()
}

/// The observed state of a revision.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RevisionStatus {
    /// Replicas that are running.
    #[serde(default)]
    pub ready_replicas: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The result of preparing the component on a node; absent until then. Written by the node; the function
    /// controller writes the other fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<ComponentStatus>,
    /// `Ready`: the component is present and compiled; `Active`: it has replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Whether a revision's component can answer requests, found before its first call.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ComponentStatus {
    pub state: ComponentState,
    /// The reason for a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The progress of preparing a component.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComponentState {
    /// It is being compiled, or waits for the compiler; the message says which.
    Compiling,
    /// Compiled: a call does not wait for the compiler.
    Compiled,
    /// The component can never answer on this node.
    Refused,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        assert_eq!(revision_name("a", 7), "a-00007");
        assert_eq!(revision_number("a", "a-00007"), Some(7));
        assert_eq!(revision_number("a", "a-123456"), Some(123_456));
        assert_eq!(revision_number("a", "a-b-00001"), None);
        assert_eq!(revision_number("a", "ab-00001"), None);
    }
}
