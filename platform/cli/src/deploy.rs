//! `mayfly deploy`: creates or updates a function from a component.
//!
//! The steps: build if a directory is given, check the component, upload it by digest unless the server has it, create
//! the Function or patch the fields that differ, wait until it is ready. Fields that neither the command nor the
//! project's manifest sets are kept: deploying new code keeps a traffic split.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bytes::Bytes;
use clap::Args;
use mayfly_api::{
    Digest, duration::Span, egress::EgressRule, function::Isolation,
    k8s::apimachinery::pkg::api::resource::Quantity, quantity, validation,
};
use serde::Serialize;
use serde_json::Value;

use super::{
    build, component,
    deploy_patch::{DeployPatch, DeploySource},
    failure::{ErrorCode, Failure},
    format,
    gateway::function_url,
    middleware, output,
    server::{Server, segment},
    session::{Session, refusal},
    spin::{self, SpinArgs},
    upload::{self, Upload},
    wait,
};
use crate::guest::{
    limits::{BuildLimits, BuildTimeout},
    project::Project,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly deploy
  mayfly deploy handler.py
  mayfly deploy target/hello.wasm --name hello --env GREETING=hi --idle-after 5m
  mayfly deploy hello.wasm --middleware require-token.wasm --env TOKEN=secret
  mayfly deploy spin.toml --variable token=secret
  mayfly deploy --image app:1 --port 80 --name app
  mayfly deploy --oci registry.example/team/hello:1")]
pub(crate) struct DeployArgs {
    /// A project or a script (.py, .js, .ts), which is built first, a component, or a Spin application
    #[arg(default_value = ".", value_name = "DIR|SCRIPT[:HANDLER]|FILE.wasm|spin.toml")]
    source: PathBuf,
    /// Deploy a container image with an HTTP server instead
    #[arg(long, value_name = "REFERENCE", conflicts_with_all = ["source", "oci"])]
    image: Option<String>,
    /// The port that the image's server listens on [default: 8080]
    #[arg(long, value_name = "PORT", requires = "image", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// The program to run instead of the image's entrypoint, as a container's command; may be given several times
    #[arg(long, value_name = "WORD", requires = "image", allow_hyphen_values = true)]
    command: Vec<String>,
    /// An argument instead of the image's own; may be given several times
    #[arg(long = "arg", value_name = "WORD", requires = "image", allow_hyphen_values = true)]
    program_args: Vec<String>,
    /// Deploy a component from a registry instead: the server pulls it
    #[arg(long, value_name = "REFERENCE", conflicts_with = "source")]
    oci: Option<String>,
    #[command(flatten)]
    pub(super) settings: Settings,
    #[command(flatten)]
    spin: SpinArgs,
    #[command(flatten)]
    timeout: BuildTimeout,
    /// Do not wait until the function is ready
    #[arg(long)]
    no_wait: bool,
    /// How long to wait until the function is ready
    #[arg(long, default_value = "60s", value_name = "DURATION")]
    wait_timeout: Span,
}

/// The settings of a function on the command line. Settings that are not given keep their value, or have the default.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Function settings")]
pub(crate) struct Settings {
    /// The function's name [default: the project's, or the file's]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,
    /// An environment variable, as NAME=VALUE; may be given several times
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    pub(super) env: Vec<(String, String)>,
    /// Memory of one instance, such as 64Mi
    #[arg(long, value_name = "QUANTITY", value_parser = quantity_text)]
    pub(super) memory: Option<String>,
    /// How long one request may take, such as 30s
    #[arg(long, value_name = "DURATION")]
    pub(super) timeout: Option<Span>,
    /// Requests that one replica handles at the same time
    #[arg(long, value_name = "COUNT")]
    pub(super) concurrency: Option<u32>,
    /// Replicas kept running without traffic
    #[arg(long, value_name = "COUNT")]
    pub(super) min: Option<u32>,
    /// The largest number of replicas
    #[arg(long, value_name = "COUNT")]
    pub(super) max: Option<u32>,
    /// Requests in flight that one replica should have
    #[arg(long, value_name = "COUNT")]
    pub(super) target: Option<u32>,
    /// Scale to zero after this long without a request, such as 60s
    #[arg(long, value_name = "DURATION")]
    pub(super) idle_after: Option<Span>,
    /// A new instance per request, or one for many: fresh, reuse
    #[arg(long, value_name = "MODE", value_parser = isolation)]
    pub(super) isolation: Option<Isolation>,
    /// A destination the function may call, such as https://api.example.com; may be given several times and replaces
    /// the existing list
    #[arg(long, value_name = "RULE", value_parser = egress)]
    pub(super) egress: Vec<String>,
    /// A component to link in front of the handler, which calls it; may be given several times, the first takes a
    /// request first
    #[arg(long, value_name = "FILE.wasm")]
    pub(super) middleware: Vec<PathBuf>,
}

impl Settings {
    pub(super) fn has_middleware(&self) -> bool {
        !self.middleware.is_empty()
    }

    /// Checks the settings that need no server, before a build that may take minutes.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if let Some(name) = &self.name {
            check_name(name)?;
        }
        match self.middleware.iter().find(|file| !file.is_file()) {
            Some(missing) => {
                let what = format!("--middleware: there is no file {}", missing.display());
                Err(Failure::error(
                    ErrorCode::FileError,
                    what,
                    "name the .wasm file of a middleware component",
                ))
            }
            None => Ok(()),
        }
    }
}

