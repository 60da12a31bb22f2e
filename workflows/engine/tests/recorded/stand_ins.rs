//! What surrounds the engine in a replay: a clock that jumps only when it is let go, and doors to nowhere.

use bytes::Bytes;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mayfly_workflows_engine::engine::{
    FunctionCall, FunctionError, FunctionOutput, Functions, HttpTasks, ObjectEntry, Objects,
};
use mayfly_workflows_engine::timers::{Clock, VirtualClock};
use tokio::sync::watch;

/// A virtual clock with a brake: while it is held, a timer that is not due does not fire.
pub(crate) struct HeldClock {
    clock: VirtualClock,
    held: watch::Sender<bool>,
}

impl HeldClock {
    pub(crate) fn new() -> HeldClock {
        HeldClock { clock: VirtualClock::at(Timestamp::now()), held: watch::Sender::new(true) }
    }

    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }
}

impl Clock for HeldClock {
    fn now_ms(&self) -> i64 {
        self.clock.now_ms()
    }

    fn sleep_until(&self, at_ms: i64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let mut held = self.held.subscribe();
            if self.clock.now_ms() < at_ms {
                let released = held.wait_for(|held| !held).await.is_ok();
                assert!(released, "the clock lives as long as its waiters");
            }
            self.clock.sleep_until(at_ms).await;
        })
    }

    fn is_virtual(&self) -> bool {
        true
    }
}

/// No function, no web, no files: what a recording needs of these it cannot get here.
pub(crate) struct Nowhere;

impl Functions for Nowhere {
    fn invoke(&self, call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, FunctionError>> {
        Box::pin(async move {
            Err(FunctionError {
                error_type: "Lambda.ResourceNotFoundException".into(),
                cause: format!("Function not found: {}", call.function),
            })
        })
    }
}

impl HttpTasks for Nowhere {
    fn send(&self, _: http::Request<Bytes>) -> BoxFuture<'_, Result<http::Response<Bytes>, String>> {
        Box::pin(async { Err("no network in a replay".into()) })
    }
}

impl Objects for Nowhere {
    fn get(&self, bucket: &str, key: &str) -> BoxFuture<'_, Result<Bytes, String>> {
        let message = format!("no object {bucket}/{key}");
        Box::pin(async move { Err(message) })
    }

    fn put(&self, _: &str, _: &str, _: Bytes) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Err("no objects in a replay".into()) })
    }

    fn list(&self, _: &str, _: &str) -> BoxFuture<'_, Result<Vec<ObjectEntry>, String>> {
        Box::pin(async { Err("no objects in a replay".into()) })
    }
}
