//! Objects of S3 services: one GET or PUT, signed with version 4. The bucket is in the path, a style that every
//! S3-compatible service accepts.

use std::path::Path;

use hyper::{
    HeaderMap, Method, Request,
    header::{HeaderName, HeaderValue},
};
use mayfly_api::{env::EnvSources, job_io::S3Location, k8s::jiff::Timestamp};
use mayfly_sigv4::Credentials;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use url::Url;

use super::{Remote, TransferError, http::Exchange};

/// The characters of a key that are percent-encoded in a path.
const KEY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

impl<S: EnvSources + Sync> Remote<'_, S> {
    pub(super) async fn get_s3(
        &self,
        location: &S3Location,
        sha256: Option<&str>,
        to: &Path,
    ) -> Result<(), TransferError> {
        let url = url(location)?;
        let headers = self.signed(location, &url, Method::GET, &mayfly_sigv4::body_sha256(b""))?;
        // A redirect would need another signature.
        let exchange = Exchange { url, headers, redirects: 0 };
        self.download(exchange, sha256, to).await
    }

    pub(super) async fn put_s3(
        &self,
        location: &S3Location,
        file: &Path,
        sha256: &str,
    ) -> Result<(), TransferError> {
        let url = url(location)?;
        let headers = self.signed(location, &url, Method::PUT, sha256)?;
        self.upload(Exchange { url, headers, redirects: 0 }, file).await
    }

    /// The headers of a request; none without credentials.
    fn signed(
        &self,
        location: &S3Location,
        url: &Url,
        method: Method,
        body_sha256: &str,
    ) -> Result<HeaderMap<HeaderValue>, TransferError> {
        let Some(name) = &location.credentials_secret else { return Ok(HeaderMap::new()) };
        let secret = self.secret(name)?;
        let credentials = Credentials {
            access_key_id: Self::required(&secret, name, "accessKeyId")?,
            secret_access_key: Self::required(&secret, name, "secretAccessKey")?,
            session_token: Self::value(&secret, name, "sessionToken")?,
        };
        let request = Request::builder().method(method).uri(url.as_str()).body(());
        let (mut head, ()) =
            request.map_err(|error| TransferError::Permanent(error.to_string()))?.into_parts();
        let now_ms = Timestamp::now().as_millisecond();
        mayfly_sigv4::sign(&mut head, body_sha256, &credentials, &location.region, "s3", now_ms);
        // The connection adds its own `Host`, with the same value.
        head.headers.remove(HeaderName::from_static("host"));
        for value in head.headers.values_mut() {
            value.set_sensitive(true);
        }
        Ok(head.headers)
    }
}

fn url(location: &S3Location) -> Result<Url, TransferError> {
    let S3Location { endpoint, bucket, key, .. } = location;
    let key = utf8_percent_encode(key, KEY);
    let text = format!("{}/{bucket}/{key}", endpoint.trim_end_matches('/'));
    Url::parse(&text).map_err(|error| TransferError::Permanent(format!("s3.endpoint is not a URL: {error}")))
}
