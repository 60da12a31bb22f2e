//! The threads of the process, in three groups, so that clients of one group do not wait for another.
//!
//! | runtime | runs | niceness |
//! |---|---|---|
//! | `request` | functions | as the process |
//! | `serve` | what answers other clients: the API over TLS, workflows and their API | as the process |
//! | `control` | reconcilers, informers, the scheduler | 5 more |
//!
//! Responses to clients have precedence over background work: thousands of objects change when thousands of functions
//! scale up. The serving threads keep the niceness of the process, because a server with a higher niceness than its
//! clients on the same machine is preempted by them at every response.

use tokio::runtime::{Builder, Handle, Runtime};

/// The control plane runs with what serving leaves.
const CONTROL_NICENESS: i32 = 5;
/// The largest niceness of the kernel.
const NICENESS_MAX: i32 = 19;
/// The time for blocking work to finish at the end. Running compilations are abandoned and repeated at the next start.
const SHUTDOWN: std::time::Duration = std::time::Duration::from_secs(1);

pub(super) struct Runtimes {
    requests: Runtime,
    serving: Runtime,
    control: Runtime,
}

/// Handles of the runtimes; the control plane's runtime is the one that polls a role.
#[derive(Clone)]
pub(super) struct Handles {
    pub(super) requests: Handle,
    pub(super) serving: Handle,
}

impl Runtimes {
    pub(super) fn create() -> std::io::Result<Self> {
        let [mut requests, mut serving, mut control] = ["request", "serve", "control"].map(|name| {
            let mut builder = Builder::new_multi_thread();
            builder.enable_all().thread_name(name);
            builder
        });
        // A thread inherits its parent's niceness, and any thread may be the parent: the process's value is used
        // instead.
        let own = rustix::process::getpriority_process(None).unwrap_or(0);
        let niceness = own.saturating_add(CONTROL_NICENESS).min(NICENESS_MAX);
        control.on_thread_start(move || {
            // Without permission all threads have the same priority.
            let _ = rustix::process::setpriority_process(None, niceness);
        });
        Ok(Self { requests: requests.build()?, serving: serving.build()?, control: control.build()? })
    }

    pub(super) fn handles(&self) -> Handles {
        Handles { requests: self.requests.handle().clone(), serving: self.serving.handle().clone() }
    }

    /// Runs a role to its end, in the control plane's runtime.
    pub(super) fn run<F: Future>(self, role: F) -> F::Output {
        let output = self.control.block_on(role);
        for runtime in [self.control, self.serving, self.requests] {
            runtime.shutdown_timeout(SHUTDOWN);
        }
        output
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This also holds for threads that threads with a higher niceness create.
    #[test]
    fn only_the_control_plane_is_nicer_and_only_once() {
        let own = rustix::process::getpriority_process(None).unwrap();
        let runtimes = Runtimes::create().unwrap();
        let handles = runtimes.handles();
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let nicer = (own + CONTROL_NICENESS).min(NICENESS_MAX);
        runtimes.run(async move {
            let control = tokio::runtime::Handle::current();
            let blocking = control.spawn(async move { tokio::task::spawn_blocking(niceness).await });
            assert_eq!(blocking.await.unwrap().unwrap(), nicer);
            assert_eq!(control.spawn(async move { niceness() }).await.unwrap(), nicer);
            for served in [handles.requests, handles.serving] {
                assert_eq!(served.spawn(async move { niceness() }).await.unwrap(), own);
            }
        });
    }
}
