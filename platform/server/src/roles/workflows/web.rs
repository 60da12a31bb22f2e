//! Requests of `http:invoke` tasks, and requests to services at an endpoint.

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, future::BoxFuture};
use http::{Request, Response};
use http_body_util::{BodyDataStream, BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use mayfly_workflows_engine::engine::{HttpTasks, Streamed};

use super::ANSWER_BYTES_MAX;
use mayfly_cli::http_client::{self, HttpsClient};

/// Sends the requests of `http:invoke`.
pub(super) struct Web(HttpsClient);

impl Web {
    pub(super) fn new() -> Self {
        Self(http_client::new())
    }

    async fn response_to(&self, request: Request<Bytes>) -> Result<Response<Incoming>, String> {
        let answer = self.0.request(request.map(Full::new)).await;
        answer.map_err(|error| http_client::innermost(&error))
    }
}

impl HttpTasks for Web {
    fn send(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Bytes>, String>> {
        Box::pin(async move {
            let (head, body) = self.response_to(request).await?.into_parts();
            let body =
                Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
            Ok(Response::from_parts(head, body.to_bytes()))
        })
    }

    fn open(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Streamed>, String>> {
        Box::pin(async move {
            let response = self.response_to(request).await?;
            Ok(response.map(|body| {
                BodyDataStream::new(body).map_err(|error| http_client::innermost(&error)).boxed()
            }))
        })
    }
}
