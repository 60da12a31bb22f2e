//! Reads `spin.toml`, versions 1 and 2, into one form. All unsupported features are refused at once, by name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use mayfly_api::Digest;
use serde::Deserialize;
use toml::{Table, Value};

use crate::failure::{ErrorCode, Failure};

/// An application.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SpinApp {
    pub(crate) name: String,
    pub(crate) variables: BTreeMap<String, VariableDeclaration>,
    pub(crate) components: Vec<SpinComponent>,
    /// Components without a trigger, which are not deployed.
    pub(crate) unused: Vec<String>,
}

/// A variable of the application.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VariableDeclaration {
    pub(crate) default: Option<String>,
    #[serde(default)]
    pub(crate) required: bool,
    #[serde(default)]
    pub(crate) secret: bool,
}

/// A component with its routes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SpinComponent {
    pub(crate) id: String,
    pub(crate) source: ComponentSource,
    pub(crate) routes: Vec<TriggerRoute>,
    pub(crate) is_private: bool,
    /// `allowed_outbound_hosts`, as written.
    pub(crate) outbound_hosts: Vec<String>,
    pub(crate) files: Vec<FileMapping>,
    pub(crate) exclude_files: Vec<String>,
    pub(crate) environment: BTreeMap<String, String>,
    /// Templates by name.
    pub(crate) variables: BTreeMap<String, String>,
    pub(crate) build: Option<BuildCommand>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ComponentSource {
    File(PathBuf),
    Url { url: String, digest: Digest },
}

/// A route that leads to a component. Paths include the application's base path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TriggerRoute {
    /// `/cart`
    Exact(String),
    /// `/static/...`: the path before the dots, without its trailing slash.
    Wildcard(String),
}

/// Files that a component reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileMapping {
    /// Files at their own paths, relative to the manifest's folder.
    Pattern(String),
    /// A file or a folder's content at another path.
    Placed { source: String, destination: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct BuildCommand {
    #[serde(deserialize_with = "lines")]
    pub(crate) command: String,
    pub(crate) workdir: Option<PathBuf>,
    /// Patterns of the source files, relative to the working directory.
    #[serde(default)]
    pub(crate) watch: Vec<String>,
}

/// One command, or several commands in sequence.
fn lines<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(command) => command,
        OneOrMany::Many(commands) => commands.join(" && "),
    })
}

#[derive(Deserialize)]
struct ManifestV2 {
    application: ApplicationTable,
    #[serde(default)]
    variables: BTreeMap<String, VariableDeclaration>,
    #[serde(default)]
    trigger: BTreeMap<String, Vec<Table>>,
    #[serde(default)]
    component: BTreeMap<String, ComponentTable>,
}

#[derive(Deserialize)]
struct ApplicationTable {
    name: String,
    #[serde(default)]
    trigger: BTreeMap<String, Table>,
}

#[derive(Deserialize)]
struct ManifestV1 {
    name: String,
    trigger: Table,
    #[serde(default)]
    variables: BTreeMap<String, VariableDeclaration>,
    #[serde(default)]
    component: Vec<ComponentV1>,
}

#[derive(Deserialize)]
struct ComponentV1 {
    id: String,
    trigger: Option<Table>,
    #[serde(default)]
    config: BTreeMap<String, String>,
    #[serde(flatten)]
    rest: ComponentTable,
}

#[derive(Deserialize)]
struct ComponentTable {
    source: Option<Value>,
    #[serde(default)]
    allowed_outbound_hosts: Vec<String>,
    /// The field of version 1.
    #[serde(default)]
    allowed_http_hosts: Vec<String>,
    #[serde(default)]
    files: Vec<Value>,
    #[serde(default)]
    exclude_files: Vec<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    #[serde(default)]
    variables: BTreeMap<String, String>,
    build: Option<BuildCommand>,
    #[serde(flatten)]
    rest: Table,
}

/// Fields of a component that have no effect here.
const IGNORED: [&str; 4] = ["description", "tool", "targets", "dependencies_inherit_configuration"];

/// Unsupported features, each with the reason.
#[derive(Default)]
struct Unsupported(Vec<String>);

impl Unsupported {
    fn add(&mut self, place: &str, why: &str) {
        self.0.push(format!("{place}: {why}"));
    }
}

/// Parses a manifest; `place` names its file in errors.
pub(crate) fn parse(text: &str, place: &str) -> anyhow::Result<SpinApp> {
    let table: Table = text.parse().with_context(|| format!("cannot read {place}"))?;
    let version = match (table.get("spin_manifest_version"), table.get("spin_version")) {
        (Some(Value::Integer(2)), _) => 2,
        (Some(Value::String(one)), _) | (None, Some(Value::String(one))) if one == "1" => 1,
        (Some(Value::Integer(1)), _) => 1,
        _ => {
            let what = format!("{place} is not a Spin manifest of version 1 or 2");
            let todo = "write spin_manifest_version = 2 at its top; another project is named by its folder";
            return Err(Failure::error(ErrorCode::InvalidFile, what, todo));
        }
    };
    let mut unsupported = Unsupported::default();
    let app = match version {
        2 => of_v2(toml::from_str(text).with_context(|| format!("cannot read {place}"))?, &mut unsupported),
        _ => of_v1(toml::from_str(text).with_context(|| format!("cannot read {place}"))?, &mut unsupported),
    }
    .with_context(|| place.to_owned())?;
    if !unsupported.0.is_empty() {
        let what = format!("{place} uses features that Mayfly does not support");
        return Err(Failure::error(ErrorCode::Unsupported, what, unsupported.0.join("\n")));
    }
    Ok(app)
}

