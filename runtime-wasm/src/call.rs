//! One request through one instance.
//!
//! ```text
//! running ──(guest answers, and ends or waits)──▶ answered ──(body read to its end)──▶ done
//!    │ traps, returns without answer, deadline        │ traps, deadline: the body ends with an error
//!    └▶ failed                                        └▶ client disconnected: the instance is dropped
//! ```
//! The guest runs inside the caller's future, without a task of its own, until it has answered and waits; a guest that
//! computes for long continues in the pool (`crate::cpu`). Most guests end together with their answer, and the complete
//! response is returned at once. Only a guest that continues after its answer gets its own task, so that its deadline
//! applies even when the client does not read the body.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{HeaderValue, Response, header::CONTENT_LENGTH, response::Parts};
use http_body::{Body as _, Frame};
use mayfly_runtime::CallError;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};
use wasmtime_wasi_http::WasiBody;

mod body;
pub(crate) mod p2;
pub(crate) mod p3;

pub(crate) use body::AnswerBody;

use crate::{cpu::Scheduled, guest::GuestProgram, record::Recording};

/// The maximum number of body bytes that are collected before the response is returned.
const GATHERED_BYTES_MAX: usize = 64 << 10;

/// A guest running one request; completes when the guest ends.
pub(crate) type Running = Pin<Box<dyn Future<Output = Result<(), CallError>> + Send>>;

/// The receiver of the guest's answer.
#[derive(Clone, Default)]
pub(crate) struct GuestReply(Arc<Mutex<ReplyState>>);

#[derive(Default)]
struct ReplyState {
    answer: Option<Result<Response<WasiBody>, String>>,
    instantiated: Option<Instant>,
    /// The body of a guest that failed after its response began, as far as the guest had written it.
    salvaged_body: Option<BufferedBody>,
    /// Why the guest failed; set before its instance, and with it the guest's end of the body, is dropped.
    failed: Option<CallError>,
    /// Whether a pool thread is polling the guest.
    polling: bool,
    /// The task to wake when the guest has answered and is not being polled.
    waiting: Option<Waker>,
}

impl GuestReply {
    /// Stores the answer; `Err` is the guest's own error code.
    pub(crate) fn put(&self, answer: Result<Response<WasiBody>, String>) {
        self.0.lock().answer = Some(answer);
    }

    /// Records that the instance exists.
    pub(crate) fn instantiated(&self) {
        self.0.lock().instantiated = Some(Instant::now());
    }

    /// Records why the guest failed.
    pub(crate) fn fail(&self, error: &CallError) {
        self.0.lock().failed.get_or_insert_with(|| error.clone());
    }

    fn failed(&self) -> Option<CallError> {
        self.0.lock().failed.clone()
    }

    /// Marks the start of a poll on a pool thread.
    pub(crate) fn begin_poll(&self) {
        self.0.lock().polling = true;
    }

    /// Marks the end of a poll: the guest waits, or its slice is over. The end of the guest is reported by its task.
    pub(crate) fn end_poll(&self) {
        let mut state = self.0.lock();
        state.polling = false;
        let waiting = if state.answer.is_some() { state.waiting.take() } else { None };
        drop(state);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }

    fn take(&self) -> Option<Result<Response<WasiBody>, String>> {
        self.0.lock().answer.take()
    }

    /// The answer of a guest in the pool. While the guest is being polled, registers the task to be woken instead.
    fn take_or_wait(&self, context: &Context<'_>) -> Option<Result<Response<WasiBody>, String>> {
        let mut state = self.0.lock();
        let answer = if state.polling { None } else { state.answer.take() };
        if answer.is_none() {
            state.waiting = Some(context.waker().clone());
        }
        answer
    }
}

/// The part of a body that was available at once.
#[derive(Default)]
struct BufferedBody {
    frames: VecDeque<Frame<Bytes>>,
    bytes: usize,
    /// Whether the body has ended.
    ended: bool,
}

impl BufferedBody {
    /// Takes the frames that are ready; returns `true` if there were any.
    fn gather(&mut self, body: &mut WasiBody, cx: &mut Context<'_>) -> Result<bool, CallError> {
        let before = self.frames.len();
        while !self.ended && self.bytes < GATHERED_BYTES_MAX {
            match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.bytes += frame.data_ref().map_or(0, Bytes::len);
                    self.frames.push_back(frame);
                }
                Poll::Ready(Some(Err(error))) => return Err(CallError::GuestError(error.to_string())),
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => break,
            }
        }
        Ok(self.frames.len() > before || self.ended)
    }
}

