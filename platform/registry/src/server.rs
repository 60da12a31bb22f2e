//! The registry's routes and their access control.

use std::{io, path::Path, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
    routing::any,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{
    collect,
    error::{RegistryRefusal, refusal},
    names::{RegistryRequest, RepositoryName, target},
    store::RegistryStore,
    uploads::BlobUploads,
};

/// Entries of a list without `n`, and the most that `n` may ask for.
const PAGE_MAX: usize = 1000;
/// The interval of the search for unreferenced contents.
const COLLECT_EVERY: Duration = Duration::from_secs(3600);

/// The access rule of the registry.
#[derive(Clone)]
pub enum RegistryAccess {
    /// All clients that reach its port, which listens on this machine only.
    Anyone,
    /// Clients that send this token as the password of a login, or as a bearer token.
    Token(String),
}

/// Does not show the token.
impl std::fmt::Debug for RegistryAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Anyone => "Anyone",
            Self::Token(_) => "Token",
        })
    }
}

/// The registry: created, then routed and run. Cheap to clone.
#[derive(Clone)]
pub struct RegistryServer {
    pub(crate) store: RegistryStore,
    pub(crate) uploads: BlobUploads,
    access: RegistryAccess,
}

impl std::fmt::Debug for RegistryServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegistryServer").field("access", &self.access).finish_non_exhaustive()
    }
}

/// The query parameters that the registry supports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RegistryQuery {
    pub(crate) digest: Option<String>,
    pub(crate) mount: Option<String>,
    pub(crate) n: Option<usize>,
    pub(crate) last: Option<String>,
    pub(crate) artifact_type: Option<String>,
}

impl RegistryServer {
    /// Opens or creates the registry's folder. Blocks while it does.
    ///
    /// # Errors
    /// The folder cannot be used.
    pub fn create(folder: &Path, access: RegistryAccess) -> io::Result<Self> {
        let store = RegistryStore::open(folder)?;
        let uploads = BlobUploads::new(store.uploads());
        Ok(Self { store, uploads, access })
    }

    /// The routes, all below `/v2/`.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/v2", any(entry))
            .route("/v2/", any(entry))
            .route("/v2/{*path}", any(entry))
            .with_state(self.clone())
    }

    /// Removes unreferenced contents periodically, until `stop`.
    pub async fn run(&self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(COLLECT_EVERY) => {}
            }
            self.uploads.forget_idle().await;
            if let Err(error) = collect::collect(&self.store, jiff::Timestamp::now()).await {
                tracing::warn!(%error, "cannot collect the registry's garbage; will retry");
            }
        }
    }

    fn is_allowed(&self, headers: &HeaderMap) -> bool {
        let RegistryAccess::Token(token) = &self.access else { return true };
        let sent =
            headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let password = match sent.split_once(' ') {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer") => rest.trim().to_owned(),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("basic") => {
                let text = STANDARD.decode(rest.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
                text.and_then(|text| Some(text.split_once(':')?.1.to_owned())).unwrap_or_default()
            }
            _ => String::new(),
        };
        // Compares digests, so that the time of the comparison is independent of the token.
        let digest = |text: &str| ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
        digest(&password).as_ref() == digest(token).as_ref()
    }

    async fn answer(&self, request: Request) -> Result<Response, RegistryRefusal> {
        let (parts, body) = request.into_parts();
        if !self.is_allowed(&parts.headers) {
            let message = "log in with any user name and, as the password, the token of the kubeconfig";
            return Err(refusal(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", message));
        }
        // A page of another site may make a browser send simple requests here.
        let is_reading = matches!(parts.method, Method::GET | Method::HEAD);
        if !is_reading && parts.headers.contains_key(header::ORIGIN) {
            let message = "browsers may read, and change nothing";
            return Err(refusal(StatusCode::FORBIDDEN, "DENIED", message));
        }
        let path = parts.uri.path().strip_prefix("/v2").unwrap_or_default().trim_start_matches('/');
        if path.is_empty() {
            return Ok(axum::Json(json!({})).into_response());
        }
        let query = RegistryQuery::read(parts.uri.query().unwrap_or_default());
        let (method, headers) = (&parts.method, &parts.headers);
        match target(path)? {
            RegistryRequest::Catalog if is_reading => self.catalog(&query).await,
            RegistryRequest::Tags(name) if is_reading => self.tags(&name, &query).await,
            RegistryRequest::Manifest(name, reference) => {
                self.manifest(method, &name, &reference, headers, body).await
            }
            RegistryRequest::Blob(_, digest) => self.blob(method, digest, headers).await,
            RegistryRequest::Uploads(name) if *method == Method::POST => {
                self.begin_upload(&name, &query, body).await
            }
            RegistryRequest::Upload(name, id) => {
                self.upload(method, (&name, id), headers, &query, body).await
            }
            RegistryRequest::Referrers(name, digest) if is_reading => {
                self.referrers(&name, digest, &query).await
            }
            _ => Err(RegistryRefusal::unsupported()),
        }
    }

    async fn catalog(&self, query: &RegistryQuery) -> Result<Response, RegistryRefusal> {
        let names = self.store.run(RegistryStore::names).await?;
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let (page, next) = page(&names, query);
        let mut response = axum::Json(json!({"repositories": page})).into_response();
        link(response.headers_mut(), "/v2/_catalog", next);
        Ok(response)
    }

    async fn tags(&self, name: &RepositoryName, query: &RegistryQuery) -> Result<Response, RegistryRefusal> {
        let wanted = name.clone();
        let tags = self.store.run(move |store| Ok(store.has(&wanted).then(|| store.tags(&wanted)))).await?;
        let tags = tags.ok_or_else(|| RegistryRefusal::name_unknown(&name.to_string()))??;
        let tags: Vec<String> = tags.into_iter().map(|(tag, _)| tag).collect();
        let (page, next) = page(&tags, query);
        let mut response = axum::Json(json!({"name": name.to_string(), "tags": page})).into_response();
        link(response.headers_mut(), &format!("/v2/{name}/tags/list"), next);
        Ok(response)
    }
}

async fn entry(State(registry): State<RegistryServer>, request: Request<Body>) -> Response {
    let mut response = registry.answer(request).await.unwrap_or_else(RegistryRefusal::into_response);
    let version = HeaderValue::from_static("registry/2.0");
    response.headers_mut().insert("docker-distribution-api-version", version);
    response
}

impl RegistryQuery {
    fn read(text: &str) -> Self {
        let mut query = Self::default();
        for pair in text.split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value);
            match key {
                "digest" => query.digest = Some(value),
                "mount" => query.mount = Some(value),
                "n" => query.n = value.parse().ok(),
                "last" => query.last = Some(value),
                "artifactType" => query.artifact_type = Some(value),
                _ => {}
            }
        }
        query
    }
}

