//! The digest of a content: `sha256:` and 64 lower-case hexadecimal digits.

use std::{fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest. Parsed once at the border; 32 bytes afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

/// The reason why a text is not a [`Digest`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a digest: expected sha256: and 64 lower-case hexadecimal digits")]
pub struct InvalidDigest {
    text: String,
}

impl Digest {
    /// The digest of a whole content.
    pub fn of(content: &[u8]) -> Self {
        Self(Sha256::digest(content).into())
    }

    /// Converts the 32 bytes that a streaming hasher produced.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The 64 digits without the algorithm: a safe file name.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// The first twelve digits, for people.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidDigest { text: text.chars().take(100).collect() };
        let digits = text.strip_prefix("sha256:").ok_or_else(invalid)?;
        if digits.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(invalid());
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| invalid())?;
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A digest that is stored as its 64 digits: `#[serde(with = "bare_hex")]`.
pub mod bare_hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    use super::Digest;

    /// Writes the digits.
    ///
    /// # Errors
    /// Those of the output.
    pub fn serialize<S: Serializer>(digest: &Digest, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&digest.hex())
    }

    /// Reads the digits.
    ///
    /// # Errors
    /// Those of the input, and a text other than 64 hexadecimal digits.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(String::deserialize(deserializer)?, &mut bytes).map_err(D::Error::custom)?;
        Ok(Digest(bytes))
    }
}

impl JsonSchema for Digest {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Digest".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_refusals() {
        let digest = Digest::of(b"hello");
        assert_eq!(
            digest.to_string(),
            "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
        );
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for bad in ["", "sha256:", "md5:00", &digest.hex(), &digest.to_string().to_uppercase(), "sha256:zz"] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn bare_digits_are_read_and_written() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Stored(#[serde(with = "bare_hex")] Digest);
        let stored = Stored(Digest::of(b"hello"));
        let text = serde_json::to_string(&stored).unwrap();
        assert_eq!(text, "\"2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824\"");
        assert_eq!(serde_json::from_str::<Stored>(&text).unwrap(), stored);
        for bad in ["\"\"", "\"00\"", "1", &serde_json::to_string(&stored.0).unwrap()] {
            assert!(serde_json::from_str::<Stored>(bad).is_err(), "{bad}");
        }
    }
}
