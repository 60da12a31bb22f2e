//! Bootstrap tokens: the credentials with which a machine joins, before it has a certificate (upstream's
//! `plugin/pkg/auth/authenticator/token/bootstrap` and `cluster-bootstrap`).
//!
//! A token is a Secret in `kube-system`; deleting the Secret revokes the token. It is read from the store for each
//! request.

use std::{collections::BTreeMap, fmt};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use k8s_openapi::{ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use mayfly_api::wellknown::NAMESPACE_SYSTEM;
use rand::RngExt as _;
use sha2::{Digest as _, Sha256};

use crate::{access::User, object::Object, registry::registry, server::ServerState, verbs::key};

const SECRET_TYPE: &str = "bootstrap.kubernetes.io/token";
const SECRET_PREFIX: &str = "bootstrap-token-";
const ID_BYTES: usize = 6;
const SECRET_BYTES: usize = 16;
const USER_PREFIX: &str = "system:bootstrap:";
const GROUP_BOOTSTRAPPERS: &str = "system:bootstrappers";
/// The longest name of a further group after [`GROUP_BOOTSTRAPPERS`] and a colon.
const EXTRA_GROUP_BYTES_MAX: usize = 256;
const KEY_ID: &str = "token-id";
const KEY_SECRET: &str = "token-secret";
const KEY_DESCRIPTION: &str = "description";
const KEY_EXPIRATION: &str = "expiration";
const KEY_AUTHENTICATION: &str = "usage-bootstrap-authentication";
const KEY_GROUPS: &str = "auth-extra-groups";

/// A bootstrap token, `ID.SECRET`: the id has 6 and the secret 16 lower case letters or digits. `Display` shows all of
/// it, `Debug` only the id.
#[derive(Clone, PartialEq, Eq)]
pub struct BootstrapToken {
    id: String,
    secret: String,
}

impl fmt::Debug for BootstrapToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootstrapToken").field("id", &self.id).finish_non_exhaustive()
    }
}

impl fmt::Display for BootstrapToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.id, self.secret)
    }
}

impl BootstrapToken {
    /// A token of random characters.
    #[must_use]
    pub fn generate() -> Self {
        const CHARACTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
        let mut random = rand::rng();
        let mut text = |length| -> String {
            (0..length).map(|_| char::from(CHARACTERS[random.random_range(0..CHARACTERS.len())])).collect()
        };
        Self { id: text(ID_BYTES), secret: text(SECRET_BYTES) }
    }

