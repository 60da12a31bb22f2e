//! The host as the gateway and the kubelet use it. One test binary, because linking the engine takes longer than most
//! tests.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod cache;
mod conformance;
mod failures;
mod functions;
mod isolation;
mod joined;
mod outbound;
mod pods;
mod policies;
mod wipe;
