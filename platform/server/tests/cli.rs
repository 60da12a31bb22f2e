//! The commands of the real binary, against a fake server that each test scripts.

#[path = "cli/artifacts.rs"]
mod artifacts;
#[path = "cli/fake.rs"]
mod fake;
#[path = "cli/finding.rs"]
mod finding;
#[path = "cli/functions.rs"]
mod functions;
#[path = "cli/objects.rs"]
mod objects;
#[path = "cli/workflows.rs"]
mod workflows;
