//! Manifests and indexes, as received.

use bytes::Bytes;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::error::PullError;

/// Largest manifest, index or configuration, in bytes; registries have to take 4 MiB.
pub(crate) const DOCUMENT_BYTES_MAX: usize = 8 << 20;

/// Media types of what a reference may name (image-spec and Docker's image manifest v2, schema 2).
pub(crate) const ACCEPTED: [&str; 4] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// A manifest or an index whose digest was computed from its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteDocument {
    /// The media type.
    pub media_type: String,
    /// `sha256:…`.
    pub digest: String,
    /// The received bytes, from which the digest was computed.
    pub bytes: Bytes,
}

impl RemoteDocument {
    /// Reads a response; `expected` is the requested digest.
    ///
    /// # Errors
    /// [`PullError::DigestMismatch`], or [`PullError::Malformed`] if the response is not a document.
    pub(crate) fn read(
        bytes: Bytes,
        header: Option<&str>,
        expected: Option<&str>,
    ) -> Result<Self, PullError> {
        let digest = format!("sha256:{}", hex::encode(Sha256::digest(&bytes)));
        if let Some(expected) = expected.filter(|expected| **expected != digest) {
            return Err(PullError::DigestMismatch { expected: expected.to_owned(), actual: digest });
        }
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|error| PullError::Malformed(error.to_string()))?;
        let stated = value["mediaType"].as_str().filter(|stated| !stated.is_empty());
        let by_header = header.map(|text| text.split(';').next().unwrap_or_default().trim());
        // Old OCI manifests do not state their type; the response's header does, else their structure.
        let media_type = match (stated, by_header.filter(|header| ACCEPTED.contains(header))) {
            (Some(stated), _) => stated,
            (None, Some(header)) => header,
            (None, None) if value["manifests"].is_array() => ACCEPTED[0],
            (None, None) if value["config"].is_object() => ACCEPTED[2],
            (None, None) => return Err(PullError::Malformed("neither a manifest nor an index".into())),
        };
        if !ACCEPTED.contains(&media_type) {
            return Err(PullError::Malformed(format!("unsupported media type {media_type}")));
        }
        Ok(Self { media_type: media_type.to_owned(), digest, bytes })
    }
}

/// Whether a document of this type lists others, one per platform.
pub fn is_index(media_type: &str) -> bool {
    media_type.contains("image.index") || media_type.contains("manifest.list")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_known_by_its_own_word_the_header_or_its_shape() {
        let read = |text: &str, header| RemoteDocument::read(Bytes::from(text.to_owned()), header, None);
        let typed = |text, header| read(text, header).unwrap().media_type;
        assert_eq!(typed(r#"{"manifests":[]}"#, None), ACCEPTED[0]);
        assert_eq!(typed(r#"{"config":{}}"#, Some("text/plain")), ACCEPTED[2]);
        assert_eq!(typed(r#"{"config":{}}"#, Some(ACCEPTED[3])), ACCEPTED[3]);
        let own = format!(r#"{{"mediaType":"{}","config":{{}}}}"#, ACCEPTED[2]);
        assert_eq!(typed(&own, Some(ACCEPTED[3])), ACCEPTED[2]);
        assert!(matches!(read("<html>", None), Err(PullError::Malformed(_))));
        let old = r#"{"mediaType":"application/vnd.docker.distribution.manifest.v1+json"}"#;
        assert!(matches!(read(old, None), Err(PullError::Malformed(why)) if why.contains("v1+json")));
    }

    #[test]
    fn a_document_with_another_digest_is_refused() {
        let bytes = Bytes::from_static(b"{\"config\":{}}");
        let honest = RemoteDocument::read(bytes.clone(), None, None).unwrap();
        assert_eq!(RemoteDocument::read(bytes.clone(), None, Some(&honest.digest)), Ok(honest));
        let other = format!("sha256:{}", "0".repeat(64));
        assert!(matches!(
            RemoteDocument::read(bytes, None, Some(&other)),
            Err(PullError::DigestMismatch { .. })
        ));
    }
}
