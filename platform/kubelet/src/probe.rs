//! Probes: checks of a running container whose results decide about its restarts and its readiness.
//!
//! ```text
//!   started ─▶ startup probe ── succeeds ─▶ liveness and readiness probes, until the container ends
//!                  │ fails                     │ liveness fails
//!                  ▼                           ▼
//!               killed, and restarted as the restart policy says
//! ```
//!
//! [`thresholds`] is the pure rule from single results to a verdict, [`tasks`] runs one task for each probe, [`check`]
//! executes a single probe. A verdict goes into the pod's local state, where the plan reads it. The rules and the
//! messages are upstream's (`pkg/kubelet/prober`, `pkg/probe`).

pub(crate) mod check;
pub(crate) mod exec;
mod grpc;
pub(crate) mod http_get;
pub(crate) mod tasks;
mod thresholds;

pub(crate) use tasks::ProbeTasks;
pub(crate) use thresholds::ProbeKind;
