//! Asynchronous invocations between the gateway, which accepts them, and the workflow engine, which stores them; and
//! the routes below `/invocations` for listing, retrying and removing them.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Path, Query, State},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, StatusCode};
use mayfly_api::ObjectKey;
use mayfly_gateway::{InvocationQueue, Refusal};
use mayfly_workflows_controller::invocations::{EnqueueError, Invocations};
use mayfly_workflows_engine::engine::{ExecutionError, RunStatus};
use serde::Deserialize;
use serde_json::{Value, json};

/// The default number of invocations of a page.
const PAGE_DEFAULT: usize = 100;
/// The largest page.
const PAGE_MAX: usize = 1_000;

/// The gateway's queue of invocations.
pub(super) struct DurableQueue(pub(super) Arc<Invocations>);

impl InvocationQueue for DurableQueue {
    fn enqueue(
        &self,
        function: ObjectKey,
        request: Request<Bytes>,
    ) -> BoxFuture<'_, Result<String, Refusal>> {
        Box::pin(async move {
            self.0.enqueue(function, request).await.map_err(|error| match error {
                EnqueueError::Full(full) => Refusal::too_many_invocations(full),
                error => Refusal::invocation_refused(error),
            })
        })
    }
}

/// The query parameters of a list or a removal.
#[derive(Debug, Deserialize)]
struct Selection {
    status: Option<String>,
    limit: Option<usize>,
    next: Option<String>,
}

impl Selection {
    fn status(&self) -> Result<Option<RunStatus>, Failure> {
        let Some(text) = &self.status else { return Ok(None) };
        let status = RunStatus::parse(&text.to_ascii_uppercase());
        let why = || format!("unknown status {text:?}: use RUNNING, SUCCEEDED, FAILED or ABORTED");
        status.map(Some).ok_or_else(|| Failure(StatusCode::BAD_REQUEST, why()))
    }
}

/// An error response: `{"error": {"code": …, "message": …}}`, with a code of docs/errors.md.
struct Failure(StatusCode, String);

impl axum::response::IntoResponse for Failure {
    fn into_response(self) -> Response {
        let code = match self.0 {
            StatusCode::BAD_REQUEST => "bad_request",
            StatusCode::NOT_FOUND => "not_found",
            StatusCode::TOO_MANY_REQUESTS => "queue_full",
            _ => "unavailable",
        };
        (self.0, Json(json!({"error": {"code": code, "message": self.1}}))).into_response()
    }
}

impl From<ExecutionError> for Failure {
    fn from(error: ExecutionError) -> Self {
        let status = match error {
            ExecutionError::InvalidPage => StatusCode::BAD_REQUEST,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self(status, error.to_string())
    }
}

fn absent(id: &str) -> Failure {
    Failure(StatusCode::NOT_FOUND, format!("there is no invocation {id:?} of this function"))
}

/// The routes: `/invocations/NAMESPACE/FUNCTION` (GET, DELETE), `…/ID` (GET), `…/ID/retry` (POST).
pub(super) fn routes(invocations: Arc<Invocations>) -> Router {
    Router::new()
        .route("/invocations/{namespace}/{function}", get(list).delete(purge))
        .route("/invocations/{namespace}/{function}/{id}", get(describe))
        .route("/invocations/{namespace}/{function}/{id}/retry", post(retry))
        .with_state(invocations)
}

async fn list(
    State(invocations): State<Arc<Invocations>>,
    Path((namespace, function)): Path<(String, String)>,
    Query(selection): Query<Selection>,
) -> Result<Json<Value>, Failure> {
    let limit = selection.limit.unwrap_or(PAGE_DEFAULT).clamp(1, PAGE_MAX);
    let status = selection.status()?;
    let page = invocations.list(&ObjectKey::new(namespace, function), status, limit, selection.next).await?;
    Ok(Json(json!({"items": page.items, "next": page.next})))
}

async fn describe(
    State(invocations): State<Arc<Invocations>>,
    Path((namespace, function, id)): Path<(String, String, String)>,
) -> Result<Json<Value>, Failure> {
    let found = invocations.describe(&ObjectKey::new(namespace, function), &id).await?;
    found.map(Json).ok_or_else(|| absent(&id))
}

async fn retry(
    State(invocations): State<Arc<Invocations>>,
    Path((namespace, function, id)): Path<(String, String, String)>,
) -> Result<Response, Failure> {
    let again = invocations.retry(&ObjectKey::new(namespace, function), &id).await;
    let failure = |error: EnqueueError| {
        let status = match error {
            EnqueueError::Full(_) => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        Failure(status, error.to_string())
    };
    match again.map_err(failure)? {
        Some(id) => Ok((StatusCode::ACCEPTED, Json(json!({"invocation": id}))).into_response()),
        None => Err(absent(&id)),
    }
}

async fn purge(
    State(invocations): State<Arc<Invocations>>,
    Path((namespace, function)): Path<(String, String)>,
    Query(selection): Query<Selection>,
) -> Result<Json<Value>, Failure> {
    let status = selection.status()?;
    let purged = invocations.purge(&ObjectKey::new(namespace, function), status).await?;
    Ok(Json(json!({"purged": purged})))
}
