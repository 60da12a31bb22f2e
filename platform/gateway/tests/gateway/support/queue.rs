//! A queue of asynchronous invocations.

use std::sync::Mutex;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::Request;
use mayfly_api::ObjectKey;
use mayfly_gateway::{InvocationQueue, Refusal};

/// Records what is queued: the function, the URI, the header of the kind of invocation, and the body.
#[derive(Default)]
pub struct RecordedQueue(Mutex<Vec<String>>);

impl RecordedQueue {
    pub fn queued(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

impl InvocationQueue for RecordedQueue {
    fn enqueue(
        &self,
        function: ObjectKey,
        request: Request<Bytes>,
    ) -> BoxFuture<'_, Result<String, Refusal>> {
        let kind = request.headers().get(mayfly_gateway::HEADER_INVOCATION);
        let body = String::from_utf8_lossy(request.body());
        let line = format!("{function} {} {kind:?} {body}", request.uri());
        let mut queued = self.0.lock().unwrap();
        queued.push(line);
        let id = format!("i{}", queued.len());
        Box::pin(async move { Ok(id) })
    }
}
