//! The settings of registries: mirrors, certificates, logins, plain HTTP.
//!
//! The file is k3s's `registries.yaml`, a form that operators know:
//! ```yaml
//! mirrors:
//!   docker.io: {endpoint: ["https://mirror.example.com"]}
//! configs:
//!   mirror.example.com:
//!     auth: {username: u, password: p}
//!     tls: {ca_file: /etc/ca.pem, cert_file: /etc/c.pem, key_file: /etc/k.pem, insecure_skip_verify: false}
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;

use crate::{
    BUILTIN_REGISTRY,
    credentials::{DockerAuth, RegistryLogin},
};

/// The key of the mirror for registries without one of their own.
const ANY: &str = "*";

/// A file of settings that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {why}")]
pub struct RegistryConfigError {
    path: String,
    why: String,
}

/// The configuration of registries.
#[derive(Clone, Debug, Default)]
pub struct RegistryConfig {
    mirrors: BTreeMap<String, Vec<String>>,
    hosts: BTreeMap<String, Arc<HostSettings>>,
    plain_http: BTreeSet<String>,
    builtin: Option<BuiltinRegistry>,
}

/// The registry that Mayfly serves itself.
#[derive(Clone, Debug)]
pub struct BuiltinRegistry {
    /// The address, such as `http://127.0.0.1:9090`.
    pub url: String,
    /// The credentials required from clients that are not on this machine.
    pub login: RegistryLogin,
}

/// The configuration of one host.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostSettings {
    pub(crate) login: Option<RegistryLogin>,
    pub(crate) ca_pem: Option<Vec<u8>>,
    /// The certificates and the key that this client presents, in PEM.
    pub(crate) identity_pem: Option<(Vec<u8>, Vec<u8>)>,
    pub(crate) skip_verify: bool,
    has_tls: bool,
}

/// An endpoint that may have an image.
#[derive(Clone, Debug)]
pub(crate) struct EndpointSpec {
    /// Scheme, host and a path, to which `/v2/` is added.
    pub(crate) base: String,
    /// Host and port.
    pub(crate) host: String,
    pub(crate) settings: Arc<HostSettings>,
    /// The registry in the image's name, which is sent to mirrors.
    pub(crate) mirror_of: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    mirrors: BTreeMap<String, Mirror>,
    configs: BTreeMap<String, Host>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Mirror {
    endpoint: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Host {
    auth: Option<DockerAuth>,
    tls: Option<Tls>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Tls {
    ca_file: Option<PathBuf>,
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    insecure_skip_verify: bool,
}

impl RegistryConfig {
    /// Reads a file, and those that it names. Blocks.
    ///
    /// # Errors
    /// The file, or one that it names, cannot be read or parsed.
    pub fn read(path: &Path) -> Result<Self, RegistryConfigError> {
        let failed = |why: String| RegistryConfigError { path: path.display().to_string(), why };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(failed)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: File = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        let mut config = Self::default();
        for (registry, mirror) in file.mirrors {
            for endpoint in &mirror.endpoint {
                base_of(endpoint).map_err(|why| format!("mirrors.{registry}.endpoint: {why}"))?;
            }
            config.mirrors.insert(registry, mirror.endpoint);
        }
        for (host, settings) in file.configs {
            let read = settings.read().map_err(|why| format!("configs.{host}: {why}"))?;
            // k3s takes a URL here, too.
            let host =
                host.trim_start_matches("https://").trim_start_matches("http://").trim_end_matches('/');
            config.hosts.insert(host.to_owned(), Arc::new(read));
        }
        Ok(config)
    }

    /// Connects to this host (with its port, if it has one) without TLS.
    pub fn allow_plain_http(&mut self, host: &str) {
        self.plain_http.insert(host.to_owned());
    }

    /// Makes [`BUILTIN_REGISTRY`] the registry that this process serves.
    pub fn set_builtin(&mut self, builtin: BuiltinRegistry) {
        self.builtin = Some(builtin);
    }

    /// The endpoints for an image of this registry, in order: mirrors, then the registry itself. `origin` is the
    /// registry's host as clients reach it.
    ///
    /// # Errors
    /// The image is one of the built-in registry, and this process serves none.
    pub(crate) fn endpoints(&self, registry: &str, origin: &str) -> Result<Vec<EndpointSpec>, String> {
        if registry == BUILTIN_REGISTRY {
            let builtin = self.builtin.as_ref().ok_or("this process serves no registry of its own")?;
            let (base, host) = base_of(&builtin.url)?;
            let settings = HostSettings { login: Some(builtin.login.clone()), ..HostSettings::default() };
            return Ok(vec![EndpointSpec { base, host, settings: Arc::new(settings), mirror_of: None }]);
        }
        let mirrors = self.mirrors.get(registry).or_else(|| self.mirrors.get(ANY)).into_iter().flatten();
        let mut endpoints = Vec::new();
        for mirror in mirrors {
            let (base, host) = base_of(mirror)?;
            let settings = self.settings(&host);
            endpoints.push(EndpointSpec { base, host, settings, mirror_of: Some(registry.to_owned()) });
        }
        let settings = match self.hosts.get(registry) {
            Some(settings) => settings.clone(),
            None => self.settings(origin),
        };
        let plain = self.plain_http.contains(registry) || (is_loopback(origin) && !settings.has_tls);
        let scheme = if plain { "http" } else { "https" };
        endpoints.push(EndpointSpec {
            base: format!("{scheme}://{origin}"),
            host: origin.to_owned(),
            settings,
            mirror_of: None,
        });
        Ok(endpoints)
    }

    fn settings(&self, host: &str) -> Arc<HostSettings> {
        self.hosts.get(host).cloned().unwrap_or_default()
    }
}

impl Host {
    fn read(&self) -> Result<HostSettings, String> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
        };
        let mut settings = HostSettings::default();
        if let Some(auth) = &self.auth {
            settings.login = Some(auth.login()?);
        }
        if let Some(tls) = &self.tls {
            settings.has_tls = true;
            settings.skip_verify = tls.insecure_skip_verify;
            settings.ca_pem = tls.ca_file.as_deref().map(read).transpose()?;
            settings.identity_pem = match (&tls.cert_file, &tls.key_file) {
                (Some(certificate), Some(key)) => Some((read(certificate)?, read(key)?)),
                (None, None) => None,
                _ => return Err("tls.cert_file and tls.key_file belong together".into()),
            };
        }
        Ok(settings)
    }
}

/// A mirror's address without `/v2`, and its host. A name alone is reached with TLS.
fn base_of(endpoint: &str) -> Result<(String, String), String> {
    let url = match endpoint.contains("://") {
        true => endpoint.to_owned(),
        false => format!("https://{endpoint}"),
    };
    let parsed: http::Uri =
        url.parse().map_err(|error| format!("{endpoint:?} is not an address: {error}"))?;
    let host = parsed.authority().map(|authority| authority.as_str().to_owned());
    let (Some(host), Some("http" | "https")) = (host, parsed.scheme_str()) else {
        return Err(format!("{endpoint:?} is not an HTTP or HTTPS address"));
    };
    let base = url.trim_end_matches('/').trim_end_matches("/v2").trim_end_matches('/');
    Ok((base.to_owned(), host))
}

/// Docker's and containerd's rule: connections within the machine need no TLS.
fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bases(config: &RegistryConfig, registry: &str, origin: &str) -> Vec<String> {
        let endpoints = config.endpoints(registry, origin).unwrap();
        endpoints.into_iter().map(|endpoint| endpoint.base).collect()
    }

