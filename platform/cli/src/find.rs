//! Finds the server: by flags, then `KUBECONFIG`, then the data directory. The error lists every place that was
//! checked, with the result.

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use kube::config::{KubeConfigOptions, Kubeconfig};

use super::{
    Globals,
    failure::{ErrorCode, Failure},
    server::Server,
};
use crate::data_dir::{DataDir, Endpoints, Origin};

/// The timeout for connecting to a server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The places that can define a server, in order of precedence.
struct Lookup {
    server: Option<String>,
    kubeconfig: Option<PathBuf>,
    /// The value of `KUBECONFIG`.
    environment: Option<OsString>,
    data_dir: DataDir,
}

/// The checked places in order, with the results.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places(Vec<Place>);

#[derive(Clone, Debug)]
struct Place {
    name: String,
    found: String,
    used: bool,
}

/// The result of the lookup.
struct Found {
    kubeconfig: Option<Kubeconfig>,
    endpoints: Option<Endpoints>,
    places: Places,
}

/// Finds the server by the flags, the environment or the data directory. Sends no request yet.
pub(crate) async fn find(globals: &Globals) -> anyhow::Result<Server> {
    let lookup = Lookup {
        server: globals.server.clone(),
        kubeconfig: globals.kubeconfig.clone(),
        environment: std::env::var_os("KUBECONFIG").filter(|value| !value.is_empty()),
        data_dir: DataDir::resolve(globals.data_dir.clone()),
    };
    let found = lookup.look()?;
    let mut config = match found.kubeconfig {
        Some(kubeconfig) => kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .map_err(|error| found.places.unusable(&error.to_string()))?,
        None => match &lookup.server {
            Some(url) => kube::Config::new(parse_server(url)?),
            None => return Err(found.places.nothing_found()),
        },
    };
    if let Some(url) = &lookup.server {
        config.cluster_url = parse_server(url)?;
    }
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Endpoints beside a kubeconfig belong to that kubeconfig's server.
    let endpoints = found.endpoints.filter(|_| lookup.server.is_none());
    Server::new(config, endpoints, found.places)
}

fn parse_server(text: &str) -> anyhow::Result<http::Uri> {
    parse_url("--server", text, "https://127.0.0.1:6443")
}

/// Parses the URL in the flag or variable `name`; the example is for the error message.
pub(super) fn parse_url(name: &str, text: &str, example: &str) -> anyhow::Result<http::Uri> {
    let usable =
        |uri: &http::Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some();
    text.parse::<http::Uri>().ok().filter(usable).ok_or_else(|| {
        Failure::error(
            ErrorCode::Usage,
            format!("{name} {text:?} is not a URL"),
            format!("write scheme, host and port, such as {example}"),
        )
    })
}

impl Lookup {
    fn look(&self) -> anyhow::Result<Found> {
        let mut places = Places::default();
        if let Some(url) = &self.server {
            places.add("--server", url.clone(), true);
        }
        if let Some(path) = &self.kubeconfig {
            let kubeconfig = read(path).map_err(|why| {
                let todo = "mayfly up writes one to DIR/kubeconfig in its data directory";
                Failure::new(
                    ErrorCode::BadKubeconfig,
                    format!("--kubeconfig {}: {why}", path.display()),
                    todo,
                )
            })?;
            places.add("--kubeconfig", path.display().to_string(), true);
            return Ok(Found { kubeconfig: Some(kubeconfig), endpoints: beside(path), places });
        }
        places.add("--kubeconfig", "not given", false);
        // A flag has precedence over the environment.
        if self.data_dir.origin() == Origin::Flag {
            let (kubeconfig, endpoints) = self.look_at_data_dir(&mut places);
            return Ok(Found { kubeconfig, endpoints, places });
        }
        if let Some((kubeconfig, endpoints)) = self.look_at_environment(&mut places) {
            return Ok(Found { kubeconfig: Some(kubeconfig), endpoints, places });
        }
        let (kubeconfig, endpoints) = self.look_at_data_dir(&mut places);
        Ok(Found { kubeconfig, endpoints, places })
    }