/// Decodes percent-encoding.
fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// One page of a sorted list, and after which entry the next one begins.
fn page<'a>(all: &'a [String], query: &RegistryQuery) -> (&'a [String], Option<&'a String>) {
    let from = match &query.last {
        Some(last) => all.partition_point(|entry| entry <= last),
        None => 0,
    };
    let size = query.n.unwrap_or(PAGE_MAX).min(PAGE_MAX);
    let to = (from + size).min(all.len());
    let page = &all[from..to];
    (page, page.last().filter(|_| to < all.len()))
}

fn link(headers: &mut HeaderMap, path: &str, next: Option<&String>) {
    if let Some(last) = next {
        headers_of(headers, &[("link", format!("<{path}?n={PAGE_MAX}&last={last}>; rel=\"next\""))]);
    }
}

/// Adds headers whose values are made of names and digests.
pub(crate) fn headers_of(headers: &mut HeaderMap, all: &[(&'static str, String)]) {
    for (name, value) in all {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let query = RegistryQuery::read(
            "digest=sha256%3Aab&n=2&last=a%2Fb&_state=x&artifactType=application%2Fx%2By",
        );
        assert_eq!(query.digest.as_deref(), Some("sha256:ab"));
        assert_eq!((query.n, query.last.as_deref()), (Some(2), Some("a/b")));
        assert_eq!(query.artifact_type.as_deref(), Some("application/x+y"));
        assert_eq!(decoded("100%"), "100%");
    }

    #[test]
    fn lists_come_in_pages() {
        let all = ["a", "b", "c"].map(String::from);
        let query = |n, last: Option<&str>| RegistryQuery {
            n,
            last: last.map(str::to_owned),
            ..RegistryQuery::default()
        };
        assert_eq!(page(&all, &query(None, None)), (&all[..], None));
        assert_eq!(page(&all, &query(Some(2), None)), (&all[..2], Some(&all[1])));
        assert_eq!(page(&all, &query(Some(2), Some("b"))), (&all[2..], None));
        assert_eq!(page(&all, &query(Some(0), None)).0.len(), 0);
    }
}
