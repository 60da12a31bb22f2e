//! `mayfly apply`: server-side apply of manifests, with the field manager `mayfly`.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::{
    discovery::{DiscoveredKind, Discovery},
    failure::{ErrorCode, Failure},
    manifest::{self, Document},
    output::{self, OutputFormat},
    server::{FIELD_MANAGER, Server, is_not_found, with_query},
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly apply -f function.yaml
  mayfly get fn hello -o yaml | mayfly apply -f -")]
pub(crate) struct ApplyArgs {
    /// A manifest, a folder of manifests, or - for stdin; may be given several times
    #[arg(short, long = "filename", required = true, value_name = "FILE|DIR|-")]
    file: Vec<PathBuf>,
    /// Also look into the folders below a folder
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Take over fields that another client set
    #[arg(long)]
    force_conflicts: bool,
    /// Have the server check everything and change nothing
    #[arg(long)]
    dry_run: bool,
}

const DEFINITION: &str = "CustomResourceDefinition";
/// The kinds that are applied before all others, in this order.
const FIRST: [&str; 2] = ["Namespace", DEFINITION];
/// The longest wait until the server serves the kind of a definition that was applied before.
const KIND_WAIT: Duration = Duration::from_secs(10);
/// The interval of checks during that wait.
const KIND_POLL: Duration = Duration::from_millis(50);

/// The kinds of the server, read again after a definition of this run has added some.
struct Kinds<'a> {
    discovery: &'a Discovery,
    refreshed: Option<Discovery>,
    /// Whether this run has applied a definition.
    defines_kinds: bool,
}

impl Kinds<'_> {
    /// The kind of a manifest.
    async fn of(&mut self, document: &Document, server: &Server) -> anyhow::Result<&DiscoveredKind> {
        let (version, kind) = (&document.api_version, &document.kind);
        let deadline = tokio::time::Instant::now() + KIND_WAIT;
        while self.defines_kinds
            && self.refreshed.as_ref().unwrap_or(self.discovery).of_manifest(version, kind).is_err()
            && tokio::time::Instant::now() < deadline
        {
            self.refreshed = Some(Discovery::fetch(server).await?);
            tokio::time::sleep(KIND_POLL).await;
        }
        self.refreshed.as_ref().unwrap_or(self.discovery).of_manifest(version, kind)
    }
}

/// The result of applying one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Created,
    Configured,
    Unchanged,
}

pub(crate) async fn run(args: ApplyArgs, session: &Session) -> anyhow::Result<()> {
    let mut documents = manifest::read(&args.file, args.recursive)?;
    // Definitions and namespaces come first; otherwise the order is kept.
    documents
        .sort_by_key(|document| FIRST.iter().position(|kind| *kind == document.kind).unwrap_or(FIRST.len()));
    let (server, discovery) = (session.server().await?, session.discovery().await?);
    let mut kinds = Kinds { discovery, refreshed: None, defines_kinds: false };
    let mut applied = Vec::new();
    let mut failures = Vec::new();
    let total = documents.len();
    for document in documents {
        match apply(&document, &args, session, server, &mut kinds).await {
            Ok((line, object)) => {
                kinds.defines_kinds |= document.kind == DEFINITION;
                if matches!(session.format(), OutputFormat::Table | OutputFormat::Wide | OutputFormat::Name) {
                    output::line(line)?;
                }
                applied.push(object);
            }
            Err(error) if total == 1 && !is_refusal(&error) => return Err(error),
            Err(error) if total == 1 => return Err(placed(&document, error)),
            // Later documents do not depend on this one: they are applied, and the command fails at the end.
            Err(error) => {
                let error = session.explain(placed(&document, error));
                output::note(format_args!("error: {}", super::failure::text(&error)));
                failures.push(document.name);
            }
        }
    }
    print_objects(session.format(), applied)?;
    if !failures.is_empty() {
        let what = format!("{} of {total} objects were not applied: {}", failures.len(), failures.join(", "));
        return Err(Failure::error(
            ErrorCode::Partial,
            what,
            "the others were; correct these and apply again",
        ));
    }
    Ok(())
}

fn print_objects(format: OutputFormat, mut objects: Vec<Value>) -> anyhow::Result<()> {
    let value = match objects.len() {
        0 => return Ok(()),
        1 => objects.remove(0),
        _ => json!({"apiVersion": "v1", "kind": "List", "items": objects}),
    };
    match format {
        OutputFormat::Json => output::out(output::json(&value)?)?,
        OutputFormat::Yaml => output::out(output::yaml(&value)?)?,
        OutputFormat::Table | OutputFormat::Wide | OutputFormat::Name => {}
    }
    Ok(())
}

/// Whether the error is about the object, not about the caller or the server.
fn is_refusal(error: &anyhow::Error) -> bool {
    match error.downcast_ref() {
        Some(kube::Error::Api(status)) => !matches!(status.code, 401 | 429 | 500..),
        _ => false,
    }
}

