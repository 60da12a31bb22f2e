//! One CertificateSigningRequest, from its creation to its certificate.

use std::time::Duration;

use kube::{Api, api::PostParams};
use mayfly_api::k8s::{
    ByteString,
    api::certificates::v1::{
        CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep, timeout_at};

use crate::{JoinError, certificates::CertificateUse, error::innermost};

/// The pause between two readings of the request.
const POLL: Duration = Duration::from_millis(500);
/// Advice where the server says nothing about a request.
const NOT_APPROVED: &str = "it waits for approval (`kubectl certificate approve`)";

/// A request to be made.
pub(crate) struct SigningRequest<'a> {
    pub(crate) certificate_use: CertificateUse,
    /// PKCS #10 in PEM.
    pub(crate) pem: &'a str,
    /// The raw public key in the request.
    pub(crate) public_key: &'a [u8],
    pub(crate) node_name: &'a str,
    /// Whether the client authenticates by a bearer token, not by a certificate.
    pub(crate) by_token: bool,
    pub(crate) server: &'a str,
}

/// The state of a request.
#[derive(Debug, PartialEq)]
enum RequestState {
    Issued(String),
    Denied(String),
    Failed(String),
    /// With what the server says about it.
    Waiting(Option<String>),
}

impl SigningRequest<'_> {
    /// The name of the object: the same for the same key, node and signer, so that an interrupted join finds its
    /// request again (as upstream's `digestedName`).
    pub(crate) fn name(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.public_key);
        hash.update(self.node_name);
        hash.update(self.certificate_use.signer());
        format!("node-csr-{}", hex::encode(&hash.finalize()[..16]))
    }

    /// Creates the request, unless it exists, and waits for its certificate (PEM) for at most `wait`.
    ///
    /// # Errors
    /// [`JoinError`]: refused, denied, failed, not signed in time, or the server is not reachable.
    pub(crate) async fn certificate(
        &self,
        client: kube::Client,
        wait: Duration,
    ) -> Result<String, JoinError> {
        let until = Instant::now() + wait;
        let requests: Api<CertificateSigningRequest> = Api::all(client);
        let name = self.name();
        let created = timeout_at(until, requests.create(&PostParams::default(), &self.object(&name))).await;
        match created {
            Ok(Err(kube::Error::Api(status))) if status.is_already_exists() => {}
            Ok(created) => {
                created.map_err(|error| self.error(error))?;
                tracing::info!(
                    request = name,
                    signer = self.certificate_use.signer(),
                    "requested a certificate"
                );
            }
            Err(_) => return Err(self.unreachable("no answer in time".to_owned())),
        }
        let mut last =
            JoinError::NotSigned { name: name.clone(), waited: wait, message: NOT_APPROVED.to_owned() };
        loop {
            match timeout_at(until, requests.get(&name)).await {
                Ok(Ok(request)) => match RequestState::of(&request) {
                    RequestState::Issued(certificate) => return Ok(certificate),
                    RequestState::Denied(message) => return Err(JoinError::Denied { name, message }),
                    RequestState::Failed(message) => return Err(JoinError::Failed { name, message }),
                    RequestState::Waiting(message) => {
                        let message = message.unwrap_or_else(|| NOT_APPROVED.to_owned());
                        last = JoinError::NotSigned { name: name.clone(), waited: wait, message };
                    }
                },
                Ok(Err(error)) => {
                    let error = self.error(error);
                    if !error.is_transient() {
                        return Err(error);
                    }
                    last = error;
                }
                Err(_) => return Err(last),
            }
            if Instant::now() + POLL >= until {
                return Err(last);
            }
            sleep(POLL).await;
        }
    }

    fn object(&self, name: &str) -> CertificateSigningRequest {
        CertificateSigningRequest {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            spec: CertificateSigningRequestSpec {
                request: ByteString(self.pem.as_bytes().to_vec()),
                signer_name: self.certificate_use.signer().to_owned(),
                usages: Some(self.certificate_use.usages().map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        }
    }

    fn unreachable(&self, cause: String) -> JoinError {
        JoinError::Unreachable { server: self.server.to_owned(), cause }
    }

    fn error(&self, error: kube::Error) -> JoinError {
        match error {
            kube::Error::Api(status) if status.code == 401 && self.by_token => {
                JoinError::TokenRefused { server: self.server.to_owned() }
            }
            kube::Error::Api(status) if status.code == 401 => JoinError::CertificateRefused {
                server: self.server.to_owned(),
                cause: status.message.clone(),
            },
            kube::Error::Api(_) | kube::Error::SerdeError(_) => {
                JoinError::Api { name: self.name(), source: Box::new(error) }
            }
            error => self.unreachable(innermost(&error)),
        }
    }
}

impl RequestState {
    fn of(request: &CertificateSigningRequest) -> Self {
        let Some(status) = &request.status else { return Self::Waiting(None) };
        let conditions = status.conditions.as_deref().unwrap_or_default();
        let with = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
        if let Some(denied) = with("Denied") {
            return Self::Denied(message(denied));
        }
        if let Some(failed) = with("Failed") {
            return Self::Failed(message(failed));
        }
        if let Some(ByteString(certificate)) = &status.certificate
            && !certificate.is_empty()
        {
            return Self::Issued(String::from_utf8_lossy(certificate).into_owned());
        }
        let said =
            conditions.iter().rfind(|condition| condition.type_ != "Approved" && condition.status == "True");
        Self::Waiting(said.map(message))
    }
}

fn message(condition: &CertificateSigningRequestCondition) -> String {
    let message = condition.message.clone().filter(|message| !message.is_empty());
    message.or_else(|| condition.reason.clone()).unwrap_or_else(|| condition.type_.clone())
}
