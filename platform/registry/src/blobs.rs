//! Blobs: pulled whole or in part, pushed in one piece or in chunks, mounted, deleted.

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use mayfly_api::Digest;
use mayfly_artifacts::Removal;
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};
use tokio_util::io::ReaderStream;
use uuid::Uuid;

use crate::{
    error::{RegistryRefusal, refusal},
    names::{RepositoryName, digest as parse_digest},
    server::{RegistryQuery, RegistryServer, headers_of},
    uploads::OpenUpload,
};

/// Largest blob, in bytes: layers with weights of language models have some 10 GiB.
pub(crate) const BLOB_BYTES_MAX: u64 = 64 << 30;

impl RegistryServer {
    pub(crate) async fn blob(
        &self,
        method: &Method,
        digest: Digest,
        headers: &HeaderMap,
    ) -> Result<Response, RegistryRefusal> {
        match *method {
            Method::GET | Method::HEAD => self.read_blob(digest, headers, *method == Method::GET).await,
            Method::DELETE => {
                let until = jiff::Timestamp::MAX;
                match self.store.contents.quarantine(&digest, until).await? {
                    Removal::Quarantined(aside) => aside.remove().await?,
                    Removal::Missing | Removal::Newer => {
                        return Err(RegistryRefusal::blob_unknown(&digest.to_string()));
                    }
                }
                Ok(StatusCode::ACCEPTED.into_response())
            }
            _ => Err(RegistryRefusal::unsupported()),
        }
    }