    #[test]
    fn mirrors_come_before_the_registry() {
        let config = RegistryConfig::parse(
            "mirrors:\n  docker.io: {endpoint: [mirror.example.com, 'http://10.0.0.1:5000/v2/']}\n  '*': {endpoint: ['https://all.example.com/proxy']}\n",
        )
        .unwrap();
        let docker = bases(&config, "docker.io", "index.docker.io");
        assert_eq!(docker, ["https://mirror.example.com", "http://10.0.0.1:5000", "https://index.docker.io"]);
        let other = config.endpoints("r.example.com", "r.example.com").unwrap();
        assert_eq!(other[0].base, "https://all.example.com/proxy");
        assert_eq!(other[0].mirror_of.as_deref(), Some("r.example.com"));
        assert_eq!(other[1].mirror_of, None);
    }

    #[test]
    fn plain_http_is_for_loopback_and_what_is_named() {
        let mut config = RegistryConfig::default();
        config.allow_plain_http("r.example.com:5000");
        for (registry, expected) in [
            ("localhost:5000", "http://localhost:5000"),
            ("127.0.0.1", "http://127.0.0.1"),
            ("[::1]:80", "http://[::1]:80"),
            ("r.example.com:5000", "http://r.example.com:5000"),
            ("r.example.com", "https://r.example.com"),
        ] {
            assert_eq!(bases(&config, registry, registry), [expected]);
        }
        let tls = RegistryConfig::parse("configs: {'localhost:5000': {tls: {insecure_skip_verify: true}}}");
        assert_eq!(bases(&tls.unwrap(), "localhost:5000", "localhost:5000"), ["https://localhost:5000"]);
    }

    #[test]
    fn logins_and_certificates_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("ca.pem"), "ca").unwrap();
        let text = format!(
            "configs:\n  https://r.example.com/:\n    auth: {{username: u, password: p}}\n    tls: {{ca_file: '{}'}}\n",
            path("ca.pem")
        );
        let endpoints =
            RegistryConfig::parse(&text).unwrap().endpoints("r.example.com", "r.example.com").unwrap();
        let settings = &endpoints[0].settings;
        assert_eq!(settings.login.as_ref().unwrap().username, "u");
        assert_eq!(settings.ca_pem.as_deref(), Some(&b"ca"[..]));
        for (text, why) in [
            ("mirror: {}", "mirror"),
            ("mirrors: {a: {endpoint: ['ftp://x']}}", "mirrors.a.endpoint"),
            ("configs: {a: {tls: {ca_file: /nowhere/ca}}}", "/nowhere/ca"),
            ("configs: {a: {tls: {cert_file: /c}}}", "belong together"),
            ("configs: {a: {auth: {auth: '%'}}}", "base64"),
        ] {
            assert!(RegistryConfig::parse(text).unwrap_err().contains(why), "{text}");
        }
    }

    #[test]
    fn the_built_in_registry_has_a_name_of_its_own() {
        let mut config = RegistryConfig::default();
        assert!(config.endpoints(BUILTIN_REGISTRY, BUILTIN_REGISTRY).is_err());
        let login = RegistryLogin { username: "mayfly".into(), ..RegistryLogin::default() };
        config.set_builtin(BuiltinRegistry { url: "http://127.0.0.1:9090".into(), login });
        assert_eq!(bases(&config, BUILTIN_REGISTRY, BUILTIN_REGISTRY), ["http://127.0.0.1:9090"]);
    }
}
