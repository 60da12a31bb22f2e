//! Tokens of service accounts: JWTs with an audience, an expiry and optionally an object whose deletion invalidates
//! them. The claims are upstream's (`pkg/serviceaccount`); they are signed with ECDSA over P-256 (`ES256`).

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jiff::Timestamp;
use ring::{
    rand::SystemRandom,
    signature::{self, ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{access::User, object::Object, registry::registry, server::ServerState, verbs::key};

/// The issuer of tokens, and their default audience.
pub(crate) const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
/// The algorithm of the signatures, as JWTs name it.
pub(crate) const ALGORITHM: &str = "ES256";
/// The default lifetime of a token in seconds, and the shortest one (upstream's).
pub(crate) const EXPIRATION_SECONDS_DEFAULT: i64 = 3600;
pub(crate) const EXPIRATION_SECONDS_MIN: i64 = 600;
pub(crate) const EXPIRATION_SECONDS_MAX: i64 = 1 << 32;
/// The longest token that is parsed, in bytes.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// The reason why a token is not accepted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum AccountTokenError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the signature of the token does not verify")]
    Signature,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    NotYet,
    #[error("token audiences {found:?} is invalid for the target audiences {wanted:?}")]
    Audience { found: Vec<String>, wanted: Vec<String> },
    #[error("the service account or the object that the token is bound to does not exist any more")]
    Unbound,
}

/// The claims of a valid token.
#[derive(Debug)]
pub(crate) struct VerifiedToken {
    pub(crate) user: User,
    /// The requested audiences that the token has.
    pub(crate) audiences: Vec<String>,
}

/// The parameters of a new token.
#[derive(Debug)]
pub(crate) struct TokenClaims<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) account: &'a str,
    pub(crate) account_uid: &'a str,
    /// Kind, name and uid of an object in the namespace.
    pub(crate) bound: Option<(&'a str, &'a str, &'a str)>,
    pub(crate) audiences: &'a [String],
    pub(crate) seconds: i64,
}

/// Signs and verifies tokens.
pub(crate) struct Tokens {
    key: EcdsaKeyPair,
    key_id: String,
    random: SystemRandom,
}

/// Generates a signing key, as PKCS #8.
pub(crate) fn new_key() -> Vec<u8> {
    let random = SystemRandom::new();
    let made = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random);
    made.expect("the system has randomness").as_ref().to_vec()
}

/// Whether `pkcs8` is a signing key, see [`new_key`].
pub(crate) fn is_key(pkcs8: &[u8]) -> bool {
    Tokens::new(pkcs8).is_some()
}

