//! One pod on this node.
//!
//! ```text
//!            bound here         sandbox made      init containers done
//!  (unknown) ──────────▶ New ───────────────▶ Initialising ──────────▶ Running ──┐ a container ended and
//!                         │                        │                     ▲  │    │ may start again: back-off
//!                         │                        │ an init container   └──┼────┘
//!                         │ deleted                │ failed for good        │ all ended for good
//!                         ▼                        ▼                        ▼
//!                     Terminating ◀─ deleted ── Failed                Succeeded / Failed
//!                         │ stopped, sandbox removed
//!                         ▼
//!                       (gone: the API object is deleted with grace 0)
//! ```

mod admission;
pub(crate) mod container;
mod container_status;
mod definition;
mod devices;
pub(crate) mod dns;
mod ending;
pub(crate) mod evicting;
pub(crate) mod fields;
mod hooks;
pub(crate) mod local;
mod options;
pub(crate) mod plan;
mod pulling;
pub(crate) mod qos;
mod service_links;
mod starting;
pub(crate) mod status;
mod stopping;
mod sysctls;
pub(crate) mod withdrawal;
pub(crate) mod worker;
