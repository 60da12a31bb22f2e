//! Artifacts from and to other places than the artifact store: HTTP servers, S3 services, Git repositories.
//!
//! [`Remote`] holds what a pod may use: its egress rules and the Secrets of its namespace. [`destination`] decides
//! which addresses may be connected to, [`http`] transfers, [`s3`] makes signed requests, [`git`] runs the node's
//! `git`.
//!
//! Messages name the server and the path, never a query, a header or the content of a Secret.

mod destination;
mod git;
mod http;
mod s3;
#[cfg(test)]
mod tests;

use std::{future::Future, path::Path, sync::Arc, time::Duration};

use mayfly_api::{
    egress::EgressRule,
    env::EnvSources,
    job_io::{ArtifactSource, ArtifactTarget, InputArtifact, TRANSFER_SECONDS_DEFAULT},
    k8s::api::core::v1::{Pod, Secret},
    wellknown::ANNOTATION_EGRESS,
};

/// Attempts of a transfer before it is reported as failed.
const ATTEMPTS: u32 = 3;
/// The pause before the second attempt; it is four times as long before the third.
const PAUSE: Duration = Duration::from_secs(1);

/// Why an artifact was not transferred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TransferError {
    /// A retry may succeed.
    Transient(String),
    /// A retry would fail the same way.
    Permanent(String),
}

impl TransferError {
    pub(crate) fn message(self) -> String {
        match self {
            Self::Transient(message) | Self::Permanent(message) => message,
        }
    }
}

/// The sources and destinations outside the store that a pod's artifacts may use.
pub(crate) struct Remote<'a, S> {
    secrets: &'a S,
    namespace: &'a str,
    egress: Vec<EgressRule>,
    /// The largest content, in bytes.
    bytes_max: u64,
    /// Protocols of Git besides `http` and `https`.
    git_protocols: &'a [String],
}

impl<'a, S: EnvSources + Sync> Remote<'a, S> {
    /// # Errors
    /// The pod's egress rules cannot be read.
    pub(crate) fn new(
        pod: &'a Pod,
        secrets: &'a S,
        bytes_max: u64,
        git_protocols: &'a [String],
    ) -> Result<Self, TransferError> {
        let rules = super::annotation(pod, ANNOTATION_EGRESS).unwrap_or_default();
        let rules = rules.split(',').map(str::trim).filter(|rule| !rule.is_empty());
        let egress = rules.map(str::parse).collect::<Result<Vec<EgressRule>, _>>();
        let egress =
            egress.map_err(|error| TransferError::Permanent(format!("{ANNOTATION_EGRESS}: {error}")))?;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        Ok(Self { secrets, namespace, egress, bytes_max, git_protocols })
    }

    /// Fetches an artifact to `to`: a file, or a folder if it is a repository. Artifacts of the store and `raw` ones
    /// are not fetched.
    ///
    /// # Errors
    /// After several attempts; the message begins with the artifact's name.
    pub(crate) async fn fetch(
        &self,
        name: &str,
        artifact: &InputArtifact,
        to: &Path,
    ) -> Result<(), TransferError> {
        let source = artifact.source().map_err(TransferError::Permanent);
        let fetched = match source? {
            ArtifactSource::Stored(_) | ArtifactSource::Raw(_) => return Ok(()),
            ArtifactSource::Http(location) => {
                let sum = artifact.sha256.as_deref();
                attempts(|| in_time(location.timeout_seconds, Box::pin(self.get_http(location, sum, to))))
                    .await
            }
            ArtifactSource::S3(location) => {
                let sum = artifact.sha256.as_deref();
                attempts(|| in_time(location.timeout_seconds, Box::pin(self.get_s3(location, sum, to)))).await
            }
            ArtifactSource::Git(location) => {
                attempts(|| in_time(location.timeout_seconds, self.checkout(location, to))).await
            }
        };
        fetched.map_err(|error| prefixed(&format!("the artifact {name:?} cannot be fetched"), error))
    }

    /// Sends a file, whose SHA-256 is known, to its destination.
    ///
    /// # Errors
    /// After several attempts; the message begins with the artifact's name.
    pub(crate) async fn send(
        &self,
        name: &str,
        target: &ArtifactTarget,
        file: &Path,
        sha256: &str,
    ) -> Result<(), TransferError> {
        let sent = match (&target.http, &target.s3) {
            (Some(location), _) => {
                attempts(|| in_time(location.timeout_seconds, Box::pin(self.put_http(location, file)))).await
            }
            (None, Some(location)) => {
                attempts(|| in_time(location.timeout_seconds, Box::pin(self.put_s3(location, file, sha256))))
                    .await
            }
            (None, None) => Ok(()),
        };
        sent.map_err(|error| prefixed(&format!("the artifact {name:?} cannot be sent"), error))
    }

    fn secret(&self, name: &str) -> Result<Arc<Secret>, TransferError> {
        // The Secret may be created soon.
        let missing = || TransferError::Transient(format!("the Secret {name:?} does not exist"));
        self.secrets.secret(self.namespace, name).ok_or_else(missing)
    }

    /// A key's value in a Secret; `None` where the Secret has no such key.
    fn value(secret: &Secret, name: &str, key: &str) -> Result<Option<String>, TransferError> {
        let Some(value) = secret.data.as_ref().and_then(|data| data.get(key)) else { return Ok(None) };
        let text = std::str::from_utf8(&value.0).map_err(|_| {
            TransferError::Permanent(format!("{key} of the Secret {name:?} is not UTF-8 text"))
        })?;
        Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
    }

    fn required(secret: &Secret, name: &str, key: &str) -> Result<String, TransferError> {
        let missing = || TransferError::Permanent(format!("the Secret {name:?} has no key {key:?}"));
        Self::value(secret, name, key)?.ok_or_else(missing)
    }
}

/// Retries transient failures.
async fn attempts<F>(work: impl Fn() -> F) -> Result<(), TransferError>
where
    F: Future<Output = Result<(), TransferError>>,
{
    let mut pause = PAUSE;
    for _ in 1..ATTEMPTS {
        match work().await {
            Err(TransferError::Transient(why)) => {
                tracing::debug!(why, "retrying the transfer of an artifact")
            }
            other => return other,
        }
        tokio::time::sleep(pause).await;
        pause *= 4;
    }
    work().await
}

async fn in_time(
    seconds: Option<u32>,
    work: impl Future<Output = Result<(), TransferError>>,
) -> Result<(), TransferError> {
    let seconds = seconds.unwrap_or(TRANSFER_SECONDS_DEFAULT);
    let limit = Duration::from_secs(seconds.into());
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(TransferError::Permanent(format!("it took longer than {seconds} s"))),
    }
}

fn prefixed(what: &str, error: TransferError) -> TransferError {
    match error {
        TransferError::Transient(why) => TransferError::Transient(format!("{what}: {why}")),
        TransferError::Permanent(why) => TransferError::Permanent(format!("{what}: {why}")),
    }
}