    async fn read_blob(
        &self,
        digest: Digest,
        headers: &HeaderMap,
        with_body: bool,
    ) -> Result<Response, RegistryRefusal> {
        let mut file = match self.store.contents.open_content(&digest).await {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(RegistryRefusal::blob_unknown(&digest.to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        let bytes = file.metadata().await?.len();
        let range = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
        let (status, from, length) = match range.map(|text| range_of(text, bytes)) {
            None | Some(RangeOfBlob::Ignored) => (StatusCode::OK, 0, bytes),
            Some(RangeOfBlob::Part { from, length }) => (StatusCode::PARTIAL_CONTENT, from, length),
            Some(RangeOfBlob::Outside) => {
                let message = format!("the blob has {bytes} bytes");
                return Err(refusal(StatusCode::RANGE_NOT_SATISFIABLE, "SIZE_INVALID", message));
            }
        };
        file.seek(std::io::SeekFrom::Start(from)).await?;
        let body = match with_body {
            true => Body::from_stream(ReaderStream::new(file.take(length))),
            false => Body::empty(),
        };
        let mut response = (status, body).into_response();
        let answer = response.headers_mut();
        answer.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        answer.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
        answer.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers_of(answer, &[("docker-content-digest", digest.to_string())]);
        if status == StatusCode::PARTIAL_CONTENT {
            headers_of(answer, &[("content-range", format!("bytes {from}-{}/{bytes}", from + length - 1))]);
        }
        Ok(response)
    }

    /// `POST …/blobs/uploads/`: a complete blob, the mount of an existing one, or a new session.
    pub(crate) async fn begin_upload(
        &self,
        name: &RepositoryName,
        query: &RegistryQuery,
        body: Body,
    ) -> Result<Response, RegistryRefusal> {
        if let Some(mounted) = &query.mount {
            let digest = parse_digest(mounted)?;
            if self.store.contents.renew(&digest).await? {
                return Ok(created(name, digest));
            }
        } else if let Some(digest) = &query.digest {
            let digest = parse_digest(digest)?;
            let content = body.into_data_stream();
            self.store.contents.upload(Some(digest), BLOB_BYTES_MAX, content).await?;
            return Ok(created(name, digest));
        }
        let upload = self.uploads.begin(name).await?;
        Ok(progress(StatusCode::ACCEPTED, name, upload.id(), 0))
    }

    pub(crate) async fn upload(
        &self,
        method: &Method,
        (name, id): (&RepositoryName, Uuid),
        headers: &HeaderMap,
        query: &RegistryQuery,
        body: Body,
    ) -> Result<Response, RegistryRefusal> {
        let upload = self.uploads.open(name, id)?;
        match *method {
            Method::GET => {
                let length = upload.length().await?;
                Ok(progress(StatusCode::NO_CONTENT, name, id, length))
            }
            Method::DELETE => {
                upload.end().await;
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            Method::PATCH => {
                continues(&upload, headers).await?;
                let length = upload.append(body).await?;
                Ok(progress(StatusCode::ACCEPTED, name, id, length))
            }
            Method::PUT => {
                let digest = query.digest.as_deref().unwrap_or_default();
                let digest = parse_digest(digest)?;
                continues(&upload, headers).await?;
                upload.append(body).await?;
                let file = tokio::fs::File::open(upload.path()).await?;
                let content = ReaderStream::new(file);
                let stored = self.store.contents.upload(Some(digest), BLOB_BYTES_MAX, content).await;
                // Content with another digest than the client's is discarded.
                upload.end().await;
                stored?;
                Ok(created(name, digest))
            }
            _ => Err(RegistryRefusal::unsupported()),
        }
    }
}

/// Checks that a chunk with a range begins at the end of the received bytes.
async fn continues(upload: &OpenUpload, headers: &HeaderMap) -> Result<(), RegistryRefusal> {
    let Some(range) = headers.get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok()) else {
        return Ok(());
    };
    let begin =
        range.trim_start_matches("bytes ").split('-').next().and_then(|text| text.parse::<u64>().ok());
    let length = upload.length().await?;
    if begin == Some(length) {
        return Ok(());
    }
    let message = format!("the chunk {range:?} does not continue the {length} bytes received so far");
    Err(refusal(StatusCode::RANGE_NOT_SATISFIABLE, "BLOB_UPLOAD_INVALID", message))
}

fn created(name: &RepositoryName, digest: Digest) -> Response {
    let mut response = StatusCode::CREATED.into_response();
    headers_of(
        response.headers_mut(),
        &[("location", format!("/v2/{name}/blobs/{digest}")), ("docker-content-digest", digest.to_string())],
    );
    response
}

fn progress(status: StatusCode, name: &RepositoryName, id: Uuid, length: u64) -> Response {
    let mut response = status.into_response();
    headers_of(
        response.headers_mut(),
        &[
            ("location", format!("/v2/{name}/blobs/uploads/{id}")),
            ("range", format!("0-{}", length.saturating_sub(1))),
            ("docker-upload-uuid", id.to_string()),
        ],
    );
    response
}

#[derive(Debug, PartialEq, Eq)]
enum RangeOfBlob {
    /// A range that this registry does not support: the response has the complete blob (RFC 9110, section 14.2).
    Ignored,
    Part {
        from: u64,
        length: u64,
    },
    Outside,
}

fn range_of(text: &str, bytes: u64) -> RangeOfBlob {
    let Some((from, to)) = text.strip_prefix("bytes=").and_then(|text| text.split_once('-')) else {
        return RangeOfBlob::Ignored;
    };
    let (from, to) = match (from.parse::<u64>(), to.parse::<u64>()) {
        (Ok(from), Ok(to)) if from <= to => (from, to.min(bytes.saturating_sub(1))),
        (Ok(from), Err(_)) if to.is_empty() => (from, bytes.saturating_sub(1)),
        (Err(_), Ok(last)) if from.is_empty() && last > 0 => {
            (bytes.saturating_sub(last), bytes.saturating_sub(1))
        }
        _ => return RangeOfBlob::Ignored,
    };
    match from < bytes {
        true => RangeOfBlob::Part { from, length: to - from + 1 },
        false => RangeOfBlob::Outside,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_blob() {
        let part = |from, length| RangeOfBlob::Part { from, length };
        for (text, expected) in [
            ("bytes=0-", part(0, 10)),
            ("bytes=3-5", part(3, 3)),
            ("bytes=3-99", part(3, 7)),
            ("bytes=-4", part(6, 4)),
            ("bytes=-99", part(0, 10)),
            ("bytes=10-", RangeOfBlob::Outside),
            ("bytes=5-3", RangeOfBlob::Ignored),
            ("bytes=0-1,3-4", RangeOfBlob::Ignored),
            ("lines=1-2", RangeOfBlob::Ignored),
        ] {
            assert_eq!(range_of(text, 10), expected, "{text}");
        }
    }
}
