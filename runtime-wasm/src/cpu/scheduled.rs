//! The guest of one call, on a serving thread or in the pool.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use mayfly_runtime::CallError;

use super::{Lane, pool::PoolTask, slice, thread_time};
use crate::call::{GuestReply, Running};

/// The number of ticks that one call may use on serving threads over many short polls. Beyond this it is a long call.
const SERVING_TICKS_MAX: u64 = 8;

/// A guest that starts on the thread that polls it, and moves to the pool after its slice.
pub(crate) struct Scheduled {
    state: State,
    /// Ticks that passed while serving threads polled it.
    ticks: u64,
}

enum State {
    /// Not polled yet.
    New(Running),
    Serving(Running),
    Pooled(PoolTask<Result<(), CallError>>),
    /// Only during the move to the pool.
    Moving,
}

impl Scheduled {
    pub(crate) fn new(guest: Running) -> Self {
        Self { state: State::New(guest), ticks: 0 }
    }

    /// Whether the call runs on a thread of the pool instead of the polling one.
    pub(crate) fn is_pooled(&self) -> bool {
        matches!(self.state, State::Pooled(_))
    }

    pub(crate) fn poll(
        &mut self,
        lane: &Arc<Lane>,
        reply: &GuestReply,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), CallError>> {
        if matches!(self.state, State::New(_)) {
            self.begin(lane, reply);
        }
        if let State::Serving(guest) = &mut self.state {
            let polled = slice::run(lane.clock(), || guest.as_mut().poll(context));
            self.ticks += polled.ticks;
            if polled.output.is_ready() {
                lane.weight.add(lane.clock().time(self.ticks));
                return polled.output;
            }
            if !polled.used_up && self.ticks < SERVING_TICKS_MAX {
                return Poll::Pending;
            }
            // Added before the call ends: other calls of the function may be about to start.
            lane.weight.add(lane.clock().time(self.ticks));
            self.move_to_pool(lane, reply);
        }
        match &mut self.state {
            State::Pooled(task) => Pin::new(task).poll(context),
            State::New(_) | State::Serving(_) | State::Moving => Poll::Pending,
        }
    }

    fn begin(&mut self, lane: &Arc<Lane>, reply: &GuestReply) {
        if lane.weight.is_heavy() {
            self.move_to_pool(lane, reply);
        } else if let State::New(guest) = std::mem::replace(&mut self.state, State::Moving) {
            self.state = State::Serving(guest);
        }
    }

    fn move_to_pool(&mut self, lane: &Arc<Lane>, reply: &GuestReply) {
        let (State::New(guest) | State::Serving(guest)) = std::mem::replace(&mut self.state, State::Moving)
        else {
            return;
        };
        let consumed = Duration::ZERO;
        let pooled = PooledGuest { guest, lane: lane.clone(), reply: reply.clone(), consumed };
        self.state = State::Pooled(lane.spawn(pooled));
    }
}

/// A guest in the pool. The caller is woken after a poll, not during it: then the answer contains all that the guest
/// wrote before it had to wait, as when the guest runs in its caller's future.
struct PooledGuest {
    guest: Running,
    lane: Arc<Lane>,
    reply: GuestReply,
    /// Processor time in the pool so far.
    consumed: Duration,
}

impl Future for PooledGuest {
    type Output = Result<(), CallError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let before = thread_time();
        self.reply.begin_poll();
        let polled = self.guest.as_mut().poll(context);
        if polled.is_pending() {
            self.reply.end_poll();
        }
        self.consumed += thread_time().saturating_sub(before);
        polled
    }
}

impl Drop for PooledGuest {
    /// A cancelled call counts with the time used so far; one that never ran is not counted.
    fn drop(&mut self) {
        if !self.consumed.is_zero() {
            self.lane.weight.add(self.consumed);
        }
    }
}
