//! The body of a response: the frames that were ready, then the rest as the guest writes it.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use mayfly_runtime::{BodyError, CallError};
use tokio::task::AbortHandle;
use wasmtime_wasi_http::WasiBody;

use super::{CallLimits, GuestReply};
use crate::{cpu::Scheduled, guest::GuestProgram, record::Recording};

/// A guest's body.
pub(crate) struct AnswerBody {
    ready: VecDeque<Frame<Bytes>>,
    /// The size of `ready` in bytes, if it is the whole body and has no trailers.
    whole_bytes: Option<u64>,
    rest: Rest,
}

enum Rest {
    Nothing,
    /// The body ends here, with an error.
    Truncated(Option<CallError>),
    Streaming(Streaming),
}

struct Streaming {
    body: WasiBody,
    bytes: u64,
    limits: CallLimits,
    /// The task in which the guest continues; `None` if it has ended.
    guest: Option<GuestTask>,
    recording: Recording,
}

/// Cancels the guest when the response is dropped.
pub(super) struct GuestTask {
    task: AbortHandle,
    reply: GuestReply,
    failed: Arc<OnceLock<CallError>>,
    /// The body has ended: the guest may continue until its deadline.
    detached: bool,
}

impl GuestTask {
    /// Detaches the guest: the body has ended or the caller no longer needs it, and the guest continues until its
    /// deadline.
    pub(super) fn detach(&mut self) {
        self.detached = true;
    }

    fn failed(&self) -> Option<CallError> {
        self.failed.get().cloned().or_else(|| self.reply.failed())
    }
}

impl Drop for GuestTask {
    fn drop(&mut self) {
        if !self.detached {
            self.task.abort();
        }
    }
}

/// Lets a guest continue in its own task until its deadline or the end of its program.
pub(super) fn continue_in_background(
    guest: Scheduled,
    reply: GuestReply,
    limits: CallLimits,
    program: &GuestProgram,
    recording: Recording,
) -> GuestTask {
    let failed = Arc::new(OnceLock::new());
    let failing = failed.clone();
    let (lane, replying) = (program.lane.clone(), reply.clone());
    let mut over = program.over();
    let task = tokio::spawn(async move {
        let mut scheduled = guest;
        let mut guest = std::pin::pin!(poll_fn(|cx| scheduled.poll(&lane, &replying, cx)));
        let ended = tokio::select! {
            biased;
            // An error would mean that the program was dropped, which cannot happen while its guest runs.
            _ = over.wait_for(|over| *over) => Ok(Err(CallError::ShuttingDown)),
            ended = tokio::time::timeout_at(limits.deadline, &mut guest) => ended,
        };
        let failed = match ended {
            Ok(ended) => ended.err(),
            Err(_) => Some(CallError::TimedOut { limit: limits.timeout }),
        };
        // Set before the guest, and with it its end of the body, is dropped at the end of this block.
        if let Some(error) = failed {
            recording.failed(&error);
            drop(failing.set(error));
        }
    });
    GuestTask { task: task.abort_handle(), reply, failed, detached: false }
}

impl AnswerBody {
    /// A complete body.
    pub(super) fn whole(ready: VecDeque<Frame<Bytes>>) -> Self {
        let mut whole_bytes = Some(0);
        for frame in &ready {
            whole_bytes = whole_bytes.zip(frame.data_ref()).map(|(sum, data)| sum + data.len() as u64);
        }
        Self { ready, whole_bytes, rest: Rest::Nothing }
    }

    /// The output of a failed guest: complete if the guest had finished its body before.
    pub(super) fn truncated(ready: VecDeque<Frame<Bytes>>, ended: bool, failed: Option<CallError>) -> Self {
        if ended {
            return Self::whole(ready);
        }
        Self { ready, whole_bytes: None, rest: Rest::Truncated(failed) }
    }

    pub(super) fn streaming(
        ready: VecDeque<Frame<Bytes>>,
        bytes: usize,
        body: WasiBody,
        guest: Option<GuestTask>,
        limits: CallLimits,
        recording: &Recording,
    ) -> Self {
        let recording = recording.clone();
        let streaming = Streaming { body, bytes: bytes as u64, limits, guest, recording };
        Self { ready, whole_bytes: None, rest: Rest::Streaming(streaming) }
    }
}

impl Streaming {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, CallError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else { return Poll::Pending };
        let failed = || self.guest.as_ref().and_then(GuestTask::failed);
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                self.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                let limit_bytes = self.limits.response_bytes_max;
                if self.bytes > limit_bytes {
                    let error = CallError::ResponseTooLarge { limit_bytes };
                    self.recording.failed(&error);
                    self.guest = None;
                    Some(Err(error))
                } else {
                    Some(Ok(frame))
                }
            }
            Some(Err(error)) => {
                Some(Err(failed().unwrap_or_else(|| CallError::GuestError(error.to_string()))))
            }
            None => match failed() {
                Some(error) => Some(Err(error)),
                None => {
                    if let Some(guest) = &mut self.guest {
                        guest.detach();
                    }
                    None
                }
            },
        })
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(frame) = self.ready.pop_front() {
            if let (Some(left), Some(data)) = (&mut self.whole_bytes, frame.data_ref()) {
                *left -= data.len() as u64;
            }
            return Poll::Ready(Some(Ok(frame)));
        }
        match &mut self.rest {
            Rest::Nothing => Poll::Ready(None),
            Rest::Truncated(error) => Poll::Ready(error.take().map(|error| Err(error.into()))),
            Rest::Streaming(streaming) => {
                let frame = std::task::ready!(streaming.poll_frame(cx));
                if !matches!(frame, Some(Ok(_))) {
                    self.rest = Rest::Nothing;
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ready.is_empty() && matches!(self.rest, Rest::Nothing)
    }

    fn size_hint(&self) -> SizeHint {
        self.whole_bytes.map_or_else(SizeHint::new, SizeHint::with_exact)
    }
}