    /// `KUBECONFIG` may list several files; as in kubectl, missing files are skipped and the first one to set a value
    /// wins.
    fn look_at_environment(&self, places: &mut Places) -> Option<(Kubeconfig, Option<Endpoints>)> {
        let Some(value) = &self.environment else {
            places.add("KUBECONFIG", "not set", false);
            return None;
        };
        let mut merged: Option<Kubeconfig> = None;
        let mut endpoints = None;
        for path in std::env::split_paths(value).filter(|path| !path.as_os_str().is_empty()) {
            match read(&path) {
                Ok(kubeconfig) => {
                    places.add("KUBECONFIG", path.display().to_string(), true);
                    endpoints = endpoints.or_else(|| beside(&path));
                    merged = match merged {
                        None => Some(kubeconfig),
                        Some(earlier) => Some(earlier.clone().merge(kubeconfig).unwrap_or(earlier)),
                    };
                }
                Err(why) => places.add("KUBECONFIG", format!("{}: {why}", path.display()), false),
            }
        }
        merged.map(|kubeconfig| (kubeconfig, endpoints))
    }

    fn look_at_data_dir(&self, places: &mut Places) -> (Option<Kubeconfig>, Option<Endpoints>) {
        let (path, origin) = (self.data_dir.path(), self.data_dir.origin());
        let name = format!("data directory {} ({origin})", path.display());
        if !path.is_dir() {
            places.add(name, "does not exist", false);
            return (None, None);
        }
        match read(&self.data_dir.kubeconfig()) {
            Ok(kubeconfig) => {
                places.add(name, "has a kubeconfig", true);
                (Some(kubeconfig), beside(&self.data_dir.kubeconfig()))
            }
            Err(why) => {
                places.add(name, format!("kubeconfig: {why}"), false);
                (None, None)
            }
        }
    }
}

/// Reads a kubeconfig; the error is a short phrase.
fn read(path: &Path) -> Result<Kubeconfig, String> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err("no such file".into()),
        Err(error) => Err(error.to_string()),
        Ok(metadata) if metadata.is_dir() => Err("is a directory".into()),
        Ok(_) => Kubeconfig::read_from(path).map_err(|error| format!("is not a kubeconfig ({error})")),
    }
}

/// The endpoints file beside a kubeconfig in a data directory.
fn beside(kubeconfig: &Path) -> Option<Endpoints> {
    Endpoints::read(&kubeconfig.with_file_name("endpoints.json")).ok()
}

impl Places {
    fn add(&mut self, name: impl Into<String>, found: impl Into<String>, used: bool) {
        self.0.push(Place { name: name.into(), found: found.into(), used });
    }

    /// The origin of the credentials.
    pub(crate) fn origin_text(&self) -> String {
        let used: Vec<_> = self.0.iter().filter(|place| place.used).map(ToString::to_string).collect();
        match used.is_empty() {
            true => "no kubeconfig was found".into(),
            false => format!("it came from {}", used.join(", ")),
        }
    }

    fn listed(&self, todo: &str) -> String {
        let mut text = "looked at:\n".to_owned();
        for place in &self.0 {
            text.push_str(&format!("  {place}\n"));
        }
        text + todo
    }

    fn nothing_found(&self) -> anyhow::Error {
        let todo = self.listed("start one with: mayfly up");
        Failure::new(ErrorCode::NoServer, "no Mayfly server was found", todo).into()
    }

    fn unusable(&self, why: &str) -> anyhow::Error {
        let todo = self.listed("start one with: mayfly up");
        Failure::new(ErrorCode::BadKubeconfig, format!("the kubeconfig cannot be used: {why}"), todo).into()
    }

    pub(crate) fn not_trusted(&self, url: &str, why: &str) -> anyhow::Error {
        let what = format!(
            "the server at {} is not the one this kubeconfig is for ({why})",
            url.trim_end_matches('/')
        );
        let todo = self.listed("use the kubeconfig in that server's own data directory");
        Failure::new(ErrorCode::NotTrusted, what, todo).into()
    }

    pub(crate) fn nothing_answers(&self, url: &str, why: &str) -> anyhow::Error {
        let what = format!("no Mayfly server answers at {} ({why})", url.trim_end_matches('/'));
        Failure::new(ErrorCode::NoServer, what, self.listed("start one with: mayfly up")).into()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubeconfig(url: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: \"{url}\"}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n"
        )
    }