impl Tokens {
    /// `pkcs8`: see [`new_key`]; `None` if it is not such a key.
    pub(crate) fn new(pkcs8: &[u8]) -> Option<Self> {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8, &random).ok()?;
        let key_id = URL_SAFE_NO_PAD.encode(Sha256::digest(key.public_key().as_ref()));
        Some(Self { key, key_id, random })
    }

    /// The key by which others verify tokens, as a JSON Web Key.
    pub(crate) fn public_key(&self) -> Value {
        // The uncompressed form of a point: a prefix, then both coordinates.
        let (x, y) = self.key.public_key().as_ref()[1..].split_at(32);
        json!({
            "use": "sig",
            "kty": "EC",
            "kid": self.key_id,
            "crv": "P-256",
            "alg": ALGORITHM,
            "x": URL_SAFE_NO_PAD.encode(x),
            "y": URL_SAFE_NO_PAD.encode(y),
        })
    }

    pub(crate) fn sign(&self, claims: &TokenClaims<'_>, now: Timestamp) -> String {
        let (issued, id) = (now.as_second(), uuid::Uuid::new_v4().to_string());
        let account = json!({"name": claims.account, "uid": claims.account_uid});
        let mut private = json!({"namespace": claims.namespace, "serviceaccount": account});
        if let Some((kind, name, uid)) = claims.bound {
            private[kind.to_lowercase()] = json!({"name": name, "uid": uid});
        }
        let body = json!({
            "aud": claims.audiences,
            "exp": issued + claims.seconds,
            "iat": issued,
            "iss": ISSUER,
            "jti": id,
            "kubernetes.io": private,
            "nbf": issued,
            "sub": User::service_account(claims.namespace, claims.account).name,
        });
        let head = json!({"alg": ALGORITHM, "kid": self.key_id, "typ": "JWT"});
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&head), part(&body));
        let signature = self.key.sign(&self.random, signed.as_bytes()).expect("the system has randomness");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref()))
    }

    /// The claims of a token with a valid signature that has not expired.
    fn claims(&self, token: &str, now: Timestamp) -> Result<Value, AccountTokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(AccountTokenError::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(AccountTokenError::Malformed)?;
        let (head, body) = signed.split_once('.').ok_or(AccountTokenError::Malformed)?;
        let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|_| AccountTokenError::Malformed);
        let json = |text: &str| -> Result<Value, AccountTokenError> {
            serde_json::from_slice(&bytes(text)?).map_err(|_| AccountTokenError::Malformed)
        };
        if json(head)?["alg"] != ALGORITHM {
            return Err(AccountTokenError::Signature);
        }
        signature::UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.key.public_key().as_ref())
            .verify(signed.as_bytes(), &bytes(signature)?)
            .map_err(|_| AccountTokenError::Signature)?;
        let claims = json(body)?;
        let (now, at) = (now.as_second(), |field: &str| claims[field].as_i64());
        if claims["iss"] != ISSUER {
            return Err(AccountTokenError::Malformed);
        }
        if at("nbf").is_some_and(|from| now < from) {
            return Err(AccountTokenError::NotYet);
        }
        if at("exp").is_none_or(|until| now > until) {
            return Err(AccountTokenError::Expired);
        }
        Ok(claims)
    }

    /// The user of a token. `audiences`: the accepted ones; if empty, the API's own.
    pub(crate) fn verify(
        &self,
        server: &ServerState,
        token: &str,
        audiences: &[String],
    ) -> Result<VerifiedToken, AccountTokenError> {
        let claims = self.claims(token, server.now())?;
        let own = [ISSUER.to_owned()];
        let wanted = if audiences.is_empty() { &own[..] } else { audiences };
        let list = claims["aud"].as_array().into_iter().flatten();
        let found: Vec<String> = list.filter_map(|one| one.as_str().map(str::to_owned)).collect();
        let common: Vec<String> = wanted.iter().filter(|one| found.contains(one)).cloned().collect();
        if common.is_empty() {
            return Err(AccountTokenError::Audience { found, wanted: wanted.to_vec() });
        }
        let private = &claims["kubernetes.io"];
        let text = |value: &Value, field: &str| value[field].as_str().unwrap_or("").to_owned();
        let namespace = text(private, "namespace");
        let (name, uid) = (text(&private["serviceaccount"], "name"), text(&private["serviceaccount"], "uid"));
        if !server.is_alive("serviceaccounts", &namespace, &name, &uid) {
            return Err(AccountTokenError::Unbound);
        }
        let mut user = User::service_account(&namespace, &name);
        user.uid = uid;
        let id = format!("JTI={}", text(&claims, "jti"));
        user.extra.insert("authentication.kubernetes.io/credential-id".into(), vec![id]);
        for (kind, plural) in [("pod", "pods"), ("secret", "secrets"), ("node", "nodes")] {
            let Some(bound) = private.get(kind) else { continue };
            let (name, uid) = (text(bound, "name"), text(bound, "uid"));
            let within = if kind == "node" { "" } else { namespace.as_str() };
            if !server.is_alive(plural, within, &name, &uid) {
                return Err(AccountTokenError::Unbound);
            }
            if kind != "secret" {
                user.extra.insert(format!("authentication.kubernetes.io/{kind}-name"), vec![name]);
                user.extra.insert(format!("authentication.kubernetes.io/{kind}-uid"), vec![uid]);
            }
        }
        Ok(VerifiedToken { user, audiences: common })
    }
}

impl ServerState {
    /// Whether an object of the core group exists under this uid.
    fn is_alive(&self, plural: &str, namespace: &str, name: &str, uid: &str) -> bool {
        let Some(kind) = registry().find("", "v1", plural) else { return false };
        let entry = self.store.get(&key(kind, namespace, name));
        entry.and_then(|entry| Object::from_entry(&entry).ok()).is_some_and(|object| object.uid() == uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(audiences: &[String], seconds: i64) -> TokenClaims<'_> {
        TokenClaims { namespace: "a", account: "b", account_uid: "u", bound: None, audiences, seconds }
    }

    #[test]
    fn a_token_is_good_for_its_time_and_its_key() {
        let (tokens, other) = (Tokens::new(&new_key()).unwrap(), Tokens::new(&new_key()).unwrap());
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let token = tokens.sign(&claims(&[ISSUER.to_owned()], 600), now);
        let found = tokens.claims(&token, now).unwrap();
        assert_eq!(found["sub"], "system:serviceaccount:a:b");
        assert_eq!(found["exp"], now.as_second() + 600);
        let at = |seconds: i64| Timestamp::from_second(now.as_second() + seconds).unwrap();
        assert_eq!(tokens.claims(&token, at(601)), Err(AccountTokenError::Expired));
        assert_eq!(tokens.claims(&token, at(-1)), Err(AccountTokenError::NotYet));
        assert_eq!(other.claims(&token, now), Err(AccountTokenError::Signature));
        let (head, rest) = token.split_once('.').unwrap();
        let (body, signature) = rest.split_once('.').unwrap();
        let mut forged: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(body).unwrap()).unwrap();
        forged["sub"] = json!("system:serviceaccount:kube-system:root");
        let forged = format!("{head}.{}.{signature}", URL_SAFE_NO_PAD.encode(forged.to_string()));
        assert_eq!(tokens.claims(&forged, now), Err(AccountTokenError::Signature));
        let none = URL_SAFE_NO_PAD.encode(json!({"alg": "none"}).to_string());
        assert_eq!(tokens.claims(&format!("{none}.{body}."), now), Err(AccountTokenError::Signature));
        for bad in ["", "a", "a.b", "a.b.c", "...."] {
            assert!(tokens.claims(bad, now).is_err(), "{bad}");
        }
    }
}
