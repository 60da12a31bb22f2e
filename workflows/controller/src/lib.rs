//! Connects the workflow engine to the cluster: its objects, its triggers, its invocations of functions, its Jobs.
//!
//! **Belongs here:** the reconciler that keeps Workflow objects and the catalog of state machines alike ([`objects`]),
//! executions as read-only objects ([`executions`]), triggers and events that start executions ([`triggers`],
//! [`events`]), asynchronous invocations of functions ([`invocations`]), the Jobs that tasks run ([`jobs`]), the
//! buckets of distributed maps and S3 tasks ([`buckets`]).
//!
//! **Does not belong here:** how an execution runs and the operations of Step Functions (`mayfly-workflows-engine`),
//! their wire form (`mayfly-workflows-api`), listeners and the calls of functions (`server` hands them in).

// A public type without `Debug` cannot be part of one that has it. Payloads and secrets are left out.
#![warn(missing_debug_implementations)]

pub mod buckets;
pub mod events;
pub mod executions;
pub mod invocations;
pub mod jobs;
pub mod objects;
pub mod services;
pub mod triggers;

/// `2026-11-21T10:00:00Z`: whole seconds, as metadata and events have them.
pub(crate) fn seconds_text(at: jiff::Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
