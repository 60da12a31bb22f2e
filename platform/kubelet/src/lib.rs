//! One node, made to match the pods that are bound to it.
//!
//! **Belongs here:** the node's own object and lease ([`node`]); one worker for each pod ([`pod`]), which
//! plans purely ([`pod::plan`]) and acts through a [`mayfly_runtime::Runtime`]; probes of containers ([`probe`]); pod addresses; the HTTP API
//! by which the API server reads logs ([`http`], [`function_logs`]), reaches into containers (`streams`) and images (`images`) and what is used ([`usage`]); what jobs read and
//! leave ([`job`]).
//!
//! **Does not belong here:** how anything runs (the runtimes'), where pods go (the scheduler's), routes.
//!
//! With the API away everything that runs goes on running; statuses are written when it is back.
//!
//! Start reading at [`Kubelet`], then `pod/worker.rs`.

mod addresses;
mod follow;
mod function_logs;
mod http;
mod image_collection;
mod images;
mod job;
mod kubelet;
mod node;
mod pod;
mod pressure;
mod probe;
pub mod process;
mod static_pods;
mod streams;
mod usage;
mod volumes;

pub use image_collection::ImageCollection;
pub use job::JobFiles;
pub use kubelet::{Config, Kubelet};
pub use pod::dns::ClusterDnsServer;
