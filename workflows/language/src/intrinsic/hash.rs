//! The digests of `States.Hash` and of JSONata's `$hash`.

use md5::Md5;
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha384, Sha512};

/// The digest in lower-case hex; `None` for an algorithm that AWS does not support.
pub(crate) fn hex_digest(algorithm: &str, data: &[u8]) -> Option<String> {
    Some(match algorithm {
        "MD5" => hex::encode(Md5::digest(data)),
        "SHA-1" => hex::encode(Sha1::digest(data)),
        "SHA-256" => hex::encode(Sha256::digest(data)),
        "SHA-384" => hex::encode(Sha384::digest(data)),
        "SHA-512" => hex::encode(Sha512::digest(data)),
        _ => return None,
    })
}
