//! The containerd host: images, sandboxes, containers, logs, exec.
//!
//! **Belongs here:** everything that names containerd, runc, CNI plugins, kernel namespaces and cgroups: a
//! [`Runtime`](mayfly_runtime::Runtime) for pods of ordinary images ([`OciRuntime`]), the program that writes
//! containers' logs ([`log_shim`]), and the decision whether this machine can run containers ([`availability`]).
//!
//! **Does not belong here:** restarts of containers, volumes, probes (the kubelet); the API.
//!
//! A pod has no pause container: its sandbox is a set of namespaces pinned below the data directory ([`namespaces`]), a
//! network attachment ([`network`]) and a cgroup ([`cgroup`]). A container is a containerd container with one task,
//! whose output goes to a process of its own ([`log_shim`]), so that a restart of this process or of containerd loses
//! no line. After a restart, running containers are found by their labels, and sandboxes by their files ([`adopt`]).
//!
//! Start reading at [`host`], then `containers.rs`.

#![warn(missing_docs, missing_debug_implementations)]

mod adopt;
mod archive;
pub mod availability;
mod cgroup;
mod client;
mod containers;
mod daemon;
mod exec;
pub mod host;
mod images;
mod layout;
pub mod log_shim;
mod namespaces;
mod network;
pub mod pod_init;
mod sandbox;
mod shared_memory;
mod spec;

pub use host::{Config, OciRuntime};
pub use network::{BridgeOptions, PodRange};
