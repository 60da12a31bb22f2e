//! `functions/x/proxy`: calls of functions for users of the API, who need no public address of the function.

use axum::{body::Body, response::Response};
use serde_json::json;

use super::prefix_location;
use crate::{call::ResourceRequest, status::ApiError};

pub(super) const GROUP: &str = "mayfly.dev";
pub(super) const PLURAL: &str = "functions";
/// The number of path segments before the proxied path: `/apis/mayfly.dev/v1/namespaces/NS/functions/NAME/proxy`.
pub(super) const SEGMENTS: usize = 8;

impl ResourceRequest {
    /// Calls the function; it sees `path` and the request's query.
    pub(super) async fn pass_to_function(&self, path: &str, body: Body) -> Result<Response, ApiError> {
        let (namespace, name) = (&self.target.namespace, self.target.name.as_deref().unwrap_or_default());
        self.review_connection(json!({"kind": "FunctionProxyOptions", "apiVersion": "v1", "path": path}))
            .await?;
        self.stored(self.target.kind, name)?;
        let call = self.server.functions.get();
        let call =
            call.ok_or_else(|| ApiError::unavailable("functions cannot be called before the gateway runs"))?;
        let query = self.parts.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        let uri = format!("{path}{query}").parse();
        let uri = uri.map_err(|_| ApiError::bad_request("the path cannot be passed on"))?;
        let mut response = call(namespace.clone(), name.to_owned(), self.passed_on(uri, body)).await;
        prefix_location(response.headers_mut(), self.parts.uri.path(), path);
        Ok(response)
    }
}
