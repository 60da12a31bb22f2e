//! Runs one request at its revision: admission, the queue, the call, and the record of its result.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::future::BoxFuture;
use http::Request;
use mayfly_runtime::{Answer, Body, CallError};
use tokio::time::Instant;

use crate::{
    nodes::NodeForwarder,
    refusal::Refusal,
    target::{Admission, DemandSignal, Permit, RevisionTarget, Upstream},
};

/// A request with a resolved revision.
pub(crate) enum RequestTurn {
    Running(Run),
    Waiting(BoxFuture<'static, Result<Run, Refusal>>),
    /// Sent to the leader.
    Forwarded(BoxFuture<'static, Result<RunAnswer, Refusal>>),
    Refused(Refusal),
}

/// A function's response, not yet in the client's form.
pub(crate) struct RunAnswer {
    pub(crate) answer: Answer,
    /// `None` for a request that another gateway has admitted.
    pub(crate) permit: Option<Permit>,
    /// The time that the request waited for admission.
    pub(crate) queue: Duration,
}

impl RequestTurn {
    /// Calls the revision if it admits the request; otherwise the request waits in the revision's queue, or is refused.
    /// `nodes`: the other nodes that the call may go to, except for `from`, which has sent the request.
    pub(crate) fn begin(
        target: &Arc<RevisionTarget>,
        demand: &DemandSignal,
        nodes: Option<&Arc<NodeForwarder>>,
        from: Option<Arc<str>>,
        request: Request<Body>,
        arrived: Instant,
        deadline: Instant,
    ) -> Self {
        if let Upstream::Unavailable(refusal) = &**target.upstream.load() {
            return Self::Refused(refusal.clone());
        }
        match target.admit(demand, arrived, deadline) {
            Ok(Admission::Running(permit)) => {
                match Run::start(target, permit, nodes, from, request, deadline) {
                    Ok(run) => Self::Running(run),
                    Err(refusal) => Self::Refused(refusal),
                }
            }
            Ok(Admission::Waiting(waiting)) => {
                let (target, nodes) = (target.clone(), nodes.cloned());
                Self::Waiting(Box::pin(async move {
                    let permit = waiting.turn(deadline).await.inspect_err(|refusal| {
                        refused(&target, refusal, arrived);
                    })?;
                    Run::start(&target, permit, nodes.as_ref(), from, request, deadline)
                }))
            }
            Err(refusal) => {
                refused(target, &refusal, arrived);
                Self::Refused(refusal)
            }
        }
    }

    /// Waits for the revision's response.
    pub(crate) async fn end(self, target: &RevisionTarget, arrived: Instant) -> Result<RunAnswer, Refusal> {
        match self {
            Self::Running(run) => run.answer(target, arrived).await,
            Self::Waiting(turn) => match turn.await {
                Ok(run) => run.answer(target, arrived).await,
                Err(refusal) => Err(refusal),
            },
            Self::Forwarded(answering) => answering.await,
            Self::Refused(refusal) => Err(refusal),
        }
    }
}

/// Calls an admitted request's revision on this node, after other nodes did not run it.
pub(crate) async fn here(
    target: &RevisionTarget,
    request: Request<Body>,
    deadline: Instant,
) -> Result<Answer, Refusal> {
    let call = match &**target.upstream.load() {
        Upstream::Local(function) => UpstreamCall::Local(function.call(request, deadline)),
        Upstream::Pod(pods) => UpstreamCall::Remote(pods.call(request, deadline)),
        Upstream::Unavailable(refusal) => return Err(refusal.clone()),
    };
    call.answer(target).await
}

/// A request that a host is processing.
pub(crate) struct Run {
    permit: Permit,
    call: UpstreamCall,
}

enum UpstreamCall {
    Local(BoxFuture<'static, Result<Answer, CallError>>),
    /// A pod's address, or another node's gateway.
    Remote(BoxFuture<'static, Result<Answer, Refusal>>),
}

impl UpstreamCall {
    async fn answer(self, target: &RevisionTarget) -> Result<Answer, Refusal> {
        match self {
            Self::Local(call) => local_answer(call.await, target),
            Self::Remote(call) => call.await,
        }
    }
}

impl Run {
    fn start(
        target: &Arc<RevisionTarget>,
        mut permit: Permit,
        nodes: Option<&Arc<NodeForwarder>>,
        from: Option<Arc<str>>,
        request: Request<Body>,
        deadline: Instant,
    ) -> Result<Self, Refusal> {
        match &**target.upstream.load() {
            Upstream::Local(function) => {
                let placed = nodes.and_then(|nodes| Some((nodes, nodes.place(target, from.as_ref())?)));
                let call = match placed {
                    None => UpstreamCall::Local(function.call(request, deadline)),
                    Some((nodes, slot)) => {
                        UpstreamCall::Remote(nodes.call(target, slot, from.as_ref(), request, deadline))
                    }
                };
                Ok(Self { permit, call })
            }
            Upstream::Pod(pods) => {
                Ok(Self { permit, call: UpstreamCall::Remote(pods.call(request, deadline)) })
            }
            Upstream::Unavailable(refusal) => {
                permit.status = Some(refusal.code.status().as_u16());
                Err(refusal.clone())
            }
        }
    }

    async fn answer(mut self, target: &RevisionTarget, arrived: Instant) -> Result<RunAnswer, Refusal> {
        let started = self.permit.started();
        match self.call.answer(target).await {
            Ok(answer) => {
                let (queue, timings) = (started - arrived, &answer.timings);
                target.gate.note_run(timings.total());
                self.permit.status = Some(answer.response.status().as_u16());
                if !queue.is_zero() || timings.cold {
                    let counts = target.traffic.counts();
                    if !queue.is_zero() {
                        counts.queue.observe(queue);
                    }
                    if timings.cold {
                        counts.cold.observe(timings.load + timings.instantiate);
                    }
                }
                Ok(RunAnswer { answer, permit: Some(self.permit), queue })
            }
            Err(refusal) => {
                self.permit.status = Some(refusal.code.status().as_u16());
                Err(refusal)
            }
        }
    }
}

/// Maps the result of a call to the in-process host; records whether the host lacks the component.
fn local_answer(called: Result<Answer, CallError>, target: &RevisionTarget) -> Result<Answer, Refusal> {
    let lacks_component = matches!(called, Err(CallError::ComponentMissing(_)));
    // Read on every request, written only when it changes.
    if lacks_component != target.lacks_component.load(Ordering::Relaxed) {
        target.lacks_component.store(lacks_component, Ordering::Relaxed);
    }
    called.map_err(|error| {
        if let CallError::Internal(cause) = &error {
            tracing::error!(revision = %target.key, %cause, "the host could not run a request");
        }
        error.into()
    })
}

/// Counts a request that was not admitted.
fn refused(target: &RevisionTarget, refusal: &Refusal, arrived: Instant) {
    target.traffic.counts().ended(Some(refusal.code.status().as_u16()), arrived.elapsed());
}