fn check_name(name: &str) -> anyhow::Result<()> {
    validation::function_name(name).map_err(|why| {
        let todo = "give it a name with --name: lower-case letters, digits and dashes";
        Failure::error(ErrorCode::Usage, format!("{name:?} cannot be a function's name: {why}"), todo)
    })
}

pub(super) fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("write NAME=VALUE".into()),
    }
}

fn quantity_text(text: &str) -> Result<String, String> {
    quantity::whole(&Quantity(text.into())).map(|_| text.into()).map_err(|error| error.to_string())
}

fn isolation(text: &str) -> Result<Isolation, String> {
    match text {
        "fresh" => Ok(Isolation::Fresh),
        "reuse" => Ok(Isolation::Reuse),
        _ => Err("write fresh or reuse".into()),
    }
}

fn egress(text: &str) -> Result<String, String> {
    text.parse::<EgressRule>().map(|_| text.into()).map_err(|error| error.to_string())
}

/// A function after a deployment.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Deployed {
    pub(crate) name: String,
    pub(crate) namespace: String,
    /// Set if a component was uploaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) component: Option<Digest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) revision: Option<String>,
    pub(crate) url: String,
    pub(crate) ready: bool,
    #[serde(skip)]
    traffic_is_pinned: bool,
}

/// The kind of source that is deployed.
pub(crate) enum DeploymentOrigin {
    /// A component file, which is uploaded.
    File(PathBuf),
    /// A component or an image in a registry.
    Registry(DeploySource),
}

/// The source to deploy.
pub(crate) struct DeploymentSource {
    pub(crate) origin: DeploymentOrigin,
    /// The function's name, unless the settings give one.
    pub(crate) name: String,
    /// The Function from the project's manifest, without a source.
    pub(crate) manifest: Option<Value>,
    /// The file that contains the manifest.
    pub(crate) place: Option<String>,
}

impl From<build::BuiltProject> for DeploymentSource {
    fn from(built: build::BuiltProject) -> Self {
        Self {
            origin: DeploymentOrigin::File(built.component),
            name: built.name,
            manifest: Some(built.manifest),
            place: Some(built.place),
        }
    }
}

pub(crate) async fn run(args: DeployArgs, session: &Session) -> anyhow::Result<()> {
    session.server().await?;
    let patience = (!args.no_wait).then_some(args.wait_timeout.0);
    let is_local = args.image.is_none() && args.oci.is_none();
    if let Some(manifest) = spin_manifest(&args.source).filter(|_| is_local) {
        return spin::deploy(session, &manifest, &args.spin, &args.settings, patience).await;
    }
    if args.spin.is_used() {
        let todo = "leave out --variable, --host and --build, or name a spin.toml";
        return Err(Failure::error(ErrorCode::Usage, "these options are for Spin applications", todo));
    }
    args.settings.check()?;
    let registry = match (args.image, args.oci) {
        (Some(reference), _) => {
            let (port, command, args) = (args.port, args.command, args.program_args);
            Some((name_of_reference(&reference), DeploySource::Image { reference, port, command, args }))
        }
        (None, Some(reference)) => Some((name_of_reference(&reference), DeploySource::Oci(reference))),
        (None, None) => None,
    };
    let source = if let Some((name, source)) = registry {
        DeploymentSource { origin: DeploymentOrigin::Registry(source), name, manifest: None, place: None }
    } else if Project::is_named_by(&args.source) {
        // Reports an unreachable server before a long build.
        answers(session, &Project::load(&args.source)?.manifest).await?;
        let directory = args.source.clone();
        let limits = BuildLimits::from(args.timeout);
        let _guard = limits.cancel_on_drop();
        tokio::task::spawn_blocking(move || build::project(&directory, &limits)).await??.into()
    } else {
        let name = name_of_file(&args.source);
        DeploymentSource { origin: DeploymentOrigin::File(args.source), name, manifest: None, place: None }
    };
    let deployed = deploy(session, &source, &args.settings, patience).await?;
    if deployed.traffic_is_pinned {
        output::note(format_args!(
            "spec.traffic of {} names revisions only: this one gets no traffic until it is listed",
            deployed.name
        ));
    }
    output::result(session.format(), &deployed, || summary(&deployed))
}

