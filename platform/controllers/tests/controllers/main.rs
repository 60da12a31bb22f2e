//! The controllers against the real API. One program: compiling the API takes longer than most tests.

mod deployments;
mod functions;
mod garbage;
mod garbage_kinds;
mod garbage_scenarios;
mod job_queues;
mod jobs;
mod joining;
mod nodes;
mod pod_ranges;
mod replica_sets;
mod sets;
mod support;