/// Adds to an error the file of the document, and the object if the server's message does not name it.
fn placed(document: &Document, error: anyhow::Error) -> anyhow::Error {
    let Document { source, kind, name, .. } = document;
    let is_nameless = is_refusal(&error) && !error.to_string().contains(&format!("{name:?}"));
    match is_nameless {
        true => error.context(format!("{source}: {}/{name}", kind.to_lowercase())),
        false => error.context(source.clone()),
    }
}

/// Applies one object; returns the line to print, and the resulting object.
async fn apply(
    document: &Document,
    args: &ApplyArgs,
    session: &Session,
    server: &Server,
    kinds: &mut Kinds<'_>,
) -> anyhow::Result<(String, Value)> {
    let kind = kinds.of(document, server).await?;
    let namespace = namespace(document, kind, session).await?;
    let path = kind.object(&namespace, &document.name);
    let before = match server.get(&path).await {
        Ok(object) => Some(object),
        Err(error) if is_not_found(&error) => None,
        Err(error) => return Err(error.into()),
    };
    let path = |force: bool| {
        let query = [
            ("fieldManager", Some(FIELD_MANAGER)),
            ("fieldValidation", Some("Strict")),
            ("force", force.then_some("true")),
            ("dryRun", args.dry_run.then_some("All")),
        ];
        with_query(&path, &query)
    };
    let body = to_send(document, kind, &namespace);
    let apply = |force| {
        let (path, body) = (path(force), &body);
        async move { server.send(Method::PATCH, &path, "application/apply-patch+yaml", body).await }
    };
    let answer = match apply(args.force_conflicts).await {
        // The fields were set by other commands of this program, such as `mayfly deploy`.
        Err(error) if is_own_conflict(&error) => apply(true).await?,
        answer => answer?,
    };
    let outcome = outcome(before.as_ref(), answer.status, &answer.body);
    let shown = kind.full_name(&document.name);
    let line = match session.format() {
        OutputFormat::Name => shown,
        _ => {
            let dry = if args.dry_run { " (dry run)" } else { "" };
            let word = match outcome {
                Outcome::Created => "created",
                Outcome::Configured => "configured",
                Outcome::Unchanged => "unchanged",
            };
            format!("{shown} {word}{dry}")
        }
    };
    Ok((line, answer.body))
}

/// Whether an apply was refused for fields that only this program's own field manager has set.
fn is_own_conflict(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let own = format!("conflict with \"{FIELD_MANAGER}\"");
    let mut conflicts = causes.filter(|cause| cause.reason == "FieldManagerConflict").peekable();
    conflicts.peek().is_some() && conflicts.all(|cause| cause.message.starts_with(&own))
}

/// The namespace of the manifest, otherwise that of the command; if both are given, they must be equal.
async fn namespace(document: &Document, kind: &DiscoveredKind, session: &Session) -> anyhow::Result<String> {
    let said = session.globals().namespace.as_ref();
    match (&document.namespace, said) {
        (Some(own), Some(said)) if kind.namespaced && own != said => Err(Failure::error(
            ErrorCode::Usage,
            format!("{} names the namespace {own:?}, the command {said:?}", document.source),
            format!("run without -n, or with -n {own}"),
        )),
        (Some(own), _) => Ok(own.clone()),
        (None, _) => session.namespace().await,
    }
}

/// The manifest without the fields that only the server writes, so that `get -o yaml | apply -f -` works.
fn to_send(document: &Document, kind: &DiscoveredKind, namespace: &str) -> Value {
    let mut value = document.value.clone();
    if let Some(metadata) = value["metadata"].as_object_mut() {
        for field in ["managedFields", "creationTimestamp", "resourceVersion", "uid", "generation"] {
            metadata.remove(field);
        }
        if kind.namespaced {
            metadata.insert("namespace".into(), namespace.into());
        }
    }
    value
}

fn outcome(before: Option<&Value>, status: StatusCode, after: &Value) -> Outcome {
    let Some(before) = before else { return Outcome::Created };
    if status == StatusCode::CREATED {
        return Outcome::Created;
    }
    // A dry run does not change the resourceVersion, so the content is compared as well.
    let stripped = |object: &Value| {
        let mut object = object.clone();
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
            metadata.remove("resourceVersion");
        }
        object
    };
    let same_version = before["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"];
    if same_version && stripped(before) == stripped(after) { Outcome::Unchanged } else { Outcome::Configured }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes() {
        let object =
            |version: &str, data: i32| json!({"metadata": {"resourceVersion": version}, "data": data});
        let ok = StatusCode::OK;
        assert_eq!(outcome(None, StatusCode::CREATED, &object("1", 1)), Outcome::Created);
        assert_eq!(outcome(Some(&object("1", 1)), ok, &object("1", 1)), Outcome::Unchanged);
        assert_eq!(outcome(Some(&object("1", 1)), ok, &object("2", 2)), Outcome::Configured);
        let dry_run = outcome(Some(&object("1", 1)), ok, &object("1", 2));
        assert_eq!(dry_run, Outcome::Configured);
    }
}
