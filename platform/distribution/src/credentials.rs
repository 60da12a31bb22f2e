//! Logins of registries, as Docker's `config.json` and pull secrets keep them.

use std::{collections::BTreeMap, fmt};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use oci_spec::distribution::Reference;
use serde::Deserialize;

/// Docker Hub's names; entries of old clients have the second one.
const DOCKER_HUB: [&str; 3] = ["docker.io", "index.docker.io", "registry-1.docker.io"];

/// A login.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct RegistryLogin {
    /// The user's name.
    pub username: String,
    /// The password, or a personal token.
    pub password: String,
    /// A refresh token, used instead of the password.
    pub identity_token: String,
}

impl fmt::Debug for RegistryLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistryLogin").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Logins by the registries, or parts of them, that they are for.
#[derive(Clone, Debug, Default)]
pub struct Keychain {
    entries: Vec<(String, RegistryLogin)>,
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, DockerAuth>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct DockerAuth {
    username: String,
    password: String,
    /// `username:password` in base64.
    auth: String,
    #[serde(alias = "identitytoken")]
    identity_token: String,
}

impl DockerAuth {
    /// # Errors
    /// `auth` is not a user name and a password.
    pub(crate) fn login(&self) -> Result<RegistryLogin, String> {
        let mut login = RegistryLogin {
            username: self.username.clone(),
            password: self.password.clone(),
            identity_token: self.identity_token.clone(),
        };
        if !self.auth.is_empty() {
            let text = STANDARD.decode(self.auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let text = text.ok_or("auth is not base64 of user:password")?;
            let (username, password) = text.split_once(':').ok_or("auth is not base64 of user:password")?;
            login.username = username.to_owned();
            login.password = password.trim_end_matches('\0').to_owned();
        }
        Ok(login)
    }
}

impl Keychain {
    /// Adds the logins of a Docker `config.json` (`{"auths": {…}}`, the content of secrets of type
    /// `kubernetes.io/dockerconfigjson`).
    ///
    /// # Errors
    /// The text is not such a file; nothing of it is added.
    pub fn add_docker_config(&mut self, text: &[u8]) -> Result<(), String> {
        let config: DockerConfig =
            serde_json::from_slice(text).map_err(|error| format!("no Docker config.json: {error}"))?;
        let mut entries = Vec::new();
        for (registry, auth) in &config.auths {
            entries.push((registry.clone(), auth.login().map_err(|why| format!("{registry}: {why}"))?));
        }
        self.entries.extend(entries);
        Ok(())
    }

    /// The logins for an image: those of the longest names first, as upstream tries them.
    pub fn logins(&self, image: &Reference) -> Vec<RegistryLogin> {
        let mut fitting: Vec<&(String, RegistryLogin)> =
            self.entries.iter().filter(|(pattern, _)| matches(pattern, image)).collect();
        fitting.sort_by_key(|(pattern, _)| std::cmp::Reverse(path_of(pattern).1.len()));
        let mut logins: Vec<RegistryLogin> = Vec::new();
        for (_, login) in fitting {
            if !logins.contains(login) {
                logins.push(login.clone());
            }
        }
        logins
    }
}

/// The host of an entry, and the path below it that images must have; `/v1/` and `/v2/` are the host itself.
fn path_of(pattern: &str) -> (&str, &str) {
    let plain = pattern.trim_start_matches("https://").trim_start_matches("http://");
    let (host, path) = plain.split_once('/').unwrap_or((plain, ""));
    let path = path.trim_matches('/');
    let path = match path.strip_prefix("v1").or_else(|| path.strip_prefix("v2")) {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => rest.trim_matches('/'),
        _ => path,
    };
    (host, path)
}

/// Upstream's rule (`credentialprovider/keyring.go`): hosts match part by part, `*` within a part; a port must be the
/// same; a path matches the beginning of the repository.
fn matches(pattern: &str, image: &Reference) -> bool {
    let (host, path) = path_of(pattern);
    let registry = image.registry();
    let hosts: &[&str] = if DOCKER_HUB.contains(&registry) { &DOCKER_HUB } else { &[registry] };
    let repository = image.repository();
    let path_fits = path.is_empty()
        || repository == path
        || repository.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'));
    path_fits && hosts.iter().any(|registry| host_matches(host, registry))
}

fn host_matches(pattern: &str, host: &str) -> bool {
    let split = |text: &str| match text.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            (name.to_owned(), Some(port.to_owned()))
        }
        _ => (text.to_owned(), None),
    };
    let ((pattern, pattern_port), (host, port)) = (split(pattern), split(host));
    let (patterns, parts): (Vec<_>, Vec<_>) = (pattern.split('.').collect(), host.split('.').collect());
    pattern_port == port
        && patterns.len() == parts.len()
        && patterns.iter().zip(&parts).all(|(pattern, part)| part_matches(pattern, part))
}

