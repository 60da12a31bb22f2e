//! The parsing of paths below `/v2/`. Pure.

use std::fmt;

use mayfly_api::Digest;
use uuid::Uuid;

use crate::error::{RegistryRefusal, refusal};

/// Longest name of a repository, in bytes: with the rest of its file's path it stays below the usual 255.
const NAME_BYTES_MAX: usize = 200;
/// Longest tag, in bytes (distribution-spec).
const TAG_BYTES_MAX: usize = 128;

/// A repository's name: parts of lower-case letters and digits, joined by `.`, `_`, `__`, `-`, and `/` between parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RepositoryName(String);

impl RepositoryName {
    pub(crate) fn parse(text: &str) -> Result<Self, RegistryRefusal> {
        let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_part = |part: &str| {
            let separators = part.split(|character: char| character.is_ascii() && is_word(character as u8));
            part.bytes().next().is_some_and(is_word)
                && part.bytes().last().is_some_and(is_word)
                && separators.into_iter().all(|separator| {
                    matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|byte| byte == b'-')
                })
        };
        if text.len() <= NAME_BYTES_MAX && text.split('/').all(is_part) {
            return Ok(Self(text.to_owned()));
        }
        let message = format!(
            "{:?} is no repository's name: lower-case letters, digits, and . _ - / between them, {NAME_BYTES_MAX} \
             bytes at most",
            text.chars().take(100).collect::<String>()
        );
        Err(refusal(http::StatusCode::BAD_REQUEST, "NAME_INVALID", message))
    }

    /// The name of its folder.
    pub(crate) fn folder(&self) -> String {
        self.0.replace('/', "+")
    }

    pub(crate) fn of_folder(folder: &str) -> Option<Self> {
        Self::parse(&folder.replace('+', "/")).ok()
    }
}

impl fmt::Display for RepositoryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A tag or a digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ManifestReference {
    Tag(String),
    Digest(Digest),
}

impl ManifestReference {
    fn parse(text: &str) -> Result<Self, RegistryRefusal> {
        if text.contains(':') {
            return digest(text).map(Self::Digest);
        }
        let is_tag = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
            && !text.starts_with(['.', '-'])
            && (1..=TAG_BYTES_MAX).contains(&text.len());
        match is_tag {
            true => Ok(Self::Tag(text.to_owned())),
            false => {
                let message = "a tag has 1 to 128 letters, digits, . _ -, and begins with none of . and -";
                Err(refusal(http::StatusCode::BAD_REQUEST, "MANIFEST_INVALID", message))
            }
        }
    }
}

/// The target of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RegistryRequest {
    Catalog,
    Tags(RepositoryName),
    Manifest(RepositoryName, ManifestReference),
    Blob(RepositoryName, Digest),
    Uploads(RepositoryName),
    Upload(RepositoryName, Uuid),
    Referrers(RepositoryName, Digest),
}

pub(crate) fn digest(text: &str) -> Result<Digest, RegistryRefusal> {
    text.parse().map_err(|_| RegistryRefusal::digest_invalid(text))
}

/// Reads the path after `/v2/`. A repository's name may have any number of parts, so it is read from the end.
pub(crate) fn target(path: &str) -> Result<RegistryRequest, RegistryRefusal> {
    if path == "_catalog" {
        return Ok(RegistryRequest::Catalog);
    }
    let unknown = || refusal(http::StatusCode::NOT_FOUND, "UNSUPPORTED", "there is nothing at this path");
    if let Some(name) = path.strip_suffix("/blobs/uploads/").or_else(|| path.strip_suffix("/blobs/uploads")) {
        return RepositoryName::parse(name).map(RegistryRequest::Uploads);
    }
    if let Some(name) = path.strip_suffix("/tags/list") {
        return RepositoryName::parse(name).map(RegistryRequest::Tags);
    }
    let (rest, last) = path.rsplit_once('/').ok_or_else(unknown)?;
    let (name, kind) = rest.rsplit_once('/').ok_or_else(unknown)?;
    match kind {
        "manifests" => {
            Ok(RegistryRequest::Manifest(RepositoryName::parse(name)?, ManifestReference::parse(last)?))
        }
        "blobs" => Ok(RegistryRequest::Blob(RepositoryName::parse(name)?, digest(last)?)),
        "referrers" => Ok(RegistryRequest::Referrers(RepositoryName::parse(name)?, digest(last)?)),
        "uploads" => {
            let name = name.strip_suffix("/blobs").ok_or_else(unknown)?;
            let id = last.parse().map_err(|_| upload_unknown())?;
            Ok(RegistryRequest::Upload(RepositoryName::parse(name)?, id))
        }
        _ => Err(unknown()),
    }
}

pub(crate) fn upload_unknown() -> RegistryRefusal {
    let message = "there is no such upload: it ended, or was idle for too long";
    refusal(http::StatusCode::NOT_FOUND, "BLOB_UPLOAD_UNKNOWN", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_repositories() {
        for good in ["a", "a/b/c", "a.b_c__d-e---f/0", "team/app"] {
            let name = RepositoryName::parse(good).unwrap();
            assert_eq!(RepositoryName::of_folder(&name.folder()), Some(name));
        }
        for bad in ["", "A", "a/", "/a", "a//b", "a..b", "-a", "a-", "a___b", "a+b", "../a", "é", "a._b"] {
            assert_eq!(RepositoryName::parse(bad).unwrap_err().code, "NAME_INVALID", "{bad:?}");
        }
        assert!(RepositoryName::parse(&"a".repeat(201)).is_err());
    }

    #[test]
    fn paths_are_read_from_their_end() {
        let name = |text: &str| RepositoryName::parse(text).unwrap();
        let zeros = format!("sha256:{}", "0".repeat(64));
        let digest: Digest = zeros.parse().unwrap();
        let tag = |text: &str| ManifestReference::Tag(text.into());
        let id = Uuid::from_u128(7);
        for (path, expected) in [
            ("_catalog".to_owned(), RegistryRequest::Catalog),
            ("a/tags/list".into(), RegistryRequest::Tags(name("a"))),
            ("tags/list/tags/list".into(), RegistryRequest::Tags(name("tags/list"))),
            ("a/b/manifests/1.0".into(), RegistryRequest::Manifest(name("a/b"), tag("1.0"))),
            (
                format!("a/manifests/{zeros}"),
                RegistryRequest::Manifest(name("a"), ManifestReference::Digest(digest)),
            ),
            (format!("a/blobs/{zeros}"), RegistryRequest::Blob(name("a"), digest)),
            ("a/blobs/uploads/".into(), RegistryRequest::Uploads(name("a"))),
            (format!("a/b/blobs/uploads/{id}"), RegistryRequest::Upload(name("a/b"), id)),
            (format!("a/referrers/{zeros}"), RegistryRequest::Referrers(name("a"), digest)),
        ] {
            assert_eq!(target(&path), Ok(expected), "{path}");
        }
        for (path, code) in [
            ("a", "UNSUPPORTED"),
            ("a/b/c", "UNSUPPORTED"),
            ("a/blobs/md5:1", "DIGEST_INVALID"),
            ("a/manifests/.x", "MANIFEST_INVALID"),
            ("a/blobs/uploads/x", "BLOB_UPLOAD_UNKNOWN"),
            ("A/tags/list", "NAME_INVALID"),
        ] {
            assert_eq!(target(path).unwrap_err().code, code, "{path}");
        }
    }
}
