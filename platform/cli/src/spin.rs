//! `mayfly deploy spin.toml`: the components of a Spin application as functions.
//!
//! [`manifest`] reads the file, and refuses unsupported features by name; [`variables`] resolves the variables;
//! [`files`] packs the files of a component, and [`fetch`] downloads one; [`plan`] creates the objects, purely; this
//! module sends them to the server: the Secret, the functions, then the Services and the Ingress. Objects from an
//! earlier deployment of the application that are not part of this one are deleted.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use http::Method;
use mayfly_api::{Digest, wellknown};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::{
    deploy::{self, DeploymentOrigin, DeploymentSource, Settings},
    failure::{CodeContext, ErrorCode, Failure},
    output,
    server::{FIELD_MANAGER, Server, is_not_found, segment, with_query},
    session::Session,
    upload, wait,
};

mod fetch;
mod files;
mod glob;
mod manifest;
mod outbound;
mod plan;
mod sources;
mod variables;

pub(crate) use manifest::named_by;
use manifest::{ComponentSource, SpinApp, SpinComponent};
use plan::{LABEL_APPLICATION, PlanSettings, PlannedFunction, SpinPlan};
pub(crate) use sources::AppSources;
use variables::VariableValues;

/// The options of `mayfly deploy` that are for Spin applications.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Spin applications (spin.toml)")]
pub(crate) struct SpinArgs {
    #[command(flatten)]
    pub(crate) values: SpinValues,
    /// Run the build commands of the components first
    #[arg(long)]
    build: bool,
}

/// The values that a Spin application gets from outside.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Spin applications (spin.toml)")]
pub(crate) struct SpinValues {
    /// The value of a variable, as NAME=VALUE; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = deploy::variable)]
    variable: Vec<(String, String)>,
    /// The host that the routes are for [default: APPLICATION.NAMESPACE.fn.localhost]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
}

impl SpinArgs {
    /// Whether any of the options is given.
    pub(crate) fn is_used(&self) -> bool {
        self.values.is_used() || self.build
    }
}

impl SpinValues {
    /// Whether any of the options is given.
    pub(crate) fn is_used(&self) -> bool {
        !self.variable.is_empty() || self.host.is_some()
    }
}

/// The collections of an application's objects, relative to a namespace.
const COLLECTIONS: [(&str, &str); 4] = [
    ("ingress", "/apis/networking.k8s.io/v1/namespaces/{}/ingresses"),
    ("service", "/api/v1/namespaces/{}/services"),
    ("function", "/apis/mayfly.dev/v1/namespaces/{}/functions"),
    ("secret", "/api/v1/namespaces/{}/secrets"),
];

fn collection(kind: &str, namespace: &str) -> String {
    let found = COLLECTIONS.iter().find(|(known, _)| *known == kind);
    found.map(|(_, path)| path.replace("{}", &segment(namespace))).unwrap_or_default()
}

/// An application after its deployment.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeployedApp {
    pub(crate) name: String,
    pub(crate) namespace: String,
    /// The URL of its routes, if it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    routes: Vec<DeployedRoute>,
    pub(crate) functions: Vec<String>,
    ready: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeployedRoute {
    route: String,
    function: String,
}

/// Deploys the application of a manifest and prints its URL. With `patience`, waits that long for each function.
pub(crate) async fn deploy(
    session: &Session,
    path: &Path,
    args: &SpinArgs,
    settings: &Settings,
    patience: Option<std::time::Duration>,
) -> anyhow::Result<()> {
    let deployed = deploy_app(session, path, &args.values, args.build, settings, patience).await?;
    output::result(session.format(), &deployed, || deployed.summary())
}

/// The source files of a manifest's application.
pub(crate) fn app_sources(path: &Path) -> anyhow::Result<AppSources> {
    AppSources::of(&read(path)?, path)
}

fn read(path: &Path) -> anyhow::Result<SpinApp> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::new(
            ErrorCode::FileError,
            format!("cannot read {}: {error}", path.display()),
            "name a spin.toml",
        )
    })?;
    manifest::parse(&text, &path.display().to_string()).context(CodeContext(ErrorCode::InvalidFile))
}

