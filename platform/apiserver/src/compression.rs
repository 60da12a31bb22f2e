//! Responses compressed with gzip for clients that accept it: whole answers of the API of more than 128 KiB, as
//! upstream (`apiserver/pkg/endpoints/handlers/responsewriters`).

use std::io::Write as _;

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use flate2::{Compression, write::GzEncoder};
use http::{HeaderMap, HeaderValue, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;

use crate::status::ApiError;

/// Smaller bodies are sent as they are.
const THRESHOLD_BYTES: u64 = 128 << 10;
/// The fastest one: on a fast network, compression takes longer than the transfer that it saves.
const LEVEL: u32 = 1;

/// Whether the client accepts gzip, by upstream's reading of `Accept-Encoding`: one of its items is `gzip`, without a
/// quality.
pub(crate) fn accepts_gzip(headers: &HeaderMap) -> bool {
    let all = headers.get_all(header::ACCEPT_ENCODING);
    let mut items = all.iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    items.any(|item| item.trim() == "gzip")
}

/// The response with a compressed body, if it is large enough. Streams are not changed.
pub(crate) async fn compressed(response: Response) -> Response {
    let is_large = response.body().size_hint().exact().is_some_and(|bytes| bytes > THRESHOLD_BYTES);
    if !is_large || response.headers().contains_key(header::CONTENT_ENCODING) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(whole) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
        return ApiError::internal("cannot read a buffered response").into_response();
    };
    let work = move || {
        let mut encoder = GzEncoder::new(Vec::with_capacity(whole.len() / 4), Compression::new(LEVEL));
        encoder.write_all(&whole).and_then(|()| encoder.finish())
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(bytes)) => {
            parts.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            parts.headers.append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
            parts.headers.remove(header::CONTENT_LENGTH);
            Response::from_parts(parts, Body::from(bytes))
        }
        Ok(Err(error)) => ApiError::internal(error).into_response(),
        Err(error) => ApiError::internal(error).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_one_of_the_accepted_encodings() {
        for (accepted, expected) in
            [("gzip", true), ("deflate, gzip", true), ("gzip;q=1", false), ("br", false), ("", false)]
        {
            let headers =
                [(header::ACCEPT_ENCODING, HeaderValue::from_static(accepted))].into_iter().collect();
            assert_eq!(accepts_gzip(&headers), expected, "{accepted}");
        }
    }
}
