//! Signature version 4, for requests whose whole body is at hand. Source: AWS's
//! public description of it; the test is its own example.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, header};
use jiff::tz::TimeZone;
use sha2::{Digest as _, Sha256};

use super::Credentials;

/// A block of SHA-256, in bytes.
const BLOCK: usize = 64;

/// Adds `Host`, `X-Amz-Date` and `Authorization`.
pub(super) fn sign(
    request: &mut Request<Bytes>,
    credentials: &Credentials,
    region: &str,
    service: &str,
    now_ms: i64,
) {
    let now = jiff::Timestamp::from_millisecond(now_ms).unwrap_or_default().to_zoned(TimeZone::UTC);
    let (date, moment) = (now.strftime("%Y%m%d").to_string(), now.strftime("%Y%m%dT%H%M%SZ").to_string());
    let host = request.uri().authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default();
    set(request, header::HOST, &host);
    set(request, HeaderName::from_static("x-amz-date"), &moment);
    let (canonical, signed) = canonical(request);
    let scope = format!("{date}/{region}/{service}/aws4_request");
    let to_sign = format!("AWS4-HMAC-SHA256\n{moment}\n{scope}\n{}", hex::encode(Sha256::digest(canonical)));
    let mut key = hmac(format!("AWS4{}", credentials.secret_access_key).as_bytes(), date.as_bytes());
    for part in [region, service, "aws4_request"] {
        key = hmac(&key, part.as_bytes());
    }
    let signature = hex::encode(hmac(&key, to_sign.as_bytes()));
    let id = &credentials.access_key_id;
    let authorization =
        format!("AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={signed}, Signature={signature}");
    set(request, header::AUTHORIZATION, &authorization);
}

fn set(request: &mut Request<Bytes>, name: HeaderName, value: &str) {
    // Only what an operator configured can be no header's value; then the service refuses the request.
    if let Ok(value) = HeaderValue::from_str(value) {
        request.headers_mut().insert(name, value);
    }
}

/// The text that is hashed, and the names of the headers in it.
fn canonical(request: &Request<Bytes>) -> (String, String) {
    let mut headers: Vec<(&str, &str)> = request
        .headers()
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?.trim())))
        .collect();
    headers.sort_unstable();
    let signed: Vec<_> = headers.iter().map(|(name, _)| *name).collect();
    let signed = signed.join(";");
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let mut query: Vec<_> = request.uri().query().unwrap_or_default().split('&').collect();
    query.sort_unstable();
    // Every service but S3 encodes the path, which is encoded already, once more.
    let path = request.uri().path().replace('%', "%25");
    let hash = hex::encode(Sha256::digest(request.body()));
    let text = format!("{}\n{path}\n{}\n{lines}\n{signed}\n{hash}", request.method(), query.join("&"));
    (text, signed)
}

/// HMAC-SHA256 (RFC 2104).
fn hmac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let mut block = [0; BLOCK];
    if key.len() > BLOCK {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let inner = Sha256::new().chain_update(block.map(|byte| byte ^ 0x36)).chain_update(text).finalize();
    Sha256::new().chain_update(block.map(|byte| byte ^ 0x5c)).chain_update(inner).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_description_comes_out() {
        // `get-vanilla` of AWS's public signing examples.
        let credentials = Credentials {
            access_key_id: "AKIDEXAMPLE".into(),
            secret_access_key: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".into(),
        };
        let mut request =
            Request::get("http://example.amazonaws.com/").body(Bytes::new()).expect("a request");
        sign(&mut request, &credentials, "us-east-1", "service", 1_440_938_160_000);
        assert_eq!(
            request.headers()["authorization"],
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
             SignedHeaders=host;x-amz-date, \
             Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
        );
        // RFC 4231, case 2.
        assert_eq!(
            hex::encode(hmac(b"Jefe", b"what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }
}
