//! The origins of input artifacts besides the artifact store, and the destinations of output artifacts.
//!
//! The node fetches inputs before the start of the first container, and sends outputs after a successful end. An
//! address that is not public has to be listed in the pod's egress rules (`mayfly.dev/egress`), as for a function's own
//! requests: otherwise a pod could make its node read what only the node may reach. Credentials are in Secrets of the
//! pod's namespace and never in the document.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ArtifactRef, PARAMETER_BYTES_MAX};
use crate::Digest;

/// The most headers of a request.
const HEADERS_MAX: usize = 32;
/// The longest time for one transfer, in seconds: an hour.
pub const TRANSFER_SECONDS_MAX: u32 = 3600;
/// The time for one transfer where none is given, in seconds.
pub const TRANSFER_SECONDS_DEFAULT: u32 = 600;

/// An input artifact, which is one of `digest`, `raw`, `http`, `s3` and `git`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct InputArtifact {
    /// A content of the artifact store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The content itself, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpLocation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Location>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub git: Option<GitLocation>,
    /// The content is a tar, and becomes a folder. A repository is always a folder.
    #[serde(skip_serializing_if = "super::is_false")]
    pub directory: bool,
    /// The expected SHA-256 of the content, as 64 hexadecimal digits; for `http` and `s3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The content's length. Informational: ignored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// The origin of an input artifact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ArtifactSource<'a> {
    Stored(Digest),
    Raw(&'a str),
    Http(&'a HttpLocation),
    S3(&'a S3Location),
    Git(&'a GitLocation),
}

/// The destination of an output artifact, which is one of `http` (a PUT) and `s3`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ArtifactTarget {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpLocation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Location>,
}

/// A resource of an HTTP server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpLocation {
    /// `http://` or `https://`, without user and password.
    pub url: String,
    /// Headers that are not secret.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// A Secret whose keys are names of headers, such as `Authorization`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret: Option<String>,
    /// The time for the whole transfer, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

/// An object of an S3 service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct S3Location {
    /// The service's URL; the bucket is the first part of the path.
    pub endpoint: String,
    #[serde(default = "region")]
    pub region: String,
    pub bucket: String,
    pub key: String,
    /// A Secret with the keys `accessKeyId`, `secretAccessKey` and, for temporary credentials, `sessionToken`. Without
    /// one the request is not signed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_secret: Option<String>,
    /// The time for the whole transfer, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

fn region() -> String {
    "us-east-1".into()
}

/// The files of one revision of a Git repository, without its history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GitLocation {
    /// `https://`, `http://`, or a protocol that the node's operator allows.
    pub repository: String,
    /// A branch, a tag, or a commit if the server allows fetching commits by hash. Default: the default branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The number of commits that are fetched to reach the revision; 0 for all. Default 1.
    #[serde(default = "depth_one")]
    pub depth: u32,
    /// A Secret with the keys `username` and `password`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_secret: Option<String>,
    /// The time for the whole transfer, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

fn depth_one() -> u32 {
    1
}

impl From<ArtifactRef> for InputArtifact {
    fn from(stored: ArtifactRef) -> Self {
        let ArtifactRef { digest, directory, bytes } = stored;
        Self { digest: Some(digest), directory, bytes, ..Self::default() }
    }
}

impl InputArtifact {
    /// The origin.
    ///
    /// # Errors
    /// There is not exactly one, or a part of it is wrong; as text that follows the artifact's name.
    pub fn source(&self) -> Result<ArtifactSource<'_>, String> {
        let given = [
            self.digest.map(ArtifactSource::Stored),
            self.raw.as_deref().map(ArtifactSource::Raw),
            self.http.as_ref().map(ArtifactSource::Http),
            self.s3.as_ref().map(ArtifactSource::S3),
            self.git.as_ref().map(ArtifactSource::Git),
        ];
        let mut given = given.into_iter().flatten();
        let (Some(source), None) = (given.next(), given.next()) else {
            return Err("one of digest, raw, http, s3 and git is required".into());
        };
        match source {
            ArtifactSource::Stored(_) => {}
            ArtifactSource::Raw(text) if text.len() as u64 > PARAMETER_BYTES_MAX => {
                return Err(format!(
                    "raw has more than {PARAMETER_BYTES_MAX} bytes: push it to the artifact store"
                ));
            }
            ArtifactSource::Raw(_) => {}
            ArtifactSource::Http(http) => http.check()?,
            ArtifactSource::S3(s3) => s3.check()?,
            ArtifactSource::Git(git) => git.check()?,
        }
        if let Some(sum) = &self.sha256 {
            if !matches!(source, ArtifactSource::Http(_) | ArtifactSource::S3(_)) {
                return Err("sha256 is for http and s3 only".into());
            }
            if sum.len() != 64 || !sum.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err("sha256 is 64 hexadecimal digits".into());
            }
        }
        if self.directory && matches!(source, ArtifactSource::Raw(_)) {
            return Err("raw is a file: directory cannot be set".into());
        }
        Ok(source)
    }
}

