//! S3's protocol: an operation is a method and a path; its members are in path, query, headers and body.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, Request, Uri, header};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use mayfly_workflows_language::value::{Map, Value};
use md5::{Digest as _, Md5};

use super::escaped;
use super::model::{Format, MemberLocation, MemberShape, Operation, ShapeType, argument, sdk_spelling};
use super::xml::{self, plain};

const NAMESPACE: &str = "http://s3.amazonaws.com/doc/2006-03-01/";
/// The SDK's message for an error body without a description.
pub(super) const BODY_KIND: &str = "application/octet-stream";

/// The request of one operation.
pub(super) fn request(url: &Uri, operation: &Operation, arguments: &Map) -> Result<Request<Bytes>, String> {
    let mut request =
        Request::builder().method(operation.method.as_str()).uri(uri(url, operation, arguments)?);
    let mut body = None;
    for (name, shape) in &operation.input {
        let Some(value) = argument(arguments, name) else { continue };
        match shape.place {
            // The HTTP client sets the body's length.
            Some(MemberLocation::Header) if shape.wire_name(name).eq_ignore_ascii_case("content-length") => {}
            Some(MemberLocation::Header) => {
                request = request.header(shape.wire_name(name), worded(value, shape, Format::Rfc822))
            }
            Some(MemberLocation::Headers) => {
                for (key, value) in value.as_object().into_iter().flat_map(Map::iter) {
                    request = request.header(format!("{}{key}", shape.wire_name("")), plain(value));
                }
            }
            Some(MemberLocation::Payload) if shape.kind == ShapeType::Structure => {
                let mut text = format!("<{name} xmlns=\"{NAMESPACE}\">", name = shape.wire_name(name));
                xml::write_inside(&mut text, value, shape);
                text.push_str(&format!("</{}>", shape.wire_name(name)));
                body = Some((text, "application/xml"));
            }
            Some(MemberLocation::Payload) => body = Some((plain(value), BODY_KIND)),
            _ => {}
        }
    }
    let no_kind = request.headers_ref().is_some_and(|headers| !headers.contains_key(header::CONTENT_TYPE));
    let (body, kind) = body.unwrap_or_default();
    if !kind.is_empty() && no_kind {
        request = request.header(header::CONTENT_TYPE, kind);
    }
    let no_sum = request.headers_ref().is_some_and(|headers| !headers.contains_key("content-md5"));
    if operation.checksum && no_sum {
        request = request.header("content-md5", STANDARD.encode(Md5::digest(&body)));
    }
    request.body(body.into()).map_err(|error| format!("The request cannot be made: {error}"))
}

fn uri(url: &Uri, operation: &Operation, arguments: &Map) -> Result<String, String> {
    let text = |name: &str| argument(arguments, name).map(plain).unwrap_or_default();
    let (path, flags) = operation.uri.split_once('?').unwrap_or((&operation.uri, ""));
    let bucket = text("Bucket");
    let host = url.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    let (host, path) = match path.strip_prefix("/{Bucket}") {
        Some(_) if bucket.is_empty() => return Err("The bucket's name is empty".to_owned()),
        // AWS expects the bucket in the host name; other services take it in the path.
        Some(rest) if in_host(url, &bucket) => (format!("{bucket}.{host}"), rest.to_owned()),
        Some(rest) => (host.to_owned(), format!("/{}{rest}", escaped(&bucket))),
        None => (host.to_owned(), path.to_owned()),
    };
    let path = match path.strip_suffix("{Key+}") {
        Some(_) if text("Key").is_empty() => return Err("The object's key is empty".to_owned()),
        Some(before) => {
            format!("{before}{}", text("Key").split('/').map(escaped).collect::<Vec<_>>().join("/"))
        }
        None => path,
    };
    let mut query: Vec<String> =
        flags.split('&').filter(|flag| !flag.is_empty()).map(str::to_owned).collect();
    for (name, shape) in
        operation.input.iter().filter(|(_, shape)| shape.place == Some(MemberLocation::QueryString))
    {
        if let Some(value) = argument(arguments, name) {
            let value = worded(value, shape, Format::Iso8601);
            query.push(format!("{}={}", escaped(shape.wire_name(name)), escaped(&value)));
        }
    }
    let scheme = url.scheme_str().unwrap_or("http");
    let base = url.path().trim_end_matches('/');
    let path = if path.is_empty() { "/" } else { &path };
    let mark = if query.is_empty() { "" } else { "?" };
    Ok(format!("{scheme}://{host}{base}{path}{mark}{}", query.join("&")))
}

