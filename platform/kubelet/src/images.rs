//! The node's images over HTTP: `GET /images`, `POST /images/import` (the body is an archive), `POST
//! /images/pull?reference=…` (the body: nothing, or a Docker `config.json` with logins), `DELETE /images?reference=…`.

use std::{path::PathBuf, sync::Arc};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use futures::StreamExt as _;
use mayfly_runtime::{ImageStore, PullSecret, Runtime, RuntimeError};
use serde::Deserialize;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

use crate::streams::HttpRefusal;

/// The largest archive, in bytes; images for machine learning have about 10 GiB.
const ARCHIVE_BYTES_MAX: u64 = 64 << 30;

/// The image stores of the runtimes that have one.
#[derive(Clone)]
pub(crate) struct NodeImages {
    runtimes: Vec<Arc<dyn Runtime>>,
    folder: Arc<PathBuf>,
}

#[derive(Deserialize)]
struct ImageQuery {
    reference: String,
}

impl NodeImages {
    pub(crate) fn new(runtimes: Vec<Arc<dyn Runtime>>, folder: PathBuf) -> Self {
        Self { runtimes, folder: Arc::new(folder) }
    }

    pub(crate) fn router(self) -> Router {
        Router::new()
            .route("/images", get(list).delete(remove))
            .route("/images/import", post(import))
            .route("/images/pull", post(pull))
            .with_state(self)
    }

    fn store(&self) -> Result<&dyn ImageStore, HttpRefusal> {
        self.runtimes.iter().find_map(|runtime| runtime.images()).ok_or_else(|| {
            let message = "this node runs no containers, so it has no images: see what mayfly up says about --containers";
            (StatusCode::NOT_IMPLEMENTED, message.to_owned())
        })
    }

    /// Writes an archive to a file, which is removed when it is dropped.
    async fn receive(&self, body: Body) -> Result<tempfile::TempPath, HttpRefusal> {
        let io = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::StorageFull => {
                (StatusCode::INSUFFICIENT_STORAGE, "the node's disk is full".into())
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, format!("cannot keep the archive: {error}")),
        };
        tokio::fs::create_dir_all(&*self.folder).await.map_err(io)?;
        let (file, path) = tempfile::NamedTempFile::new_in(&*self.folder).map_err(io)?.into_parts();
        let mut file = tokio::fs::File::from_std(file);
        let (mut body, mut bytes) = (body.into_data_stream(), 0_u64);
        while let Some(chunk) = body.next().await {
            let chunk = chunk
                .map_err(|error| (StatusCode::BAD_REQUEST, format!("the upload ended early: {error}")))?;
            bytes += chunk.len() as u64;
            if bytes > ARCHIVE_BYTES_MAX {
                return Err((StatusCode::PAYLOAD_TOO_LARGE, format!("more than {ARCHIVE_BYTES_MAX} bytes")));
            }
            file.write_all(&chunk).await.map_err(io)?;
        }
        file.flush().await.map_err(io)?;
        Ok(path)
    }
}

async fn list(State(images): State<NodeImages>) -> Result<Response, HttpRefusal> {
    let listed = images.store()?.list().await.map_err(refusal)?;
    Ok(Json(json!({"items": listed})).into_response())
}

async fn import(State(images): State<NodeImages>, body: Body) -> Result<Response, HttpRefusal> {
    images.store()?;
    let archive = images.receive(body).await?;
    let imported = images.store()?.import(&archive).await.map_err(refusal)?;
    Ok(Json(json!({"items": imported})).into_response())
}

async fn pull(
    State(images): State<NodeImages>,
    Query(query): Query<ImageQuery>,
    body: Bytes,
) -> Result<Response, HttpRefusal> {
    let secrets: Vec<PullSecret> =
        (body.starts_with(b"{")).then(|| PullSecret(body.to_vec())).into_iter().collect();
    let pulled = images.store()?.pull(&query.reference, &secrets).await.map_err(refusal)?;
    Ok(Json(json!({"items": [pulled]})).into_response())
}

async fn remove(
    State(images): State<NodeImages>,
    Query(query): Query<ImageQuery>,
) -> Result<Response, HttpRefusal> {
    images.store()?.remove(&query.reference).await.map_err(refusal)?;
    Ok(Json(json!({"items": []})).into_response())
}

fn refusal(error: RuntimeError) -> HttpRefusal {
    let code = match &error {
        RuntimeError::ImageMissing(_) | RuntimeError::NoSandbox(_) => StatusCode::NOT_FOUND,
        RuntimeError::ImageName(_) | RuntimeError::Invalid(_) | RuntimeError::ConfigRefused(_) => {
            StatusCode::BAD_REQUEST
        }
        RuntimeError::NoRoom(_) => StatusCode::INSUFFICIENT_STORAGE,
        RuntimeError::StartFailed(_) | RuntimeError::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (code, error.to_string())
}
