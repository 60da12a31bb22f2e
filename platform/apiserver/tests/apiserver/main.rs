//! The API as its clients meet it: its HTTP, kube's client, and the real kubectl.

mod access;
mod admission_policies;
mod artifacts;
mod audit;
mod client;
mod cluster_kinds;
mod custom_resources;
mod encodings;
mod field_types;
mod joining;
mod kubectl;
mod lifecycle;
mod lists;
mod logs;
mod mistakes;
mod objects;
mod policy;
mod protocol;
mod recorded;
mod streams;
mod support;
mod upstream;
mod usage;
mod views;
mod watchers;
mod webhooks;