impl ArtifactTarget {
    /// # Errors
    /// There is not exactly one destination, or a part of it is wrong; as text that follows the artifact's name.
    pub fn check(&self) -> Result<(), String> {
        match (&self.http, &self.s3) {
            (Some(http), None) => http.check(),
            (None, Some(s3)) => s3.check(),
            _ => Err("one of http and s3 is required".into()),
        }
    }
}

impl HttpLocation {
    fn check(&self) -> Result<(), String> {
        web_url("http.url", &self.url)?;
        if self.headers.len() > HEADERS_MAX {
            return Err(format!("http.headers has more than {HEADERS_MAX} headers"));
        }
        let token = |name: &str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        if let Some((name, _)) = self
            .headers
            .iter()
            .find(|(name, value)| !token(name) || value.bytes().any(|byte| byte < b' ' || byte == 127))
        {
            return Err(format!(
                "http.headers: {name:?} is not a header's name, or its value has control characters"
            ));
        }
        seconds("http", self.timeout_seconds)
    }
}

impl S3Location {
    fn check(&self) -> Result<(), String> {
        web_url("s3.endpoint", &self.endpoint)?;
        let bucket = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if self.bucket.is_empty() || !self.bucket.bytes().all(bucket) {
            return Err(format!("s3.bucket: {:?} is not a bucket's name", self.bucket));
        }
        if self.key.is_empty() || self.key.len() > 1024 {
            return Err("s3.key has 1 to 1024 bytes".into());
        }
        // Such parts would lead to another key in a URL's path.
        if self.key.split('/').any(|part| matches!(part, "." | "..")) {
            return Err("s3.key: a part of a key is neither . nor ..".into());
        }
        if self.region.is_empty()
            || !self.region.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        {
            return Err(format!("s3.region: {:?} is not a region", self.region));
        }
        seconds("s3", self.timeout_seconds)
    }
}

impl GitLocation {
    fn check(&self) -> Result<(), String> {
        // Prevents that the text is parsed as an option of the program; `ext::` would run a command.
        let plain = |text: &str| {
            !text.is_empty()
                && !text.starts_with('-')
                && !text.bytes().any(|byte| byte <= b' ' || byte == 127)
        };
        let Some((protocol, rest)) = self.repository.split_once("://") else {
            return Err("git.repository is a URL, such as https://example.com/group/project.git".into());
        };
        if !plain(&self.repository) || protocol.contains(':') || rest.is_empty() {
            return Err("git.repository is not the URL of a repository".into());
        }
        if matches!(protocol, "http" | "https") {
            web_url("git.repository", &self.repository)?;
        }
        if let Some(revision) = &self.revision
            && (!plain(revision)
                || revision.contains([':', '^', '~', '?', '*', '[', '\\'])
                || revision.contains(".."))
        {
            return Err(format!("git.revision: {revision:?} is not a branch, tag or commit"));
        }
        seconds("git", self.timeout_seconds)
    }
}

/// Whether a text is an `http` or `https` URL. Its user and password would be shown with it.
fn web_url(field: &str, text: &str) -> Result<(), String> {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let Some(rest) = rest else { return Err(format!("{field} begins with http:// or https://")) };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.is_empty() || text.bytes().any(|byte| byte <= b' ' || byte == 127) {
        return Err(format!("{field} is not a URL"));
    }
    if authority.contains('@') {
        return Err(format!("{field} has a user or a password in it: they belong in a Secret"));
    }
    Ok(())
}

