//! The roles of a process. Each is thin: it creates the components, connects them, starts them, and stops them in
//! order.

mod admin;
mod banner;
mod components;
mod containers;
mod data_files;
mod devices;
pub(crate) mod flex_bridge;
mod function_calls;
mod gpu_metrics;
mod image_registry;
mod listeners;
mod metrics;
mod network;
mod nodes;
mod open_files;
mod part_configs;
mod runtimes;
mod signals;
mod slurm;
mod start_pages;
mod tasks;
pub(crate) mod up;
mod workflows;
