//! Requests to registries: the choice of endpoint and credentials, and the transfer of content.

use std::{collections::HashMap, fmt, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream::BoxStream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use oci_spec::distribution::Reference;
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use crate::{
    challenge::{self, Challenge},
    config::{EndpointSpec, RegistryConfig},
    credentials::{Keychain, RegistryLogin},
    document::{ACCEPTED, DOCUMENT_BYTES_MAX, RemoteDocument},
    error::PullError,
    transport::{self, HttpClient, STALL_TIMEOUT, collect, innermost, send},
};

/// Redirects that are followed for one request: registries send clients on to storage and content networks.
const REDIRECTS_MAX: usize = 5;
/// Largest response of a token server, and largest error that is read, in bytes.
const TOKEN_BYTES_MAX: usize = 1 << 20;
/// Longest part of an error that is repeated, in characters.
const MESSAGE_CHARACTERS_MAX: usize = 300;
/// The maximum number of hosts with cached connections.
const CLIENTS_MAX: usize = 64;

/// The client of all registries. Cheap to clone.
#[derive(Clone)]
pub struct RegistryClient {
    config: Arc<RegistryConfig>,
    clients: Arc<Mutex<HashMap<String, HttpClient>>>,
}

impl fmt::Debug for RegistryClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistryClient").finish_non_exhaustive()
    }
}

/// An image at the endpoint that has it.
#[derive(Clone)]
pub struct RemoteImage {
    endpoint: Arc<Endpoint>,
    repository: String,
    /// The document of the reference: a manifest or an index.
    pub target: RemoteDocument,
}

/// Does not show the login of the endpoint.
impl std::fmt::Debug for RemoteImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteImage").field("repository", &self.repository).finish_non_exhaustive()
    }
}

/// The rest of a blob.
pub struct BlobBody {
    /// The offset of the first byte: the requested one, or 0 if the registry does not support ranges.
    pub offset: u64,
    /// The bytes, whose digest is not verified. An error ends the stream.
    pub stream: BoxStream<'static, Result<Bytes, PullError>>,
}

impl std::fmt::Debug for BlobBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlobBody").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// A registry with the login of one user.
struct Endpoint {
    spec: EndpointSpec,
    client: HttpClient,
    login: Option<RegistryLogin>,
    /// The `Authorization` header that the registry last required.
    authorization: Mutex<Option<HeaderValue>>,
}

impl RegistryClient {
    /// A client with these settings.
    pub fn new(config: RegistryConfig) -> Self {
        Self { config: Arc::new(config), clients: Arc::default() }
    }

    /// Finds the image: at the mirrors, then at the registry of its name; with the matching logins, then with none.
    ///
    /// # Errors
    /// The error of the registry in its name, or of a mirror whose error was not "not found".
    pub async fn open(&self, image: &Reference, keychain: &Keychain) -> Result<RemoteImage, PullError> {
        let endpoints =
            self.config.endpoints(image.registry(), image.resolve_registry()).map_err(PullError::Config)?;
        let mut last = PullError::NotFound(image.whole());
        for spec in endpoints {
            let mirror = spec.mirror_of.is_some();
            match self.open_at(spec, image, keychain).await {
                Ok(found) => return Ok(found),
                Err(error) => {
                    if mirror {
                        tracing::debug!(image = image.whole(), %error, "a mirror does not have an image");
                    }
                    last = error;
                }
            }
        }
        Err(last)
    }

    async fn open_at(
        &self,
        spec: EndpointSpec,
        image: &Reference,
        keychain: &Keychain,
    ) -> Result<RemoteImage, PullError> {
        let client = self.client(&spec)?;
        let mut logins: Vec<Option<RegistryLogin>> = match spec.mirror_of {
            // Credentials are sent to the registry in the name only, not to its mirrors.
            Some(_) => Vec::new(),
            None => keychain.logins(image).into_iter().map(Some).collect(),
        };
        logins.extend(spec.settings.login.clone().map(Some));
        logins.push(None);
        let mut denied = None;
        for login in logins {
            let (spec, client) = (spec.clone(), client.clone());
            let endpoint = Arc::new(Endpoint { spec, client, login, authorization: Mutex::default() });
            let name = image.digest().or(image.tag()).unwrap_or("latest");
            let whole = image.whole();
            match endpoint.document(image.repository(), name, image.digest(), &whole).await {
                Ok(target) => {
                    return Ok(RemoteImage { endpoint, repository: image.repository().to_owned(), target });
                }
                // The first response with credentials counts: without any, most registries respond only that they are
                // required.
                Err(error) if error.is_denied() => {
                    denied.get_or_insert(error);
                }
                Err(error) => return Err(denied.unwrap_or(error)),
            }
        }
        Err(denied.unwrap_or_else(|| PullError::NotFound(image.whole())))
    }

