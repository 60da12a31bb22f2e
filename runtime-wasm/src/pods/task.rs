//! A container's task: runs until it ends, is stopped, or is killed.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use mayfly_runtime::ContainerId;
use tokio::{sync::watch, task::AbortHandle, time::Instant};

use super::{EXIT_KILLED, Meter, Pods};

/// The result of a container.
#[derive(Clone, Debug)]
pub(super) struct ContainerExit {
    pub(super) code: i32,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl ContainerExit {
    pub(super) fn completed() -> Self {
        Self { code: 0, reason: "Completed", message: String::new() }
    }

    /// The exit of a program that was asked to stop: it cannot receive the request.
    pub(super) fn interrupted() -> Self {
        let message = "it was killed: a wasm program cannot receive a stop signal".into();
        Self { code: EXIT_KILLED, reason: "Error", message }
    }

    fn killed() -> Self {
        let message = "it was still running when its grace period was over".into();
        Self { code: EXIT_KILLED, reason: "Error", message }
    }
}

/// The deadline of a task, set when it is asked to end.
pub(super) type StopRequest = watch::Receiver<Option<Instant>>;

/// The handle of a container's task. Dropping it kills the task.
pub(super) struct RunningTask {
    stop: watch::Sender<Option<Instant>>,
    exit: Arc<OnceLock<ContainerExit>>,
    ended: watch::Receiver<bool>,
    meter: Meter,
    task: AbortHandle,
}

/// Awaits the end of a task.
pub(super) struct TaskEnd(watch::Receiver<bool>);

impl TaskEnd {
    pub(super) async fn wait(mut self) {
        // An error means that the task is gone, so it has ended.
        self.0.wait_for(|ended| *ended).await.ok();
    }
}

impl RunningTask {
    /// Runs `work` until it ends or a stop's grace period is over, then `finish`; then reports the exit to `pods`.
    /// `work` sees the stop request, and may end early.
    pub(super) fn spawn<W>(
        pods: &Arc<Pods>,
        id: ContainerId,
        meter: Meter,
        work: impl FnOnce(StopRequest) -> W,
        finish: impl FnOnce() + Send + 'static,
    ) -> Self
    where
        W: Future<Output = ContainerExit> + Send + 'static,
    {
        let (stop, mut stopping) = watch::channel(None);
        let (end, ended) = watch::channel(false);
        let work = work(stopping.clone());
        let pods = Arc::downgrade(pods);
        let exit = Arc::new(OnceLock::new());
        let exited = exit.clone();
        let task = tokio::spawn(async move {
            let killed = async {
                let until = stopping.wait_for(Option::is_some).await.map(|until| *until);
                // An error means that the sender is gone: the pod cannot be stopped any more.
                let Ok(until) = until else { return std::future::pending().await };
                tokio::time::sleep_until(until.unwrap_or_else(Instant::now)).await;
            };
            let exit = tokio::select! {
                biased;
                exit = work => exit,
                () = killed => ContainerExit::killed(),
            };
            finish();
            // Set before the report, in case the container is not listed yet.
            exited.set(exit.clone()).ok();
            if let Some(pods) = pods.upgrade() {
                pods.ended(&id, exit);
            }
            end.send_replace(true);
        });
        Self { stop, exit, ended, meter, task: task.abort_handle() }
    }

    pub(super) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// The task's exit, if it has ended.
    pub(super) fn exit(&self) -> Option<ContainerExit> {
        self.exit.get().cloned()
    }

    /// Asks the task to end within `grace`; `None` if it has already ended.
    pub(super) fn stop(&self, grace: Duration) -> Option<TaskEnd> {
        if *self.ended.borrow() {
            return None;
        }
        let until = Instant::now() + grace;
        // A later stop may shorten the grace period, not extend it.
        self.stop.send_modify(|asked| *asked = Some(asked.map_or(until, |asked| asked.min(until))));
        Some(TaskEnd(self.ended.clone()))
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}
