//! The folder of a node's credentials.
//!
//! | file | content |
//! |---|---|
//! | `ca.crt` | the certificate of the cluster's CA |
//! | `client.crt`, `client.key` | the certificate `system:node:NAME` and its key |
//! | `serving.crt`, `serving.key` | the certificate of the node's agent and its key |
//! | `client.next.key`, `serving.next.key` | the key of a request whose certificate has not arrived yet |
//!
//! Every file is written atomically and durably, with the mode 0600. A new pair is taken over in two steps: the
//! certificate is written, then the key's file is renamed from `.next.key` to `.key`. After a crash between the two
//! the certificate matches the key in `.next.key`, and the next reading renames it.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rcgen::KeyPair;

use crate::{
    JoinError,
    certificates::{CertificatePair, CertificateUse, public_key},
};

const CA: &str = "ca.crt";

/// The folder of a node's credentials. All methods block.
#[derive(Clone, Debug)]
pub(crate) struct CredentialFolder {
    path: PathBuf,
}

impl CredentialFolder {
    /// Creates the folder if it is absent.
    pub(crate) fn open(path: &Path) -> Result<Self, JoinError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|source| JoinError::File { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned() })
    }

    /// The CA's certificate in PEM.
    pub(crate) fn authority(&self) -> Result<Option<String>, JoinError> {
        self.read(CA)
    }

    /// Replaces the CA's certificate, and removes everything that belongs to another CA first.
    pub(crate) fn set_authority(&self, pem: &str) -> Result<(), JoinError> {
        for certificate_use in [CertificateUse::Client, CertificateUse::Serving] {
            for file in ["crt", "key", "next.key"] {
                self.remove(&name(certificate_use, file))?;
            }
        }
        self.write(CA, pem)
    }

    /// A certificate and its key, if both are present and belong together.
    pub(crate) fn pair(&self, certificate_use: CertificateUse) -> Result<Option<CertificatePair>, JoinError> {
        let Some(certificate_pem) = self.read(&name(certificate_use, "crt"))? else { return Ok(None) };
        let matches = |key: &str| {
            let key = KeyPair::from_pem(key).ok();
            key.is_some_and(|key| public_key(&certificate_pem).as_deref() == Some(key.public_key_raw()))
        };
        let next = name(certificate_use, "next.key");
        if let Some(key_pem) = self.read(&next)?.filter(|key| matches(key)) {
            self.rename(&next, &name(certificate_use, "key"))?;
            return Ok(Some(CertificatePair { certificate_pem, key_pem }));
        }
        let key_pem = self.read(&name(certificate_use, "key"))?.filter(|key| matches(key));
        Ok(key_pem.map(|key_pem| CertificatePair { certificate_pem, key_pem }))
    }

    /// The key of the request in progress; a new one where there is none.
    pub(crate) fn pending_key(&self, certificate_use: CertificateUse) -> Result<KeyPair, JoinError> {
        let file = name(certificate_use, "next.key");
        if let Some(key) = self.read(&file)?.and_then(|text| KeyPair::from_pem(&text).ok()) {
            return Ok(key);
        }
        let key = KeyPair::generate()?;
        self.write(&file, &key.serialize_pem())?;
        Ok(key)
    }

    /// Gives up the request in progress: the next one has another key and another name.
    pub(crate) fn drop_pending_key(&self, certificate_use: CertificateUse) -> Result<(), JoinError> {
        self.remove(&name(certificate_use, "next.key"))
    }

    /// Takes over the certificate of the pending key.
    pub(crate) fn accept(&self, certificate_use: CertificateUse, certificate: &str) -> Result<(), JoinError> {
        self.write(&name(certificate_use, "crt"), certificate)?;
        self.rename(&name(certificate_use, "next.key"), &name(certificate_use, "key"))
    }

    fn read(&self, file: &str) -> Result<Option<String>, JoinError> {
        match fs::read_to_string(self.path.join(file)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.error(file, error)),
        }
    }

    fn write(&self, file: &str, text: &str) -> Result<(), JoinError> {
        let write = || {
            let temporary = self.path.join(format!("{file}.new"));
            let mut options = fs::OpenOptions::new();
            let mut open = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            open.write_all(text.as_bytes())?;
            open.sync_all()?;
            fs::rename(&temporary, self.path.join(file))?;
            self.sync()
        };
        write().map_err(|error| self.error(file, error))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), JoinError> {
        let rename = || {
            fs::rename(self.path.join(from), self.path.join(to))?;
            self.sync()
        };
        rename().map_err(|error| self.error(from, error))
    }

    fn remove(&self, file: &str) -> Result<(), JoinError> {
        match fs::remove_file(self.path.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.error(file, error)),
            _ => Ok(()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        fs::File::open(&self.path)?.sync_all()
    }

    fn error(&self, file: &str, source: io::Error) -> JoinError {
        JoinError::File { path: self.path.join(file), source }
    }
}

fn name(certificate_use: CertificateUse, suffix: &str) -> String {
    format!("{}.{suffix}", certificate_use.file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rcgen::CertificateParams;

    use super::*;

    const USE: CertificateUse = CertificateUse::Client;

    fn certificate(key: &KeyPair) -> String {
        CertificateParams::default().self_signed(key).unwrap().pem()
    }

    #[test]
    fn a_pair_survives_a_crash_between_its_two_files() {
        let directory = tempfile::tempdir().unwrap();
        let folder = CredentialFolder::open(&directory.path().join("credentials")).unwrap();
        assert!(folder.pair(USE).unwrap().is_none());
        let first = folder.pending_key(USE).unwrap();
        assert_eq!(folder.pending_key(USE).unwrap().serialize_pem(), first.serialize_pem());
        folder.accept(USE, &certificate(&first)).unwrap();
        assert_eq!(folder.pair(USE).unwrap().unwrap().key_pem, first.serialize_pem());
        // A request in progress leaves the pair usable.
        let second = folder.pending_key(USE).unwrap();
        assert_ne!(second.serialize_pem(), first.serialize_pem());
        assert_eq!(folder.pair(USE).unwrap().unwrap().key_pem, first.serialize_pem());
        // The crash: the new certificate is written, the key is not renamed.
        folder.write("client.crt", &certificate(&second)).unwrap();
        assert_eq!(folder.pair(USE).unwrap().unwrap().key_pem, second.serialize_pem());
        assert_eq!(folder.pair(USE).unwrap().unwrap().key_pem, second.serialize_pem());
        assert_eq!(folder.read("client.next.key").unwrap(), None);
        // A certificate of another key is no pair.
        folder.write("client.crt", &certificate(&KeyPair::generate().unwrap())).unwrap();
        assert!(folder.pair(USE).unwrap().is_none());
        for entry in fs::read_dir(&folder.path).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn another_authority_removes_the_credentials_of_the_old_one() {
        let directory = tempfile::tempdir().unwrap();
        let folder = CredentialFolder::open(directory.path()).unwrap();
        folder.set_authority("one").unwrap();
        let key = folder.pending_key(USE).unwrap();
        folder.accept(USE, &certificate(&key)).unwrap();
        folder.pending_key(USE).unwrap();
        folder.set_authority("two").unwrap();
        assert_eq!(folder.authority().unwrap().as_deref(), Some("two"));
        let left: Vec<_> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["ca.crt"]);
    }
}
