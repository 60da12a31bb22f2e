//! `http:invoke`: one request to an endpoint, its answer as a value.

use bytes::Bytes;
use mayfly_workflows_language::value::{Map, Value};

use crate::engine::{FunctionError, HttpTasks};

/// Sends the request that a task's arguments describe.
pub(crate) async fn invoke(http: &dyn HttpTasks, arguments: &Value) -> Result<Value, FunctionError> {
    let request = request_of(arguments).map_err(|cause| FunctionError::new("States.Runtime", cause))?;
    let response =
        http.send(request).await.map_err(|cause| FunctionError::new("States.Http.Socket", cause))?;
    let status = response.status();
    let body = body_of(response.headers(), response.body());
    if !status.is_success() {
        let cause = body.as_str().map_or_else(|| body.to_text(), str::to_owned);
        return Err(FunctionError::new(format!("States.Http.StatusCode.{}", status.as_u16()), cause));
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
            uri.push(if uri.contains('?') { '&' } else { '?' });
            uri.push_str(&format!("{}={}", escaped(name), escaped(&plain(&value))));
        }
    }
    let mut request = http::Request::builder().method(method).uri(uri);
    for (name, value) in arguments.get("Headers").and_then(Value::as_object).into_iter().flat_map(Map::iter) {
        request = request.header(&**name, plain(value));
    }
    for (name, value) in OWN_HEADERS {
        if request.headers_ref().is_some_and(|headers| !headers.contains_key(&name)) {
            request = request.header(name, value);
        }
    }
    let transform = |name: &str| arguments.get("Transform")?.get(name);
    let form = match transform("RequestBodyEncoding").and_then(Value::as_str) {
        Some("URL_ENCODED") => Some(ArrayFormat::of(transform("RequestEncodingOptions"))?),
        None | Some("NONE") => None,
        Some(other) => return Err(format!("The RequestBodyEncoding '{other}' is not URL_ENCODED or NONE")),
    };
    let body = match (arguments.get("RequestBody"), form) {
        (None, _) => Bytes::new(),
        (Some(Value::Object(members)), Some(arrays)) => form_of(members, arrays).into(),
        (Some(Value::String(text)), _) => text.to_string().into(),
        (Some(value), _) => value.to_text().into(),
    };
    let no_kind =
        request.headers_ref().is_some_and(|headers| !headers.contains_key(http::header::CONTENT_TYPE));
    if !body.is_empty() && no_kind {
        let kind = if form.is_some() { "application/x-www-form-urlencoded" } else { "application/json" };
        request = request.header(http::header::CONTENT_TYPE, kind);
    }
    request.body(body).map_err(|error| format!("The HTTP request cannot be made: {error}"))
}

/// Headers that AWS adds to each of these requests unless the task sets them.
const OWN_HEADERS: [(http::HeaderName, &str); 2] = [
    (http::header::USER_AGENT, "Amazon|StepFunctions|HttpInvoke|us-east-1"),
    (http::header::RANGE, "bytes=0-262144"),
];

/// A text as it is, anything else as JSON.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_text(), str::to_owned)
}

/// The encoding of an array in a form: `Transform.RequestEncodingOptions.ArrayFormat`.
#[derive(Clone, Copy)]
enum ArrayFormat {
    /// `a[0]=x&a[1]=y`
    Indices,
    /// `a[]=x&a[]=y`
    Brackets,
    /// `a=x,y`
    Commas,
    /// `a=x&a=y`
    Repeat,
}

impl ArrayFormat {
    fn of(options: Option<&Value>) -> Result<Self, String> {
        match options.and_then(|options| options.get("ArrayFormat")).and_then(Value::as_str) {
            None | Some("INDICES") => Ok(Self::Indices),
            Some("BRACKETS") => Ok(Self::Brackets),
            Some("COMMAS") => Ok(Self::Commas),
            Some("REPEAT") => Ok(Self::Repeat),
            Some(other) => {
                Err(format!("The ArrayFormat '{other}' is not INDICES, BRACKETS, COMMAS or REPEAT"))
            }
        }
    }
}

/// A form: objects below the first are `outer[inner]=value`.
fn form_of(members: &Map, arrays: ArrayFormat) -> String {
    let mut pairs = Vec::new();
    for (name, value) in members.iter() {
        add_pairs(&mut pairs, escaped(name), value, arrays);
    }
    pairs.join("&")
}

fn add_pairs(pairs: &mut Vec<String>, name: String, value: &Value, arrays: ArrayFormat) {
    match (value, arrays) {
        (Value::Object(members), _) => {
            for (inner, value) in members.iter() {
                add_pairs(pairs, format!("{name}[{}]", escaped(inner)), value, arrays);
            }
        }
        (Value::Array(items), ArrayFormat::Commas) => {
            let items: Vec<_> = items.iter().map(|item| escaped(&plain(item))).collect();
            pairs.push(format!("{name}={}", items.join(",")));
        }
        (Value::Array(items), _) => {
            for (at, item) in items.iter().enumerate() {
                let name = match arrays {
                    ArrayFormat::Indices => format!("{name}[{at}]"),
                    ArrayFormat::Brackets => format!("{name}[]"),
                    ArrayFormat::Commas | ArrayFormat::Repeat => name.clone(),
                };
                add_pairs(pairs, name, item, arrays);
            }
        }
        _ => pairs.push(format!("{name}={}", escaped(&plain(value)))),
    }
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
        assert_eq!(request.headers()["range"], "bytes=0-262144");
        assert!(request_of(&Value::empty_object()).is_err());
    }

    fn body(transform: &str) -> Result<String, String> {
        let arguments = format!(
            r#"{{"ApiEndpoint":"http://h","Headers":{{"Content-Type":"application/x-www-form-urlencoded"}},
                "RequestBody":{{"k":[1,"a b"],"o":{{"p":"q"}},"z":true}}{transform}}}"#
        );
        let request = request_of(&Value::parse(&arguments).expect("JSON"))?;
        assert_eq!(request.headers()["content-type"], "application/x-www-form-urlencoded");
        Ok(String::from_utf8(request.into_body().to_vec()).expect("text"))
    }

    #[test]
    fn a_transformed_body_is_a_form() {
        let format = |name| {
            body(&format!(
                r#","Transform":{{"RequestBodyEncoding":"URL_ENCODED","RequestEncodingOptions":{{"ArrayFormat":"{name}"}}}}"#
            ))
        };
        assert_eq!(format("INDICES").unwrap(), "k[0]=1&k[1]=a%20b&o[p]=q&z=true");
        assert_eq!(format("BRACKETS").unwrap(), "k[]=1&k[]=a%20b&o[p]=q&z=true");
        assert_eq!(format("COMMAS").unwrap(), "k=1,a%20b&o[p]=q&z=true");
        assert_eq!(format("REPEAT").unwrap(), "k=1&k=a%20b&o[p]=q&z=true");
        assert!(format("SPACES").unwrap_err().contains("SPACES"));
        let indices = body(r#","Transform":{"RequestBodyEncoding":"URL_ENCODED"}"#).unwrap();
        assert_eq!(indices, format("INDICES").unwrap());
        // Not by its content type alone.
        assert!(body("").unwrap().starts_with('{'));
        assert!(body(r#","Transform":{"RequestBodyEncoding":"NONE"}"#).unwrap().starts_with('{'));
    }
}