/// The result of [`answer`].
pub(crate) struct Answered {
    pub(crate) response: Response<AnswerBody>,
    pub(crate) instantiated: Option<Instant>,
}

/// The limits of an answer.
#[derive(Clone, Copy)]
pub(crate) struct CallLimits {
    pub(crate) deadline: Instant,
    pub(crate) timeout: std::time::Duration,
    pub(crate) response_bytes_max: u64,
}

/// Runs a guest until its response can be returned.
pub(crate) async fn answer(
    guest: Running,
    reply: GuestReply,
    limits: CallLimits,
    program: &GuestProgram,
    recording: &Recording,
) -> Result<Answered, CallError> {
    let guest = Some(Scheduled::new(guest));
    let mut exchange = Exchange { guest, program, reply, limits, late: None, head: None };
    poll_fn(|cx| exchange.poll(cx)).await?;
    exchange.finish(recording)
}

struct Exchange<'a> {
    /// `None` when the guest has ended.
    guest: Option<Scheduled>,
    program: &'a GuestProgram,
    reply: GuestReply,
    limits: CallLimits,
    late: Option<Pin<Box<Sleep>>>,
    head: Option<Head>,
}

struct Head {
    parts: Parts,
    body: WasiBody,
    gathered: BufferedBody,
    /// Why the guest ended, if it failed after its answer.
    failed: Option<CallError>,
}

impl Exchange<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        loop {
            let ended = self.poll_guest(cx);
            if self.head.is_none() {
                match self.take_answer(ended.is_some(), cx) {
                    Some(Ok(response)) => self.head = Some(Head::new(response)?),
                    Some(Err(code)) => return Poll::Ready(Err(CallError::GuestError(code))),
                    None => match ended {
                        Some(Err(error)) => return Poll::Ready(Err(error)),
                        Some(Ok(())) => return Poll::Ready(Err(CallError::NoAnswer)),
                        None => return self.poll_deadline(cx),
                    },
                }
            }
            let Some(head) = &mut self.head else { continue };
            if let Some(Err(error)) = ended {
                head.fail(error, &self.reply, cx);
                return Poll::Ready(Ok(()));
            }
            let progress = match head.gathered.gather(&mut head.body, cx) {
                Ok(progress) => progress,
                Err(error) => return Poll::Ready(Err(error)),
            };
            if head.gathered.bytes as u64 > self.limits.response_bytes_max {
                let limit_bytes = self.limits.response_bytes_max;
                return Poll::Ready(Err(CallError::ResponseTooLarge { limit_bytes }));
            }
            // When a failed guest is dropped, its body seems to end: report the failure instead.
            if let Some(error) = self.guest.as_ref().and_then(|_| self.reply.failed()) {
                head.gathered.ended = false;
                head.failed = Some(error);
                self.guest = None;
                return Poll::Ready(Ok(()));
            }
            let full = head.gathered.bytes >= GATHERED_BYTES_MAX;
            if self.guest.is_none() || head.gathered.ended || full || !progress {
                return Poll::Ready(Ok(()));
            }
            // Reading made room in the body, which the guest may have waited for.
        }
    }

    fn poll_guest(&mut self, cx: &mut Context<'_>) -> Option<Result<(), CallError>> {
        let guest = self.guest.as_mut()?;
        let Poll::Ready(ended) = guest.poll(&self.program.lane, &self.reply, cx) else { return None };
        self.guest = None;
        Some(ended)
    }

    fn take_answer(
        &self,
        guest_ended: bool,
        context: &Context<'_>,
    ) -> Option<Result<Response<WasiBody>, String>> {
        let pooled = self.guest.as_ref().is_some_and(Scheduled::is_pooled);
        if pooled && !guest_ended { self.reply.take_or_wait(context) } else { self.reply.take() }
    }

    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        let deadline = self.limits.deadline;
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        late.as_mut().poll(cx).map(|()| Err(CallError::TimedOut { limit: self.limits.timeout }))
    }

    fn finish(self, recording: &Recording) -> Result<Answered, CallError> {
        let head = self.head.ok_or(CallError::NoAnswer)?;
        head.check_length()?;
        let instantiated = self.reply.0.lock().instantiated;
        let Head { parts, body, gathered, failed } = head;
        let body = match (self.guest, gathered.ended) {
            // The usual case: the body is complete and the guest has ended.
            (None, true) if failed.is_none() => AnswerBody::whole(gathered.frames),
            (None, _) if failed.is_some() => AnswerBody::truncated(gathered.frames, gathered.ended, failed),
            // The guest continues after its answer.
            (Some(guest), true) => {
                body::continue_in_background(guest, self.reply, self.limits, self.program, recording.clone())
                    .detach();
                AnswerBody::whole(gathered.frames)
            }
            (guest, _) => {
                let BufferedBody { frames, bytes, .. } = gathered;
                let guest = guest.map(|guest| {
                    body::continue_in_background(
                        guest,
                        self.reply,
                        self.limits,
                        self.program,
                        recording.clone(),
                    )
                });
                AnswerBody::streaming(frames, bytes, body, guest, self.limits, recording)
            }
        };
        Ok(Answered { response: Response::from_parts(parts, body), instantiated })
    }
}