fn of_v2(manifest: ManifestV2, unsupported: &mut Unsupported) -> anyhow::Result<SpinApp> {
    for kind in manifest.trigger.keys().filter(|kind| *kind != "http") {
        refuse_trigger(kind, unsupported);
    }
    let base = manifest.application.trigger.get("http").and_then(|http| http.get("base"));
    let base = base.and_then(Value::as_str).unwrap_or("/").to_owned();
    let mut routed: BTreeMap<String, Routes> = BTreeMap::new();
    for trigger in manifest.trigger.get("http").into_iter().flatten() {
        let Some(Value::String(component)) = trigger.get("component") else {
            let why = "a component within a trigger: write it as [component.NAME] and name it";
            unsupported.add("trigger.http.component", why);
            continue;
        };
        if !manifest.component.contains_key(component) {
            anyhow::bail!("a trigger names the component {component:?}, which does not exist");
        }
        routed.entry(component.clone()).or_default().add(component, trigger, &base, unsupported)?;
    }
    let mut app = SpinApp {
        name: manifest.application.name,
        variables: manifest.variables,
        components: Vec::new(),
        unused: Vec::new(),
    };
    for (id, table) in manifest.component {
        match routed.remove(&id) {
            Some(routes) => app.components.push(component(id, table, routes, unsupported)?),
            None => app.unused.push(id),
        }
    }
    finish(app)
}

fn of_v1(manifest: ManifestV1, unsupported: &mut Unsupported) -> anyhow::Result<SpinApp> {
    let kind = manifest.trigger.get("type").and_then(Value::as_str).unwrap_or("http");
    if kind != "http" {
        refuse_trigger(kind, unsupported);
    }
    let base = manifest.trigger.get("base").and_then(Value::as_str).unwrap_or("/").to_owned();
    let mut app = SpinApp {
        name: manifest.name,
        variables: manifest.variables,
        components: Vec::new(),
        unused: Vec::new(),
    };
    for ComponentV1 { id, trigger, config, rest } in manifest.component {
        let Some(trigger) = trigger else {
            app.unused.push(id);
            continue;
        };
        let mut routes = Routes::default();
        routes.add(&id, &trigger, &base, unsupported)?;
        let table = ComponentTable { variables: config, ..rest };
        app.components.push(component(id, table, routes, unsupported)?);
    }
    finish(app)
}

fn refuse_trigger(kind: &str, unsupported: &mut Unsupported) {
    let why = match kind {
        "cron" => "triggers of this kind: a Function has spec.triggers with a schedule",
        _ => "triggers of this kind: components are called by HTTP only",
    };
    unsupported.add(&format!("trigger.{kind}"), why);
}

/// Checks rules that span several components.
fn finish(app: SpinApp) -> anyhow::Result<SpinApp> {
    if app.components.is_empty() {
        anyhow::bail!("no trigger leads to a component, so there is nothing to deploy");
    }
    let mut seen = BTreeMap::new();
    for component in &app.components {
        for route in &component.routes {
            if let Some(other) = seen.insert(route, &component.id) {
                let path = match route {
                    TriggerRoute::Exact(path) => path.clone(),
                    TriggerRoute::Wildcard(path) => format!("{path}/..."),
                };
                anyhow::bail!("the route {path} is that of {other:?} and of {:?}", component.id);
            }
        }
    }
    for (name, declaration) in &app.variables {
        if declaration.default.is_none() && !declaration.required {
            anyhow::bail!("variables.{name} has neither a default nor required = true");
        }
    }
    Ok(app)
}

/// The routes of one component.
#[derive(Default)]
struct Routes {
    paths: Vec<TriggerRoute>,
    is_private: bool,
}

impl Routes {
    fn add(
        &mut self,
        component: &str,
        trigger: &Table,
        base: &str,
        unsupported: &mut Unsupported,
    ) -> anyhow::Result<()> {
        let place = format!("the route of {component:?}");
        let executor = trigger.get("executor").and_then(|executor| executor.get("type"));
        if executor.and_then(Value::as_str).is_some_and(|executor| executor != "spin") {
            unsupported.add(&place, "executors other than \"spin\" (WAGI): build a component for wasi:http");
        }
        match trigger.get("route") {
            Some(Value::String(path)) if path.split('/').any(|part| part.starts_with(':')) => {
                unsupported.add(&place, "named wildcards (:name): read the path after a wildcard (/...)");
            }
            Some(Value::String(path)) => self.paths.push(route(base, path).context(place)?),
            Some(Value::Table(table)) if table.get("private").and_then(Value::as_bool) == Some(true) => {
                self.is_private = true;
            }
            _ => anyhow::bail!("{place} must be a path, or {{ private = true }}"),
        }
        Ok(())
    }
}

