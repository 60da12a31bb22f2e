//! The tasks of a role: each has a name, failures are data, and stopping has an order and a deadline.

use std::{future::Future, time::Duration};

use tokio::{runtime::Handle, task::JoinSet};
use tokio_util::sync::CancellationToken;

/// Named tasks that are expected to run until they are stopped.
pub(crate) struct Tasks {
    name: &'static str,
    runtime: Handle,
    set: JoinSet<(&'static str, anyhow::Result<()>)>,
    stop: CancellationToken,
}

impl Tasks {
    /// Creates an empty group; its tasks will run in `runtime`.
    pub(crate) fn new(name: &'static str, runtime: &Handle) -> Self {
        Self { name, runtime: runtime.clone(), set: JoinSet::new(), stop: CancellationToken::new() }
    }

    /// The token that stops the tasks of this group.
    pub(crate) fn token(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Starts a task. It ends when [`Tasks::token`] is cancelled; ending earlier is a failure of the role.
    pub(crate) fn spawn<F, E>(&mut self, name: &'static str, task: F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error>,
    {
        let task = async move { (name, task.await.map_err(Into::into)) };
        self.set.spawn_on(task, &self.runtime);
    }

    /// Starts a task that cannot fail. Its end before the stop is a failure.
    pub(crate) fn run<F>(&mut self, name: &'static str, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let task = async move {
            task.await;
            (name, Ok(()))
        };
        self.set.spawn_on(task, &self.runtime);
    }

    /// Resolves with a task's name and error when the task ends before shutdown.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        match self.set.join_next().await {
            None => std::future::pending().await,
            Some(Ok((name, Ok(())))) => anyhow::anyhow!("{}: task {name} ended by itself", self.name),
            Some(Ok((name, Err(error)))) => error.context(format!("{}: task {name} failed", self.name)),
            Some(Err(error)) => anyhow::Error::new(error).context(format!("{}: a task panicked", self.name)),
        }
    }

    /// Signals all tasks to stop, waits for them up to `deadline`, then aborts them. Logs the result.
    pub(crate) async fn stop(mut self, deadline: Duration) {
        self.stop.cancel();
        let drained = tokio::time::timeout(deadline, async {
            while let Some(ended) = self.set.join_next().await {
                match ended {
                    Ok((_, Ok(()))) => {}
                    Ok((name, Err(error))) => {
                        tracing::warn!(
                            role = self.name,
                            task = name,
                            error = format!("{error:#}"),
                            "ended with an error"
                        );
                    }
                    Err(error) => tracing::error!(role = self.name, %error, "a task panicked"),
                }
            }
        });
        if drained.await.is_err() {
            tracing::warn!(
                role = self.name,
                left = self.set.len(),
                ?deadline,
                "did not stop in time; aborted"
            );
            self.set.shutdown().await;
        } else {
            tracing::debug!(role = self.name, "stopped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failure_has_the_tasks_name_and_stop_has_a_deadline() {
        let mut tasks = Tasks::new("role", &Handle::current());
        tasks.spawn("broken", async { Err::<(), _>(anyhow::anyhow!("oh")) });
        assert_eq!(format!("{:#}", tasks.failed().await), "role: task broken failed: oh");
        let token = tasks.token();
        tasks.run("polite", async move { token.cancelled().await });
        tasks.spawn("deaf", async { std::future::pending::<anyhow::Result<()>>().await });
        tasks.stop(Duration::from_secs(5)).await;
    }
}
