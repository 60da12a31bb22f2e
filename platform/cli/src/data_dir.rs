//! The data directory: its location and its layout. `mayfly up` writes it; every other command finds the server through
//! it.

use std::{
    ffi::OsString,
    fmt, fs, io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// The mode bits for other users.
const OTHERS: u32 = 0o007;

/// A data directory, and the origin of its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDir {
    root: PathBuf,
    origin: Origin,
}

/// The origin of the data directory's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment,
    /// The file given by `mayfly up --config`.
    ConfigFile,
    XdgStateHome,
    Home,
    /// The default without a home directory.
    System,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flag => "--data-dir",
            Self::Environment => "MAYFLY_DATA_DIR",
            Self::ConfigFile => "the config file",
            Self::XdgStateHome => "XDG_STATE_HOME",
            Self::Home => "the default",
            Self::System => "the default without a home directory",
        })
    }
}

impl DataDir {
    /// The flag, otherwise `MAYFLY_DATA_DIR`, otherwise the XDG state directory: `$XDG_STATE_HOME/mayfly`, or
    /// `~/.local/state/mayfly`. Absolute.
    pub fn resolve(flag: Option<PathBuf>) -> Self {
        let chosen = Self::choose(
            flag,
            std::env::var_os("MAYFLY_DATA_DIR"),
            std::env::var_os("XDG_STATE_HOME"),
            std::env::home_dir(),
        );
        chosen.absolute()
    }

    /// Makes the path absolute, so that it stays valid in another working directory.
    fn absolute(self) -> Self {
        match std::path::absolute(&self.root) {
            Ok(root) => Self { root, ..self },
            // The path is empty.
            Err(_) => self,
        }
    }

    fn choose(
        flag: Option<PathBuf>,
        environment: Option<OsString>,
        state_home: Option<OsString>,
        home: Option<PathBuf>,
    ) -> Self {
        let of = |root, origin| Self { root, origin };
        if let Some(root) = flag {
            return of(root, Origin::Flag);
        }
        if let Some(root) = environment.filter(|text| !text.is_empty()) {
            return of(root.into(), Origin::Environment);
        }
        // According to the XDG specification, a relative path is invalid and ignored.
        if let Some(base) = state_home.map(PathBuf::from).filter(|path| path.is_absolute()) {
            return of(base.join("mayfly"), Origin::XdgStateHome);
        }
        match home.filter(|path| path.is_absolute()) {
            Some(home) => of(home.join(".local/state/mayfly"), Origin::Home),
            None => of("/var/lib/mayfly".into(), Origin::System),
        }
    }

    /// Replaces the default by the path of the config file; flags and the environment take precedence.
    pub fn unless_configured(self, file: Option<PathBuf>) -> Self {
        let is_said = matches!(self.origin, Origin::Flag | Origin::Environment);
        match file.filter(|root| !is_said && !root.as_os_str().is_empty()) {
            Some(root) => Self { root, origin: Origin::ConfigFile }.absolute(),
            None => self,
        }
    }

    /// The same directory with another origin.
    #[cfg(test)]
    pub(crate) fn with_origin(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    pub fn path(&self) -> &Path {
        &self.root
    }

    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Creates the directory and its private folders with access only for the owner. The mode of an existing directory
    /// is not changed. Blocks.
    pub fn make(&self) -> io::Result<()> {
        let private = |path: &Path| {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
            made.map_err(|error| match path.ancestors().find(|path| path.is_file()) {
                Some(file) => io::Error::new(
                    io::ErrorKind::NotADirectory,
                    format!("{} is a file, not a directory", file.display()),
                ),
                None => error,
            })
        };
        private(&self.root)?;
        for folder in [self.artifacts(), self.workflows(), self.jobs(), self.containers(), self.logs()] {
            private(&folder)?;
            let mode = fs::metadata(&folder)?.permissions().mode();
            if mode & OTHERS != 0 {
                fs::set_permissions(&folder, fs::Permissions::from_mode(mode & !OTHERS))?;
            }
        }
        Ok(())
    }

    /// The file with the server's addresses: an [`Endpoints`] as JSON. Written when the server is ready.
    pub fn endpoints(&self) -> PathBuf {
        self.root.join("endpoints.json")
    }

    /// The credentials for kubectl and the commands; mode 0600.
    pub fn kubeconfig(&self) -> PathBuf {
        self.root.join("kubeconfig")
    }

    /// The cluster objects.
    pub fn database(&self) -> PathBuf {
        self.root.join("mayfly.db")
    }

    /// Uploaded components and their compiled forms.
    pub fn artifacts(&self) -> PathBuf {
        self.root.join("artifacts")
    }

    /// The measured speed of compilation, for estimates. Unlike the others it may be removed at any time.
    pub fn compile_speed(&self) -> PathBuf {
        self.root.join("compile-speed")
    }

    /// State machines, the journal of executions, and the buckets that maps read from and write to.
    pub fn workflows(&self) -> PathBuf {
        self.root.join("workflows")
    }

    /// The inputs and outputs of running jobs.
    pub fn jobs(&self) -> PathBuf {
        self.root.join("jobs")
    }

    /// Images and artifacts of the registry that the server serves.
    pub fn registry(&self) -> PathBuf {
        self.root.join("registry")
    }

    /// Data of containers: containerd's state, sandboxes, volumes.
    pub fn containers(&self) -> PathBuf {
        self.root.join("containers")
    }

    /// The data of local PersistentVolumes.
    pub fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    /// Logs of functions and pods.
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// The token with which machines join this server; mode 0600.
    pub fn join_token(&self) -> PathBuf {
        self.root.join("join-token")
    }

    /// The certificate authority, keys and tokens.
    pub fn pki(&self) -> PathBuf {
        self.root.join("pki")
    }
}

/// The addresses of a running server, as URLs without a path, with the actual ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoints {
    pub api: String,
    pub http: String,
    /// The URL of functions and Ingresses over TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workflows: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<String>,
}

