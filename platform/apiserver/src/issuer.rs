//! Discovery of the issuer of service account tokens, by which relying parties verify tokens without the API
//! (upstream's `pkg/serviceaccount/openidmetadata.go`).

use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use serde_json::json;

use crate::{
    render::json_value,
    server::ServerState,
    tokens::{ALGORITHM, ISSUER},
};

/// How long relying parties may keep both documents.
const CACHE: &str = "public, max-age=3600";

/// Answers `/.well-known/openid-configuration` and `/openid/v1/jwks`; `None` for other paths.
pub(crate) fn answer(server: &ServerState, path: &[String]) -> Option<Response> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let (content_type, document) = match path.as_slice() {
        [".well-known", "openid-configuration"] => (
            "application/json",
            json!({
                "issuer": ISSUER,
                "jwks_uri": format!("{ISSUER}/openid/v1/jwks"),
                "response_types_supported": ["id_token"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": [ALGORITHM],
            }),
        ),
        ["openid", "v1", "jwks"] => {
            ("application/jwk-set+json", json!({"keys": [server.tokens.public_key()]}))
        }
        _ => return None,
    };
    let mut response = json_value(StatusCode::OK, &document);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(CACHE));
    Some(response)
}
