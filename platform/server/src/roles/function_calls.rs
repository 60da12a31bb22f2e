//! The connection from the API server to the gateway: within one process, a call.

use std::sync::Arc;

use axum::body::Body;
use http::Request;
use http_body_util::BodyExt as _;
use mayfly_apiserver::FunctionConnector;
use mayfly_gateway::GatewayHandle;

/// Calls functions for `functions/x/proxy`. The gateway's refusals are responses.
pub(super) fn connector(gateway: GatewayHandle) -> FunctionConnector {
    Arc::new(move |namespace, name, request: Request<Body>| {
        let gateway = gateway.clone();
        Box::pin(async move {
            let request = request.map(|body| body.map_err(Into::into).boxed_unsync());
            match gateway.call(&namespace, &name, request).await {
                Ok(response) => response.map(Body::new),
                Err(refusal) => refusal.into_response(&uuid::Uuid::new_v4().to_string()).map(Body::new),
            }
        })
    })
}