    fn url(found: &Found) -> Option<String> {
        found.kubeconfig.as_ref()?.clusters.first()?.cluster.as_ref()?.server.clone()
    }

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            std::fs::create_dir(folder.path().join("data")).unwrap();
            std::fs::write(folder.path().join("data/kubeconfig"), kubeconfig("https://data")).unwrap();
            let endpoints = r#"{"api": "https://data", "http": "http://data-http"}"#;
            std::fs::write(folder.path().join("data/endpoints.json"), endpoints).unwrap();
            std::fs::write(folder.path().join("other"), kubeconfig("https://other")).unwrap();
            Self(folder)
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn lookup(&self) -> Lookup {
            let data_dir = DataDir::resolve(Some(self.at("nowhere")));
            Lookup { server: None, kubeconfig: None, environment: None, data_dir }
        }
    }

    #[test]
    fn flags_then_kubeconfig_then_the_data_directory() {
        let folder = Folder::new();
        let data_dir = DataDir::resolve(Some(folder.at("data")));
        let environment = Some(folder.at("other").into_os_string());

        let flag =
            Lookup { kubeconfig: Some(folder.at("other")), data_dir: data_dir.clone(), ..folder.lookup() };
        assert_eq!(url(&flag.look().unwrap()).as_deref(), Some("https://other"));

        let flag = Lookup { environment: environment.clone(), data_dir: data_dir.clone(), ..folder.lookup() };
        let found = flag.look().unwrap();
        assert_eq!(url(&found).as_deref(), Some("https://data"));
        assert_eq!(found.endpoints.unwrap().http, "http://data-http");

        let unflagged = data_dir.with_origin(Origin::Environment);
        let by_environment = Lookup { environment, data_dir: unflagged.clone(), ..folder.lookup() };
        let found = by_environment.look().unwrap();
        assert_eq!(url(&found).as_deref(), Some("https://other"));
        assert!(found.endpoints.is_none());

        let missing = Some(folder.at("missing").into_os_string());
        let by_data_dir = Lookup { environment: missing, data_dir: unflagged, ..folder.lookup() };
        assert_eq!(url(&by_data_dir.look().unwrap()).as_deref(), Some("https://data"));
    }

    #[test]
    fn a_kubeconfig_in_a_data_directory_brings_its_endpoints() {
        let folder = Folder::new();
        let lookup = Lookup { kubeconfig: Some(folder.at("data/kubeconfig")), ..folder.lookup() };
        assert_eq!(lookup.look().unwrap().endpoints.unwrap().http, "http://data-http");
    }

    #[test]
    fn several_files_in_kubeconfig_are_merged() {
        let folder = Folder::new();
        let paths = [folder.at("missing"), folder.at("other"), folder.at("data/kubeconfig")];
        let environment = Some(std::env::join_paths(paths).unwrap());
        let data_dir = folder.lookup().data_dir.with_origin(Origin::Home);
        let found = Lookup { environment, data_dir, ..folder.lookup() }.look().unwrap();
        assert_eq!(url(&found).as_deref(), Some("https://other"));
        assert_eq!(found.endpoints.unwrap().http, "http://data-http");
    }

    #[test]
    fn the_error_lists_every_place_and_what_was_there() {
        let folder = Folder::new();
        std::fs::write(folder.at("broken"), "clusters: 7").unwrap();
        let data_dir = folder.lookup().data_dir.with_origin(Origin::Environment);
        let environment = Some(folder.at("broken").into_os_string());
        let found = Lookup { environment, data_dir, ..folder.lookup() }.look().unwrap();
        assert!(found.kubeconfig.is_none());
        let text = super::super::failure::text(&found.places.nothing_found());
        for part in [
            "no Mayfly server was found\n",
            "--kubeconfig: not given\n",
            "broken: is not a kubeconfig",
            "nowhere (MAYFLY_DATA_DIR): does not exist\n",
            "start one with: mayfly up",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }

    #[test]
    fn a_named_kubeconfig_must_be_there() {
        let folder = Folder::new();
        let lookup = Lookup { kubeconfig: Some(folder.at("missing")), ..folder.lookup() };
        let error = lookup.look().err().unwrap().to_string();
        assert!(error.contains("missing: no such file"), "{error}");
    }

    #[test]
    fn urls() {
        assert!(parse_server("https://127.0.0.1:6443").is_ok());
        for bad in ["", "127.0.0.1:6443", "ftp://x", "https://"] {
            assert!(parse_server(bad).is_err(), "{bad}");
        }
    }
}