/// Matches one part of a host name against a pattern in which `*` is any text.
fn part_matches(pattern: &str, part: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == part };
    let Some(rest) = part.strip_prefix(before) else { return false };
    (0..=rest.len()).filter(|at| rest.is_char_boundary(*at)).any(|at| part_matches(after, &rest[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse_reference;

    fn chain(text: &str) -> Keychain {
        let mut chain = Keychain::default();
        chain.add_docker_config(text.as_bytes()).unwrap();
        chain
    }

    #[test]
    fn entries_fit_registries_as_upstream_says() {
        for (pattern, image, fits) in [
            ("registry.example.com", "registry.example.com/a:1", true),
            ("https://registry.example.com/v2/", "registry.example.com/a:1", true),
            ("*.example.com", "registry.example.com/a", true),
            ("*.example.com", "example.com/a", false),
            ("*.example.com", "a.b.example.com/a", false),
            ("r*y.example.com", "registry.example.com/a", true),
            ("registry.example.com/team", "registry.example.com/team/a", true),
            ("registry.example.com/team", "registry.example.com/teams/a", false),
            ("registry.example.com:5000", "registry.example.com:5000/a", true),
            ("registry.example.com", "registry.example.com:5000/a", false),
            ("https://index.docker.io/v1/", "busybox", true),
            ("docker.io", "someone/app", true),
            ("localhost:5000", "localhost:5000/a", true),
        ] {
            assert_eq!(matches(pattern, &parse_reference(image).unwrap()), fits, "{pattern} {image}");
        }
    }

    #[test]
    fn logins_are_read_in_every_form_and_the_narrowest_comes_first() {
        let auth = STANDARD.encode("u:p:q");
        let text = format!(
            r#"{{"auths": {{"r.example.com": {{"auth": "{auth}"}},
                "r.example.com/team": {{"username": "team", "password": "x", "email": "e"}},
                "other.example.com": {{"identitytoken": "t"}}}}}}"#
        );
        let names = |image: &str| {
            let logins = chain(&text).logins(&parse_reference(image).unwrap());
            logins.into_iter().map(|login| (login.username, login.password)).collect::<Vec<_>>()
        };
        let own = |name: &str, password: &str| (name.to_owned(), password.to_owned());
        assert_eq!(names("r.example.com/team/a"), [own("team", "x"), own("u", "p:q")]);
        assert_eq!(names("r.example.com/a"), [own("u", "p:q")]);
        assert_eq!(names("elsewhere.example.com/a"), []);
        let token = chain(&text).logins(&parse_reference("other.example.com/a").unwrap());
        assert_eq!(token[0].identity_token, "t");
        assert!(!format!("{:?}", chain(&text)).contains("p:q"), "no password in logs");
    }

    #[test]
    fn damaged_secrets_say_what_is_wrong() {
        let add = |text: &str| Keychain::default().add_docker_config(text.as_bytes()).unwrap_err();
        assert!(add("{").contains("config.json"));
        assert!(add(r#"{"auths": {"r": {"auth": "%%"}}}"#).contains("base64"));
        let without = STANDARD.encode("nothing");
        assert!(add(&format!(r#"{{"auths": {{"r": {{"auth": "{without}"}}}}}}"#)).contains("r: auth"));
    }
}
