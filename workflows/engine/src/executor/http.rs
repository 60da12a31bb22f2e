//! `http:invoke`: one request to an endpoint, its answer as a value.

use bytes::Bytes;
use mayfly_workflows_language::value::{Map, Value};

use crate::engine::{FunctionError, HttpTasks};

/// Sends the request that a task's arguments describe.
pub(crate) async fn invoke(http: &dyn HttpTasks, arguments: &Value) -> Result<Value, FunctionError> {
    let request = request_of(arguments).map_err(|cause| failure("States.Runtime", cause))?;
    let response = http.send(request).await.map_err(|cause| failure("States.Http.Socket", cause))?;
    let status = response.status();
    let body = body_of(response.headers(), response.body());
    if !status.is_success() {
        let cause = body.as_str().map_or_else(|| body.to_text(), str::to_owned);
        return Err(failure(&format!("States.Http.StatusCode.{}", status.as_u16()), cause));
    }
    let mut headers = Map::new();
    for (name, value) in response.headers() {
        let value = Value::from(String::from_utf8_lossy(value.as_bytes()).into_owned());
        let all = match headers.get(name.as_str()) {
            Some(Value::Array(before)) => before.iter().cloned().chain([value]).collect(),
            _ => Value::from(vec![value]),
        };
        headers.insert(std::sync::Arc::<str>::from(name.as_str()), all);
    }
    Ok(Value::object([
        ("Headers", Value::from(headers)),
        ("ResponseBody", body),
        ("StatusCode", Value::from(u64::from(status.as_u16()))),
        ("StatusText", Value::from(status.canonical_reason().unwrap_or_default())),
    ]))
}

fn failure(error_type: &str, cause: String) -> FunctionError {
    FunctionError { error_type: error_type.to_owned(), cause }
}

fn body_of(headers: &http::HeaderMap, body: &Bytes) -> Value {
    let is_json = headers
        .get(http::header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .is_some_and(|kind| kind.contains("json"));
    let text = String::from_utf8_lossy(body);
    match Value::parse(&text) {
        Ok(value) if is_json => value,
        _ => Value::from(text.into_owned()),
    }
}

fn request_of(arguments: &Value) -> Result<http::Request<Bytes>, String> {
    let text = |name: &str| arguments.get(name).and_then(Value::as_str);
    let endpoint = text("ApiEndpoint").ok_or("The field 'ApiEndpoint' is required but was missing")?;
    let method = text("Method").unwrap_or("GET");
    let mut uri = endpoint.to_owned();
    for (name, value) in
        arguments.get("QueryParameters").and_then(Value::as_object).into_iter().flat_map(Map::iter)
    {
        let values = value.as_array().map_or_else(|| vec![value.clone()], <[Value]>::to_vec);
        for value in values {
            let value = value.as_str().map_or_else(|| value.to_text(), str::to_owned);
            uri.push(if uri.contains('?') { '&' } else { '?' });
            uri.push_str(&format!("{}={}", escaped(name), escaped(&value)));
        }
    }
    let mut request = http::Request::builder().method(method).uri(uri);
    let mut form = false;
    for (name, value) in arguments.get("Headers").and_then(Value::as_object).into_iter().flat_map(Map::iter) {
        let value = value.as_str().map_or_else(|| value.to_text(), str::to_owned);
        form |= name.eq_ignore_ascii_case("content-type")
            && value.starts_with("application/x-www-form-urlencoded");
        request = request.header(&**name, value);
    }
    let body = match arguments.get("RequestBody") {
        None => Bytes::new(),
        Some(Value::Object(members)) if form => {
            let pair = |(name, value): (&std::sync::Arc<str>, &Value)| {
                let value = value.as_str().map_or_else(|| value.to_text(), str::to_owned);
                format!("{}={}", escaped(name), escaped(&value))
            };
            members.iter().map(pair).collect::<Vec<_>>().join("&").into()
        }
        Some(Value::String(text)) => text.to_string().into(),
        Some(value) => value.to_text().into(),
    };
    let no_kind =
        request.headers_ref().is_some_and(|headers| !headers.contains_key(http::header::CONTENT_TYPE));
    if !body.is_empty() && no_kind {
        request = request.header(http::header::CONTENT_TYPE, "application/json");
    }
    request.body(body).map_err(|error| format!("The HTTP request cannot be made: {error}"))
}

/// Percent-encodes everything but what RFC 3986 leaves unreserved.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_become_a_request() {
        let arguments = Value::parse(
            r#"{"ApiEndpoint":"http://h/p","Method":"POST","QueryParameters":{"a b":"c&d"},"Headers":{"X-One":"1"},"RequestBody":{"k":[1]}}"#,
        )
        .expect("JSON");
        let request = request_of(&arguments).expect("a request");
        assert_eq!(request.uri(), "http://h/p?a%20b=c%26d");
        assert_eq!(request.method(), "POST");
        assert_eq!(request.headers()["x-one"], "1");
        assert_eq!(request.headers()["content-type"], "application/json");
        assert_eq!(request.body(), "{\"k\":[1]}");
        assert!(request_of(&Value::empty_object()).is_err());
    }
}
