//! Tokens by which a machine joins a cluster.

use std::{fmt, str::FromStr};

use rand::{CryptoRng, RngExt as _};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use sha2::{Digest as _, Sha256};

/// Length of [`JoinToken::id`] in characters (upstream's).
const ID_CHARACTERS: usize = 6;
/// Length of [`JoinToken::secret`] in characters (upstream's).
const SECRET_CHARACTERS: usize = 16;
const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
const HASH_BYTES: usize = 32;

/// The SHA-256 of the DER of a certificate authority's certificate; 64 hexadecimal digits as text.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CaHash([u8; HASH_BYTES]);

impl CaHash {
    /// The hash of a certificate, in DER.
    pub fn of_der(certificate: &[u8]) -> Self {
        Self(Sha256::digest(certificate).into())
    }

    /// The hash of the first certificate in a PEM text; `None` if there is none.
    pub fn of_pem(pem: &str) -> Option<Self> {
        CertificateDer::from_pem_slice(pem.as_bytes()).ok().map(|der| Self::of_der(&der))
    }
}

impl fmt::Display for CaHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for CaHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A token that admits a machine as a node: a bootstrap token of the API server, and the hash of the CA certificate by
/// which the machine recognises the server. As text: `ID.SECRET.CAHASH`.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    id: String,
    secret: String,
    ca_hash: CaHash,
}

impl JoinToken {
    /// Makes a token with a random id and a random secret (82 bits).
    pub fn generate(ca_hash: CaHash, random: &mut impl CryptoRng) -> Self {
        let mut text = |characters: usize| {
            let letters =
                (0..characters).map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())]));
            letters.collect::<String>()
        };
        Self { id: text(ID_CHARACTERS), secret: text(SECRET_CHARACTERS), ca_hash }
    }

    /// The public part, which names the Secret `bootstrap-token-ID`: 6 characters of `[a-z0-9]`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The secret part: 16 characters of `[a-z0-9]`.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// The hash of the cluster's CA certificate.
    pub fn ca_hash(&self) -> CaHash {
        self.ca_hash
    }

    /// The bearer token for the API server: `ID.SECRET`.
    pub fn bearer(&self) -> String {
        format!("{}.{}", self.id, self.secret)
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.id, self.secret, self.ca_hash)
    }
}

/// Does not show the secret.
impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken")
            .field("id", &self.id)
            .field("ca_hash", &self.ca_hash)
            .finish_non_exhaustive()
    }
}

/// The reason why a text is not a [`JoinToken`]. Does not repeat the text, which may contain a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidToken {
    /// The number of parts is not three.
    #[error(
        "a join token has three parts, ID.SECRET.CAHASH, not {0}; copy the whole token that the server printed"
    )]
    Parts(usize),
    /// The first part is not an id.
    #[error("the first part of a join token has {ID_CHARACTERS} characters of a-z and 0-9")]
    Id,
    /// The second part is not a secret.
    #[error("the second part of a join token has {SECRET_CHARACTERS} characters of a-z and 0-9")]
    Secret,
    /// The third part is not a hash.
    #[error(
        "the third part of a join token is the SHA-256 of the cluster's CA certificate: 64 hexadecimal digits"
    )]
    CaHash,
}

impl FromStr for CaHash {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let bytes = hex::decode(text).map_err(|_| InvalidToken::CaHash)?;
        bytes.try_into().map(Self).map_err(|_| InvalidToken::CaHash)
    }
}

impl FromStr for JoinToken {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let parts: Vec<_> = text.trim().split('.').collect();
        let [id, secret, hash] = parts[..] else { return Err(InvalidToken::Parts(parts.len())) };
        let is_text = |part: &str, characters: usize| {
            part.len() == characters && part.bytes().all(|byte| ALPHABET.contains(&byte))
        };
        if !is_text(id, ID_CHARACTERS) {
            return Err(InvalidToken::Id);
        }
        if !is_text(secret, SECRET_CHARACTERS) {
            return Err(InvalidToken::Secret);
        }
        Ok(Self { id: id.to_owned(), secret: secret.to_owned(), ca_hash: hash.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_its_text() {
        let hash = CaHash::of_der(b"certificate");
        let token = JoinToken::generate(hash, &mut rand::rng());
        assert_eq!(token.to_string().parse(), Ok(token.clone()));
        assert_eq!(format!(" {token}\n").parse(), Ok(token.clone()));
        assert_eq!(token.to_string(), format!("{}.{hash}", token.bearer()));
        assert_ne!(token, JoinToken::generate(hash, &mut rand::rng()));
        assert!(!format!("{token:?}").contains(token.secret()));
    }

    #[test]
    fn other_texts_are_refused_with_the_part_that_is_wrong() {
        let hash = "a".repeat(64);
        for (text, expected) in [
            (String::new(), InvalidToken::Parts(1)),
            ("abcdef.0123456789abcdef".into(), InvalidToken::Parts(2)),
            (format!("abcde.0123456789abcdef.{hash}"), InvalidToken::Id),
            (format!("ABCDEF.0123456789abcdef.{hash}"), InvalidToken::Id),
            (format!("abcdef.0123456789abcde!.{hash}"), InvalidToken::Secret),
            (format!("abcdef.0123456789abcdef.{}", &hash[1..]), InvalidToken::CaHash),
            (format!("abcdef.0123456789abcdef.{}g", &hash[1..]), InvalidToken::CaHash),
        ] {
            assert_eq!(text.parse::<JoinToken>(), Err(expected), "{text}");
        }
        // The hash that `openssl x509 -outform der | sha256sum` prints, in any case.
        let upper = format!("abcdef.0123456789abcdef.{}", hash.to_uppercase());
        assert_eq!(upper.parse::<JoinToken>().unwrap().ca_hash().to_string(), hash);
    }
}
