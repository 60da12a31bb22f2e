//! Requests of `http:invoke` tasks.

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use mayfly_workflows_engine::engine::HttpTasks;

use super::ANSWER_BYTES_MAX;
use crate::http_client::{self, HttpsClient};

/// Sends what `http:invoke` asks for.
pub(super) struct Web(HttpsClient);

impl Web {
    pub(super) fn new() -> Self {
        Self(http_client::new())
    }
}

impl HttpTasks for Web {
    fn send(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Bytes>, String>> {
        Box::pin(async move {
            let response = self
                .0
                .request(request.map(Full::new))
                .await
                .map_err(|error| http_client::innermost(&error))?;
            let (head, body) = response.into_parts();
            let body =
                Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
            Ok(Response::from_parts(head, body.to_bytes()))
        })
    }
}
