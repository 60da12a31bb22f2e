//! The access log: one line for each request to a function.

use http::{HeaderValue, Request, Response};
use mayfly_runtime::Body;
use tokio::time::Instant;

use crate::{ResponseBody, headers, refusal::Refusal, target::RevisionTarget};

/// Logs one line for each request when its response head is ready, if the level is enabled. The host logs its own line,
/// with the same request id, at the end of the call.
pub(crate) struct AccessLog {
    method: http::Method,
    path: String,
    request_id: HeaderValue,
}

impl AccessLog {
    pub(crate) fn of(request: &Request<Body>) -> Option<Self> {
        if !tracing::enabled!(target: "mayfly_gateway::access", tracing::Level::DEBUG) {
            return None;
        }
        let request_id = request.headers().get(headers::X_REQUEST_ID).cloned();
        Some(Self {
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            request_id: request_id.unwrap_or(HeaderValue::from_static("")),
        })
    }

    pub(crate) fn write(
        self,
        target: &RevisionTarget,
        outcome: &Result<Response<ResponseBody>, Refusal>,
        arrived: Instant,
    ) {
        let (status, code, timing) = match outcome {
            Ok(response) => {
                let timing = response.headers().get_all(headers::SERVER_TIMING).iter().next_back();
                (response.status(), "", timing)
            }
            Err(refusal) => (refusal.code.status(), refusal.code.as_str(), None),
        };
        tracing::debug!(
            target: "mayfly_gateway::access",
            revision = %target.key,
            method = %self.method,
            path = self.path,
            status = status.as_u16(),
            refusal = code,
            request_id = self.request_id.to_str().unwrap_or_default(),
            took_us = u64::try_from(arrived.elapsed().as_micros()).unwrap_or(u64::MAX),
            timing = timing.and_then(|timing| timing.to_str().ok()).unwrap_or_default(),
        );
    }
}
