//! Looks up which components the artifact store has, through the API.

use std::{collections::HashMap, time::Duration};

use http::{Request, StatusCode};
use kube::{Client, client::Body};
use mayfly_api::Digest;
use parking_lot::Mutex;
use tokio::time::Instant;

/// The time for which the presence of a component is cached.
const CACHED_FOR: Duration = Duration::from_secs(60);
/// The maximum number of cached components.
const REMEMBERED_MAX: usize = 20_000;

pub(super) struct Presence {
    client: Client,
    seen: Mutex<HashMap<Digest, Instant>>,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot look up component {digest}: {cause}")]
pub(super) struct PresenceError {
    digest: Digest,
    cause: String,
}

impl Presence {
    pub(super) fn new(client: Client) -> Self {
        Self { client, seen: Mutex::default() }
    }

    pub(super) async fn has(&self, digest: Digest) -> Result<bool, PresenceError> {
        let now = Instant::now();
        if self.seen.lock().get(&digest).is_some_and(|at| now.duration_since(*at) < CACHED_FOR) {
            return Ok(true);
        }
        let failed = |cause: String| PresenceError { digest, cause };
        let request = Request::head(format!("/artifacts/{digest}"));
        let request = request.body(Body::empty()).map_err(|error| failed(error.to_string()))?;
        let response = self.client.send(request).await.map_err(|error| failed(error.to_string()))?;
        match response.status() {
            status if status.is_success() => {
                let mut seen = self.seen.lock();
                if seen.len() >= REMEMBERED_MAX {
                    seen.clear();
                }
                seen.insert(digest, now);
                Ok(true)
            }
            StatusCode::NOT_FOUND => Ok(false),
            status => Err(failed(format!("the API answered {status}"))),
        }
    }
}
