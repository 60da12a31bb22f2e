//! Tasks that a script answers, in the engine's own time.

use std::sync::Arc;
use std::time::Duration;

use mayfly_workflows_language::definition::{IntegrationPattern, Resource};

use super::tasks::Finished;
use crate::engine::{EffectGuards, MockAnswer, MockCall, Mocks, Reporter};
use mayfly_workflows_language::execution::Payload;
use mayfly_workflows_machine::{Event, TaskCall};

/// Answers a task by a mock. The machine gets the events that the real service would cause (a worker took the task,
/// the service accepted it).
pub(crate) async fn run(
    reporter: &Reporter,
    task: &TaskCall,
    guards: &mut EffectGuards,
    mocks: &Arc<dyn Mocks>,
) -> Finished {
    let n = reporter.n;
    let Some((state, retries)) = reporter.state().await else { return Finished::Later };
    let (resource, arguments) = (task.arn.to_string(), task.arguments.to_serde());
    let answer = mocks.answer(MockCall { state, resource, arguments, retries });
    let is_activity = matches!(task.resource, Resource::Activity(_));
    let on_the_way = match is_activity {
        true => vec![Event::Accepted { n }, Event::Began { n, worker: None }],
        false if task.resource.pattern() == IntegrationPattern::RequestResponse => Vec::new(),
        false => vec![Event::Submitted { n, output: Payload::from("{}") }],
    };
    for event in on_the_way {
        if !reporter.report(event).await {
            return Finished::Later;
        }
    }
    pass_time(reporter, &task.token, guards, &answer).await;
    match answer.outcome {
        Some(Ok(text)) => Finished::Text(text),
        Some(Err(failure)) => Finished::Failed(failure),
        None => {
            guards.release();
            std::future::pending().await
        }
    }
}

async fn pass_time(reporter: &Reporter, token: &str, guards: &mut EffectGuards, answer: &MockAnswer) {
    let mut left = answer.after;
    while !left.is_zero() {
        let step = answer.heartbeat.filter(|every| !every.is_zero() && *every < left).unwrap_or(left);
        left -= step;
        wait(reporter, guards, step).await;
        if !left.is_zero() {
            reporter.inner.mocked_heartbeat(token).await;
        }
    }
}

async fn wait(reporter: &Reporter, guards: &mut EffectGuards, time: Duration) {
    let alarm = reporter.inner.alarm(time);
    guards.release();
    // An engine that is gone rings no more, and takes this effect with it.
    if let Ok(busy) = alarm.await {
        guards.hold_busy(busy);
    }
}
