//! The library of the end-to-end tests: runs the real binary as a process, and real clients against it.
//!
//! What belongs here: starting, killing and restarting `mayfly up` ([`Up`]), its commands ([`Cli`]), HTTP to functions
//! ([`Http`]), TLS to the API ([`Api`]), the components of the examples ([`guest`]), waiting for a condition with a
//! timeout ([`wait::until`]).
//!
//! What does not belong here: any crate of the platform. Tests use only the interfaces of users. Start reading at
//! [`Up`]; the tests are in `tests/e2e/`.

#![warn(missing_debug_implementations)]

mod api;
mod cli;
mod guests;
mod http_client;
mod load;
mod manifests;
mod up;
pub mod wait;

pub use api::{Api, ApiAnswer, digest_of};
pub use cli::{Cli, CliOutput};
pub use guests::guest;
pub use http_client::{Body, CompleteResponse, Http, full, streamed};
pub use load::{Latencies, flags};
pub use manifests::{function, is_ready, ready_replicas};
pub use up::{Start, Up, binary};

/// The name of the test that contains the macro call.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let name = std::any::type_name_of_val(&here);
        name.trim_end_matches("::here").trim_end_matches("::{{closure}}")
    }};
}

/// The component of an example; if it was not built, reports the test as skipped, and returns.
#[macro_export]
macro_rules! guest_or_skip {
    ($name:expr) => {
        match $crate::guest($name) {
            Ok(component) => component,
            Err(reason) => {
                $crate::skipped($crate::test_name!(), &reason);
                return Ok(());
            }
        }
    };
}

/// Reports a test as skipped. `cargo xtask test` counts these lines.
#[expect(clippy::print_stdout, reason = "the runner reads this line from the test's output")]
pub fn skipped(test: &str, reason: &str) {
    println!("\nSKIPPED {test}: {reason}");
}
