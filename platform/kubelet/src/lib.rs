//! The agent of one node: runs the pods that are bound to it.
//!
//! **Belongs here:** the node's own object and lease ([`node`]); one worker for each pod ([`pod`]), which plans purely
//! ([`pod::plan`]) and acts through a [`mayfly_runtime::Runtime`]; probes of containers ([`probe`]); pod addresses; the
//! HTTP API through which the API server gets logs ([`http`], [`function_logs`]), streams into containers (`streams`),
//! images (`images`) and measurements ([`usage`], [`volume_statistics`]); inputs and outputs of jobs ([`job`]); the client of the server's artifact store
//! ([`artifacts`]); volumes and their drivers
//! ([`volumes`], [`plugin_registry`]).
//!
//! **Does not belong here:** how containers run (the runtimes), the choice of nodes (the scheduler), routes.
//!
//! While the API is unreachable everything that runs continues; statuses are written when the API answers again.
//!
//! Start reading at [`Kubelet`], then `pod/worker.rs`.

#![warn(missing_debug_implementations)]

mod addresses;
mod artifacts;
mod config;
mod follow;
mod function_logs;
mod http;
mod image_collection;
mod images;
mod job;
mod kubelet;
mod local_storage;
mod node;
mod plugin_registry;
mod pod;
mod pressure;
mod probe;
pub mod process;
mod runtimes;
mod static_pods;
mod streams;
#[cfg(test)]
mod test_objects;
mod unverified_tls;
mod usage;
mod volume_statistics;
mod volumes;

pub use artifacts::ApiArtifacts;
pub use config::Config;
pub use image_collection::ImageCollection;
pub use job::JobFiles;
pub use kubelet::Kubelet;
pub use pod::{dns::ClusterDnsServer, withdrawal::ServedEndpoints};
pub use volumes::csi::CsiConfig;