/// The Spin application that a path refers to. A folder that is also a Mayfly project is deployed as the project.
pub(crate) fn spin_manifest(path: &Path) -> Option<PathBuf> {
    spin::named_by(path).filter(|_| !Project::has_manifest(path))
}

fn summary(deployed: &Deployed) -> String {
    let Deployed { name, namespace, url, .. } = deployed;
    let revision = deployed.revision.as_deref().unwrap_or("its revision is being made");
    let state = if deployed.ready { "is ready" } else { "was accepted" };
    let elsewhere = if namespace == "default" { String::new() } else { format!(" -n {namespace}") };
    format!(
        "function {name} {state} ({revision})\n  {url}\n\
         call it:    curl {url}    or: mayfly invoke {name}{elsewhere} -d JSON\n\
         its output: mayfly logs {name}{elsewhere} --follow\n"
    )
}

/// Compiling a component of this size takes seconds, which is reported to the user.
const LARGE_BYTES: usize = 4 << 20;

/// Deploys a function. With `patience`, waits that long until the function is ready.
pub(crate) async fn deploy(
    session: &Session,
    source: &DeploymentSource,
    settings: &Settings,
    patience: Option<Duration>,
) -> anyhow::Result<Deployed> {
    let name = settings.name.as_deref().unwrap_or(&source.name);
    check_name(name)?;
    let server = session.server().await?;
    let namespace = namespace(session, source.manifest.as_ref()).await?;
    let mut uploaded = None;
    let of = match &source.origin {
        DeploymentOrigin::Registry(_) if !settings.middleware.is_empty() => {
            let todo = "deploy the handler's file with its middleware";
            return Err(Failure::error(
                ErrorCode::Usage,
                "middleware is linked to a component's file, not to an image",
                todo,
            ));
        }
        DeploymentOrigin::Registry(source) => source.clone(),
        DeploymentOrigin::File(path) => {
            let content = middleware::link(component::read(path)?, &settings.middleware)?;
            let digest = Digest::of(&content);
            uploaded = Some((digest, content.len()));
            send(server, &digest, content).await?;
            DeploySource::Component(digest)
        }
    };
    let patch =
        DeployPatch { namespace: &namespace, name, source: of, manifest: source.manifest.as_ref(), settings };
    let function = patch.apply(server).await.map_err(|error| placed(source, error))?;
    let is_large = uploaded.is_some_and(|(_, bytes)| bytes >= LARGE_BYTES);
    if is_large && patience.is_some() {
        output::note("the server compiles it, once for each new component");
    }
    let function = match patience {
        Some(patience) => {
            let begun = Instant::now();
            let function = wait::ready(server, &namespace, name, patience).await?;
            if is_large {
                output::note(format_args!("ready after {}", format::seconds(begun.elapsed().as_secs_f64())));
            }
            function
        }
        None => function,
    };
    let pinned = |target: &mayfly_api::function::TrafficTarget| target.latest != Some(true);
    let traffic_is_pinned = !function.spec.traffic.is_empty() && function.spec.traffic.iter().all(pinned);
    let status = function.status.unwrap_or_default();
    let url = match status.url {
        Some(url) => url,
        None if !function.spec.visibility.is_public() => String::new(),
        None => function_url(session, &namespace, name).await?,
    };
    Ok(Deployed {
        name: name.to_owned(),
        namespace,
        component: uploaded.map(|(digest, _)| digest),
        revision: status.latest_revision.filter(|_| patience.is_some()),
        url,
        ready: patience.is_some(),
        traffic_is_pinned,
    })
}

/// Checks before a build that the server is reachable, accepts the credentials, and has the project's namespace.
pub(super) async fn answers(session: &Session, manifest: &Value) -> anyhow::Result<()> {
    let namespace = namespace(session, Some(manifest)).await?;
    let path = format!("/api/v1/namespaces/{}", segment(&namespace));
    match session.server().await?.get(&path).await {
        // A user without permission to read the namespace may still be allowed to deploy to it.
        Err(kube::Error::Api(status)) if status.is_forbidden() => Ok(()),
        answer => Ok(answer.map(drop)?),
    }
}