/// Does the bucket belong into the host's name? A name with dots there fits no certificate.
fn in_host(url: &Uri, bucket: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    url.host().is_some_and(|host| host.ends_with(".amazonaws.com")) && bucket.bytes().all(plain)
}

/// A member in a header or a query.
fn worded(value: &Value, shape: &MemberShape, usual: Format) -> String {
    match value {
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        value if shape.kind == ShapeType::Timestamp && shape.format.unwrap_or(usual) == Format::Rfc822 => {
            let text = plain(value);
            match text.parse::<Timestamp>() {
                Ok(at) => at.to_zoned(TimeZone::UTC).strftime("%a, %d %b %Y %H:%M:%S GMT").to_string(),
                Err(_) => text,
            }
        }
        value => plain(value),
    }
}

/// An answer as a task's result.
pub(super) fn answer(operation: &Operation, headers: &HeaderMap, body: &Bytes) -> Result<Value, String> {
    let is_blob =
        |shape: &MemberShape| shape.place == Some(MemberLocation::Payload) && shape.kind == ShapeType::Blob;
    let mut members = Vec::new();
    let text = std::str::from_utf8(body).map_err(|_| "the object is not UTF-8 text".to_owned())?;
    if let Some((name, _)) = operation.output.iter().find(|(_, shape)| is_blob(shape)) {
        members.push((sdk_spelling(name).into(), Value::from(text)));
    } else if !text.trim().is_empty() {
        let document =
            roxmltree::Document::parse(text).map_err(|error| format!("the answer is no XML: {error}"))?;
        let root = document.root_element();
        match operation.output.iter().find(|(_, shape)| shape.place == Some(MemberLocation::Payload)) {
            Some((name, shape)) => members.push((sdk_spelling(name).into(), xml::value(root, shape))),
            None => members.extend(xml::members(root, &operation.output)),
        }
        // For the location of a bucket, the root is the answer's only member.
        let alone = operation.output.get_key_value(root.tag_name().name());
        if let Some((name, shape)) = alone.filter(|(_, shape)| shape.kind == ShapeType::String) {
            members.push((sdk_spelling(name).into(), xml::value(root, shape)));
        }
    }
    for (name, shape) in &operation.output {
        if let Some(value) = in_headers(headers, name, shape) {
            members.push((sdk_spelling(name).into(), value));
        }
    }
    members.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(Value::object(members))
}

