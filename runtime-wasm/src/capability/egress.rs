//! Outbound HTTP: denied unless the function's rules allow the destination, over pooled connections.
//!
//! A destination is checked twice: its name when the guest sends the request ([`mayfly_api::egress::judge`]), and each
//! of its addresses when a connection is made ([`super::connect`]), by the same rules and by NetworkPolicies. The
//! connection goes to a checked address, so DNS rebinding has no effect. The guest follows redirects itself, and each
//! is checked like any other request.

use std::{
    error::Error as _,
    pin::Pin,
    sync::{Arc, LazyLock},
    time::Duration,
};

use http::{HeaderName, Request, Response, uri::Scheme};
use http_body_util::BodyExt as _;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioTimer},
};
use mayfly_api::egress::{EgressRule, EgressVerdict, judge};
use parking_lot::Mutex;
use wasmtime_wasi_http::{
    DEFAULT_FORBIDDEN_HEADERS, Error, ForbiddenHeaderFilter, RequestOptions, WasiBody, WasiHttpHooks,
};

use super::{
    body::TimedBody,
    connect::{CheckedConnector, ConnectError},
    lookup::HostLookups,
    policy::PodPolicies,
};
use crate::{
    config::EgressConfig,
    guest::{BODY_CHUNK_BYTES_MAX, GuestProgram},
};

/// Flow control windows of HTTP/2, per response and per connection. All instances of a revision share a connection:
/// unread responses must not block the others.
const HTTP2_STREAM_WINDOW_BYTES: u32 = 256 << 10;
const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// The interval of PING frames on an idle connection with open streams; without a reply it is closed.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(10);

type HttpClient = Client<HttpsConnector<CheckedConnector>, WasiBody>;

/// The outbound HTTP of one program: its rules and its connections.
pub(crate) struct Egress {
    rules: Arc<[EgressRule]>,
    config: EgressConfig,
    policies: PodPolicies,
    connector: CheckedConnector,
    /// The client and the generation of the policies for which it was created. The first request after a change of the
    /// policies creates another one, because the new policies were not applied to the pooled connections.
    client: Mutex<Option<(u64, HttpClient)>>,
}

impl Egress {
    pub(crate) fn new(
        rules: Vec<EgressRule>,
        config: EgressConfig,
        lookups: HostLookups,
        policies: PodPolicies,
    ) -> Self {
        let rules: Arc<[EgressRule]> = rules.into();
        let connector = CheckedConnector::new(rules.clone(), &config, lookups, policies.clone());
        Self { rules, config, policies, connector, client: Mutex::default() }
    }

    fn client(&self) -> HttpClient {
        let generation = self.policies.generation();
        let mut client = self.client.lock();
        match &*client {
            Some((made_for, client)) if *made_for == generation => client.clone(),
            _ => client.insert((generation, self.new_client())).1.clone(),
        }
    }

    fn new_client(&self) -> HttpClient {
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls())
            .https_or_http()
            .enable_all_versions()
            .wrap_connector(self.connector.clone());
        Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(self.config.idle_connections_max)
            .pool_idle_timeout(self.config.idle_timeout)
            .http2_initial_stream_window_size(HTTP2_STREAM_WINDOW_BYTES)
            .http2_initial_connection_window_size(HTTP2_CONNECTION_WINDOW_BYTES)
            .http2_keep_alive_interval(HTTP2_PING_INTERVAL)
            .http2_keep_alive_timeout(HTTP2_PING_TIMEOUT)
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .build(connector)
    }

    fn verdict(&self, request: &Request<WasiBody>) -> EgressVerdict {
        let uri = request.uri();
        match (uri.scheme_str(), uri.host()) {
            (Some(scheme), Some(host)) => judge(&self.rules, scheme, host, uri.port_u16()),
            _ => EgressVerdict::Denied,
        }
    }

    async fn send(
        &self,
        request: Request<WasiBody>,
        options: Option<RequestOptions>,
    ) -> Result<Response<WasiBody>, Error> {
        let options = options.unwrap_or_default();
        let at_most = |asked: Option<Duration>, max: Duration| asked.map_or(max, |asked| asked.min(max));
        let connect = at_most(options.connect_timeout, self.config.connect_timeout);
        let first_byte = at_most(options.first_byte_timeout, self.config.first_byte_timeout);
        let between_bytes = at_most(options.between_bytes_timeout, self.config.between_bytes_timeout);
        let answer = tokio::time::timeout(connect + first_byte, self.client().request(request))
            .await
            .map_err(|_| Error::ConnectionReadTimeout)?
            .map_err(|error| client_error(&error))?;
        Ok(answer.map(|body| TimedBody::new(body, between_bytes).boxed_unsync()))
    }
}