/// Deploys the application of a manifest; with `builds`, after running the build commands of its components. With
/// `patience`, waits that long for each function.
pub(crate) async fn deploy_app(
    session: &Session,
    path: &Path,
    args: &SpinValues,
    builds: bool,
    settings: &Settings,
    patience: Option<std::time::Duration>,
) -> anyhow::Result<DeployedApp> {
    if settings.has_middleware() {
        let todo = "deploy the component's file with its middleware: mayfly deploy FILE.wasm --middleware …";
        return Err(Failure::error(
            ErrorCode::Usage,
            "middleware is linked to one component, not to an application",
            todo,
        ));
    }
    let place = path.display().to_string();
    let mut app = read(path)?;
    app.name = settings.name.clone().unwrap_or(app.name);
    for unused in &app.unused {
        output::note(format_args!("component {unused} is not deployed: no trigger names it"));
    }
    let values = VariableValues::resolve(&app.variables, &args.variable, |name| std::env::var(name).ok())?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (server, namespace) = (session.server().await?, session.namespace().await?);
    let host = args.host.clone().unwrap_or_else(|| {
        format!("{}.{namespace}{}", plan::object_name(&app.name), wellknown::FUNCTION_HOST_SUFFIX)
    });
    let archives = archives(&app, folder)?;
    let digests = archives.iter().map(|(id, content)| (id.clone(), Digest::of(content))).collect();
    let planned =
        plan::plan(&app, &values, &PlanSettings { namespace: &namespace, host: &host, files: digests })
            .with_context(|| place.clone())?;
    if builds {
        for component in &app.components {
            build(component, folder).await?;
        }
    }
    let sources = sources(&app, folder).await?;
    for content in archives.into_values() {
        upload::upload(server, &Digest::of(&content), content).await?;
    }
    if let Some(secret) = &planned.secret {
        apply(server, &namespace, "secret", secret).await?;
    }
    let own = Settings { name: None, ..settings.clone() };
    for (planned, origin) in planned.functions.iter().zip(sources.origins) {
        let PlannedFunction { name, manifest } = planned;
        let manifest = Some(manifest.clone());
        let source = DeploymentSource { origin, name: name.clone(), manifest, place: Some(place.clone()) };
        // All components are compiled concurrently.
        deploy::deploy(session, &source, &own, None).await?;
    }
    for service in &planned.services {
        apply(server, &namespace, "service", service).await?;
    }
    if let Some(ingress) = &planned.ingress {
        apply(server, &namespace, "ingress", ingress).await?;
    }
    prune(server, &namespace, &plan::object_name(&app.name), &planned).await?;
    for function in planned.functions.iter().filter(|_| patience.is_some()) {
        wait::ready(server, &namespace, &function.name, patience.unwrap_or_default()).await?;
    }
    Ok(deployed(server, &app, &planned, namespace, &host, patience.is_some()))
}

/// The archives of the components' files, by component.
fn archives(app: &SpinApp, folder: &Path) -> anyhow::Result<BTreeMap<String, Bytes>> {
    let mut archives = BTreeMap::new();
    for component in &app.components {
        let archive = files::archive(folder, &component.files, &component.exclude_files)
            .with_context(|| format!("component.{}", component.id))?;
        match archive {
            Some(archive) => drop(archives.insert(component.id.clone(), archive.into())),
            None if !component.files.is_empty() => {
                output::note(format_args!("component {}: files selects no file", component.id));
            }
            None => {}
        }
    }
    Ok(archives)
}

/// The components' files, in the order of the application.
struct ComponentFiles {
    origins: Vec<DeploymentOrigin>,
    /// The folder for downloads; removed on drop.
    _folder: tempfile::TempDir,
}

async fn sources(app: &SpinApp, folder: &Path) -> anyhow::Result<ComponentFiles> {
    let downloads = tempfile::tempdir().context("cannot make a folder for downloads")?;
    let mut origins = Vec::new();
    for component in &app.components {
        origins.push(DeploymentOrigin::File(match &component.source {
            ComponentSource::File(path) => {
                let file = folder.join(path);
                if !file.is_file() {
                    return Err(not_built(component, &file));
                }
                file
            }
            ComponentSource::Url { url, digest } => {
                output::note(format_args!("fetching {url}"));
                let file = downloads.path().join(format!("{}.wasm", digest.hex()));
                std::fs::write(&file, fetch::component(url, digest).await?)?;
                file
            }
        }));
    }
    Ok(ComponentFiles { origins, _folder: downloads })
}

fn not_built(component: &SpinComponent, file: &Path) -> anyhow::Error {
    let what = format!("component.{}.source: there is no {}", component.id, file.display());
    match &component.build {
        Some(build) => Failure::error(
            ErrorCode::FileError,
            what,
            format!("build it first, or deploy with --build: {}", build.command),
        ),
        None => Failure::error(ErrorCode::FileError, what, "build it, or correct the path"),
    }
}

