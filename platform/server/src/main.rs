//! The Mayfly binary: roles, configuration, commands.
//!
//! **Belongs here:** what a person or an operator touches: flags, files, addresses, messages; and the wiring
//! of the parts into roles. **Does not belong here:** what any part does.
//!
//! Start reading at [`cli`] for commands, at [`roles::up`] for the server.

use std::process::ExitCode;

mod aws_credentials;
mod cli;
mod config;
mod data_dir;
mod guest;
mod http_client;
mod logging;
mod roles;

/// Gives memory back to the system when a burst is over, which the C library's allocator does not.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The process that a Ctrl-C ends exits with this, as shells expect.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    cli::main()
}
