//! Outcomes reported from outside: task tokens, activity workers.

use std::sync::Arc;
use std::time::Duration;

use mayfly_workflows_language::arn::ActivityArn;

use super::Engine;
use super::error::{ExecutionError, TokenError};
use super::inner::{ApplyError, Inner};
use super::live::ResidentExecution;
use super::types::ActivityTask;
use crate::executor::activities::{ActivityHandover, Work};
use mayfly_workflows_journal::JournalError;
use mayfly_workflows_language::execution::JsonText;
use mayfly_workflows_machine::{EffectId, Event, Machine, ReportedEnd, Token};
use parking_lot::Mutex;

/// The pause before a worker asks again for work that could not be given out.
const WORK_RETRY: Duration = Duration::from_millis(250);

impl Inner {
    pub(crate) fn offer_work(&self, work: Work) {
        self.activity_queues.offer(work);
    }

    /// A heartbeat of a task that this process mocks.
    pub(crate) async fn mocked_heartbeat(self: &Arc<Self>, token: &str) {
        // A task that has ended needs none.
        let _ = Engine { inner: self.clone() }.send_task_heartbeat(token).await;
    }

    /// The execution a token belongs to, and its effect.
    async fn token(self: &Arc<Self>, text: &str) -> Result<(Arc<ResidentExecution>, EffectId), TokenError> {
        let token = Token::parse(text).ok_or(TokenError::Invalid)?;
        let genuine = |seed: &[u8; 16]| Token::new(token.execution, token.effect, seed) == token;
        let unavailable = |error: ExecutionError| TokenError::Unavailable(error.to_string());
        if let Some(running) = self.ensure_resident(token.execution).await.map_err(unavailable)? {
            let seed = running.lock().row.birth.seed;
            return if genuine(&seed) { Ok((running, token.effect)) } else { Err(TokenError::Invalid) };
        }
        let row = self.read(move |journal| journal.execution(token.execution)).await;
        match row.map_err(|error| TokenError::Unavailable(error.to_string()))? {
            Some(row) if genuine(&row.birth.seed) => Err(TokenError::TimedOut),
            _ => Err(TokenError::Invalid),
        }
    }

    /// Applies the reported end of a task, and returns when it is durable.
    async fn report(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        n: EffectId,
        end: ReportedEnd,
    ) -> Result<(), TokenError> {
        // What the end causes may take long: the report is acknowledged first.
        let event = end.clone().event(n, running.evaluates_apart);
        match self.deliver_and_wait(running, event, move |machine| machine.waits_for(n)).await {
            Ok(()) => Ok(()),
            Err(ApplyError::Ended) => Err(TokenError::TimedOut),
            // The execution was evicted after it was found: load it and try again.
            Err(ApplyError::Evicted(_)) => match self.ensure_resident(running.id).await {
                Ok(Some(running)) => Box::pin(self.report(&running, n, end)).await,
                Ok(None) => Err(TokenError::TimedOut),
                Err(error) => Err(TokenError::Unavailable(error.to_string())),
            },
            Err(ApplyError::Journal(error)) => Err(TokenError::Unavailable(error.to_string())),
        }
    }
}

impl Engine {
    /// A task's result. `output` is JSON text.
    pub async fn send_task_success(&self, token: &str, output: &str) -> Result<(), TokenError> {
        let (running, n) = self.inner.token(token).await?;
        let json = JsonText::from(output);
        json.value().map_err(|error| TokenError::InvalidOutput(error.describe(output)))?;
        self.inner.report(&running, n, ReportedEnd::Succeeded { output: json.into() }).await
    }

    /// A task's error.
    pub async fn send_task_failure(
        &self,
        token: &str,
        error: Option<String>,
        cause: Option<String>,
    ) -> Result<(), TokenError> {
        let (running, n) = self.inner.token(token).await?;
        self.inner.report(&running, n, ReportedEnd::Failed { error, cause }).await
    }

