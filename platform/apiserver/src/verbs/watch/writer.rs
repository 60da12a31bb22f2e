//! The form of a watch's lines.

use mayfly_store::Revision;
use serde_json::{Value, json};

use crate::{config::Clock, negotiate::Representation, registry::Kind, render::ObjectView, status::ApiError};

const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Writes the lines of one watch.
pub(super) struct LineWriter {
    view: ObjectView,
    clock: Clock,
    columns_sent: bool,
}

impl LineWriter {
    pub(super) fn new(view: ObjectView, clock: Clock) -> Self {
        Self { view, clock, columns_sent: false }
    }

    /// Appends an ERROR line with the reason why the watch ends.
    pub(super) fn error(out: &mut Vec<u8>, error: &ApiError) {
        out.extend_from_slice(b"{\"type\":\"ERROR\",\"object\":");
        out.extend_from_slice(&error.to_json());
        out.extend_from_slice(b"}\n");
    }

    pub(super) fn line(&mut self, out: &mut Vec<u8>, kind: &str, stored: &[u8], revision: Revision) {
        let start = out.len();
        out.extend_from_slice(b"{\"type\":\"");
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(b"\",\"object\":");
        let with_columns = !std::mem::replace(&mut self.columns_sent, true);
        if self.view.representation == Representation::Table {
            // Ages are those of the line, not of the watch.
            self.view.now = (self.clock)();
        }
        if let Err(error) = self.view.append_stored_with(out, stored, revision, with_columns) {
            tracing::error!(%error, kind = ?self.view.kind, "a stored object does not parse");
            return out.truncate(start);
        }
        out.extend_from_slice(b"}\n");
    }

    pub(super) fn bookmark(&self, out: &mut Vec<u8>, revision: Revision, initial_end: bool) {
        let kind: &Kind = self.view.kind;
        let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if initial_end {
            metadata["annotations"] = json!({INITIAL_EVENTS_END: "true"});
        }
        let object = match self.view.representation {
            Representation::Object => {
                json!({"kind": kind.kind, "apiVersion": kind.api_version(), "metadata": metadata})
            }
            Representation::Metadata => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
            }
            Representation::Table => json!({
                "kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": Value::Null,
                "metadata": {"resourceVersion": revision.to_string()},
                "rows": [{"cells": Value::Null, "object": {
                    "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata
                }}],
            }),
        };
        out.extend_from_slice(b"{\"type\":\"BOOKMARK\",\"object\":");
        serde_json::to_writer(&mut *out, &object).expect("a Vec takes every byte");
        out.extend_from_slice(b"}\n");
    }
}