impl Head {
    fn new(response: Response<WasiBody>) -> Result<Self, CallError> {
        let (parts, body) = response.into_parts();
        if parts.status.is_informational() {
            // An informational status announces another response, which cannot follow.
            let status = parts.status.as_u16();
            return Err(CallError::GuestError(format!("{status} is not a final response status")));
        }
        Ok(Self { parts, body, gathered: BufferedBody::default(), failed: None })
    }

    /// Checks the length of a complete body against its content-length. A connection sends the body as it is, so with a
    /// wrong header its client would take the next response for the rest of this one, or the reverse. An empty body is
    /// valid: responses to HEAD and responses with status 304 have none.
    fn check_length(&self) -> Result<(), CallError> {
        let BufferedBody { bytes, ended, .. } = self.gathered;
        if !ended || bytes == 0 {
            return Ok(());
        }
        let parsed = |said: &HeaderValue| said.to_str().ok().and_then(|said| said.parse::<usize>().ok());
        match self.parts.headers.get_all(CONTENT_LENGTH).iter().find(|said| parsed(said) != Some(bytes)) {
            None => Ok(()),
            Some(said) => Err(self.failed.clone().unwrap_or_else(|| {
                CallError::GuestError(format!(
                    "its body has {bytes} bytes, but its content-length is {said:?}"
                ))
            })),
        }
    }

    /// Handles a guest that failed after its response began: what it wrote until then is the response.
    fn fail(&mut self, error: CallError, reply: &GuestReply, cx: &mut Context<'_>) {
        match reply.0.lock().salvaged_body.take() {
            Some(salvaged_body) => self.gathered = salvaged_body,
            None if self.gathered.ended => {}
            // An end that arrives now may only mean that the guest was dropped.
            None => {
                self.gathered.gather(&mut self.body, cx).ok();
                self.gathered.ended = false;
            }
        }
        self.failed = Some(error);
    }
}

impl GuestReply {
    /// Reads the output of a failed guest while its instance still exists: afterwards, a finished body cannot be told
    /// from an abandoned one.
    pub(crate) fn drain_body(&self) {
        let mut state = self.0.lock();
        let mut gathered = BufferedBody::default();
        let Some(Ok(response)) = &mut state.answer else { return };
        let mut cx = Context::from_waker(std::task::Waker::noop());
        // An error of the body is the failure itself.
        gathered.gather(response.body_mut(), &mut cx).ok();
        state.salvaged_body = Some(gathered);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use http_body_util::{BodyExt as _, Full};

    use super::*;

    fn head(status: u16, length: Option<&'static str>, body: &'static str) -> Result<Head, CallError> {
        let body = Full::from(body).map_err(|never| match never {}).boxed_unsync();
        let mut response = Response::new(body);
        *response.status_mut() = status.try_into().unwrap();
        if let Some(length) = length {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static(length));
        }
        Head::new(response)
    }

    #[test]
    fn a_whole_body_is_as_long_as_its_header_says() {
        for (length, body, fits) in [
            (None, "hello", true),
            (Some("5"), "hello", true),
            (Some("10"), "hello", false),
            (Some("3"), "hello", false),
            (Some("five"), "hello", false),
            (Some("7"), "", true),
        ] {
            let mut head = head(200, length, body).unwrap();
            head.gathered.gather(&mut head.body, &mut Context::from_waker(Waker::noop())).unwrap();
            assert!(head.gathered.ended);
            assert_eq!(head.check_length().is_ok(), fits, "{length:?} {body:?}");
            head.failed = Some(CallError::NoAnswer);
            let why = head.check_length().err();
            assert_eq!(why, (!fits).then_some(CallError::NoAnswer), "a guest that failed is told why it did");
        }
    }

    #[test]
    fn an_informational_status_is_rejected_as_response() {
        for status in [100, 101, 103] {
            let expected = CallError::GuestError(format!("{status} is not a final response status"));
            assert_eq!(head(status, None, "").err(), Some(expected));
        }
        for status in [200, 304, 599] {
            assert_eq!(head(status, None, "").err(), None);
        }
    }
}
