//! Types of an execution that the state machine, the journal and the API share: its status, and its payloads.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};

/// The status of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RunStatus {
    /// Has not ended.
    Running,
    /// Ended with an output.
    Succeeded,
    /// Ended with an error.
    Failed,
    /// Ended by its own `TimeoutSeconds`.
    TimedOut,
    /// Stopped from outside.
    Aborted,
    /// A child of a map run that waits until the redrive of its parent reaches it.
    PendingRedrive,
}

impl RunStatus {
    /// The API's name of the status.
    pub fn as_str(self) -> &'static str {
        match self {
            RunStatus::Running => "RUNNING",
            RunStatus::Succeeded => "SUCCEEDED",
            RunStatus::Failed => "FAILED",
            RunStatus::TimedOut => "TIMED_OUT",
            RunStatus::Aborted => "ABORTED",
            RunStatus::PendingRedrive => "PENDING_REDRIVE",
        }
    }

    /// The inverse of [`RunStatus::as_str`].
    pub fn parse(text: &str) -> Option<RunStatus> {
        [
            RunStatus::Running,
            RunStatus::Succeeded,
            RunStatus::Failed,
            RunStatus::TimedOut,
            RunStatus::Aborted,
            RunStatus::PendingRedrive,
        ]
        .into_iter()
        .find(|status| status.as_str() == text)
    }
}

/// The SHA-256 digest of some content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentDigest(pub [u8; 32]);

impl ContentDigest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        ContentDigest(Sha256::digest(bytes).into())
    }

    /// The first half as a UUID; the same for the same content.
    pub fn uuid(&self) -> uuid::Uuid {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.0[..16]);
        uuid::Builder::from_random_bytes(bytes).into_uuid()
    }
}

impl std::fmt::Debug for ContentDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl Serialize for ContentDigest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(self.0))
    }
}

impl<'de> Deserialize<'de> for ContentDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(&text, &mut bytes).map_err(de::Error::custom)?;
        Ok(ContentDigest(bytes))
    }
}

/// JSON text, inline or stored elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// The text, inline.
    Here(Arc<str>),
    /// Stored by its digest.
    Part {
        /// The digest of the text.
        part: ContentDigest,
    },
}

impl Serialize for Payload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Payload::Here(text) => serializer.serialize_str(text),
            Payload::Part { part } => StoredPart { part: *part }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Stored::deserialize(deserializer)? {
            Stored::Here(text) => Payload::Here(text.into()),
            Stored::Part(StoredPart { part }) => Payload::Part { part },
        })
    }
}

#[derive(Serialize, Deserialize)]
struct StoredPart {
    part: ContentDigest,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Here(String),
    Part(StoredPart),
}

impl From<&str> for Payload {
    fn from(text: &str) -> Self {
        Payload::Here(text.into())
    }
}

impl From<Arc<str>> for Payload {
    fn from(text: Arc<str>) -> Self {
        Payload::Here(text)
    }
}

impl Payload {
    /// The text, if it is inline. Payloads of live machines always are.
    pub fn text(&self) -> Option<&Arc<str>> {
        match self {
            Payload::Here(text) => Some(text),
            Payload::Part { .. } => None,
        }
    }
}