    fn client(&self, spec: &EndpointSpec) -> Result<HttpClient, PullError> {
        if let Some(client) = self.clients.lock().get(&spec.base) {
            return Ok(client.clone());
        }
        let client = transport::client(&spec.settings)?;
        let mut clients = self.clients.lock();
        if clients.len() >= CLIENTS_MAX {
            clients.clear();
        }
        clients.insert(spec.base.clone(), client.clone());
        Ok(client)
    }
}

impl RemoteImage {
    /// A manifest that an index names.
    ///
    /// # Errors
    /// The registry does not return it, or returns another document.
    pub async fn manifest(&self, digest: &str) -> Result<RemoteDocument, PullError> {
        self.endpoint.document(&self.repository, digest, Some(digest), digest).await
    }

    /// A blob from `offset` on.
    ///
    /// # Errors
    /// The registry does not return it.
    pub async fn blob(&self, digest: &str, offset: u64) -> Result<BlobBody, PullError> {
        let mut headers = HeaderMap::new();
        if offset > 0
            && let Ok(range) = HeaderValue::from_str(&format!("bytes={offset}-"))
        {
            headers.insert(header::RANGE, range);
        }
        let path = format!("/v2/{}/blobs/{digest}", self.repository);
        let answer = self.endpoint.get(&self.repository, &path, &headers).await?;
        let status = answer.status();
        let host = self.endpoint.spec.host.clone();
        let offset = match status {
            StatusCode::PARTIAL_CONTENT => offset,
            StatusCode::OK => 0,
            _ => return Err(failure(answer, &host, digest).await),
        };
        Ok(BlobBody { offset, stream: with_stall_timeout(answer.into_body(), host).boxed() })
    }
}

/// A body that fails when no data arrives for [`STALL_TIMEOUT`].
fn with_stall_timeout(body: Incoming, host: String) -> impl Stream<Item = Result<Bytes, PullError>> + Send {
    let stream = Some(body.into_data_stream());
    futures::stream::unfold((stream, host), |(stream, host)| async move {
        let mut stream = stream?;
        let unreachable = |cause: String| PullError::Unreachable { host: host.clone(), cause };
        match tokio::time::timeout(STALL_TIMEOUT, stream.next()).await {
            Ok(None) => None,
            Ok(Some(Ok(chunk))) => Some((Ok(chunk), (Some(stream), host))),
            Ok(Some(Err(error))) => Some((Err(unreachable(innermost(&error))), (None, host))),
            Err(_) => {
                let cause = format!("no data arrived for {} s", STALL_TIMEOUT.as_secs());
                Some((Err(unreachable(cause)), (None, host)))
            }
        }
    })
}

impl Endpoint {
    async fn document(
        &self,
        repository: &str,
        name: &str,
        digest: Option<&str>,
        what: &str,
    ) -> Result<RemoteDocument, PullError> {
        let mut headers = HeaderMap::new();
        headers.insert(
            header::ACCEPT,
            HeaderValue::from_str(&ACCEPTED.join(", "))
                .map_err(|error| PullError::Malformed(error.to_string()))?,
        );
        let path = format!("/v2/{repository}/manifests/{name}");
        let answer = self.get(repository, &path, &headers).await?;
        if answer.status() != StatusCode::OK {
            return Err(failure(answer, &self.spec.host, what).await);
        }
        let media_type = answer.headers().get(header::CONTENT_TYPE).cloned();
        let bytes = collect(answer.into_body(), &self.spec.host, what, DOCUMENT_BYTES_MAX).await?;
        RemoteDocument::read(bytes, media_type.as_ref().and_then(|value| value.to_str().ok()), digest)
    }