fn seconds(what: &str, given: Option<u32>) -> Result<(), String> {
    match given {
        Some(seconds) if seconds == 0 || seconds > TRANSFER_SECONDS_MAX => {
            Err(format!("{what}.timeoutSeconds is 1 to {TRANSFER_SECONDS_MAX}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refused(written: Value) -> String {
        match serde_json::from_value::<InputArtifact>(written) {
            Ok(artifact) => artifact.source().expect_err("it is refused"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn sources_are_checked() {
        let s3 = |change: Value| {
            let mut s3 = json!({"endpoint": "https://s3.example.com", "bucket": "b", "key": "a/b.csv"});
            s3.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            json!({ "s3": s3 })
        };
        let git = |change: Value| {
            let mut git = json!({"repository": "https://example.com/p.git"});
            git.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            json!({ "git": git })
        };
        let url = "https://example.com/data.csv";
        for good in [
            json!({"digest": Digest::of(b"x"), "directory": true, "bytes": 1}),
            json!({"raw": ""}),
            json!({"http": {"url": url, "headers": {"Accept": "text/csv"}, "headersSecret": "s", "timeoutSeconds": 5},
                "sha256": "0".repeat(64), "directory": true}),
            s3(json!({"credentialsSecret": "s"})),
            git(json!({"revision": "v1.2", "depth": 0, "credentialsSecret": "s"})),
            git(json!({"repository": "ssh://git@example.com/p.git"})),
        ] {
            let artifact: InputArtifact = serde_json::from_value(good.clone()).unwrap();
            assert!(artifact.source().is_ok(), "{good}: {:?}", artifact.source());
            assert_eq!(serde_json::from_value::<InputArtifact>(json!(artifact)).unwrap(), artifact);
        }
        for (bad, why) in [
            (json!({}), "one of digest, raw"),
            (json!({"raw": "x", "digest": Digest::of(b"x")}), "one of digest, raw"),
            (json!({"raw": "x", "directory": true}), "raw is a file"),
            (json!({"raw": "x".repeat(1 << 21)}), "push it"),
            (json!({"raw": "x", "sha256": "0".repeat(64)}), "for http and s3 only"),
            (json!({"http": {"url": url}, "sha256": "0"}), "64 hexadecimal"),
            (json!({"http": {"url": "ftp://example.com/x"}}), "http.url begins with"),
            (json!({"http": {"url": "https:///x"}}), "http.url is not a URL"),
            (json!({"http": {"url": "https://u:p@example.com/x"}}), "belong in a Secret"),
            (json!({"http": {"url": url, "headers": {"A": "x\r\nB: y"}}}), "control characters"),
            (json!({"http": {"url": url, "headers": {"A:B": "x"}}}), "is not a header's name"),
            (json!({"http": {"url": url, "timeoutSeconds": 4000}}), "1 to 3600"),
            (json!({"http": {"url": url, "password": "x"}}), "unknown field"),
            (s3(json!({"bucket": "a/b"})), "not a bucket's name"),
            (s3(json!({"key": ""})), "s3.key"),
            (s3(json!({"key": "a/../b"})), "s3.key: a part"),
            (s3(json!({"region": "a b"})), "s3.region"),
            (s3(json!({"endpoint": "example.com"})), "s3.endpoint"),
            (git(json!({"repository": "ext::sh -c id"})), "is a URL"),
            (git(json!({"repository": "ext::x://y"})), "not the URL of a repository"),
            (git(json!({"repository": "--upload-pack=x://y"})), "not the URL of a repository"),
            (git(json!({"repository": "https://u:p@example.com/x"})), "belong in a Secret"),
            (git(json!({"revision": "--output=x"})), "git.revision"),
            (git(json!({"revision": "a:b"})), "git.revision"),
        ] {
            let told = refused(bad.clone());
            assert!(told.contains(why), "{bad}: {told}");
        }
    }

    #[test]
    fn targets_are_checked() {
        for (written, is_good) in [
            (json!({"http": {"url": "https://example.com/put"}}), true),
            (json!({"s3": {"endpoint": "http://10.0.0.5:9000", "bucket": "b", "key": "k"}}), true),
            (json!({}), false),
            (json!({"http": {"url": "file:///etc/passwd"}}), false),
        ] {
            let target: ArtifactTarget = serde_json::from_value(written.clone()).unwrap();
            assert_eq!(target.check().is_ok(), is_good, "{written}");
        }
    }
}