/// Runs a component's build command, as `spin build` does.
async fn build(component: &SpinComponent, folder: &Path) -> anyhow::Result<()> {
    let Some(build) = &component.build else { return Ok(()) };
    output::note(format_args!("building {}: {}", component.id, build.command));
    let workdir = build.workdir.as_ref().map_or_else(|| folder.to_owned(), |workdir| folder.join(workdir));
    let status =
        Command::new("sh").args(["-c", &build.command]).current_dir(&workdir).kill_on_drop(true).status();
    let status =
        status.await.with_context(|| format!("cannot run the build command in {}", workdir.display()))?;
    match status.success() {
        true => Ok(()),
        false => {
            let what = format!("the build command of component {} failed ({status})", component.id);
            Err(Failure::error(
                ErrorCode::BuildFailed,
                what,
                format!("it was run in {}: {}", workdir.display(), build.command),
            ))
        }
    }
}

/// Creates or changes an object, as `mayfly apply` does.
async fn apply(server: &Server, namespace: &str, kind: &str, object: &Value) -> anyhow::Result<()> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let query = [("fieldManager", Some(FIELD_MANAGER)), ("fieldValidation", Some("Strict"))];
    let path = with_query(&format!("{}/{}", collection(kind, namespace), segment(name)), &query);
    let sent = server.send(Method::PATCH, &path, "application/apply-patch+yaml", object).await;
    sent.with_context(|| format!("{kind}/{name}"))?;
    Ok(())
}

/// Deletes the objects of the application that are not part of this deployment.
async fn prune(server: &Server, namespace: &str, app: &str, plan: &SpinPlan) -> anyhow::Result<()> {
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    for (kind, _) in COLLECTIONS {
        let kept: Vec<String> = match kind {
            "function" => plan.functions.iter().map(|function| function.name.clone()).collect(),
            "service" => plan.services.iter().map(name).collect(),
            "ingress" => plan.ingress.iter().map(name).collect(),
            _ => plan.secret.iter().map(name).collect(),
        };
        let collection = collection(kind, namespace);
        let selector = format!("{LABEL_APPLICATION}={app}");
        let list = server.get(&with_query(&collection, &[("labelSelector", Some(&selector))])).await?;
        for object in list["items"].as_array().into_iter().flatten() {
            let name = name(object);
            if kept.contains(&name) {
                continue;
            }
            let body =
                json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"});
            let path = format!("{collection}/{}", segment(&name));
            match server.send(Method::DELETE, &path, "application/json", &body).await {
                Ok(_) => output::note(format_args!(
                    "deleted {kind} {name}: it is not part of the application any more"
                )),
                Err(error) if is_not_found(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn deployed(
    server: &Server,
    app: &SpinApp,
    plan: &SpinPlan,
    namespace: String,
    host: &str,
    ready: bool,
) -> DeployedApp {
    let port =
        server.endpoints().and_then(|endpoints| endpoints.http.rsplit(':').next()?.parse::<u16>().ok());
    let authority = port.map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
    let mut routes = Vec::new();
    for (component, function) in app.components.iter().zip(&plan.functions) {
        for route in &component.routes {
            let route = match route {
                manifest::TriggerRoute::Exact(path) => path.clone(),
                manifest::TriggerRoute::Wildcard(path) => format!("{path}/..."),
            };
            routes.push(DeployedRoute { route, function: function.name.clone() });
        }
    }
    DeployedApp {
        name: plan::object_name(&app.name),
        namespace,
        url: plan.ingress.as_ref().map(|_| format!("http://{authority}")),
        routes,
        functions: plan.functions.iter().map(|function| function.name.clone()).collect(),
        ready,
    }
}

impl DeployedApp {
    pub(crate) fn summary(&self) -> String {
        let state = if self.ready { "is ready" } else { "was accepted" };
        let mut text = format!("application {} {state}\n", self.name);
        for DeployedRoute { route, function } in &self.routes {
            let url = self.url.as_deref().unwrap_or_default();
            text.push_str(&format!("  {url}{route}  {function}\n"));
        }
        let has_route = |name: &String| self.routes.iter().any(|route| route.function == *name);
        for function in self.functions.iter().filter(|name| !has_route(name)) {
            text.push_str(&format!(
                "  {function} (private): http://{function}.{}.svc.cluster.local\n",
                self.namespace
            ));
        }
        text.push_str(&format!("remove it with: {}\n", self.removal()));
        text
    }

    /// The command that removes all objects of the application.
    pub(crate) fn removal(&self) -> String {
        format!(
            "mayfly delete function,service,ingress,secret -n {} -l {LABEL_APPLICATION}={}",
            self.namespace, self.name
        )
    }
}