/// Adds the file to an error about fields that the server does not know.
fn placed(source: &DeploymentSource, error: anyhow::Error) -> anyhow::Error {
    let is_misfit =
        matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if refusal(status).1.is_some());
    match &source.place {
        Some(place) if is_misfit => error.context(place.clone()),
        _ => error,
    }
}

/// The value of `--namespace`, otherwise the manifest's namespace, otherwise the context's.
async fn namespace(session: &Session, manifest: Option<&Value>) -> anyhow::Result<String> {
    let own = manifest.and_then(|manifest| manifest["metadata"]["namespace"].as_str());
    match own.filter(|_| session.globals().namespace.is_none()) {
        Some(own) => Ok(own.to_owned()),
        None => session.namespace().await,
    }
}

async fn send(server: &Server, digest: &Digest, content: Bytes) -> anyhow::Result<()> {
    let size = format::bytes(content.len() as u64);
    match upload::upload(server, digest, content).await? {
        Upload::Sent => output::note(format_args!("uploaded {size} as sha256:{}…", digest.short())),
        Upload::AlreadyThere => {
            output::note(format_args!("sha256:{}… is on the server already", digest.short()));
        }
    }
    Ok(())
}

/// `my_function.wasm` → `my-function`.
fn name_of_file(path: &Path) -> String {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().to_lowercase()).unwrap_or_default();
    let stem = stem.strip_suffix(".component").unwrap_or(&stem);
    stem.replace(['_', '.', ' '], "-")
}

/// `registry.example/team/my_app:1` → `my-app`.
fn name_of_reference(reference: &str) -> String {
    let last = reference.rsplit('/').next().unwrap_or(reference);
    let name = last.split(['@', ':']).next().unwrap_or(last);
    name.to_lowercase().replace(['_', '.'], "-")
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: DeployArgs,
    }

    pub(crate) fn settings(line: &[&str]) -> Settings {
        Line::try_parse_from([&["deploy"], line].concat()).unwrap().args.settings
    }

    #[test]
    fn wrong_settings_are_refused_before_anything_is_sent() {
        for (line, expected) in [
            (&["--env", "A"][..], "NAME=VALUE"),
            (&["--memory", "lots"], "not a quantity"),
            (&["--timeout", "30"], "not a duration"),
            (&["--isolation", "none"], "fresh or reuse"),
            (&["--egress", "example.com"], "not an egress rule"),
        ] {
            let Err(error) = Line::try_parse_from([&["deploy"], line].concat()) else { panic!("{line:?}") };
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn settings_are_checked_before_a_build() {
        let folder = tempfile::tempdir().unwrap();
        let [there, missing] =
            ["a.wasm", "b.wasm"].map(|name| folder.path().join(name).display().to_string());
        std::fs::write(&there, "").unwrap();
        assert!(settings(&["--name", "hello", "--middleware", &there]).check().is_ok());
        for (line, expected) in [
            (&["--name", "My_Function"][..], "cannot be a function's name"),
            (&["--middleware", &there, "--middleware", &missing], "there is no file"),
        ] {
            let error = settings(line).check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_file_names_its_function() {
        for (path, expected) in
            [("a/my_fn.wasm", "my-fn"), ("Hello.component.wasm", "hello"), ("x", "x"), ("/", "")]
        {
            assert_eq!(name_of_file(Path::new(path)), expected);
        }
    }

    #[test]
    fn a_reference_names_its_function() {
        for (reference, expected) in
            [("app:1", "app"), ("r.example:5000/team/My_App:v1.2", "my-app"), ("r.example/x@sha256:00", "x")]
        {
            assert_eq!(name_of_reference(reference), expected);
        }
        let parse = |line: &[&str]| Line::try_parse_from([&["deploy"], line].concat());
        assert!(parse(&["--image", "app:1", "--port", "80"]).is_ok());
        let words =
            parse(&["--image", "app:1", "--command", "/bin/app", "--arg", "-v", "--arg", "x"]).unwrap().args;
        assert_eq!(
            (words.command, words.program_args),
            (vec!["/bin/app".into()], vec!["-v".into(), "x".into()])
        );
        assert!(parse(&["--arg", "x"]).is_err());
        assert!(parse(&["--port", "80"]).is_err() && parse(&["x.wasm", "--image", "app:1"]).is_err());
    }
}