impl Endpoints {
    /// Reads `endpoints.json`.
    pub fn read(path: &Path) -> io::Result<Self> {
        serde_json::from_slice(&std::fs::read(path)?).map_err(io::Error::from)
    }

    /// Writes `endpoints.json` atomically.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec(self)?;
        text.push(b'\n');
        let folder = path.parent().unwrap_or(Path::new("."));
        let file = tempfile::NamedTempFile::new_in(folder)?;
        std::fs::write(file.path(), text)?;
        file.persist(path)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strongest_name_wins() {
        let some = |text: &str| Some(OsString::from(text));
        let home = || Some(PathBuf::from("/home/ada"));
        for (flag, environment, state, home, root, origin) in [
            (Some("/f"), some("/e"), some("/x"), home(), "/f", Origin::Flag),
            (None, some("/e"), some("/x"), home(), "/e", Origin::Environment),
            (None, some(""), some("/x"), home(), "/x/mayfly", Origin::XdgStateHome),
            (None, None, some("relative"), home(), "/home/ada/.local/state/mayfly", Origin::Home),
            (None, None, None, home(), "/home/ada/.local/state/mayfly", Origin::Home),
            (None, None, None, None, "/var/lib/mayfly", Origin::System),
        ] {
            let chosen = DataDir::choose(flag.map(PathBuf::from), environment, state, home);
            assert_eq!(chosen, DataDir { root: root.into(), origin });
        }
    }

    #[test]
    fn it_is_the_same_from_another_folder() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(DataDir::resolve(Some("./data".into())).path(), here.join("data"));
        assert_eq!(DataDir::resolve(Some("/data".into())).path(), Path::new("/data"));
    }

    #[test]
    fn a_flag_and_the_environment_are_stronger_than_the_file() {
        let file = || Some(PathBuf::from("/file"));
        for (origin, expected) in [
            (Origin::Flag, "/d"),
            (Origin::Environment, "/d"),
            (Origin::XdgStateHome, "/file"),
            (Origin::Home, "/file"),
            (Origin::System, "/file"),
        ] {
            let dir = DataDir { root: "/d".into(), origin };
            assert_eq!(dir.clone().unless_configured(file()).path(), Path::new(expected));
            assert_eq!(dir.clone().unless_configured(None), dir);
        }
    }

    /// Function logs may contain secrets, and the root of a volume is accessible to all users.
    #[test]
    fn what_lies_in_it_is_not_for_everybody() {
        let folder = tempfile::tempdir().unwrap();
        let open_to_all = fs::Permissions::from_mode(0o755);
        let dir = DataDir { root: folder.path().into(), origin: Origin::Flag };
        fs::set_permissions(dir.path(), open_to_all.clone()).unwrap();
        fs::create_dir(dir.logs()).unwrap();
        fs::set_permissions(dir.logs(), open_to_all).unwrap();
        dir.make().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(dir.path()), 0o755);
        assert_eq!((mode(&dir.logs()), mode(&dir.artifacts()), mode(&dir.jobs())), (0o750, 0o700, 0o700));
        let new = DataDir { root: folder.path().join("a/b"), origin: Origin::Flag };
        new.make().unwrap();
        assert_eq!(mode(new.path()), 0o700);
    }

    #[test]
    fn a_file_in_its_place_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for root in [file.path().to_owned(), file.path().join("below")] {
            let error = DataDir { root, origin: Origin::Flag }.make().unwrap_err();
            assert_eq!(error.to_string(), format!("{} is a file, not a directory", file.path().display()));
        }
    }

    #[test]
    fn endpoints_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("endpoints.json");
        let endpoints = Endpoints {
            api: "https://127.0.0.1:6443".into(),
            http: "http://127.0.0.1:8080".into(),
            https: None,
            workflows: None,
            admin: Some("http://127.0.0.1:9090".into()),
        };
        endpoints.write(&path).unwrap();
        assert_eq!(Endpoints::read(&path).unwrap(), endpoints);
        std::fs::write(&path, "{").unwrap();
        assert!(Endpoints::read(&path).is_err());
    }
}
