//! The reconcilers of functions, job queues and Kubernetes' built-in kinds, and the garbage collector.
//!
//! **Belongs here:** a module for each controller: it watches some kinds, plans (a pure function from a snapshot to
//! steps), and acts through the API. All are level-triggered: an event only starts another comparison.
//!
//! **Does not belong here:** placing pods (the scheduler), running them (the kubelet), the number of a function's
//! replicas (the gateway's autoscaler), Workflow objects (`mayfly-workflows-controller`), the store (only the API server opens
//! it).
//!
//! Start reading at [`function`], then [`deployment`], [`replica_set`], [`job`] and [`garbage`]; [`Controllers`] starts
//! them all.

#![warn(missing_debug_implementations)]

mod artifacts;
mod autoscaler;
mod certificate_signing;
mod controllers;
mod cron_job;
mod csi;
mod daemon_set;
mod deployment;
mod disruption;
mod endpoints;
mod events;
mod function;
mod garbage;
mod history;
mod job;
mod job_queue;
mod load_balancer;
mod metadata;
mod namespace_defaults;
mod node;
mod node_approval;
mod node_ipam;
mod owned_pods;
mod ownership;
mod persistent_volume;
mod pods;
mod replica_set;
mod resync;
mod scaled_value;
mod stateful_set;
mod template_hash;

pub use artifacts::Config as ArtifactsConfig;
pub use autoscaler::Config as AutoscalerConfig;
pub use certificate_signing::{Config as CertificateSigningConfig, Sign as SignCertificate};
pub use controllers::{Config, Controllers};
pub use cron_job::Config as CronJobConfig;
pub use csi::Config as CsiConfig;
pub use daemon_set::Config as DaemonSetConfig;
pub use deployment::Config as DeploymentConfig;
pub use disruption::Config as DisruptionConfig;
pub use endpoints::Config as EndpointsConfig;
pub use events::Config as EventsConfig;
pub use function::{Config as FunctionConfig, RouteFollows, Routes};
pub use garbage::Config as GarbageConfig;
pub use job::Config as JobConfig;
pub use job_queue::Config as JobQueueConfig;
pub use namespace_defaults::Config as NamespaceDefaultsConfig;
pub use node::{Config as NodeConfig, EvictionRates};
pub use node_approval::NodeApproval;
pub use node_ipam::{ANNOTATION_POD_RANGE, NodeIpam};
pub use persistent_volume::{Config as PersistentVolumeConfig, LocalVolumes};
pub use pods::Config as PodsConfig;
pub use replica_set::Config as ReplicaSetConfig;
pub use stateful_set::Config as StatefulSetConfig;
