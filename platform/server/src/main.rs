//! The Mayfly binary: roles and their configuration.
//!
//! **Belongs here:** an operator's settings, and the wiring of the components into roles. **Does not belong here:**
//! what any component does, and the commands that need no role (`platform/cli`).
//!
//! Start reading at [`roles::up`] for the server, at [`command_line`] for the commands.

use std::process::ExitCode;

mod aws_credentials;
mod command_line;
mod config;
mod image_config;
mod logging;
mod roles;
mod slurm_config;

/// Returns memory to the system after a burst, which the C library's allocator does not.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    command_line::main()
}
