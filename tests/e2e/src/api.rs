//! A client of the Kubernetes API over TLS, with the kubeconfig's address, certificate authority and token.

use std::{net::SocketAddr, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use http::{Method, Request};
use http_body_util::BodyExt;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::{Body, full};

const API_HOST: &str = "127.0.0.1";

pub struct Api {
    address: SocketAddr,
    token: String,
    tls: TlsConnector,
}

/// Does not show the token.
impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("address", &self.address).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub struct ApiAnswer {
    pub status: u16,
    /// `null` if the body is not JSON.
    pub body: Value,
    pub text: String,
}

impl ApiAnswer {
    /// The message of a Status.
    pub fn message(&self) -> &str {
        self.body["message"].as_str().unwrap_or(&self.text)
    }
}

impl Api {
    /// Reads the kubeconfig that the server wrote. Finds fields by name, which works for one cluster and one user.
    pub fn from_kubeconfig(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| format!("no {}", file.display()))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.trim().trim_start_matches("- ").strip_prefix(name));
            let value =
                line.map(|value| value.trim_start_matches(':').trim().trim_matches(['"', '\'']).to_owned());
            value.with_context(|| format!("{} has no {name}", file.display()))
        };
        let address = field("server")?.trim_start_matches("https://").trim_end_matches('/').parse()?;
        let authority =
            base64::engine::general_purpose::STANDARD.decode(field("certificate-authority-data")?)?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&authority) {
            roots.add(certificate?)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { address, token: field("token")?, tls: TlsConnector::from(Arc::new(config)) })
    }

    /// A client of the same server with another token.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.token = token.to_owned();
        self
    }

    /// Opens a new connection.
    pub async fn connect(&self) -> Result<SendRequest<Body>> {
        let tcp = TcpStream::connect(self.address).await?;
        tcp.set_nodelay(true)?;
        let tls = self.tls.connect(ServerName::try_from(API_HOST)?, tcp).await.context("TLS to the API")?;
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await?;
        // Ends when the sender, or the upgraded stream, is dropped.
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }

    pub fn request(&self, method: Method, path: &str) -> http::request::Builder {
        let host = self.address.to_string();
        let request = Request::builder().method(method).uri(path).header("host", host);
        request.header("authorization", format!("Bearer {}", self.token))
    }

    pub async fn get(&self, path: &str) -> Result<ApiAnswer> {
        self.call(Method::GET, path, "", full("")).await
    }

    pub async fn post(&self, path: &str, object: &Value) -> Result<ApiAnswer> {
        self.call(Method::POST, path, "application/json", full(object.to_string())).await
    }

    pub async fn delete(&self, path: &str) -> Result<ApiAnswer> {
        self.call(Method::DELETE, path, "", full("")).await
    }

    /// Sends a request on a new connection.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Body,
    ) -> Result<ApiAnswer> {
        let mut request = self.request(method, path);
        if !content_type.is_empty() {
            request = request.header("content-type", content_type);
        }
        let response = self.connect().await?.send_request(request.body(body)?).await?;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        Ok(ApiAnswer { status, body: serde_json::from_slice(&body).unwrap_or(Value::Null), text })
    }

    /// Applies a Function's manifest, and takes over fields from other managers.
    pub async fn apply_function(&self, manifest: &Value) -> Result<()> {
        let name = manifest["metadata"]["name"].as_str().context("a manifest without a name")?;
        let path = format!(
            "/apis/mayfly.dev/v1/namespaces/default/functions/{name}?fieldManager=e2e&force=true&fieldValidation=Strict"
        );
        let answer = self
            .call(Method::PATCH, &path, "application/apply-patch+yaml", full(manifest.to_string()))
            .await?;
        ensure!((200..300).contains(&answer.status), "applying {manifest} gave {answer:?}");
        Ok(())
    }

    /// Uploads a component; returns its digest in the form of manifests.
    pub async fn upload(&self, content: Vec<u8>) -> Result<String> {
        let digest = digest_of(&content);
        let path = format!("/artifacts/{digest}");
        let answer = self.call(Method::PUT, &path, "application/wasm", full(content)).await?;
        ensure!((200..300).contains(&answer.status), "the upload gave {answer:?}");
        Ok(digest)
    }
}

/// `sha256:…`
pub fn digest_of(content: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(content)))
}
