//! Uploads of blobs: sessions, each with a file that grows.

use std::{collections::HashMap, io, path::PathBuf, sync::Arc, time::Duration};

use axum::body::Body;
use futures::StreamExt as _;
use http::StatusCode;
use parking_lot::Mutex;
use tokio::{fs, io::AsyncWriteExt as _, time::Instant};
use uuid::Uuid;

use crate::{
    blobs::BLOB_BYTES_MAX,
    error::{RegistryRefusal, refusal},
    names::{RepositoryName, upload_unknown},
};

/// The maximum number of concurrent uploads; each is a file.
const SESSIONS_MAX: usize = 256;
/// The longest pause of an upload between two chunks.
const IDLE_MAX: Duration = Duration::from_secs(3600);

#[derive(Clone)]
pub(crate) struct BlobUploads {
    folder: Arc<PathBuf>,
    sessions: Arc<Mutex<HashMap<Uuid, Session>>>,
}

struct Session {
    name: RepositoryName,
    touched: Instant,
    is_busy: bool,
}

/// The exclusive use of a session by one request. Dropped, the next request can use it.
pub(crate) struct OpenUpload {
    uploads: BlobUploads,
    id: Uuid,
}

impl Drop for OpenUpload {
    fn drop(&mut self) {
        if let Some(session) = self.uploads.sessions.lock().get_mut(&self.id) {
            session.is_busy = false;
            session.touched = Instant::now();
        }
    }
}

impl BlobUploads {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder: Arc::new(folder), sessions: Arc::default() }
    }

    pub(crate) async fn begin(&self, name: &RepositoryName) -> Result<OpenUpload, RegistryRefusal> {
        self.forget_idle().await;
        let id = Uuid::new_v4();
        {
            let mut sessions = self.sessions.lock();
            if sessions.len() >= SESSIONS_MAX {
                let message = format!("{SESSIONS_MAX} uploads are in progress: retry when one has ended");
                return Err(refusal(StatusCode::TOO_MANY_REQUESTS, "TOOMANYREQUESTS", message));
            }
            let session = Session { name: name.clone(), touched: Instant::now(), is_busy: true };
            sessions.insert(id, session);
        }
        let upload = OpenUpload { uploads: self.clone(), id };
        if let Err(error) = fs::File::create(upload.path()).await {
            upload.end().await;
            return Err(error.into());
        }
        Ok(upload)
    }

    pub(crate) fn open(&self, name: &RepositoryName, id: Uuid) -> Result<OpenUpload, RegistryRefusal> {
        let mut sessions = self.sessions.lock();
        let session = sessions.get_mut(&id).filter(|session| session.name == *name);
        let session = session.ok_or_else(upload_unknown)?;
        if session.is_busy {
            let message = "another request sends a chunk of this upload";
            return Err(refusal(StatusCode::CONFLICT, "BLOB_UPLOAD_INVALID", message));
        }
        session.is_busy = true;
        Ok(OpenUpload { uploads: self.clone(), id })
    }

    /// Removes uploads that have been idle for too long.
    pub(crate) async fn forget_idle(&self) {
        let idle: Vec<Uuid> = {
            let mut sessions = self.sessions.lock();
            let is_idle = |session: &Session| !session.is_busy && session.touched.elapsed() >= IDLE_MAX;
            let idle: Vec<_> =
                sessions.iter().filter(|(_, session)| is_idle(session)).map(|(id, _)| *id).collect();
            idle.iter().for_each(|id| drop(sessions.remove(id)));
            idle
        };
        for id in idle {
            let _ = fs::remove_file(self.folder.join(id.to_string())).await;
        }
    }
}

impl OpenUpload {
    pub(crate) fn id(&self) -> Uuid {
        self.id
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.uploads.folder.join(self.id.to_string())
    }

    pub(crate) async fn length(&self) -> io::Result<u64> {
        Ok(fs::metadata(self.path()).await?.len())
    }

    /// Appends a body, and returns the new length. Bytes received before a failure are kept, as the client may
    /// continue.
    pub(crate) async fn append(&self, body: Body) -> Result<u64, RegistryRefusal> {
        let mut length = self.length().await?;
        let mut file = fs::OpenOptions::new().append(true).open(self.path()).await?;
        let mut content = body.into_data_stream();
        while let Some(chunk) = content.next().await {
            let chunk = match chunk {
                Ok(chunk) => chunk,
                Err(error) => {
                    file.flush().await?;
                    let message = format!("the upload ended early: {error}");
                    return Err(refusal(StatusCode::BAD_REQUEST, "BLOB_UPLOAD_INVALID", message));
                }
            };
            length += chunk.len() as u64;
            if length > BLOB_BYTES_MAX {
                let message = format!("more than {BLOB_BYTES_MAX} bytes");
                return Err(refusal(StatusCode::PAYLOAD_TOO_LARGE, "SIZE_INVALID", message));
            }
            file.write_all(&chunk).await?;
        }
        file.flush().await?;
        Ok(length)
    }

    /// Ends the session and removes its file.
    pub(crate) async fn end(self) {
        self.uploads.sessions.lock().remove(&self.id);
        let _ = fs::remove_file(self.path()).await;
    }
}
