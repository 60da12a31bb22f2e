//! Payloads: small ones stand in their row, large ones are stored once by content.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};

use super::{Change, Journal, JournalError};

/// Texts of at least this many bytes are stored by content: below it, the
/// digest and its row would cost more than they save.
pub const PART_BYTES_MIN: usize = 1024;

/// SHA-256 of a content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Digest(Sha256::digest(bytes).into())
    }

    /// Its first half as a UUID: as random as the content, and the same for the same one.
    pub fn uuid(&self) -> uuid::Uuid {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.0[..16]);
        uuid::Builder::from_random_bytes(bytes).into_uuid()
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(self.0))
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(&text, &mut bytes).map_err(de::Error::custom)?;
        Ok(Digest(bytes))
    }
}

/// JSON text, here or elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// The text itself.
    Here(Arc<str>),
    /// Stored by content.
    Part {
        /// Of the text.
        part: Digest,
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
    part: Digest,
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
    /// The text, when it is here. Payloads of live machines always are.
    pub fn text(&self) -> Option<&Arc<str>> {
        match self {
            Payload::Here(text) => Some(text),
            Payload::Part { .. } => None,
        }
    }

    /// The form to write: a large text moves into `changes` as a part.
    pub fn stored(&self, changes: &mut Vec<Change>) -> Payload {
        match self {
            Payload::Here(text) if text.len() >= PART_BYTES_MIN => {
                let digest = Digest::of(text.as_bytes());
                changes.push(Change::Part { digest, text: text.clone() });
                Payload::Part { part: digest }
            }
            other => other.clone(),
        }
    }

    /// The form to use: a part is read back.
    pub fn loaded(self, journal: &dyn Journal) -> Result<Payload, JournalError> {
        match self {
            Payload::Here(_) => Ok(self),
            Payload::Part { part } => match journal.part(&part)? {
                Some(text) => Ok(Payload::Here(text.into())),
                None => {
                    Err(JournalError::RowDamaged { table: "parts", reason: format!("{part:?} is missing") })
                }
            },
        }
    }
}