    /// Restarts the task's heartbeat timer. Nothing is journalled.
    pub async fn send_task_heartbeat(&self, token: &str) -> Result<(), TokenError> {
        let (running, n) = self.inner.token(token).await?;
        let look = move |machine: &Machine| (machine.waits_for(n), machine.heartbeat(n));
        let Some((true, heartbeat)) = running.with_machine(look).await else {
            return Err(TokenError::TimedOut);
        };
        if let Some((timer, seconds)) = heartbeat {
            let at_ms = self.inner.now_ms() + i64::try_from(seconds).unwrap_or(i64::MAX / 2000) * 1000;
            self.inner.timers.postpone(running.timer(timer), at_ms);
        }
        Ok(())
    }

    /// Waits for work of an activity: a minute at most.
    pub async fn get_activity_task(
        &self,
        activity_arn: &ActivityArn,
        worker: Option<String>,
    ) -> Option<ActivityTask> {
        let deadline = tokio::time::Instant::now() + self.inner.config.limits.activity_poll;
        loop {
            let handed = match self.inner.activity_queues.request(activity_arn) {
                Ok(handed) => handed,
                Err(receiver) => match tokio::time::timeout_at(deadline, receiver).await {
                    Ok(Ok(handed)) => handed,
                    _ => return None,
                },
            };
            match self.begin_work(handed, worker.clone()).await {
                Ok(Some(task)) => return Some(task),
                // No state waits for it any more.
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(activity = %activity_arn, %error, "an activity's work could not be given out");
                    let now = tokio::time::Instant::now();
                    if now >= deadline {
                        return None;
                    }
                    tokio::time::sleep_until(deadline.min(now + WORK_RETRY)).await;
                }
            }
        }
    }

    /// Records in the execution that a worker begins its task; `None` when the execution does not wait for that task
    /// any more. If this fails, or is dropped before the event waits to be applied, the task returns to its queue.
    async fn begin_work(
        &self,
        handed: ActivityHandover,
        worker: Option<String>,
    ) -> Result<Option<ActivityTask>, TokenError> {
        let Some((execution, n)) = handed.work().map(|work| (work.execution, work.effect)) else {
            return Ok(None);
        };
        let handed = Arc::new(Mutex::new(Some(handed)));
        loop {
            let running = self.inner.ensure_resident(execution).await;
            let running = running.map_err(|error| TokenError::Unavailable(error.to_string()))?;
            let began = match &running {
                Some(running) => self.begin_work_of(running, n, worker.clone(), handed.clone()).await,
                None => Err(ApplyError::Ended),
            };
            match began {
                Ok(work) => {
                    let task = |work: Work| ActivityTask {
                        token: work.token.to_string(),
                        input: work.input.to_string(),
                    };
                    return Ok(work.map(task));
                }
                Err(ApplyError::Ended) => {
                    let handed = handed.lock().take();
                    drop(handed.and_then(ActivityHandover::take));
                    return Ok(None);
                }
                // The execution was evicted after it was found: load it and try again.
                Err(ApplyError::Evicted(_)) => {}
                Err(ApplyError::Journal(error)) => return Err(TokenError::Unavailable(error.to_string())),
            }
        }
    }

    /// The work once its begin is durable. As soon as the event waits to be applied, the work is not handed to another
    /// worker unless the event is refused.
    async fn begin_work_of(
        &self,
        running: &Arc<ResidentExecution>,
        n: EffectId,
        worker: Option<String>,
        handed: Arc<Mutex<Option<ActivityHandover>>>,
    ) -> Result<Option<Work>, ApplyError> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let waits = move |machine: &Machine| machine.waits_for(n);
        self.inner.deliver_if(running, Event::Began { n, worker }, waits, move |outcome| {
            let began = outcome.map(|()| {
                let handed = handed.lock().take();
                handed.and_then(ActivityHandover::take)
            });
            // Ignore a worker that disconnected.
            let _ = sender.send(began);
        })?;
        receiver.await.unwrap_or(Err(ApplyError::Journal(JournalError::Closed)))
    }
}
