//! Names of images: registry, repository, tag and digest.

use oci_spec::distribution::Reference;

/// A text that is not the name of an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("couldn't parse image name {text:?}: {cause}")]
pub struct InvalidReference {
    text: String,
    cause: String,
}

/// Reads a name; what it leaves out is completed: `busybox` is `docker.io/library/busybox:latest`.
///
/// # Errors
/// The text is not a name; the message is upstream's.
pub fn parse_reference(text: &str) -> Result<Reference, InvalidReference> {
    text.parse::<Reference>()
        .map_err(|error| InvalidReference { text: text.to_owned(), cause: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_completed() {
        for (text, full) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:local", "docker.io/library/busybox:local"),
            ("a/b:1", "docker.io/a/b:1"),
            ("localhost:5000/a:1", "localhost:5000/a:1"),
            ("registry.mayfly.internal/team/app", "registry.mayfly.internal/team/app:latest"),
        ] {
            assert_eq!(parse_reference(text).unwrap().whole(), full);
        }
        let digest = format!("a/b@sha256:{}", "0".repeat(64));
        assert_eq!(parse_reference(&digest).unwrap().digest().unwrap().len(), 71);
        for wrong in ["A b", "", "a:b:c", "a@sha256:1", "http://a/b"] {
            assert!(parse_reference(wrong).is_err(), "{wrong}");
        }
    }
}
