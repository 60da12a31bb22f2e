//! The server's identity: a certificate authority of its own and the administrator's token, created at the first start
//! and kept. The server's certificate is issued at every start, so that its names fit the host.
//!
//! | file | mode | content |
//! |---|---|---|
//! | `ca.crt` | 0644 | the authority's certificate, embedded in kubeconfigs |
//! | `ca.key` | 0600 | its key |
//! | `token` | 0600 | the administrator's bearer token |
//! | `sa.key` | 0600 | the key that signs tokens of service accounts, PKCS #8 in base64 |

use std::{
    fs,
    io::{self, Write},
    net::IpAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::{SignedDuration, Timestamp, ToSpan, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject as _};
use sha2::{Digest as _, Sha256};

pub(crate) use self::signing::requested_groups;
pub use self::{node_client::NodeClientCertificate, signing::SignError};
use crate::certificates::{AuthorityError, ClientAuthority};

mod node_client;
mod signing;

/// The lifetime of certificates.
const VALID_YEARS: i16 = 10;
/// Bytes of randomness in the token.
const TOKEN_BYTES: usize = 32;
/// Names by which the server is reached, besides the host's own.
const NAMES: [&str; 5] = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];
const ADDRESSES: [&str; 2] = ["127.0.0.1", "::1"];

/// An error of [`Identity`].
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: not a key or certificate of this server ({source}); remove the folder to create a new identity", path.display())]
    Damaged { path: PathBuf, source: rcgen::Error },
    #[error("{}: not a token of this server (a token has {} digits); remove the file to create a new one", path.display(), 2 * TOKEN_BYTES)]
    NoToken { path: PathBuf },
    #[error("{}: not a service account key; remove the file to create a new one, which invalidates all existing tokens", path.display())]
    NoKey { path: PathBuf },
    #[error("{} exists but {} does not: restore it, or remove the folder to create a new identity", present.display(), absent.display())]
    Incomplete { present: PathBuf, absent: PathBuf },
    #[error("{0:?} is neither a DNS name nor an IP address: the server's certificate cannot have it")]
    Name(String),
    #[error("a certificate cannot be issued: {0}")]
    Issue(#[from] rcgen::Error),
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

/// The authority and the token, and a TLS configuration issued from them.
#[derive(Clone)]
pub struct Identity {
    ca_pem: String,
    ca_hash: String,
    token: String,
    service_account_key: Vec<u8>,
    ca_key: Arc<KeyPair>,
    client_authority: ClientAuthority,
    tls: Arc<rustls::ServerConfig>,
    serving: ServingCertificate,
}

/// The certificate of the server, for ports beside that of the API.
#[derive(Clone)]
pub struct ServingCertificate {
    pub certificate_pem: String,
    /// Its key, as PKCS #8.
    pub key_pem: String,
}

/// Does not show the key.
impl std::fmt::Debug for ServingCertificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServingCertificate").finish_non_exhaustive()
    }
}