    /// Sends a request, and again with credentials if the registry requires them.
    async fn get(
        &self,
        repository: &str,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Response<Incoming>, PullError> {
        let mut url = format!("{}{path}", self.spec.base);
        if let Some(registry) = &self.spec.mirror_of {
            url = format!("{url}?ns={}", utf8_percent_encode(registry, NON_ALPHANUMERIC));
        }
        let answer = self.follow(&url, headers).await?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(answer);
        }
        let wanted = answer.headers().get_all(header::WWW_AUTHENTICATE);
        let challenge = challenge::parse(wanted.iter().filter_map(|value| value.to_str().ok()));
        let Some(authorization) = self.answer(challenge, repository).await? else { return Ok(answer) };
        *self.authorization.lock() = Some(authorization);
        self.follow(&url, headers).await
    }

    /// Follows redirects; the login is for the registry's host only.
    async fn follow(&self, url: &str, headers: &HeaderMap) -> Result<Response<Incoming>, PullError> {
        let mut uri: Uri = url.parse().map_err(|_| PullError::Malformed(format!("not an address: {url}")))?;
        let first = uri.clone();
        for _ in 0..=REDIRECTS_MAX {
            let mut request = Request::new(Full::default());
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = headers.clone();
            if uri.authority() == first.authority()
                && uri.scheme() == first.scheme()
                && let Some(authorization) = self.authorization.lock().clone()
            {
                request.headers_mut().insert(header::AUTHORIZATION, authorization);
            }
            let answer = send(&self.client, request).await?;
            if !answer.status().is_redirection() {
                return Ok(answer);
            }
            let location = answer.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let location = location.ok_or_else(|| PullError::Malformed("a redirect to nowhere".into()))?;
            uri = redirected(&uri, location)?;
        }
        Err(PullError::Malformed(format!("more than {REDIRECTS_MAX} redirects")))
    }

    /// The header that answers a challenge; `None` if there are no (new) credentials for it.
    async fn answer(
        &self,
        challenge: Option<Challenge>,
        repository: &str,
    ) -> Result<Option<HeaderValue>, PullError> {
        match (challenge, &self.login) {
            (Some(Challenge::Basic), Some(login)) => Ok(basic(login)),
            (Some(Challenge::Bearer { realm, service, scope }), login) => {
                let scope = scope.unwrap_or_else(|| format!("repository:{repository}:pull"));
                self.token(&realm, service.as_deref(), &scope, login.as_ref()).await.map(Some)
            }
            (Some(Challenge::Basic) | None, _) => Ok(None),
        }
    }

    /// A token of the server that the registry names (distribution's `spec/auth/token.md`, `oauth.md`).
    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: &str,
        login: Option<&RegistryLogin>,
    ) -> Result<HeaderValue, PullError> {
        let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let mut query = format!("scope={}", encode(scope));
        if let Some(service) = service {
            query.push_str(&format!("&service={}", encode(service)));
        }
        let mut request = Request::new(Full::default());
        let refresh = login.map(|login| login.identity_token.as_str()).filter(|token| !token.is_empty());
        let url = match refresh {
            Some(token) => {
                let form =
                    format!("grant_type=refresh_token&client_id=mayfly&refresh_token={}", encode(token));
                *request.method_mut() = Method::POST;
                *request.body_mut() = Full::from(format!("{form}&{query}"));
                let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
                request.headers_mut().insert(header::CONTENT_TYPE, kind);
                realm.to_owned()
            }
            None => {
                if let Some(header) = login.and_then(basic) {
                    request.headers_mut().insert(header::AUTHORIZATION, header);
                }
                format!("{realm}{}{query}", if realm.contains('?') { "&" } else { "?" })
            }
        };
        let uri: Uri = url.parse().map_err(|_| PullError::Malformed(format!("no token server: {realm}")))?;
        let host = uri.authority().map(ToString::to_string).unwrap_or_default();
        *request.uri_mut() = uri;
        let answer = send(&self.client, request).await?;
        if !answer.status().is_success() {
            return Err(match failure(answer, &host, scope).await {
                PullError::NotFound(message) => PullError::Denied { host, message },
                other => other,
            });
        }
        let text = collect(answer.into_body(), &host, "a token", TOKEN_BYTES_MAX).await?;
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| PullError::Malformed(error.to_string()))?;
        let token = value["token"].as_str().or(value["access_token"].as_str()).unwrap_or_default();
        let header = HeaderValue::from_str(&format!("Bearer {token}"));
        let mut header =
            header.map_err(|_| PullError::Malformed("the token is not a valid header value".into()))?;
        header.set_sensitive(true);
        Ok(header)
    }
}