    /// Parses `ID.SECRET`; `None` if the text does not have this form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (id, secret) = text.split_once('.')?;
        let is_part = |text: &str, length| {
            text.len() == length && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9'))
        };
        let is_token = is_part(id, ID_BYTES) && is_part(secret, SECRET_BYTES);
        is_token.then(|| Self { id: id.to_owned(), secret: secret.to_owned() })
    }

    /// The public part of the token, which is also in the name of its Secret and of its user.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The Secret whose existence makes the token valid until `expiration` (`None`: until the Secret is deleted).
    #[must_use]
    pub fn to_secret(&self, description: &str, expiration: Option<Timestamp>) -> Secret {
        let expiration =
            expiration.map(|until| (KEY_EXPIRATION, until.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()));
        let data = [
            (KEY_ID, self.id.clone()),
            (KEY_SECRET, self.secret.clone()),
            (KEY_DESCRIPTION, description.to_owned()),
            (KEY_AUTHENTICATION, "true".to_owned()),
        ];
        let data = data.into_iter().chain(expiration);
        Secret {
            metadata: ObjectMeta {
                name: Some(format!("{SECRET_PREFIX}{}", self.id)),
                namespace: Some(NAMESPACE_SYSTEM.to_owned()),
                ..ObjectMeta::default()
            },
            type_: Some(SECRET_TYPE.to_owned()),
            data: Some(data.map(|(key, value)| (key.to_owned(), ByteString(value.into_bytes()))).collect()),
            ..Secret::default()
        }
    }

    /// The groups of this token's user, sorted.
    ///
    /// # Errors
    /// The reason for which `secret` does not authenticate this token.
    fn groups(&self, secret: &Object, now: Timestamp) -> Result<Vec<String>, &'static str> {
        if secret.is_terminating() {
            return Err("is being deleted");
        }
        if secret.str_at(&["type"]) != SECRET_TYPE {
            return Err("has another type than bootstrap.kubernetes.io/token");
        }
        let data: BTreeMap<&str, Vec<u8>> = secret
            .at(&["data"])
            .and_then(serde_json::Value::as_object)
            .into_iter()
            .flatten()
            .filter_map(|(key, value)| Some((key.as_str(), STANDARD.decode(value.as_str()?).ok()?)))
            .collect();
        let of = |key: &str| data.get(key).map_or(&[][..], Vec::as_slice);
        // Comparing digests makes the time of the comparison independent of the secret.
        if Sha256::digest(of(KEY_SECRET)) != Sha256::digest(self.secret.as_bytes()) {
            return Err("has another token-secret");
        }
        if of(KEY_ID) != self.id.as_bytes() {
            return Err("has a token-id that differs from its name");
        }
        let expiration = String::from_utf8_lossy(of(KEY_EXPIRATION));
        // A time that cannot be parsed is in the past.
        if !expiration.is_empty() && !expiration.parse::<Timestamp>().is_ok_and(|until| now < until) {
            return Err("has expired");
        }
        if of(KEY_AUTHENTICATION) != b"true" {
            return Err("is not for authentication: usage-bootstrap-authentication is not \"true\"");
        }
        let extra = String::from_utf8_lossy(of(KEY_GROUPS));
        let extra: Vec<_> = extra.split(',').filter(|_| !extra.is_empty()).map(str::to_owned).collect();
        if !extra.iter().all(|group| is_bootstrap_group(group)) {
            return Err("has an invalid group in auth-extra-groups");
        }
        let mut groups: Vec<_> = extra.into_iter().chain([GROUP_BOOTSTRAPPERS.to_owned()]).collect();
        groups.sort();
        groups.dedup();
        Ok(groups)
    }
}

/// Whether a Secret may put its token's user into this group: `system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]`.
fn is_bootstrap_group(group: &str) -> bool {
    let name = group.strip_prefix(GROUP_BOOTSTRAPPERS).and_then(|rest| rest.strip_prefix(':'));
    let is_plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9');
    name.is_some_and(|name| {
        name.len() <= EXTRA_GROUP_BYTES_MAX
            && name.bytes().all(|byte| is_plain(byte) || matches!(byte, b':' | b'-'))
            && name.bytes().last().is_some_and(is_plain)
    })
}

