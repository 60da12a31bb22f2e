//! Types of an execution that the state machine, the journal and the API share: its status, and its payloads.

use std::fmt;
use std::sync::{Arc, OnceLock};

use mayfly_vocabulary::bare_hex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::value::{JsonError, Value};

pub use mayfly_vocabulary::Digest;

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

/// The first half of a digest as a UUID; the same for the same content.
pub fn uuid_of(digest: &Digest) -> uuid::Uuid {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.as_bytes()[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

/// JSON text, and its value once it was parsed. Clones share both, so that a text is parsed once on its way from a
/// request to the machine. The value is always that of the text: a replay, which has the text only, gets the same.
#[derive(Clone)]
pub struct JsonText(Arc<SharedText>);

struct SharedText {
    text: Arc<str>,
    value: OnceLock<Value>,
}

impl JsonText {
    /// The text.
    pub fn text(&self) -> &Arc<str> {
        &self.0.text
    }

    /// The value of the text; parsed at the first call.
    ///
    /// # Errors
    /// The text is not JSON.
    pub fn value(&self) -> Result<Value, JsonError> {
        if let Some(value) = self.0.value.get() {
            return Ok(value.clone());
        }
        let value = Value::parse(&self.0.text)?;
        Ok(self.0.value.get_or_init(|| value).clone())
    }
}

/// Shows the size only.
impl fmt::Debug for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JsonText({} bytes)", self.0.text.len())
    }
}

impl PartialEq for JsonText {
    fn eq(&self, other: &Self) -> bool {
        self.0.text == other.0.text
    }
}

impl Eq for JsonText {}

impl From<Arc<str>> for JsonText {
    fn from(text: Arc<str>) -> Self {
        Self(Arc::new(SharedText { text, value: OnceLock::new() }))
    }
}

impl From<&str> for JsonText {
    fn from(text: &str) -> Self {
        Arc::<str>::from(text).into()
    }
}

impl From<String> for JsonText {
    fn from(text: String) -> Self {
        Arc::<str>::from(text).into()
    }
}

/// JSON text, inline or stored elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// The text, inline.
    Inline(JsonText),
    /// Stored by its digest.
    Part {
        /// The digest of the text.
        part: Digest,
    },
}

impl Serialize for Payload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Payload::Inline(json) => serializer.serialize_str(json.text()),
            Payload::Part { part } => StoredPart { part: *part }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Stored::deserialize(deserializer)? {
            Stored::Inline(text) => Payload::Inline(text.into()),
            Stored::Part(StoredPart { part }) => Payload::Part { part },
        })
    }
}

#[derive(Serialize, Deserialize)]
struct StoredPart {
    #[serde(with = "bare_hex")]
    part: Digest,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Inline(String),
    Part(StoredPart),
}

impl From<JsonText> for Payload {
    fn from(text: JsonText) -> Self {
        Payload::Inline(text)
    }
}

impl From<&str> for Payload {
    fn from(text: &str) -> Self {
        Payload::Inline(text.into())
    }
}

impl From<Arc<str>> for Payload {
    fn from(text: Arc<str>) -> Self {
        Payload::Inline(text.into())
    }
}

impl Payload {
    /// The text, if it is inline. Payloads of live machines always are.
    pub fn text(&self) -> Option<&Arc<str>> {
        match self {
            Payload::Inline(json) => Some(json.text()),
            Payload::Part { .. } => None,
        }
    }

    /// The text and its value, if it is inline.
    pub fn json(&self) -> Option<&JsonText> {
        match self {
            Payload::Inline(json) => Some(json),
            Payload::Part { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_parsed_once() {
        let json = JsonText::from(r#"{"a":[1]}"#);
        let array = |json: &JsonText| match json.value().expect("JSON").get("a") {
            Some(Value::Array(items)) => items.clone(),
            other => panic!("{other:?}"),
        };
        assert!(Arc::ptr_eq(&array(&json), &array(&json.clone())), "clones share the value");
        let twice = JsonText::from("x");
        assert!(twice.value().is_err() && twice.value().is_err());
        assert_eq!(format!("{json:?}"), "JsonText(9 bytes)", "payloads are not printed");
    }
}