/// Shows neither keys nor the token.
impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Identity {
    /// Reads the identity in `folder`, or makes it. `extra_names` are further DNS names or IP addresses under which
    /// clients reach the server. The server's certificate is issued by each call, so that it has these names. Blocks.
    ///
    /// # Errors
    /// [`PkiError`]: a file cannot be read or written or is damaged, or one of `extra_names` cannot be in a certificate.
    pub fn load_or_create(folder: &Path, extra_names: &[String], now: Timestamp) -> Result<Self, PkiError> {
        let at = |path: &Path, source| PkiError::File { path: path.to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|e| at(folder, e))?;
        let (certificate, key) = (folder.join("ca.crt"), folder.join("ca.key"));
        let (ca_pem, ca_key) = match (read(&certificate)?, read(&key)?) {
            (Some(certificate), Some(text)) => {
                let parsed = KeyPair::from_pem(&text);
                (certificate, parsed.map_err(|source| PkiError::Damaged { path: key, source })?)
            }
            (None, None) => make_authority(&certificate, &key, now)?,
            // The process ended between the two writes. Clients trust the key and the name, from which a certificate
            // can be created at any time.
            (None, Some(text)) => {
                let parsed = KeyPair::from_pem(&text);
                let pair = parsed.map_err(|source| PkiError::Damaged { path: key, source })?;
                (certify(&pair, &certificate, now)?, pair)
            }
            (Some(_), None) => return Err(PkiError::Incomplete { present: certificate, absent: key }),
        };
        let path = folder.join("token");
        let token = match read(&path)? {
            Some(token) => parse_token(&token).ok_or(PkiError::NoToken { path })?,
            None => {
                let token = hex::encode(rand::random::<[u8; TOKEN_BYTES]>());
                write(&path, &token, 0o600)?;
                token
            }
        };
        let service_account_key = service_account_key(folder)?;
        let client_authority = ClientAuthority::of_pem(&ca_pem)?;
        let (tls, serving) = issue(&ca_key, &client_authority, extra_names, now)?;
        let ca_key = Arc::new(ca_key);
        let ca_hash = hash(&ca_pem)?;
        Ok(Self {
            ca_pem,
            ca_hash,
            token,
            service_account_key,
            ca_key,
            client_authority,
            tls: Arc::new(tls),
            serving,
        })
    }

    /// The certificate of the TLS configuration, whose names include the extra ones.
    pub fn serving_certificate(&self) -> &ServingCertificate {
        &self.serving
    }

    /// The administrator's bearer token.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The key that signs tokens of service accounts, as PKCS #8.
    pub fn service_account_key(&self) -> &[u8] {
        &self.service_account_key
    }

    /// The authority's certificate, as PEM.
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// The SHA-256 of the authority's certificate (of its DER form), in hexadecimal: with it a machine that joins
    /// verifies `GET /cacerts`.
    pub fn ca_hash(&self) -> &str {
        &self.ca_hash
    }

    /// The authority of client certificates: the one that signs requests ([`Identity::sign`]).
    pub fn client_authority(&self) -> ClientAuthority {
        self.client_authority.clone()
    }

    /// Signs a certificate request (PKCS #10, PEM) for these usages (the names of `spec.usages` of a
    /// CertificateSigningRequest), valid from shortly before `now` for `duration`. Returns the certificate as PEM.
    ///
    /// # Errors
    /// [`SignError`]: the request cannot be signed, now or later.
    pub fn sign(
        &self,
        request: &str,
        usages: &[String],
        duration: SignedDuration,
        now: Timestamp,
    ) -> Result<String, SignError> {
        let issuer = Issuer::new(authority(now), &*self.ca_key);
        signing::sign(&issuer, request, usages, duration, now)
    }

    /// For [`crate::ApiServer::serve`]; HTTP/2 and HTTP/1.1.
    pub fn tls(&self) -> Arc<rustls::ServerConfig> {
        Arc::clone(&self.tls)
    }

    /// A kubeconfig for the administrator, authority and token embedded. `server`: `https://127.0.0.1:6443`.
    pub fn kubeconfig(&self, server: &str) -> String {
        let (ca, token) = (STANDARD.encode(&self.ca_pem), &self.token);
        format!(
            "apiVersion: v1\n\
             kind: Config\n\
             clusters:\n\
             - name: mayfly\n\
             \x20 cluster:\n\
             \x20   server: {server}\n\
             \x20   certificate-authority-data: {ca}\n\
             users:\n\
             - name: mayfly-admin\n\
             \x20 user:\n\
             \x20   token: {token}\n\
             contexts:\n\
             - name: mayfly\n\
             \x20 context:\n\
             \x20   cluster: mayfly\n\
             \x20   user: mayfly-admin\n\
             \x20   namespace: default\n\
             current-context: mayfly\n"
        )
    }
}

fn read(path: &Path) -> Result<Option<String>, PkiError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::File { path: path.to_owned(), source }),
    }
}

/// Writes a file atomically and durably: after a crash the old or the new content is present under its name.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), PkiError> {
    let write = || {
        let temporary = path.with_extension("new");
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    write().map_err(|source| PkiError::File { path: path.to_owned(), source })
}

/// The SHA-256 of a certificate in PEM, in hexadecimal.
fn hash(pem: &str) -> Result<String, PkiError> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(AuthorityError::of)?;
    Ok(hex::encode(Sha256::digest(&der)))
}

