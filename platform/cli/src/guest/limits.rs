//! The limits of a build. Code at the top level of a script runs during its build, and may never end.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use clap::Args;
use mayfly_api::duration::Span;

use super::{process_tree, script::Script};
use crate::{
    failure::{ErrorCode, Failure},
    format,
};

/// How often a running program is compared with its limits: a person waits for it, after a save.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The limit of a build on the command line.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct BuildTimeout {
    /// How long a script may take to load: the code at its top level runs during the build
    #[arg(long, env = "MAYFLY_BUILD_TIMEOUT", default_value = "5m", value_name = "DURATION")]
    pub(crate) build_timeout: Span,
}

/// When the programs of a build are ended. Clones share the cancellation.
#[derive(Clone, Debug, Default)]
pub(crate) struct BuildLimits {
    /// How long one program may run; `None` for any time.
    time: Option<Duration>,
    cancelled: Arc<AtomicBool>,
}

impl From<BuildTimeout> for BuildLimits {
    fn from(timeout: BuildTimeout) -> Self {
        Self { time: Some(timeout.build_timeout.0), cancelled: Arc::default() }
    }
}

impl BuildLimits {
    /// The same limits for programs whose time depends on the network.
    pub(super) fn without_time(&self) -> Self {
        Self { time: None, cancelled: self.cancelled.clone() }
    }

    /// Ends the running program of the build, and each that it starts later.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Cancels the build on drop: its caller waits no more, for example after Ctrl-C, and its programs would run on.
    pub(crate) fn cancel_on_drop(&self) -> BuildGuard {
        BuildGuard(self.clone())
    }

    /// Whether the build was cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// The error of a script that was not loaded in time.
    pub(super) fn overdue(&self, script: &Script) -> anyhow::Error {
        let limit = format::seconds(self.time.unwrap_or_default().as_secs_f64());
        Failure::error(
            ErrorCode::TimedOut,
            format!("{} was not loaded within {limit}, the limit of a build", script.file_name()),
            "the code at the top level of a module runs during the build: it may loop, or wait for something\n\
             --build-timeout or MAYFLY_BUILD_TIMEOUT raises the limit",
        )
    }

    fn exceeded(&self, started: Instant) -> Option<Interruption> {
        if self.is_cancelled() {
            Some(Interruption::Cancelled)
        } else if self.time.is_some_and(|time| started.elapsed() >= time) {
            Some(Interruption::Overdue)
        } else {
            None
        }
    }
}

/// Cancels a build on drop.
#[derive(Debug)]
pub(crate) struct BuildGuard(BuildLimits);

impl Drop for BuildGuard {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Why a program was ended before it ended itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interruption {
    Overdue,
    Cancelled,
}

/// A thread that ends a child process at its limits.
pub(super) struct LimitWatch {
    ended: mpsc::Sender<()>,
    thread: JoinHandle<Option<Interruption>>,
}

impl LimitWatch {
    /// Watches the child with this process id.
    pub(super) fn start(child: u32, limits: &BuildLimits) -> Self {
        let (ended, is_ended) = mpsc::channel();
        let limits = limits.clone();
        let started = Instant::now();
        let thread = thread::spawn(move || {
            while is_ended.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if let Some(interruption) = limits.exceeded(started) {
                    process_tree::kill(child, Path::new("/proc"));
                    return Some(interruption);
                }
            }
            None
        });
        Self { ended, thread }
    }

    /// Ends the watch of a child that has ended.
    pub(super) fn stop(self) -> Option<Interruption> {
        drop(self.ended);
        self.thread.join().expect("watching does not panic")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_its_caller_is_cancelled() {
        let limits = BuildLimits::default();
        let guard = limits.cancel_on_drop();
        assert!(!limits.without_time().is_cancelled());
        drop(guard);
        assert!(limits.is_cancelled() && limits.without_time().is_cancelled());
    }

    #[test]
    fn the_error_names_the_file_the_limit_and_how_to_raise_it() {
        let limits = BuildLimits::from(BuildTimeout { build_timeout: Span(Duration::from_secs(90)) });
        let script = Script::parse(Path::new("shop/handler.py")).unwrap();
        let said = limits.overdue(&script).to_string();
        for part in ["handler.py was not loaded within", "--build-timeout", "MAYFLY_BUILD_TIMEOUT"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(said.contains(&format::seconds(90.0)), "{said}");
    }
}
