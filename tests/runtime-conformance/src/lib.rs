//! The requirements on every implementation of [`Runtime`], as one suite that is generic over it.
//!
//! **Belongs here:** the behaviour that the kubelet relies on: idempotent calls, the states of a container, the end of
//! a container by its own exit and by force, the independence of pods, the cleanup by a removal.
//!
//! **Does not belong here:** the behaviour of one kind of runtime (images, exec, limits): its own tests cover that.
//!
//! An implementation provides a [`RuntimeFixture`] and calls [`check_all`] in a test. What a kind of runtime does not
//! have by its nature (addresses, usage, a start without a queue) is a method of the fixture, so that each exception
//! has a name. Start reading at [`CHECKS`].

#![warn(missing_debug_implementations)]

mod checks;
mod pod;

use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use mayfly_runtime::{ContainerSpec, Runtime, SandboxSpec};

/// The timeout of a check for an expected state, without image pulls.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The program of a container under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestProgram {
    /// Runs until it is stopped. If it has a [grace period](RuntimeFixture::has_grace), it writes the fixture's
    /// [line](RuntimeFixture::log_line) as soon as it handles the request to stop.
    Waits,
    /// Runs until it is killed: it does not react to the request to stop. Writes the line like `Waits`.
    IgnoresStop,
    /// Writes the fixture's [line](RuntimeFixture::log_line) to its stdout and exits with this code, 0 or 1.
    Exits(i32),
}

/// A runtime under test, and the pods it can run.
#[async_trait]
pub trait RuntimeFixture: Send + Sync {
    fn runtime(&self) -> &dyn Runtime;

    /// A pod whose only container, `main`, runs `program`. `name` is unique within the runtime and is the pod's UID.
    async fn pod(&self, name: &str, program: TestProgram) -> (SandboxSpec, ContainerSpec);

    /// The line that programs write to their stdout; `None` if they write nothing.
    fn log_line(&self) -> Option<&str>;

    /// Whether programs have a grace period: a runtime whose programs cannot receive the stop request ends them at
    /// once.
    fn has_grace(&self) -> bool;

    /// Whether a container runs as soon as its start returns. Otherwise it may be queued first, and the checks wait
    /// until it runs.
    fn starts_at_once(&self) -> bool {
        true
    }

    /// Whether the runtime measures what running containers use.
    fn measures_usage(&self) -> bool {
        true
    }

    /// Whether pods have addresses at all.
    fn has_addresses(&self) -> bool {
        true
    }

    /// The number of pods that one check starts at the same time, all of which must run.
    fn pods_at_once(&self) -> usize {
        8
    }
}

/// One check.
pub struct Check {
    pub name: &'static str,
    pub run: for<'a> fn(&'a dyn RuntimeFixture) -> BoxFuture<'a, ()>,
}

impl std::fmt::Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Check").field("name", &self.name).finish_non_exhaustive()
    }
}

macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        &[$(Check { name: stringify!($name), run: |fixture| Box::pin(checks::$name(fixture)) }),*]
    };
}

/// All checks. They are independent of each other: each creates and removes its own pods.
pub const CHECKS: &[Check] = checks![
    a_sandbox_is_listed_until_it_is_removed,
    a_repeated_creation_keeps_the_sandbox,
    pods_have_addresses_of_their_own,
    a_container_needs_a_sandbox,
    a_started_container_runs,
    a_repeated_start_starts_nothing,
    simultaneous_starts_start_one_container,
    an_exit_is_reported_with_its_code,
    an_exit_is_announced,
    a_stop_ends_a_container,
    a_stop_of_an_ended_or_unknown_container_is_no_error,
    a_program_that_ignores_the_stop_is_killed,
    a_restart_is_a_container_of_its_own,
    a_removal_ends_what_runs,
    a_repeated_removal_is_no_error,
    a_removed_pod_can_come_back,
    pods_are_independent,
    many_pods_start_at_once,
    the_output_is_in_the_log,
];

/// Runs all checks in sequence.
///
/// # Panics
/// At the first failed check; the last printed line is its name.
#[expect(clippy::print_stdout, reason = "the test runner shows the output of a failed test")]
pub async fn check_all(fixture: &dyn RuntimeFixture) {
    let class = fixture.runtime().class().to_owned();
    for check in CHECKS {
        println!("runtime {class:?}: {}", check.name);
        (check.run)(fixture).await;
        let left = fixture.runtime().sandboxes();
        assert!(left.is_empty(), "{} left the sandboxes {left:?}", check.name);
    }
}