fn route(base: &str, path: &str) -> anyhow::Result<TriggerRoute> {
    if !path.starts_with('/') {
        anyhow::bail!("{path:?} must begin with a slash");
    }
    let whole = format!("{}{path}", base.trim_end_matches('/'));
    let is_plain = |path: &str| !path.contains("...") && path.bytes().all(|byte| byte.is_ascii_graphic());
    match whole.strip_suffix("/...") {
        Some(front) if is_plain(front) => Ok(TriggerRoute::Wildcard(front.to_owned())),
        None if is_plain(&whole) => {
            let path = whole.trim_end_matches('/');
            Ok(TriggerRoute::Exact(if path.is_empty() { "/".to_owned() } else { path.to_owned() }))
        }
        _ => anyhow::bail!("{path:?} is not a path: a wildcard must be at its end, as in /static/..."),
    }
}

fn component(
    id: String,
    table: ComponentTable,
    routes: Routes,
    unsupported: &mut Unsupported,
) -> anyhow::Result<SpinComponent> {
    let place = |field: &str| format!("component.{id}.{field}");
    for field in table.rest.keys().filter(|field| !IGNORED.contains(&field.as_str())) {
        let why = match field.as_str() {
            "key_value_stores" => "key-value stores: call one by HTTP, with allowed_outbound_hosts",
            "sqlite_databases" => "SQLite databases: call a database's HTTP interface",
            "ai_models" => "models: call an inference server by HTTP",
            "dependencies" => "dependencies: compose the component before, or mayfly deploy --middleware",
            "trigger" => "a trigger within a component: write [[trigger.http]]",
            _ => "this field",
        };
        unsupported.add(&place(field), why);
    }
    let source = match table.source {
        Some(Value::String(path)) => Some(ComponentSource::File(path.into())),
        Some(Value::Table(source)) => remote(&source, &place("source"), unsupported)?,
        _ => anyhow::bail!("{} is missing", place("source")),
    };
    let outbound_hosts = table.allowed_outbound_hosts.into_iter();
    let old_hosts = table.allowed_http_hosts.iter().map(|host| host_v1(host));
    let files: anyhow::Result<_> = table.files.iter().map(|file| mapping(file, &place("files"))).collect();
    Ok(SpinComponent {
        // Placeholder: an error was recorded instead.
        source: source.unwrap_or(ComponentSource::File(PathBuf::new())),
        routes: routes.paths,
        is_private: routes.is_private,
        outbound_hosts: outbound_hosts.chain(old_hosts).collect(),
        files: files?,
        exclude_files: table.exclude_files,
        environment: table.environment,
        variables: table.variables,
        build: table.build,
        id,
    })
}

/// A source with a URL; `None` if it is refused.
fn remote(
    source: &Table,
    place: &str,
    unsupported: &mut Unsupported,
) -> anyhow::Result<Option<ComponentSource>> {
    if source.contains_key("registry") || source.contains_key("package") {
        unsupported.add(place, "packages of a wasm registry: fetch the component and name its file");
        return Ok(None);
    }
    let text = |field: &str| source.get(field).and_then(Value::as_str);
    match (text("url"), text("digest")) {
        (Some(url), Some(digest)) => {
            let digest = digest.parse().with_context(|| format!("{place}.digest"))?;
            Ok(Some(ComponentSource::Url { url: url.to_owned(), digest }))
        }
        _ => anyhow::bail!("{place} must be a file, or {{ url = \"…\", digest = \"sha256:…\" }}"),
    }
}

/// Converts a host of `allowed_http_hosts` to the form of `allowed_outbound_hosts`.
fn host_v1(host: &str) -> String {
    match host {
        "insecure:allow-all" => "*://*:*".to_owned(),
        host if host.contains("://") => host.to_owned(),
        host => format!("*://{host}"),
    }
}

fn mapping(file: &Value, place: &str) -> anyhow::Result<FileMapping> {
    match file {
        Value::String(pattern) => Ok(FileMapping::Pattern(pattern.clone())),
        Value::Table(table) => {
            let text = |field: &str| table.get(field).and_then(Value::as_str).map(str::to_owned);
            let (Some(source), Some(destination)) = (text("source"), text("destination")) else {
                anyhow::bail!("{place}: a table has source and destination");
            };
            Ok(FileMapping::Placed { source, destination })
        }
        _ => anyhow::bail!("{place} has patterns and tables only"),
    }
}

/// The manifest at a path: a file called `spin.toml` or ending in that, or a folder that contains one.
pub(crate) fn named_by(path: &Path) -> Option<PathBuf> {
    let in_folder = path.join("spin.toml");
    if path.is_dir() {
        return in_folder.is_file().then_some(in_folder);
    }
    path.extension().is_some_and(|extension| extension == "toml").then(|| path.to_owned())
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
