//! Responses in YAML, in protobuf, and in JSON for people: the JSON of a response is converted at the end.

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use serde_json::Value;

use crate::{negotiate::Encoding, status::ApiError};

/// Larger responses are converted on a blocking thread.
const AT_ONCE_BYTES_MAX: usize = 64 << 10;

/// The response with its JSON body in `encoding`. Streams, texts and files are not changed.
pub(crate) async fn rewritten(response: Response, encoding: Encoding) -> Response {
    let written: fn(&Bytes) -> Result<Option<Bytes>, String> = match encoding {
        Encoding::Json => return response,
        Encoding::IndentedJson => indented,
        Encoding::Yaml => written,
        Encoding::Protobuf => protobuf,
    };
    let is_json = response.headers().get(header::CONTENT_TYPE).is_some_and(|form| form == "application/json");
    let is_whole = response.body().size_hint().exact().is_some_and(|bytes| bytes > 0);
    if !is_json || !is_whole {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(json) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
        return ApiError::internal("cannot read a buffered response").into_response();
    };
    let body = json.clone();
    let written = match json.len() {
        0..=AT_ONCE_BYTES_MAX => written(&json),
        _ => match tokio::task::spawn_blocking(move || written(&json)).await {
            Ok(written) => written,
            Err(error) => Err(error.to_string()),
        },
    };
    match written {
        Ok(Some(written)) => {
            let form = match encoding {
                Encoding::Yaml => "application/yaml",
                Encoding::Protobuf => "application/vnd.kubernetes.protobuf",
                Encoding::Json | Encoding::IndentedJson => "application/json",
            };
            parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(form));
            parts.headers.remove(header::CONTENT_LENGTH);
            Response::from_parts(parts, Body::from(written))
        }
        // Custom objects and tables have no form in protobuf.
        Ok(None) => Response::from_parts(parts, Body::from(body)),
        Err(why) => ApiError::internal(format!("the answer cannot be converted: {why}")).into_response(),
    }
}

fn indented(json: &Bytes) -> Result<Option<Bytes>, String> {
    let value: Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let text = serde_json::to_string_pretty(&value).map_err(|error| error.to_string())?;
    Ok(Some(text.into()))
}

fn written(json: &Bytes) -> Result<Option<Bytes>, String> {
    let mut value: Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    // Upstream sorts the keys: it converts through a map.
    value.sort_all_objects();
    let text = serde_saphyr::to_string(&value).map_err(|error| error.to_string())?;
    Ok(Some(text.into()))
}

fn protobuf(json: &Bytes) -> Result<Option<Bytes>, String> {
    let value: Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    Ok(crate::protobuf::encode(&value).map(Bytes::from))
}
