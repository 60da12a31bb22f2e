//! Downloads components that a manifest refers to by URL and digest.

use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt as _, Full, Limited};
use mayfly_api::Digest;
use url::Url;

use crate::{
    failure::{ErrorCode, Failure},
    http_client::{self, HttpsClient},
};

/// The number of redirects of one download: releases usually have one or two.
const REDIRECTS_MAX: usize = 5;
/// The largest component that is downloaded, in bytes.
const COMPONENT_BYTES_MAX: usize = 128 << 20;
/// The timeout of one download.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Downloads a component. It is verified by its digest, so plain HTTP is allowed.
pub(crate) async fn component(url: &str, digest: &Digest) -> anyhow::Result<Bytes> {
    let what = || format!("cannot fetch {url}");
    let content = tokio::time::timeout(TIMEOUT, download(url)).await;
    let content = content.map_err(|_| anyhow::anyhow!("it took more than {} s", TIMEOUT.as_secs()));
    let content = content.flatten().with_context(what)?;
    let found = Digest::of(&content);
    if found != *digest {
        let todo = "the manifest's digest is of another file: check both before you change it";
        return Err(Failure::error(
            ErrorCode::InvalidFile,
            format!("{url} has the digest {found}, not {digest}"),
            todo,
        ));
    }
    Ok(content)
}

async fn download(url: &str) -> anyhow::Result<Bytes> {
    let client: HttpsClient = http_client::new();
    let mut url = Url::parse(url)?;
    for _ in 0..=REDIRECTS_MAX {
        let request = Request::get(url.as_str())
            .header(header::USER_AGENT, concat!("mayfly/", env!("CARGO_PKG_VERSION")))
            .body(Full::default())?;
        let answer = client.request(request).await;
        let answer = answer.map_err(|error| anyhow::anyhow!(http_client::innermost(&error)))?;
        let location = answer.headers().get(header::LOCATION).filter(|_| answer.status().is_redirection());
        if let Some(location) = location {
            url = url.join(location.to_str().context("its redirect is not text")?)?;
            continue;
        }
        if !answer.status().is_success() {
            anyhow::bail!("it answered {}", answer.status());
        }
        let body = Limited::new(answer.into_body(), COMPONENT_BYTES_MAX).collect().await;
        return Ok(body.map_err(|error| anyhow::anyhow!("reading it: {error}"))?.to_bytes());
    }
    anyhow::bail!("it redirects more than {REDIRECTS_MAX} times")
}