fn service_account_key(folder: &Path) -> Result<Vec<u8>, PkiError> {
    let path = folder.join("sa.key");
    if let Some(text) = read(&path)? {
        let key = STANDARD.decode(text.trim()).ok().filter(|key| crate::tokens::is_key(key));
        return key.ok_or(PkiError::NoKey { path });
    }
    let key = crate::tokens::new_key();
    write(&path, &STANDARD.encode(&key), 0o600)?;
    Ok(key)
}

/// The authority's name and key usages, constant across starts: certificates are issued in this name.
fn authority(now: Timestamp) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "mayfly-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages =
        vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    set_validity(&mut params, now);
    params
}

/// Valid from one day before `now`, for clients whose clock is behind.
fn set_validity(params: &mut CertificateParams, now: Timestamp) {
    let today = now.to_zoned(TimeZone::UTC).date();
    let yesterday = today.checked_sub(1.day()).unwrap_or(today);
    let day = |date: jiff::civil::Date, years: i16| {
        // Every month has a 28th.
        let (month, day) = (date.month().unsigned_abs(), date.day().unsigned_abs().min(28));
        date_time_ymd(i32::from(date.year() + years), month, day)
    };
    params.not_before = day(yesterday, 0);
    params.not_after = day(today, VALID_YEARS);
}

fn make_authority(certificate: &Path, key: &Path, now: Timestamp) -> Result<(String, KeyPair), PkiError> {
    let pair = KeyPair::generate()?;
    write(key, &pair.serialize_pem(), 0o600)?;
    Ok((certify(&pair, certificate, now)?, pair))
}

/// Writes the self-signed certificate of the authority; returns it as PEM.
fn certify(pair: &KeyPair, certificate: &Path, now: Timestamp) -> Result<String, PkiError> {
    let pem = authority(now).self_signed(pair)?.pem();
    write(certificate, &pem, 0o644)?;
    Ok(pem)
}

/// A certificate for this host, ready to serve.
fn issue(
    ca_key: &KeyPair,
    clients: &ClientAuthority,
    extra_names: &[String],
    now: Timestamp,
) -> Result<(rustls::ServerConfig, ServingCertificate), PkiError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "mayfly-apiserver");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, now);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let fixed = NAMES.iter().chain(&ADDRESSES).copied();
    // A host name that is not a valid DNS name is left out.
    let mut names: Vec<_> = fixed.chain([host.trim()]).filter_map(alternative_name).collect();
    for name in extra_names {
        names.push(alternative_name(name).ok_or_else(|| PkiError::Name(name.clone()))?);
    }
    for name in names {
        if !params.subject_alt_names.contains(&name) {
            params.subject_alt_names.push(name);
        }
    }
    let key = KeyPair::generate()?;
    let issuer = Issuer::new(authority(now), ca_key);
    let certificate = params.signed_by(&key, &issuer)?;
    let serving = ServingCertificate { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() };
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(clients.handshake())
        .with_single_cert(vec![certificate.der().clone()], key)?;
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok((tls, serving))
}

/// A DNS name or an IP address as a name of a certificate; `None` if the text is neither.
fn alternative_name(name: &str) -> Option<SanType> {
    match name.parse::<IpAddr>() {
        Ok(address) => Some(SanType::IpAddress(address)),
        Err(_) if name.is_empty() || name.contains([' ', '/', ':']) => None,
        Err(_) => name.try_into().ok().map(SanType::DnsName),
    }
}