fn basic(login: &RegistryLogin) -> Option<HeaderValue> {
    let text = STANDARD.encode(format!("{}:{}", login.username, login.password));
    let mut header = HeaderValue::from_str(&format!("Basic {text}")).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// Resolves `Location` relative to `base`. A redirect from TLS to plain HTTP is refused.
fn redirected(base: &Uri, location: &str) -> Result<Uri, PullError> {
    let wrong = || PullError::Malformed(format!("a redirect to {location:?}"));
    let (Some(scheme), Some(authority)) = (base.scheme_str(), base.authority()) else { return Err(wrong()) };
    let text = match location {
        absolute if absolute.contains("://") => absolute.to_owned(),
        other if other.starts_with("//") => format!("{scheme}:{other}"),
        path if path.starts_with('/') => format!("{scheme}://{authority}{path}"),
        _ => return Err(wrong()),
    };
    let next: Uri = text.parse().map_err(|_| wrong())?;
    match (scheme, next.scheme_str()) {
        ("https", Some("https")) | ("http", Some("http" | "https")) => Ok(next),
        _ => Err(wrong()),
    }
}

/// The error in a registry's response.
async fn failure(answer: Response<Incoming>, host: &str, what: &str) -> PullError {
    let status = answer.status();
    let text = collect(answer.into_body(), host, "an error", TOKEN_BYTES_MAX).await.unwrap_or_default();
    let message = message(&text).unwrap_or_else(|| status.to_string());
    let host = host.to_owned();
    match status {
        StatusCode::NOT_FOUND => PullError::NotFound(what.to_owned()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => PullError::Denied { host, message },
        _ => PullError::Status { host, status: status.as_u16(), message },
    }
}

/// `{"errors": [{"code": …, "message": …}]}` (distribution-spec, error codes), or `{"details": …}` of token servers.
fn message(text: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(text).ok()?;
    let first = &value["errors"][0];
    let found = match (first["code"].as_str(), first["message"].as_str()) {
        (Some(code), Some(message)) => format!("{}: {message}", code.to_lowercase()),
        (Some(text), None) | (None, Some(text)) => text.to_owned(),
        (None, None) => value["details"].as_str().or(value["message"].as_str())?.to_owned(),
    };
    Some(found.chars().take(MESSAGE_CHARACTERS_MAX).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_stay_encrypted() {
        let go = |base: &str, location: &str| {
            redirected(&base.parse().unwrap(), location).map(|uri| uri.to_string()).ok()
        };
        assert_eq!(go("https://a/v2/x", "/y?z=1").as_deref(), Some("https://a/y?z=1"));
        assert_eq!(go("https://a/v2/x", "//b/y").as_deref(), Some("https://b/y"));
        assert_eq!(go("http://a/v2/x", "https://b/y").as_deref(), Some("https://b/y"));
        assert_eq!(go("https://a/v2/x", "http://b/y"), None);
        assert_eq!(go("https://a/v2/x", "ftp://b/y"), None);
        assert_eq!(go("https://a/v2/x", "y"), None);
    }

    #[test]
    fn what_a_registry_says_is_repeated() {
        let text = br#"{"errors":[{"code":"DENIED","message":"no","detail":1}]}"#;
        assert_eq!(message(text).as_deref(), Some("denied: no"));
        assert_eq!(message(br#"{"details":"incorrect password"}"#).as_deref(), Some("incorrect password"));
        assert_eq!(message(b"<html>"), None);
        let long = format!(r#"{{"message":"{}"}}"#, "x".repeat(5000));
        assert_eq!(message(long.as_bytes()).unwrap().len(), MESSAGE_CHARACTERS_MAX);
    }
}
