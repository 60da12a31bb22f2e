//! A call of a webhook: a POST over HTTPS, with limits on its time and on the size of the response.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::rules::Webhook;

/// The largest response that is read: a patch of the largest object, in base64.
const ANSWER_BYTES_MAX: usize = 8 << 20;

pub(super) struct WebhookCall<'a> {
    pub(super) webhook: &'a Webhook,
    pub(super) body: &'a Value,
    /// The endpoint of the webhook's Service, or the reason why there is none; `None` for a webhook with a URL.
    pub(super) endpoint: Option<Result<SocketAddr, String>>,
}

impl WebhookCall<'_> {
    /// Sends the review; returns the response, or the reason for the failure, with upstream's message where it has
    /// one.
    pub(super) async fn send(self) -> Result<Value, String> {
        let (timeout, seconds) = (self.webhook.timeout, self.webhook.timeout.as_secs());
        let url = format!("{}?timeout={seconds}s", self.webhook.url);
        let failed = |why: String| format!("failed to call webhook: Post {url:?}: {why}");
        match tokio::time::timeout(timeout, self.exchange(&url)).await {
            Ok(answer) => answer.map_err(failed),
            Err(_) => Err(failed("context deadline exceeded".into())),
        }
    }

    async fn exchange(&self, url: &str) -> Result<Value, String> {
        let url = url::Url::parse(url).map_err(|error| error.to_string())?;
        let host = url.host_str().ok_or("the URL has no host")?;
        let port = url.port_or_known_default().unwrap_or(443);
        let stream = match &self.endpoint {
            Some(endpoint) => TcpStream::connect(endpoint.clone()?).await,
            // An IPv6 address is in brackets in a URL.
            None => TcpStream::connect((host.trim_matches(['[', ']']), port)).await,
        };
        let stream = stream.map_err(|error| format!("dial tcp: {error}"))?;
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned());
        let name = name.map_err(|error| error.to_string())?;
        let stream = TlsConnector::from(Arc::new(self.tls()?)).connect(name, stream).await;
        let stream = stream.map_err(|error| format!("tls: {error}"))?;

        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
        let path =
            url.query().map_or_else(|| url.path().to_owned(), |query| format!("{}?{query}", url.path()));
        let request = Request::post(path)
            .header(header::HOST, format!("{host}:{port}"))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, "kube-apiserver-admission")
            .body(Full::new(Bytes::from(self.body.to_string())))
            .map_err(|error| error.to_string())?;
        let answer = async move {
            let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| format!("cannot read the answer: {error}"))?.to_bytes();
            if status != StatusCode::OK {
                return Err(format!("the server answered {status}"));
            }
            serde_json::from_slice(&body).map_err(|error| format!("the answer is not JSON: {error}"))
        };
        // The connection is polled beside the exchange, and closed with it.
        tokio::select! {
            answer = answer => answer,
            closed = connection => Err(closed.err().map_or_else(|| "EOF".to_owned(), |e| e.to_string())),
        }
    }

    fn tls(&self) -> Result<ClientConfig, String> {
        let mut roots = RootCertStore::empty();
        if self.webhook.ca_bundle.is_empty() {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        for certificate in CertificateDer::pem_slice_iter(&self.webhook.ca_bundle) {
            let certificate = certificate.map_err(|error| format!("caBundle: {error}"))?;
            roots.add(certificate).map_err(|error| format!("caBundle: {error}"))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        Ok(builder.with_root_certificates(roots).with_no_client_auth())
    }
}
