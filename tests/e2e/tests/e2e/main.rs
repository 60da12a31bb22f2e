//! The tests that drive the whole: see each module's first line. One program, so that it links once.

mod aws_clients;
mod bad_components;
mod bad_guests;
mod bad_manifests;
mod buckets;
mod clients;
mod endpoints;
mod environment;
mod faults;
mod first_day;
mod jobs;
mod kubectl;
mod kubectl_habits;
mod kubectl_kinds;
mod kubectl_usage;
mod offline;
mod per_call_record;
mod restarts;
mod scaling;
mod stand_in_s3;
mod starting;
mod traffic;
mod triggers;
mod workflow_examples;
mod workflow_objects;
mod workflows;