/// The root certificates and protocol versions of all TLS connections, created once.
fn tls() -> rustls::ClientConfig {
    static TLS: LazyLock<rustls::ClientConfig> = LazyLock::new(|| {
        use hyper_rustls::ConfigBuilderExt as _;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap_or_else(|error| unreachable!("ring speaks the default versions: {error}"))
            .with_webpki_roots()
            .with_no_client_auth()
    });
    TLS.clone()
}

/// The client's error as an error code of wasi:http. The connector's error is among the causes.
fn client_error(error: &hyper_util::client::legacy::Error) -> Error {
    let mut cause = error.source();
    while let Some(at) = cause {
        if let Some(error) = at.downcast_ref::<ConnectError>() {
            return error.to_guest();
        }
        if let Some(error) = at.downcast_ref::<rustls::Error>() {
            return match error {
                rustls::Error::InvalidCertificate(_) => Error::TlsCertificateError,
                _ => Error::TlsProtocolError,
            };
        }
        // An error wrapped in an io::Error is its content, not its source.
        if let Some(error) = at.downcast_ref::<std::io::Error>()
            && let Some(inner) = error.get_ref()
            && inner.is::<rustls::Error>()
        {
            cause = Some(inner);
            continue;
        }
        if let Some(error) = at.downcast_ref::<Error>() {
            return Error::InternalError(Some(error.to_string()));
        }
        cause = at.source();
    }
    match error.is_connect() {
        true => Error::ConnectionRefused,
        false => Error::ConnectionTerminated,
    }
}

/// One instance's hooks into `wasi:http`.
pub(crate) struct Outbound {
    program: Arc<GuestProgram>,
}

impl Outbound {
    pub(crate) fn new(program: Arc<GuestProgram>) -> Self {
        Self { program }
    }
}

type Io = Box<dyn Future<Output = Result<(), Error>> + Send>;

impl WasiHttpHooks for Outbound {
    fn is_forbidden_header(&mut self, name: &HeaderName) -> bool {
        DEFAULT_FORBIDDEN_HEADERS.contains(name)
    }

    fn forbidden_header_filter(&mut self) -> ForbiddenHeaderFilter {
        static FILTER: LazyLock<ForbiddenHeaderFilter> =
            LazyLock::new(|| Arc::new(|name| DEFAULT_FORBIDDEN_HEADERS.contains(name)));
        FILTER.clone()
    }

    fn p2_outgoing_body_chunk_size(&mut self) -> usize {
        BODY_CHUNK_BYTES_MAX
    }

    fn p3_outgoing_body_chunk_size(&mut self) -> usize {
        BODY_CHUNK_BYTES_MAX
    }

    fn is_supported_scheme(&mut self, scheme: &Scheme) -> bool {
        *scheme == Scheme::HTTP || *scheme == Scheme::HTTPS
    }

    fn send_request(
        &mut self,
        request: Request<WasiBody>,
        options: Option<RequestOptions>,
        _: Box<dyn Future<Output = Result<(), Error>> + Send>,
    ) -> Box<dyn Future<Output = Result<(Response<WasiBody>, Io), Error>> + Send> {
        let program = self.program.clone();
        Box::new(async move {
            let target = request.uri().to_string();
            if program.egress.verdict(&request) == EgressVerdict::Denied {
                program
                    .log
                    .log_host_message(&format!("request to {target} denied: not listed in spec.egress"));
                return Err(Error::HttpRequestDenied);
            }
            match program.egress.send(request, options).await {
                Ok(response) => Ok((response, Box::new(async { Ok(()) }) as Io)),
                Err(error) => {
                    let why = match error {
                        Error::DestinationIpProhibited => {
                            "it has no public address; private addresses must be listed explicitly"
                        }
                        Error::HttpRequestDenied => "NetworkPolicies do not allow the connection",
                        error => return Err(error),
                    };
                    program.log.log_host_message(&format!("request to {target} denied: {why}"));
                    Err(Error::HttpRequestDenied)
                }
            }
        })
    }
}

/// For `Pin<Box<…>>` in signatures elsewhere.
pub(crate) type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, ConnectError>> + Send>>;