impl ServerState {
    /// The user of a bootstrap token; `None` for a text of another form and for a token without a valid Secret.
    pub(crate) fn bootstrap_user(&self, token: &str) -> Option<User> {
        let token = BootstrapToken::parse(token)?;
        let kind = registry().find("", "v1", "secrets")?;
        let name = format!("{SECRET_PREFIX}{}", token.id);
        let entry = self.store.get(&key(kind, NAMESPACE_SYSTEM, &name))?;
        let secret = Object::from_entry(&entry).ok()?;
        match token.groups(&secret, self.now()) {
            Ok(groups) => Some(User::authenticated(format!("{USER_PREFIX}{}", token.id), groups)),
            Err(why) => {
                tracing::debug!(secret = name, why, "a bootstrap token is refused");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: &str = "2026-01-01T00:00:00Z";

    fn object(secret: &Secret) -> Object {
        match serde_json::to_value(secret).unwrap() {
            Value::Object(map) => Object(map),
            _ => Object::default(),
        }
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn tokens_have_one_form() {
        let token = BootstrapToken::parse("abc123.0123456789abcdef").unwrap();
        assert_eq!((token.id(), token.to_string().as_str()), ("abc123", "abc123.0123456789abcdef"));
        assert!(!format!("{token:?}").contains("0123456789abcdef"));
        let made = BootstrapToken::generate();
        assert_eq!(BootstrapToken::parse(&made.to_string()), Some(made.clone()));
        assert_ne!(BootstrapToken::generate(), made);
        for bad in [
            "",
            "abc123",
            "abc12.0123456789abcdef",
            "abc123.0123456789abcde",
            "abc123.0123456789abcdef0",
            "ABC123.0123456789abcdef",
            "abc123.0123456789abcde.",
            "abc12-.0123456789abcdef",
            "abc123.0123456789abcdef\n",
            " abc123.0123456789abcdef",
        ] {
            assert_eq!(BootstrapToken::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_secret_authenticates_its_token_only() {
        let token = BootstrapToken::parse("abc123.0123456789abcdef").unwrap();
        let secret = token.to_secret("for tests", Some(at("2026-01-01T00:00:01Z")));
        assert_eq!(secret.metadata.name.as_deref(), Some("bootstrap-token-abc123"));
        let secret = object(&secret);
        assert_eq!(token.groups(&secret, at(NOW)), Ok(vec!["system:bootstrappers".to_owned()]));
        assert_eq!(token.groups(&secret, at("2026-01-01T00:00:01Z")), Err("has expired"));
        let other = BootstrapToken::parse("abc123.0123456789abcdee").unwrap();
        assert_eq!(other.groups(&secret, at(NOW)), Err("has another token-secret"));
        let other = BootstrapToken::parse("abc124.0123456789abcdef").unwrap();
        assert!(other.groups(&secret, at(NOW)).is_err());
        let endless = object(&token.to_secret("", None));
        assert!(token.groups(&endless, at("2126-01-01T00:00:00Z")).is_ok());
    }

    #[test]
    fn secrets_with_other_content_authenticate_nobody() {
        let token = BootstrapToken::parse("abc123.0123456789abcdef").unwrap();
        let with = |path: &str, value: Value| {
            let mut secret = Value::Object(object(&token.to_secret("", None)).0);
            *secret.pointer_mut(path).unwrap() = value;
            let Value::Object(map) = secret else { unreachable!("it is an object") };
            token.groups(&Object(map), at(NOW))
        };
        let encoded = |text: &str| json!(STANDARD.encode(text));
        assert!(with("/data/description", encoded("other")).is_ok());
        assert!(with("/type", json!("Opaque")).is_err());
        assert!(with("/data", json!({})).is_err());
        assert!(with("/data", Value::Null).is_err());
        assert!(with("/data/token-id", encoded("abc124")).is_err());
        assert!(with("/data/token-secret", encoded("")).is_err());
        assert!(with("/data/usage-bootstrap-authentication", encoded("True")).is_err());
        let mut deleted = object(&token.to_secret("", None));
        deleted.meta_mut().insert("deletionTimestamp".into(), json!(NOW));
        assert_eq!(token.groups(&deleted, at(NOW)), Err("is being deleted"));
    }

    #[test]
    fn further_groups_and_expirations_are_validated() {
        let token = BootstrapToken::parse("abc123.0123456789abcdef").unwrap();
        let with = |field: &str, value: &str| {
            let mut secret = object(&token.to_secret("", None));
            secret.map_mut("data").insert(field.to_owned(), json!(STANDARD.encode(value)));
            token.groups(&secret, at(NOW))
        };
        let found =
            with(KEY_GROUPS, "system:bootstrappers:b:c-1,system:bootstrappers:a,system:bootstrappers:a");
        assert_eq!(
            found.unwrap(),
            ["system:bootstrappers", "system:bootstrappers:a", "system:bootstrappers:b:c-1"]
        );
        let longest = format!("system:bootstrappers:{}", "a".repeat(256));
        assert!(with(KEY_GROUPS, &longest).is_ok());
        for bad in [
            "system:masters",
            "system:bootstrappers",
            "system:bootstrappers:",
            "system:bootstrappers:-",
            "system:bootstrappers:A",
            "system:bootstrappers:a,",
            "system:bootstrappers:a, system:bootstrappers:b",
            &format!("{longest}a"),
        ] {
            assert!(with(KEY_GROUPS, bad).is_err(), "{bad:?}");
        }
        assert!(with(KEY_EXPIRATION, "2026-01-01T01:00:01+01:00").is_ok(), "with a time zone");
        for bad in ["2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00", "tomorrow", "2027"] {
            assert_eq!(with(KEY_EXPIRATION, bad), Err("has expired"), "{bad:?}");
        }
    }
}