fn in_headers(headers: &HeaderMap, name: &str, shape: &MemberShape) -> Option<Value> {
    let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    match shape.place {
        Some(MemberLocation::Header) => {
            let found = text(headers.get(shape.wire_name(name))?);
            let at = (shape.kind == ShapeType::Timestamp)
                .then(|| jiff::fmt::rfc2822::parse(&found).ok())
                .flatten();
            Some(at.map_or_else(
                || xml::scalar(&found, shape.kind),
                |at| Value::from(at.timestamp().to_string()),
            ))
        }
        Some(MemberLocation::Headers) => {
            let prefix = shape.wire_name(name);
            let entry = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
                Some((name.as_str().strip_prefix(prefix)?.into(), Value::from(text(value))))
            };
            Some(Value::from(headers.iter().filter_map(entry).collect::<Map>()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::S3;
    use super::*;

    fn sent(url: &str, operation: &str, arguments: &str) -> Result<Request<Bytes>, String> {
        let arguments = Value::parse(arguments).expect("JSON");
        request(&url.parse().expect("a URL"), &S3[operation], arguments.as_object().expect("an object"))
    }

    #[test]
    fn members_go_where_the_protocol_has_them() {
        let request =
            sent("http://h:9000", "GetObject", r#"{"Bucket":"b","Key":"a b/c+ä.txt","VersionId":"v=1"}"#);
        assert_eq!(request.expect("a request").uri(), "http://h:9000/b/a%20b/c%2B%C3%A4.txt?versionId=v%3D1");
        let request = sent("http://h", "ListObjectsV2", r#"{"Bucket":"b","Prefix":"p/","MaxKeys":7}"#);
        assert_eq!(request.expect("a request").uri(), "http://h/b?list-type=2&max-keys=7&prefix=p%2F");
        let request = sent("http://h/base/", "ListBuckets", "{}").expect("a request");
        assert_eq!(request.uri(), "http://h/base/");
        let request = sent(
            "http://h",
            "PutObject",
            r#"{"Bucket":"b","Key":"k","Body":{"a":[1]},"Metadata":{"who":"me"},"SsekmsKeyId":"id",
                "Expires":"2024-02-01T10:00:00Z"}"#,
        );
        let request = request.expect("a request");
        assert_eq!((request.method().as_str(), &request.body()[..]), ("PUT", &b"{\"a\":[1]}"[..]));
        assert_eq!(request.headers()["x-amz-meta-who"], "me");
        assert_eq!(request.headers()["x-amz-server-side-encryption-aws-kms-key-id"], "id");
        assert_eq!(request.headers()["expires"], "Thu, 01 Feb 2024 10:00:00 GMT");
        assert_eq!(request.headers()["content-type"], BODY_KIND);
        let arguments = r#"{"Bucket":"b","Delete":{"Objects":[{"Key":"k"}]}}"#;
        let request = sent("http://h", "DeleteObjects", arguments).expect("a request");
        assert_eq!(request.uri(), "http://h/b?delete");
        assert_eq!(
            request.body(),
            "<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Object><Key>k</Key></Object></Delete>"
        );
        assert_eq!(request.headers()["content-md5"], STANDARD.encode(Md5::digest(request.body())));
        assert!(sent("http://h", "GetObject", r#"{"Bucket":"b","Key":""}"#).is_err());
        assert!(sent("http://h", "HeadBucket", r#"{"Bucket":""}"#).is_err());
    }

    #[test]
    fn only_aws_has_buckets_in_its_hosts_name() {
        let aws = "https://s3.eu-west-1.amazonaws.com";
        for (url, bucket, expected) in [
            (aws, "b-1", "https://b-1.s3.eu-west-1.amazonaws.com/k"),
            (aws, "with.dots", "https://s3.eu-west-1.amazonaws.com/with.dots/k"),
            ("http://minio:9000", "b-1", "http://minio:9000/b-1/k"),
        ] {
            let arguments = format!(r#"{{"Bucket":"{bucket}","Key":"k"}}"#);
            assert_eq!(sent(url, "GetObject", &arguments).expect("a request").uri(), expected);
        }
        let listed = sent(aws, "ListObjectsV2", r#"{"Bucket":"b"}"#).expect("a request");
        assert_eq!(listed.uri(), "https://b.s3.eu-west-1.amazonaws.com/?list-type=2");
    }

    fn shown(operation: &str, headers: &[(&str, &str)], body: &str) -> String {
        let mut response = http::Response::builder();
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let response = response.body(Bytes::from(body.to_owned())).expect("a response");
        answer(&S3[operation], response.headers(), response.body()).expect("an answer").to_text()
    }

    #[test]
    fn answers_are_put_together_from_headers_and_body() {
        let headers = [
            ("etag", "\"e\""),
            ("content-length", "2"),
            ("last-modified", "Thu, 01 Feb 2024 10:00:00 GMT"),
            ("x-amz-meta-who", "me"),
            ("x-amz-request-id", "r"),
        ];
        assert_eq!(
            shown("GetObject", &headers, "hi"),
            r#"{"Body":"hi","ContentLength":2,"ETag":"\"e\"","LastModified":"2024-02-01T10:00:00Z","Metadata":{"who":"me"}}"#
        );
        let copied = "<?xml version=\"1.0\"?><CopyObjectResult><ETag>\"c\"</ETag></CopyObjectResult>";
        assert_eq!(shown("CopyObject", &[], copied), r#"{"CopyObjectResult":{"ETag":"\"c\""}}"#);
        let place = "<LocationConstraint xmlns=\"x\">eu-west-1</LocationConstraint>";
        assert_eq!(shown("GetBucketLocation", &[], place), r#"{"LocationConstraint":"eu-west-1"}"#);
        assert_eq!(shown("DeleteObject", &[], ""), "{}");
    }
}
