//! Transfers over HTTP: one connection for each request, to addresses that were checked.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, LazyLock},
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use http_body_util::{BodyExt, Empty, Limited, StreamBody, combinators::BoxBody};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Frame, Incoming},
    client::conn::http1,
    header::{CONTENT_LENGTH, HOST, HeaderName, HeaderValue, LOCATION, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use mayfly_api::{env::EnvSources, job_io::HttpLocation};
use sha2::{Digest as _, Sha256};
use tokio::{
    fs::File,
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName},
};
use tokio_util::io::ReaderStream;
use url::Url;

use super::{
    Remote, TransferError,
    destination::{addresses, authority, shown},
};

/// The timeout of a connection to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// The longest time without progress within a transfer.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of redirects that are followed.
const REDIRECTS_MAX: usize = 5;
/// The number of bytes of an error response that are read.
const ERROR_BYTES_MAX: usize = 16 << 10;
const AGENT: &str = concat!("mayfly/", env!("CARGO_PKG_VERSION"));

/// The body of a request.
type RequestBody = BoxBody<Bytes, std::io::Error>;

/// A request without its body.
pub(super) struct Exchange {
    pub(super) url: Url,
    pub(super) headers: HeaderMap<HeaderValue>,
    /// The number of redirects that may still be followed.
    pub(super) redirects: usize,
}

fn transient(url: &Url, why: impl std::fmt::Display) -> TransferError {
    TransferError::Transient(format!("{}: {why}", shown(url)))
}

fn permanent(url: &Url, why: impl std::fmt::Display) -> TransferError {
    TransferError::Permanent(format!("{}: {why}", shown(url)))
}

impl<S: EnvSources + Sync> Remote<'_, S> {
    pub(super) async fn get_http(
        &self,
        location: &HttpLocation,
        sha256: Option<&str>,
        to: &Path,
    ) -> Result<(), TransferError> {
        let exchange = self.exchange(location)?;
        self.download(exchange, sha256, to).await
    }

    pub(super) async fn put_http(&self, location: &HttpLocation, file: &Path) -> Result<(), TransferError> {
        let exchange = self.exchange(location)?;
        self.upload(exchange, file).await
    }

    fn exchange(&self, location: &HttpLocation) -> Result<Exchange, TransferError> {
        let url = Url::parse(&location.url)
            .map_err(|error| TransferError::Permanent(format!("http.url is not a URL: {error}")))?;
        let mut headers = HeaderMap::new();
        let mut add = |name: &str, value: &str, from: &str| {
            let parsed = HeaderName::try_from(name).ok().zip(HeaderValue::try_from(value).ok());
            let Some((name, mut value)) = parsed else {
                return Err(TransferError::Permanent(format!("{from}: {name:?} is not a valid header")));
            };
            value.set_sensitive(true);
            headers.insert(name, value);
            Ok(())
        };
        for (name, value) in &location.headers {
            add(name, value, "http.headers")?;
        }
        if let Some(name) = &location.headers_secret {
            let secret = self.secret(name)?;
            for key in secret.data.iter().flat_map(|data| data.keys()) {
                let value = Self::required(&secret, name, key)?;
                add(key, &value, &format!("the Secret {name:?}"))?;
            }
        }
        Ok(Exchange { url, headers, redirects: REDIRECTS_MAX })
    }

    /// GETs a file of at most `bytes_max` bytes.
    pub(super) async fn download(
        &self,
        mut exchange: Exchange,
        sha256: Option<&str>,
        to: &Path,
    ) -> Result<(), TransferError> {
        loop {
            let Exchange { url, headers, redirects } = &exchange;
            let body = Empty::new().map_err(|never| match never {}).boxed();
            let request = request(Method::GET, url, headers, body)?;
            let save = async |answer: Response<Incoming>| match target(url, &answer) {
                Some(_) if *redirects == 0 => {
                    Err(permanent(url, "the server redirects, too often or to nowhere"))
                }
                Some(target) => target.map(Some),
                None => self.save(url, answer, sha256, to).await.map(|()| None),
            };
            let Some(next) = self.send_request(url, request, save).await? else { return Ok(()) };
            if next.origin() != url.origin() {
                // Headers meant for one server are not sent to another.
                exchange.headers.clear();
            }
            exchange = Exchange { url: next, headers: exchange.headers, redirects: exchange.redirects - 1 };
        }
    }

    async fn save(
        &self,
        url: &Url,
        answer: Response<Incoming>,
        sha256: Option<&str>,
        to: &Path,
    ) -> Result<(), TransferError> {
        let answer = succeeded(url, answer).await?;
        let too_large = || permanent(url, format!("it has more than {} bytes", self.bytes_max));
        let length = answer.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: u64| length > self.bytes_max) {
            return Err(too_large());
        }
        let on_disk =
            |error: std::io::Error| TransferError::Transient(super::super::io_message("write", to, &error));
        let mut file = File::create(to).await.map_err(on_disk)?;
        let (mut hash, mut bytes) = (Sha256::new(), 0);
        let mut body = answer.into_body().into_data_stream();
        loop {
            let chunk = tokio::time::timeout(STALL_TIMEOUT, body.next()).await;
            let chunk = chunk.map_err(|_| stalled(url))?;
            let Some(chunk) = chunk else { break };
            let chunk = chunk.map_err(|error| transient(url, error))?;
            bytes += chunk.len() as u64;
            if bytes > self.bytes_max {
                return Err(too_large());
            }
            hash.update(&chunk);
            file.write_all(&chunk).await.map_err(on_disk)?;
        }
        file.flush().await.map_err(on_disk)?;
        let found = hex::encode(hash.finalize());
        match sha256 {
            Some(expected) if !expected.eq_ignore_ascii_case(&found) => {
                Err(permanent(url, format!("its SHA-256 is {found}, and {expected} is expected")))
            }
            _ => Ok(()),
        }
    }

    /// PUTs a file. Redirects are not followed: the body would be sent twice.
    pub(super) async fn upload(&self, exchange: Exchange, file: &Path) -> Result<(), TransferError> {
        let Exchange { url, headers, .. } = &exchange;
        let unreadable =
            |error: std::io::Error| TransferError::Transient(super::super::io_message("read", file, &error));
        let opened = File::open(file).await.map_err(unreadable)?;
        let length = opened.metadata().await.map_err(unreadable)?.len();
        let frames = ReaderStream::new(opened).map_ok(Frame::data);
        let mut request = request(Method::PUT, url, headers, BodyExt::boxed(StreamBody::new(frames)))?;
        request.headers_mut().insert(CONTENT_LENGTH, length.into());
        let check = async |answer: Response<Incoming>| succeeded(url, answer).await.map(drop);
        self.send_request(url, request, check).await
    }

    /// Connects and sends; `use_answer` takes the answer while the connection is driven.
    async fn send_request<T>(
        &self,
        url: &Url,
        request: Request<RequestBody>,
        use_answer: impl AsyncFnOnce(Response<Incoming>) -> Result<T, TransferError>,
    ) -> Result<T, TransferError> {
        let stream = connect(url, &addresses(&self.egress, url).await?).await?;
        if url.scheme() != "https" {
            return over(url, stream, request, use_answer).await;
        }
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host).map_err(|error| permanent(url, error))?;
        let stream =
            tls()?.connect(name, stream).await.map_err(|error| transient(url, format!("TLS: {error}")))?;
        over(url, stream, request, use_answer).await
    }
}

