//! Environment variables: literal, from ConfigMaps and Secrets, and `$(NAME)` references.

use std::collections::BTreeMap;

use crate::k8s::api::core::v1::{ConfigMap, EnvVar, Secret};

/// The source of values: the caller's cache of ConfigMaps and Secrets.
pub trait EnvSources {
    fn config_map(&self, namespace: &str, name: &str) -> Option<std::sync::Arc<ConfigMap>>;
    fn secret(&self, namespace: &str, name: &str) -> Option<std::sync::Arc<Secret>>;
}

/// The error of an environment that cannot be made. The words are the kubelet's.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum EnvError {
    #[error("{kind} {namespace}/{name} not found (env {variable})")]
    SourceMissing { kind: &'static str, namespace: String, name: String, variable: String },
    #[error("couldn't find key {key} in {kind} {namespace}/{name} (env {variable})")]
    KeyMissing { kind: &'static str, namespace: String, name: String, key: String, variable: String },
    #[error("value of key {key} in {kind} {namespace}/{name} is not UTF-8 (env {variable})")]
    NotText { kind: &'static str, namespace: String, name: String, key: String, variable: String },
    #[error("env {variable}: only value, configMapKeyRef and secretKeyRef are supported here")]
    Unsupported { variable: String },
}

/// A ConfigMap or Secret, by its name, that a variable takes its value from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference<'a> {
    ConfigMap(&'a str),
    Secret(&'a str),
}

/// The ConfigMaps and Secrets that these variables refer to, with duplicates.
pub fn references(variables: &[EnvVar]) -> impl Iterator<Item = Reference<'_>> {
    variables.iter().filter_map(|variable| variable.value_from.as_ref()).flat_map(|from| {
        let config_map = from.config_map_key_ref.as_ref().map(|named| Reference::ConfigMap(&named.name));
        let secret = from.secret_key_ref.as_ref().map(|named| Reference::Secret(&named.name));
        config_map.into_iter().chain(secret)
    })
}

/// Resolves a list of variables in order. Later ones take precedence and may refer by `$(NAME)` to earlier ones and
/// to those of `known`, which are not in the result.
pub fn resolve(
    namespace: &str,
    variables: &[EnvVar],
    known: &[(String, String)],
    sources: &impl EnvSources,
) -> Result<Vec<(String, String)>, EnvError> {
    let mut resolved: BTreeMap<&str, String> = BTreeMap::new();
    let mut order = Vec::new();
    for variable in variables {
        let value = match (&variable.value, &variable.value_from) {
            (Some(value), _) => Some(expand(value, |name| {
                let before = || known.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
                resolved.get(name).cloned().or_else(before)
            })),
            (None, None) => Some(String::new()),
            (None, Some(_)) => referenced(namespace, variable, sources)?,
        };
        let Some(value) = value else { continue };
        if resolved.insert(&variable.name, value).is_none() {
            order.push(variable.name.as_str());
        }
    }
    Ok(order.into_iter().map(|name| (name.to_owned(), resolved[name].clone())).collect())
}

/// A referenced value; `None` when it is absent and marked optional.
fn referenced(
    namespace: &str,
    variable: &EnvVar,
    sources: &impl EnvSources,
) -> Result<Option<String>, EnvError> {
    let from = variable.value_from.clone().unwrap_or_default();
    if let Some(reference) = from.config_map_key_ref {
        let kind = "configmap";
        let optional = reference.optional.unwrap_or(false);
        let Some(map) = sources.config_map(namespace, &reference.name) else {
            return missing(optional, kind, namespace, reference.name, variable);
        };
        let text = map.data.as_ref().and_then(|data| data.get(&reference.key)).cloned();
        return key_or_error(text, optional, kind, namespace, reference.name, reference.key, variable);
    }
    if let Some(reference) = from.secret_key_ref {
        let kind = "secret";
        let optional = reference.optional.unwrap_or(false);
        let Some(secret) = sources.secret(namespace, &reference.name) else {
            return missing(optional, kind, namespace, reference.name, variable);
        };
        let bytes = secret.data.as_ref().and_then(|data| data.get(&reference.key)).cloned();
        let text =
            bytes.map(|bytes| String::from_utf8(bytes.0)).transpose().map_err(|_| EnvError::NotText {
                kind,
                namespace: namespace.into(),
                name: reference.name.clone(),
                key: reference.key.clone(),
                variable: variable.name.clone(),
            })?;
        return key_or_error(text, optional, kind, namespace, reference.name, reference.key, variable);
    }
    Err(EnvError::Unsupported { variable: variable.name.clone() })
}

fn missing(
    optional: bool,
    kind: &'static str,
    namespace: &str,
    name: String,
    variable: &EnvVar,
) -> Result<Option<String>, EnvError> {
    if optional {
        return Ok(None);
    }
    Err(EnvError::SourceMissing { kind, namespace: namespace.into(), name, variable: variable.name.clone() })
}

fn key_or_error(
    text: Option<String>,
    optional: bool,
    kind: &'static str,
    namespace: &str,
    name: String,
    key: String,
    variable: &EnvVar,
) -> Result<Option<String>, EnvError> {
    match text {
        Some(text) => Ok(Some(text)),
        None if optional => Ok(None),
        None => Err(EnvError::KeyMissing {
            kind,
            namespace: namespace.into(),
            name,
            key,
            variable: variable.name.clone(),
        }),
    }
}

/// Replaces `$(NAME)` by the variable of that name; unknown names stay as they are, `$$` is a dollar sign
/// (upstream: `third_party/forked/golang/expansion`).
pub fn expand(text: &str, mut lookup: impl FnMut(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
            match lookup(name) {
                Some(value) => out.push_str(&value),
                None => out.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::k8s::{
        ByteString,
        api::core::v1::{ConfigMapKeySelector, EnvVarSource, SecretKeySelector},
    };

    struct Two;
    impl EnvSources for Two {
        fn config_map(&self, _: &str, name: &str) -> Option<Arc<ConfigMap>> {
            (name == "settings").then(|| {
                let data = Some([("mode".into(), "fast".into())].into());
                Arc::new(ConfigMap { data, ..Default::default() })
            })
        }
        fn secret(&self, _: &str, name: &str) -> Option<Arc<Secret>> {
            (name == "keys").then(|| {
                let data = Some(
                    [("raw".into(), ByteString(vec![255])), ("k".into(), ByteString(b"s".into()))].into(),
                );
                Arc::new(Secret { data, ..Default::default() })
            })
        }
    }

    fn literal(name: &str, value: &str) -> EnvVar {
        EnvVar { name: name.into(), value: Some(value.into()), ..Default::default() }
    }
    fn from_map(name: &str, map: &str, key: &str, optional: bool) -> EnvVar {
        let reference = ConfigMapKeySelector { name: map.into(), key: key.into(), optional: Some(optional) };
        let value_from = Some(EnvVarSource { config_map_key_ref: Some(reference), ..Default::default() });
        EnvVar { name: name.into(), value_from, ..Default::default() }
    }
    fn from_secret(name: &str, secret: &str, key: &str) -> EnvVar {
        let reference = SecretKeySelector { name: secret.into(), key: key.into(), optional: None };
        let value_from = Some(EnvVarSource { secret_key_ref: Some(reference), ..Default::default() });
        EnvVar { name: name.into(), value_from, ..Default::default() }
    }

    #[test]
    fn literals_references_and_expansion() {
        let variables = [
            literal("A", "1"),
            literal("B", "$(A)-$(NONE)-$$(A)-$-$(K)"),
            from_map("M", "settings", "mode", false),
            from_map("GONE", "nothing", "x", true),
            from_secret("S", "keys", "k"),
            literal("A", "2"),
        ];
        let known = [("A", "0"), ("K", "9")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let pairs = resolve("default", &variables, &known, &Two).unwrap();
        let text: Vec<_> = pairs.iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(text, ["A=2", "B=1-$(NONE)-$(A)-$-9", "M=fast", "S=s"]);
    }

    #[test]
    fn references_are_named_by_kind() {
        let variables = [
            literal("A", "1"),
            from_secret("S", "keys", "k"),
            from_map("M", "settings", "mode", true),
            from_map("N", "settings", "other", false),
        ];
        let found: Vec<_> = references(&variables).collect();
        let settings = Reference::ConfigMap("settings");
        assert_eq!(found, [Reference::Secret("keys"), settings, settings]);
    }

    #[test]
    fn says_what_is_missing() {
        for (variable, expected) in [
            (from_map("M", "nothing", "x", false), "configmap default/nothing not found (env M)"),
            (
                from_map("M", "settings", "x", false),
                "couldn't find key x in configmap default/settings (env M)",
            ),
            (from_secret("S", "keys", "raw"), "value of key raw in secret default/keys is not UTF-8 (env S)"),
        ] {
            assert_eq!(resolve("default", &[variable], &[], &Two).unwrap_err().to_string(), expected);
        }
    }
}
