//! AWS's signature version 4 of HTTP requests.
//!
//! **Belongs here:** the headers that sign a request, for both of its users: tasks of workflows that call services at
//! endpoints, and nodes that fetch and store artifacts of jobs. Source: AWS's public description; the tests are its
//! examples. Start reading at [`sign`].
//!
//! **Does not belong here:** the operations of services, the sending of requests, the places of credentials.

#![warn(missing_docs, missing_debug_implementations)]

use http::{HeaderName, HeaderValue, header, request::Parts};
use jiff::tz::TimeZone;
use ring::hmac;
use sha2::{Digest as _, Sha256};

/// The key that signs requests.
#[derive(Clone)]
pub struct Credentials {
    /// The key's name.
    pub access_key_id: String,
    /// The key.
    pub secret_access_key: String,
    /// The session token of temporary credentials.
    pub session_token: Option<String>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials({})", self.access_key_id)
    }
}

/// The SHA-256 of a body that is in memory, as [`sign`] takes it.
pub fn body_sha256(body: &[u8]) -> String {
    hex::encode(Sha256::digest(body))
}

/// Adds `Host`, `X-Amz-Date` and `Authorization`; for S3 `X-Amz-Content-Sha256` too.
///
/// `hash` is the SHA-256 of the body, as 64 hexadecimal digits; `now_ms` the time since 1970 in milliseconds, from
/// which the service's clock may differ by a quarter of an hour.
pub fn sign(
    request: &mut Parts,
    hash: &str,
    credentials: &Credentials,
    region: &str,
    service: &str,
    now_ms: i64,
) {
    let now = jiff::Timestamp::from_millisecond(now_ms).unwrap_or_default().to_zoned(TimeZone::UTC);
    let (date, moment) = (now.strftime("%Y%m%d").to_string(), now.strftime("%Y%m%dT%H%M%SZ").to_string());
    let host = request.uri.authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default();
    set(request, header::HOST, &host);
    set(request, HeaderName::from_static("x-amz-date"), &moment);
    if let Some(token) = &credentials.session_token {
        set(request, HeaderName::from_static("x-amz-security-token"), token);
    }
    if service == "s3" {
        set(request, HeaderName::from_static("x-amz-content-sha256"), hash);
    }
    let (canonical, signed) = canonical(request, hash, service == "s3");
    let scope = format!("{date}/{region}/{service}/aws4_request");
    let to_sign = format!("AWS4-HMAC-SHA256\n{moment}\n{scope}\n{}", hex::encode(Sha256::digest(canonical)));
    let mut key = hmac_sha256(format!("AWS4{}", credentials.secret_access_key).as_bytes(), date.as_bytes());
    for part in [region, service, "aws4_request"] {
        key = hmac_sha256(key.as_ref(), part.as_bytes());
    }
    let signature = hex::encode(hmac_sha256(key.as_ref(), to_sign.as_bytes()));
    let id = &credentials.access_key_id;
    let authorization =
        format!("AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={signed}, Signature={signature}");
    set(request, header::AUTHORIZATION, &authorization);
}

fn set(request: &mut Parts, name: HeaderName, value: &str) {
    // Only an operator's configuration can have an invalid header value; then the service refuses the request.
    if let Ok(value) = HeaderValue::from_str(value) {
        request.headers.insert(name, value);
    }
}

/// The canonical request, and the names of its signed headers.
fn canonical(request: &Parts, hash: &str, is_s3: bool) -> (String, String) {
    let one_space =
        |text: &str| text.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
    let mut headers: Vec<(&str, String)> = request
        .headers
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), one_space(value.to_str().ok()?))))
        .collect();
    headers.sort_unstable();
    let signed: Vec<_> = headers.iter().map(|(name, _)| *name).collect();
    let signed = signed.join(";");
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let query = request.uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    let mut query: Vec<_> = query.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect();
    query.sort_unstable();
    let query: Vec<_> = query.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    // Every service but S3 encodes the path a second time.
    let path = request.uri.path();
    let path = if is_s3 { path.to_owned() } else { path.replace('%', "%25") };
    let text = format!("{}\n{path}\n{}\n{lines}\n{signed}\n{hash}", request.method, query.join("&"));
    (text, signed)
}

fn hmac_sha256(key: &[u8], text: &[u8]) -> hmac::Tag {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn signature(request: Request<&'static str>, key: (&str, &str), service: &str, now_ms: i64) -> String {
        let credentials =
            Credentials { access_key_id: key.0.into(), secret_access_key: key.1.into(), session_token: None };
        let (mut request, body) = request.into_parts();
        let hash = body_sha256(body.as_bytes());
        sign(&mut request, &hash, &credentials, "us-east-1", service, now_ms);
        request.headers["authorization"].to_str().expect("text").to_owned()
    }

    #[test]
    fn the_example_of_the_description_comes_out() {
        // `get-vanilla` of AWS's public signing examples, and two with a query.
        let key = ("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY");
        for (query, expected) in [
            ("", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
            (
                "?Param2=value2&Param1=value1",
                "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
            ),
        ] {
            let request = Request::get(format!("http://example.amazonaws.com/{query}")).body("");
            assert_eq!(
                signature(request.expect("a request"), key, "service", 1_440_938_160_000),
                format!(
                    "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
                     SignedHeaders=host;x-amz-date, Signature={expected}"
                )
            );
        }
        // RFC 4231, case 2.
        assert_eq!(
            hex::encode(hmac_sha256(b"Jefe", b"what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }

    #[test]
    fn the_examples_of_s3s_description_come_out() {
        let key = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY");
        let at = |path: &str| format!("https://examplebucket.s3.amazonaws.com/{path}");
        for (request, expected) in [
            (
                Request::get(at("test.txt")).header("range", "bytes=0-9").body(""),
                "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            ),
            (
                Request::put(at("test%24file.text"))
                    .header("date", "Fri, 24 May 2013 00:00:00 GMT")
                    .header("x-amz-storage-class", "REDUCED_REDUNDANCY")
                    .body("Welcome to Amazon S3."),
                "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
            ),
            (
                Request::get(at("?lifecycle")).body(""),
                "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
            ),
            (
                Request::get(at("?max-keys=2&prefix=J")).body(""),
                "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            ),
        ] {
            let told = signature(request.expect("a request"), key, "s3", 1_369_353_600_000);
            assert!(told.ends_with(&format!("Signature={expected}")), "{told}");
        }
    }

    #[test]
    fn a_lent_key_goes_with_its_token() {
        let credentials = Credentials {
            access_key_id: "A".into(),
            secret_access_key: "s".into(),
            session_token: Some("t".into()),
        };
        let (mut request, ()) = Request::get("http://h/").body(()).expect("a request").into_parts();
        sign(&mut request, &body_sha256(b""), &credentials, "us-east-1", "sqs", 0);
        assert_eq!(request.headers["x-amz-security-token"], "t");
        let told = request.headers["authorization"].to_str().expect("text");
        assert!(told.contains("SignedHeaders=host;x-amz-date;x-amz-security-token"), "{told}");
    }
}