/// Connects to the first address that accepts.
async fn connect(url: &Url, addresses: &[SocketAddr]) -> Result<TcpStream, TransferError> {
    let mut last = transient(url, "no address");
    for address in addresses {
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = transient(url, error),
            Err(_) => last = transient(url, "the connection takes too long"),
        }
    }
    Err(last)
}

async fn over<IO, T>(
    url: &Url,
    stream: IO,
    request: Request<RequestBody>,
    use_answer: impl AsyncFnOnce(Response<Incoming>) -> Result<T, TransferError>,
) -> Result<T, TransferError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| transient(url, error))?;
    let mut connection = std::pin::pin!(connection);
    let exchange = async {
        // Sending the body may take the whole time of the transfer; the timeout of the answer starts after it.
        let answer = sender.send_request(request).await.map_err(|error| transient(url, error))?;
        use_answer(answer).await
    };
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        biased;
        done = &mut exchange => return done,
        ended = &mut connection => if let Err(error) = ended { return Err(transient(url, error)) },
    }
    // The connection has ended; the rest of the answer is already buffered.
    exchange.await
}

fn request(
    method: Method,
    url: &Url,
    headers: &HeaderMap<HeaderValue>,
    body: RequestBody,
) -> Result<Request<RequestBody>, TransferError> {
    let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
    let built = Request::builder().method(method).uri(path).body(body);
    let mut request = built.map_err(|error| permanent(url, error))?;
    *request.headers_mut() = headers.clone();
    let host = HeaderValue::try_from(authority(url)).map_err(|error| permanent(url, error))?;
    request.headers_mut().insert(HOST, host);
    request.headers_mut().entry(USER_AGENT).or_insert(HeaderValue::from_static(AGENT));
    Ok(request)
}

/// The target of a redirect.
fn target(url: &Url, answer: &Response<Incoming>) -> Option<Result<Url, TransferError>> {
    if !matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let location = answer.headers().get(LOCATION)?.to_str().ok()?;
    let refused = |why: &str| Some(Err(permanent(url, why)));
    match url.join(location) {
        Ok(next) if !matches!(next.scheme(), "http" | "https") => {
            refused("the server redirects to another protocol")
        }
        Ok(next) if url.scheme() == "https" && next.scheme() == "http" => {
            refused("the server redirects from https to http")
        }
        Ok(next) => Some(Ok(next)),
        Err(_) => refused("the server redirects to an invalid URL"),
    }
}

/// Turns an unsuccessful answer into an error, with the code of an S3 error document if there is one.
async fn succeeded(url: &Url, answer: Response<Incoming>) -> Result<Response<Incoming>, TransferError> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let body = Limited::new(answer.into_body(), ERROR_BYTES_MAX).collect();
    let body = match tokio::time::timeout(STALL_TIMEOUT, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) | Err(_) => Bytes::new(),
    };
    let code = error_code(&String::from_utf8_lossy(&body)).map(|code| format!(" ({code})"));
    let why = format!("the server answers {status}{}", code.unwrap_or_default());
    let passes = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
    Err(if passes { transient(url, why) } else { permanent(url, why) })
}

/// The content of the document's `<Code>` (`NoSuchKey`). The rest of the document may repeat parts of the request.
fn error_code(document: &str) -> Option<&str> {
    let (_, rest) = document.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    (code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric())).then_some(code)
}

fn stalled(url: &Url) -> TransferError {
    transient(url, format!("nothing came for {} s", STALL_TIMEOUT.as_secs()))
}

/// A TLS client that trusts the node's certificate authorities.
fn tls() -> Result<TlsConnector, TransferError> {
    static CONFIG: LazyLock<Result<Arc<ClientConfig>, String>> = LazyLock::new(|| {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err("the node has no certificate authorities: install its package ca-certificates".into());
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
    });
    match &*CONFIG {
        Ok(config) => Ok(TlsConnector::from(config.clone())),
        Err(why) => Err(TransferError::Permanent(why.clone())),
    }
}
