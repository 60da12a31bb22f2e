//! The roles of a process. Each is thin: it creates the components, connects them, starts them, and stops them in
//! order.

mod admin;
mod agent;
mod agent_port;
mod banner;
mod cluster;
mod components;
mod containers;
mod data_files;
mod devices;
pub(crate) mod flex_bridge;
mod function_calls;
mod functions;
mod gpu_metrics;
mod image_registry;
pub(crate) mod joined;
mod listeners;
mod metrics;
mod network;
mod node_admin;
mod nodes;
mod open_files;
mod part_configs;
mod pod_range;
mod runtimes;
mod signals;
mod slurm;
mod start_pages;
mod tasks;
pub(crate) mod up;
mod workflows;
