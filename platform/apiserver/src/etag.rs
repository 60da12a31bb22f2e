//! Entity tags of documents that clients keep: discovery and OpenAPI.

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::BodyExt as _;
use sha2::{Digest as _, Sha256};

use crate::status::ApiError;

/// The response with the tag of its body; without the body and with status 304 if `headers`, those of the request, say
/// that the client has it. The body is complete, not a stream.
pub(crate) async fn tagged(headers: &HeaderMap, response: Response) -> Response {
    if response.status() != StatusCode::OK {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(bytes) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
        return ApiError::internal("cannot read a buffered response").into_response();
    };
    let tag = format!("\"{}\"", hex::encode_upper(Sha256::digest(&bytes)));
    let is_known = is_listed(headers, &tag);
    parts.headers.insert(header::ETAG, HeaderValue::try_from(tag).expect("plain ASCII"));
    parts.headers.insert(header::VARY, HeaderValue::from_static("Accept"));
    if is_known {
        parts.status = StatusCode::NOT_MODIFIED;
        parts.headers.remove(header::CONTENT_TYPE);
        return Response::from_parts(parts, Body::empty());
    }
    Response::from_parts(parts, Body::from(bytes))
}

/// Whether `If-None-Match` lists the tag.
fn is_listed(headers: &HeaderMap, tag: &str) -> bool {
    let values = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut listed = values.flat_map(|value| value.split(',')).map(str::trim);
    listed.any(|listed| listed == "*" || listed.strip_prefix("W/").unwrap_or(listed) == tag)
}
