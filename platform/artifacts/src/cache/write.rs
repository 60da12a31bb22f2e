//! Writes: a content goes to the origin before it is kept here.

use std::{io, path::Path, sync::Arc, time::Duration};

use bytes::BytesMut;
use futures::{StreamExt as _, stream};
use mayfly_api::Digest;
use parking_lot::Mutex;
use tokio::{
    fs::File,
    io::AsyncReadExt as _,
    time::{Instant, sleep_until, timeout},
};

use super::{OriginCache, stalled};
use crate::origin::{ContentStream, OriginError};

/// Bytes of a file that are sent at once.
const CHUNK_BYTES: usize = 256 << 10;

impl OriginCache {
    /// Sets a content's age to zero at the origin; returns whether the origin has it.
    pub(crate) async fn renew(&self, digest: Digest) -> Result<bool, OriginError> {
        let limit = self.config.stall_timeout;
        let renewed = timeout(limit, self.origin.renew(digest)).await;
        renewed.unwrap_or_else(|_| Err(OriginError::Unavailable(stalled(limit))))
    }

    /// Stores the content of a file at the origin. Fails when the origin takes no data, and does not answer, for
    /// [`super::CacheConfig::stall_timeout`].
    pub(crate) async fn send(
        &self,
        digest: Digest,
        bytes: u64,
        file: &Path,
    ) -> io::Result<Result<(), OriginError>> {
        let taken = Arc::new(Mutex::new(Instant::now()));
        let content = chunks_of(File::open(file).await?, taken.clone());
        let mut upload = self.origin.upload(digest, bytes, content);
        let limit: Duration = self.config.stall_timeout;
        loop {
            let deadline = *taken.lock() + limit;
            tokio::select! {
                sent = &mut upload => return Ok(sent),
                () = sleep_until(deadline) => {
                    if *taken.lock() + limit <= deadline {
                        return Ok(Err(OriginError::Unavailable(stalled(limit))));
                    }
                }
            }
        }
    }
}

/// The content of a file; `taken` is set to the time at which the last chunk was read.
fn chunks_of(file: File, taken: Arc<Mutex<Instant>>) -> ContentStream {
    let read = move |mut file: File| {
        *taken.lock() = Instant::now();
        async move {
            let mut chunk = BytesMut::with_capacity(CHUNK_BYTES);
            let length = file.read_buf(&mut chunk).await?;
            Ok((length > 0).then(|| (chunk.freeze(), file)))
        }
    };
    stream::try_unfold(file, read).boxed()
}