/// The token in a file; `None` for a truncated one (after a full disk, for example), which would be easy to guess.
fn parse_token(text: &str) -> Option<String> {
    let text = text.trim();
    (text.len() == 2 * TOKEN_BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_identity_is_kept_and_its_secrets_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pki");
        let now = Timestamp::now();
        let first = Identity::load_or_create(&path, &["example.test".into()], now).unwrap();
        let second = Identity::load_or_create(&path, &[], now).unwrap();
        assert_eq!((first.token(), first.ca_pem()), (second.token(), second.ca_pem()));
        assert_eq!(first.token().len(), 2 * TOKEN_BYTES);
        for secret in ["ca.key", "token"] {
            let mode = fs::metadata(path.join(secret)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{secret}");
        }
        assert!(first.kubeconfig("https://127.0.0.1:1").contains(&format!("token: {}", first.token())));
        let der = CertificateDer::from_pem_slice(first.ca_pem().as_bytes()).unwrap();
        assert_eq!(first.ca_hash(), hex::encode(Sha256::digest(&der)));
        assert_eq!(first.ca_hash(), second.ca_hash());
    }

    #[test]
    fn the_certificate_has_the_names_of_this_start() {
        let folder = tempfile::tempdir().unwrap();
        // The name or address that the client of a handshake expects is checked by the client.
        let accepts = |identity: &Identity, name: &str| {
            let ca = CertificateDer::from_pem_slice(identity.ca_pem().as_bytes()).unwrap();
            let mut roots = rustls::RootCertStore::empty();
            roots.add(ca).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let name = name.to_owned().try_into().unwrap();
            let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
            let mut server = rustls::ServerConnection::new(identity.tls()).unwrap();
            for _ in 0..8 {
                if !client.is_handshaking() {
                    return true;
                }
                let mut sent = Vec::new();
                client.write_tls(&mut sent).unwrap();
                server.read_tls(&mut sent.as_slice()).unwrap();
                server.process_new_packets().unwrap();
                let mut sent = Vec::new();
                server.write_tls(&mut sent).unwrap();
                client.read_tls(&mut sent.as_slice()).unwrap();
                if client.process_new_packets().is_err() {
                    return false;
                }
            }
            panic!("the handshake does not end");
        };
        let names = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            Identity::load_or_create(folder.path(), &names, Timestamp::now())
        };
        let first = names(&["192.0.2.7", "2001:db8::7", "mayfly.example.com"]).unwrap();
        for name in ["192.0.2.7", "2001:db8::7", "mayfly.example.com", "localhost", "127.0.0.1"] {
            assert!(accepts(&first, name), "{name}");
        }
        assert!(!accepts(&first, "192.0.2.8"));
        let second = names(&["192.0.2.8", "localhost"]).unwrap();
        assert!(accepts(&second, "192.0.2.8") && accepts(&second, "localhost"));
        assert!(!accepts(&second, "192.0.2.7"), "a name of an earlier start");
        for bad in ["", "a b", "https://host", "host:6443", "gr\u{fc}n"] {
            assert!(matches!(names(&[bad]), Err(PkiError::Name(name)) if name == bad), "{bad:?}");
        }
    }

    #[test]
    fn damage_is_reported_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        Identity::load_or_create(folder.path(), &[], Timestamp::now()).unwrap();
        let key = folder.path().join("ca.key");
        fs::write(&key, "nonsense").unwrap();
        let again = || Identity::load_or_create(folder.path(), &[], Timestamp::now()).map(|_| ());
        assert!(matches!(again(), Err(PkiError::Damaged { .. })));
        assert_eq!(fs::read_to_string(&key).unwrap(), "nonsense");
        fs::remove_file(&key).unwrap();
        assert!(matches!(again(), Err(PkiError::Incomplete { .. })));
    }

    /// Killed after the key was written: the certificate is missing.
    #[test]
    fn a_certificate_that_was_not_written_yet_is_made_of_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let load = || Identity::load_or_create(folder.path(), &[], Timestamp::now());
        load().unwrap();
        let (key, certificate) = (folder.path().join("ca.key"), folder.path().join("ca.crt"));
        let secret = fs::read_to_string(&key).unwrap();
        fs::remove_file(&certificate).unwrap();
        let again = load().unwrap();
        assert_eq!(fs::read_to_string(&certificate).unwrap(), again.ca_pem());
        assert_eq!(fs::read_to_string(&key).unwrap(), secret);
        fs::remove_file(&certificate).unwrap();
        fs::write(&key, "nonsense").unwrap();
        assert!(matches!(load().map(|_| ()), Err(PkiError::Damaged { .. })));
    }

    #[test]
    fn a_token_that_was_cut_short_opens_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let load = || Identity::load_or_create(folder.path(), &[], Timestamp::now());
        let token = load().unwrap().token().to_owned();
        for cut in ["", "\n", &token[..10]] {
            std::fs::write(folder.path().join("token"), cut).unwrap();
            let refused = load().err().unwrap().to_string();
            assert!(refused.contains("token") && refused.contains("remove the file"), "{refused}");
        }
        std::fs::write(folder.path().join("token"), format!("{token}\n")).unwrap();
        assert_eq!(load().unwrap().token(), token);
    }
}
