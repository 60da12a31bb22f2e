//! Outcomes reported from outside: task tokens, activity workers.

use std::sync::Arc;

use mayfly_workflows_language::value::Value;

use super::Engine;
use super::error::{ExecutionError, TokenError};
use super::inner::{Inner, Refused};
use super::live::Running;
use super::types::ActivityTask;
use crate::executor::activities::Work;
use crate::journal::Payload;
use crate::machine::{Event, Token};
use crate::timers::TimerKey;

impl Inner {
    pub(crate) fn offer_work(&self, activity: &str, work: Work) {
        self.lines.lock().offer(activity, work);
    }

    pub(crate) fn activity_exists(&self, arn: &str) -> bool {
        self.activities.get().is_some_and(|activities| activities.exists(arn))
    }

    /// The execution a token belongs to, and its effect.
    async fn token(self: &Arc<Self>, text: &str) -> Result<(Arc<Running>, u32), TokenError> {
        let token = Token::parse(text).ok_or(TokenError::Invalid)?;
        let genuine = |seed: &[u8; 16]| Token::new(token.execution, token.effect, seed) == token;
        let unavailable = |error: ExecutionError| TokenError::Unavailable(error.to_string());
        if let Some(running) = self.awake(token.execution).await.map_err(unavailable)? {
            let seed = running.cell.lock().row.birth.seed;
            return if genuine(&seed) { Ok((running, token.effect)) } else { Err(TokenError::Invalid) };
        }
        let row = self.read(move |journal| journal.execution(token.execution)).await;
        match row.map_err(|error| TokenError::Unavailable(error.to_string()))? {
            Some(row) if genuine(&row.birth.seed) => Err(TokenError::TimedOut),
            _ => Err(TokenError::Invalid),
        }
    }

    async fn report(
        self: &Arc<Self>,
        running: &Arc<Running>,
        n: u32,
        event: Event,
    ) -> Result<(), TokenError> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let told = self.deliver_if(
            running,
            event,
            |cell| cell.machine.waits_for(n),
            move |outcome| {
                // Whoever reported may have gone.
                let _ = sender.send(outcome);
            },
        );
        match told {
            Ok(()) => match receiver.await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(TokenError::Unavailable(error.to_string())),
                Err(_) => Err(TokenError::Unavailable("the engine is shutting down".to_owned())),
            },
            Err(Refused::Ended) => Err(TokenError::TimedOut),
            // It fell asleep between being found and being told: once more.
            Err(Refused::Asleep(event)) => match self.awake(running.id).await {
                Ok(Some(running)) => Box::pin(self.report(&running, n, event)).await,
                Ok(None) => Err(TokenError::TimedOut),
                Err(error) => Err(TokenError::Unavailable(error.to_string())),
            },
            Err(Refused::Journal(error)) => Err(TokenError::Unavailable(error.to_string())),
        }
    }
}

impl Engine {
    /// A task's result. `output` is JSON text.
    pub async fn send_task_success(&self, token: &str, output: &str) -> Result<(), TokenError> {
        let (running, n) = self.inner.token(token).await?;
        Value::parse(output).map_err(|error| TokenError::InvalidOutput(error.to_string()))?;
        let event = Event::Succeeded { n, output: Payload::from(output) };
        self.inner.report(&running, n, event).await
    }

    /// A task's error.
    pub async fn send_task_failure(
        &self,
        token: &str,
        error: Option<String>,
        cause: Option<String>,
    ) -> Result<(), TokenError> {
        let (running, n) = self.inner.token(token).await?;
        self.inner.report(&running, n, Event::Failed { n, error, cause }).await
    }

    /// A sign of life: the task's heartbeat timer starts anew. Nothing is journalled.
    pub async fn send_task_heartbeat(&self, token: &str) -> Result<(), TokenError> {
        let (running, n) = self.inner.token(token).await?;
        let cell = running.cell.lock();
        if !cell.machine.waits_for(n) {
            return Err(TokenError::TimedOut);
        }
        if let Some((timer, seconds)) = cell.machine.heartbeat(n) {
            let at_ms = self.inner.now_ms() + i64::try_from(seconds).unwrap_or(i64::MAX / 2000) * 1000;
            self.inner.wheel.lock().insert(TimerKey { execution: running.id, timer }, at_ms);
        }
        Ok(())
    }

    /// Waits for work of an activity: a minute at most.
    pub async fn get_activity_task(
        &self,
        activity_arn: &str,
        worker: Option<String>,
    ) -> Option<ActivityTask> {
        let deadline = tokio::time::Instant::now() + self.inner.config.limits.activity_poll;
        loop {
            let asked = self.inner.lines.lock().ask(activity_arn);
            let work = match asked {
                Ok(work) => work,
                Err(receiver) => match tokio::time::timeout_at(deadline, receiver).await {
                    Ok(Ok(work)) => work,
                    _ => return None,
                },
            };
            let Ok(Some(running)) = self.inner.awake(work.execution).await else { continue };
            let event = Event::Began { n: work.effect, worker: worker.clone() };
            if self.inner.report(&running, work.effect, event).await.is_ok() {
                return Some(ActivityTask { token: work.token.to_string(), input: work.input.to_string() });
            }
        }
    }
}
