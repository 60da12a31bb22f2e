//! Certificates of Ingresses: from Secrets, selected by the server name of the TLS handshake (SNI), replaced without a
//! restart.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use mayfly_api::{
    ObjectKey,
    k8s::api::{core::v1::Secret, networking::v1::Ingress},
};
use mayfly_informer::Informer;
use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio_util::sync::CancellationToken;

use super::plan;

/// Changes within this time are applied together.
const GATHER: Duration = Duration::from_millis(5);
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// The certificates by host: `shop.example.com`, `*.example.com`.
pub(crate) struct Certificates {
    by_host: ArcSwap<HashMap<String, Arc<CertifiedKey>>>,
    /// The server's own certificate, for other names.
    fallback: Arc<dyn ResolvesServerCert>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("hosts", &self.by_host.load().len()).finish_non_exhaustive()
    }
}

/// The reason why a Secret has no usable certificate.
#[derive(Debug, thiserror::Error)]
enum CertificateError {
    #[error("there is no such Secret")]
    Missing,
    #[error("it has no {0}")]
    NoEntry(&'static str),
    #[error("{0} is not PEM: {1}")]
    Pem(&'static str, rustls::pki_types::pem::Error),
    #[error("certificate and key cannot be used: {0}")]
    Unusable(rustls::Error),
}

impl Certificates {
    pub(crate) fn new(fallback: Arc<dyn ResolvesServerCert>) -> Self {
        Self { by_host: ArcSwap::default(), fallback }
    }

    /// The certificate for a name; an exact host has precedence over a wildcard.
    fn of(&self, name: &str) -> Option<Arc<CertifiedKey>> {
        let by_host = self.by_host.load();
        let name = name.to_ascii_lowercase();
        let wildcard = || by_host.get(&format!("*.{}", name.split_once('.')?.1));
        by_host.get(&name).or_else(wildcard).cloned()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        hello.server_name().and_then(|name| self.of(name)).or_else(|| self.fallback.resolve(hello))
    }
}

/// The Secret of each host in the TLS sections of Ingresses; the older Ingress wins a host. A section without hosts is
/// for the hosts of its Ingress's rules.
fn secrets_of<'a>(ingresses: impl IntoIterator<Item = &'a Ingress>) -> BTreeMap<String, ObjectKey> {
    let mut served: Vec<_> = ingresses.into_iter().filter(|ingress| plan::is_served(ingress)).collect();
    served.sort_by_key(|ingress| {
        let metadata = &ingress.metadata;
        (metadata.creation_timestamp.clone(), metadata.namespace.clone(), metadata.name.clone())
    });
    let mut secrets = BTreeMap::new();
    for ingress in served {
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let Some(spec) = &ingress.spec else { continue };
        let of_rules: Vec<&String> =
            spec.rules.iter().flatten().filter_map(|rule| rule.host.as_ref()).collect();
        for tls in spec.tls.iter().flatten() {
            let Some(name) = tls.secret_name.as_deref().filter(|name| !name.is_empty()) else { continue };
            let own: Vec<&String> = tls.hosts.iter().flatten().collect();
            for host in if own.is_empty() { &of_rules } else { &own } {
                let (host, secret) = (host.to_ascii_lowercase(), || ObjectKey::new(namespace, name));
                if plan::may_claim(namespace, &host) {
                    secrets.entry(host).or_insert_with(secret);
                }
            }
        }
    }
    secrets
}

fn certified_key(secret: Option<&Secret>) -> Result<CertifiedKey, CertificateError> {
    let data = secret.ok_or(CertificateError::Missing)?.data.as_ref();
    let entry = |name| data.and_then(|data| data.get(name)).ok_or(CertificateError::NoEntry(name));
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&entry(CERTIFICATE)?.0).collect();
    let chain = chain.map_err(|error| CertificateError::Pem(CERTIFICATE, error))?;
    let key = PrivateKeyDer::from_pem_slice(&entry(KEY)?.0);
    let key = key.map_err(|error| CertificateError::Pem(KEY, error))?;
    CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider())
        .map_err(CertificateError::Unusable)
}

/// Keeps the certificates up to date with Ingresses and Secrets.
pub(crate) struct CertificateOwner {
    pub(crate) ingresses: Informer<Ingress>,
    pub(crate) secrets: Informer<Secret>,
    pub(crate) certificates: Arc<Certificates>,
}

