//! One attempt to have a request answered by another gateway.

use http::Request;
use mayfly_runtime::{Answer, Body, CallError};
use tokio::time::Instant;

use super::{
    NodeCallError, NodeCallFuture,
    replicas::PeerNode,
    wire::{self, NodeAction, NodeRefusal, NodeRequest},
};
use crate::{
    metrics::{NodeCallCounters, NodeCallOutcome},
    refusal::{Refusal, RefusalCode},
    target::RevisionTarget,
};

/// The result of an attempt.
pub(super) enum Attempt {
    /// The response, without its permit.
    Answered(Answer),
    /// The request was processed, or its time is over: there is no other attempt.
    Refused(Refusal),
    /// The function has not run.
    NotRun(Refusal),
    /// No connection: nothing was sent.
    Unreachable(Refusal),
    /// The connection failed: the function may have run.
    Lost(Refusal),
}

/// The request for another gateway.
///
/// # Errors
/// Its address is too long.
pub(super) fn for_gateway(
    action: NodeAction,
    target: &RevisionTarget,
    from: &str,
    deadline: Instant,
    request: Request<Body>,
) -> Result<Request<Body>, Refusal> {
    let request = NodeRequest {
        action,
        key: target.key.clone(),
        uid: target.uid.clone(),
        remaining: deadline.saturating_duration_since(Instant::now()),
        from: from.to_owned(),
        request,
    };
    request.encode().ok_or_else(|| {
        let message = "the request's address is too long to be sent to another node";
        Refusal::new(RefusalCode::HeadTooLarge, message, "send a shorter address")
    })
}

/// Waits for the other gateway's answer, at most until the deadline.
pub(super) async fn attempt(
    target: &RevisionTarget,
    node: &PeerNode,
    counters: &NodeCallCounters,
    call: NodeCallFuture,
    deadline: Instant,
) -> Attempt {
    let answering = async {
        let response = call.await?;
        Ok::<_, NodeCallError>(wire::decode_answer(response).await)
    };
    let (outcome, attempt) = match tokio::time::timeout_at(deadline, answering).await {
        Err(_) => {
            let timed_out = CallError::TimedOut { limit: target.timeout };
            (NodeCallOutcome::TimedOut, Attempt::Refused(timed_out.into()))
        }
        Ok(Ok(answered)) => {
            node.answered();
            match answered {
                Ok(answer) => (NodeCallOutcome::Answered, Attempt::Answered(answer)),
                Err(refusal) => refused(target, node, refusal),
            }
        }
        Ok(Err(error)) => {
            node.avoid();
            let lost = no_answer(target, node, &error);
            tracing::debug!(node = %node.name, revision = %target.key, %error, "a call of another node failed");
            match error {
                NodeCallError::Unreachable(_) => (NodeCallOutcome::Unreachable, Attempt::Unreachable(lost)),
                NodeCallError::Lost(_) => (NodeCallOutcome::Lost, Attempt::Lost(lost)),
            }
        }
    };
    counters.count(outcome);
    attempt
}

fn refused(target: &RevisionTarget, node: &PeerNode, refusal: NodeRefusal) -> (NodeCallOutcome, Attempt) {
    let has_not_run = refusal.has_not_run();
    match refusal {
        NodeRefusal::NotHosted => {
            let message = format!("node {} does not run revision {} (yet)", node.name, target.key);
            let refusal = Refusal::new(RefusalCode::NotReady, message, "try again in a moment");
            (NodeCallOutcome::NotHosted, Attempt::NotRun(refusal.retry(std::time::Duration::from_secs(1))))
        }
        NodeRefusal::Refused(refusal) if has_not_run => {
            if refusal.code == RefusalCode::ShuttingDown {
                node.avoid();
            }
            (NodeCallOutcome::Refused, Attempt::NotRun(refusal))
        }
        NodeRefusal::Refused(refusal) => (NodeCallOutcome::Refused, Attempt::Refused(refusal)),
    }
}

fn no_answer(target: &RevisionTarget, node: &PeerNode, error: &NodeCallError) -> Refusal {
    let message = format!("node {} gave no answer for revision {}: {error}", node.name, target.key);
    let hint = "see `kubectl get nodes`; the function may have run";
    Refusal::new(RefusalCode::NoAnswer, message, hint)
}