impl CertificateOwner {
    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let keeping = async {
            tokio::join!(self.ingresses.synced(), self.secrets.synced());
            let (mut ingresses, mut secrets) = (self.ingresses.subscribe(), self.secrets.subscribe());
            let mut used = self.update();
            loop {
                let is_used = tokio::select! {
                    _ = ingresses.next() => true,
                    keys = secrets.next() => keys.iter().any(|key| used.contains(key)),
                };
                if is_used {
                    tokio::time::sleep(GATHER).await;
                    ingresses.take();
                    secrets.take();
                    used = self.update();
                }
            }
        };
        let _: Option<()> = stop.run_until_cancelled(keeping).await;
    }

    /// Rebuilds the certificates; returns the Secrets that they depend on.
    fn update(&self) -> BTreeSet<ObjectKey> {
        let ingresses = self.ingresses.list();
        let secrets = secrets_of(ingresses.iter().map(|ingress| &**ingress));
        let mut by_host = HashMap::new();
        for (host, secret) in &secrets {
            match certified_key(self.secrets.get(secret).as_deref()) {
                Ok(key) => drop(by_host.insert(host.clone(), Arc::new(key))),
                Err(error) => {
                    tracing::warn!(%host, %secret, %error, "cannot use the certificate of an Ingress; using the server's own");
                }
            }
        }
        self.certificates.by_host.store(Arc::new(by_host));
        secrets.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A resolver without certificates.
    #[derive(Debug)]
    struct NoCertificate;

    impl ResolvesServerCert for NoCertificate {
        fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            None
        }
    }

    fn ingress(name: &str, created: &str, tls: &Value) -> Ingress {
        let metadata = json!({"namespace": "shop", "name": name, "creationTimestamp": created});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"tls": tls}})).unwrap()
    }

    fn secret(names: &[&str]) -> Secret {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        let data = [(CERTIFICATE, made.cert.pem()), (KEY, made.signing_key.serialize_pem())];
        let string_data: BTreeMap<_, _> = data.into_iter().collect();
        let mut secret: Secret = serde_json::from_value(json!({"metadata": {}})).unwrap();
        let bytes = |text: String| mayfly_api::k8s::ByteString(text.into_bytes());
        secret.data =
            Some(string_data.into_iter().map(|(name, text)| (name.to_owned(), bytes(text))).collect());
        secret
    }

    #[test]
    fn hosts_name_their_secrets() {
        let younger = ingress(
            "a",
            "2026-01-02T00:00:00Z",
            &json!([{"hosts": ["A.example.com"], "secretName": "younger"}]),
        );
        let older = ingress(
            "b",
            "2026-01-01T00:00:00Z",
            &json!([{"hosts": ["a.example.com", "*.example.com"], "secretName": "older"}, {"hosts": ["none"]}]),
        );
        let secrets = secrets_of([&younger, &older]);
        let found: Vec<_> = secrets.iter().map(|(host, secret)| format!("{host} {secret}")).collect();
        assert_eq!(found, ["*.example.com shop/older", "a.example.com shop/older"]);
        let foreign = json!([{"hosts": ["f.other.fn.localhost", "f.shop.fn.localhost"], "secretName": "s"}]);
        let foreign = ingress("c", "2026-01-01T00:00:00Z", &foreign);
        assert_eq!(secrets_of([&foreign]).into_keys().collect::<Vec<_>>(), ["f.shop.fn.localhost"]);
        // Without hosts the secret is for those of the rules.
        let mut bare = ingress("c", "2026-01-03T00:00:00Z", &json!([{"secretName": "bare"}]));
        let rules = json!([{"host": "b.example.com"}, {"host": "A.example.com"}, {}]);
        bare.spec.as_mut().unwrap().rules = serde_json::from_value(rules).unwrap();
        let secrets = secrets_of([&older, &bare]);
        assert_eq!(secrets["b.example.com"].name, "bare");
        assert_eq!(secrets["a.example.com"].name, "older");
        assert_eq!(secrets.len(), 3);
    }

    #[test]
    fn certificates_are_found_by_name() {
        let certificates = Certificates::new(Arc::new(NoCertificate));
        let key = |names: &[&str]| Arc::new(certified_key(Some(&secret(names))).unwrap());
        let (exact, wild) = (key(&["a.example.com"]), key(&["*.example.com"]));
        let by_host =
            [("a.example.com".to_owned(), exact.clone()), ("*.example.com".to_owned(), wild.clone())];
        certificates.by_host.store(Arc::new(by_host.into_iter().collect()));
        assert!(Arc::ptr_eq(&certificates.of("A.example.com").unwrap(), &exact));
        assert!(Arc::ptr_eq(&certificates.of("b.example.com").unwrap(), &wild));
        assert!(certificates.of("a.b.example.com").is_none() && certificates.of("example.com").is_none());
    }

    #[test]
    fn a_secret_that_cannot_be_used_says_why() {
        let mut broken = secret(&["a"]);
        broken.data.as_mut().unwrap().remove(KEY);
        let mut mixed = secret(&["a"]);
        let other = secret(&["b"]).data.unwrap().remove(KEY).unwrap();
        mixed.data.as_mut().unwrap().insert(KEY.to_owned(), other);
        for (secret, expected) in
            [(None, "no such Secret"), (Some(&broken), "no tls.key"), (Some(&mixed), "cannot be used")]
        {
            let error = certified_key(secret).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
