//! `mayfly delete`: deletes objects by kind and name, by label, or from manifests.

mod preview;

use std::{path::PathBuf, time::Duration};

use clap::Args;
use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    discovery::DiscoveredKind,
    failure::{ErrorCode, Failure},
    get::{GetTarget, named_or_selected, targets},
    manifest, output,
    server::{Server, is_not_found, with_query},
    session::Session,
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly delete function hello
  mayfly delete -f function.yaml
  mayfly delete namespace shop --preview")]
pub(crate) struct DeleteArgs {
    /// KIND NAME…, or KIND/NAME…
    #[arg(value_name = "KIND NAME", required_unless_present = "file", conflicts_with = "file")]
    what: Vec<String>,
    /// The objects of a manifest, of a folder, or of stdin (-)
    #[arg(short, long = "filename", value_name = "FILE|DIR|-")]
    file: Vec<PathBuf>,
    /// Also look into the folders below a folder
    #[arg(short = 'R', long)]
    recursive: bool,
    /// All objects with these labels
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "file")]
    selector: Option<String>,
    /// All objects of the kind in the namespace
    #[arg(long, conflicts_with_all = ["selector", "file"])]
    all: bool,
    /// Succeed when the object does not exist
    #[arg(long)]
    ignore_not_found: bool,
    /// Do not wait until the object is gone
    #[arg(long)]
    no_wait: bool,
    /// Show the objects that would be deleted with it, as a tree, and delete nothing
    #[arg(long)]
    preview: bool,
}

/// An object to delete.
struct DeletionTarget {
    kind: DiscoveredKind,
    namespace: String,
    name: String,
}

pub(crate) async fn run(args: DeleteArgs, session: &Session) -> anyhow::Result<()> {
    let server = session.server().await?;
    let mut failures = Failures { session, total: 0, names: Vec::new() };
    let deletions = if args.file.is_empty() {
        let deletions = named(&args, session, server).await?;
        failures.total = deletions.len();
        deletions
    } else {
        of_manifests(&args, session, &mut failures).await?
    };
    if args.preview {
        preview::run(session, &deletions, args.ignore_not_found).await?;
        return failures.into_result();
    }
    let mut gone = Vec::new();
    for object in deletions {
        let path = object.kind.object(&object.namespace, &object.name);
        let body = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"});
        match server.send(Method::DELETE, &path, "application/json", &body).await {
            Ok(answer) => {
                let shown = object.kind.full_name(&object.name);
                output::line(format_args!("{shown} deleted"))?;
                if !args.no_wait {
                    gone.push((path, shown, uid(&answer.body)));
                }
            }
            Err(error) if args.ignore_not_found && is_not_found(&error) => {}
            Err(error) => failures.add(&object.name, error.into())?,
        }
    }
    for (path, shown, uid) in gone {
        wait_until_gone(server, &path, &shown, &uid).await?;
    }
    failures.into_result()
}

/// Failed deletions. With a single object its failure is the failure of the command; with several, the others are
/// deleted, and the command fails at the end.
struct Failures<'a> {
    session: &'a Session,
    total: usize,
    names: Vec<String>,
}

impl Failures<'_> {
    fn add(&mut self, name: &str, error: anyhow::Error) -> anyhow::Result<()> {
        if self.total == 1 {
            return Err(error);
        }
        let error = self.session.explain(error);
        output::note(format_args!("error: {}", super::failure::text(&error)));
        self.names.push(name.to_owned());
        Ok(())
    }

    fn into_result(self) -> anyhow::Result<()> {
        if self.names.is_empty() {
            return Ok(());
        }
        let Self { total, names, .. } = self;
        let what = format!("{} of {total} objects were not deleted: {}", names.len(), names.join(", "));
        let others = if names.len() == total { "nothing was" } else { "the others were" };
        Err(Failure::error(ErrorCode::Partial, what, others))
    }
}

async fn named(args: &DeleteArgs, session: &Session, server: &Server) -> anyhow::Result<Vec<DeletionTarget>> {
    let namespace = session.namespace().await?;
    let mut deletions = Vec::new();
    let targets = targets(session.discovery().await?, &args.what)?;
    named_or_selected(&targets, args.selector.as_ref().map(|_| "-l LABELS").or(args.all.then_some("--all")))?;
    for GetTarget { kind, names } in targets {
        let whole_kind = args.all || args.selector.is_some();
        if names.is_empty() && !whole_kind {
            return Err(Failure::error(
                ErrorCode::Usage,
                format!("which {}?", kind.plural),
                format!(
                    "mayfly delete {} NAME, or -l LABELS, or --all for every one in the namespace",
                    kind.singular_name()
                ),
            ));
        }
        let names = if names.is_empty() {
            let path = kind.collection(Some(&namespace));
            let list = server.get(&with_query(&path, &[("labelSelector", args.selector.as_deref())])).await?;
            let items = list["items"].as_array().cloned().unwrap_or_default();
            items.iter().filter_map(|item| item["metadata"]["name"].as_str().map(str::to_owned)).collect()
        } else {
            names
        };
        let named = names.into_iter();
        deletions.extend(named.map(|name| DeletionTarget {
            kind: kind.clone(),
            namespace: namespace.clone(),
            name,
        }));
    }
    if deletions.is_empty() {
        output::note("nothing to delete");
    }
    Ok(deletions)
}

async fn of_manifests(
    args: &DeleteArgs,
    session: &Session,
    failures: &mut Failures<'_>,
) -> anyhow::Result<Vec<DeletionTarget>> {
    let mut deletions = Vec::new();
    let documents = manifest::read(&args.file, args.recursive)?;
    failures.total = documents.len();
    let discovery = session.discovery().await?;
    for document in documents {
        let kind = match discovery.of_manifest(&document.api_version, &document.kind) {
            Ok(kind) => kind.clone(),
            Err(error) => {
                failures.add(&document.name, error.context(document.source))?;
                continue;
            }
        };
        let namespace = match document.namespace {
            Some(namespace) => namespace,
            None => session.namespace().await?,
        };
        deletions.push(DeletionTarget { kind, namespace, name: document.name });
    }
    Ok(deletions)
}

/// The uid of the deleted object: the response is the object, or a Status with details about it.
fn uid(answer: &Value) -> String {
    let uid = answer.pointer("/metadata/uid").or_else(|| answer.pointer("/details/uid"));
    uid.and_then(Value::as_str).unwrap_or("").to_owned()
}

/// The state of a deleted object according to one response.
#[derive(Debug, PartialEq, Eq)]
enum DeletionState {
    Gone,
    /// Present, or not distinguishable from another object.
    There,
    /// Unknown: the server cannot be reached or is overloaded.
    Unknown,
    /// A retry would give the same answer.
    Refused,
}

/// The object is gone if the response is "not found", and replaced if the response has another uid.
fn deletion_state(answer: &Result<Value, kube::Error>, uid_deleted: &str) -> DeletionState {
    match answer {
        Ok(object) if is_another(&uid(object), uid_deleted) => DeletionState::Gone,
        Ok(_) => DeletionState::There,
        Err(error) if is_not_found(error) => DeletionState::Gone,
        Err(kube::Error::Api(status)) if status.code == 429 || status.code >= 500 => DeletionState::Unknown,
        Err(kube::Error::Api(_)) => DeletionState::Refused,
        Err(_) => DeletionState::Unknown,
    }
}

fn is_another(uid: &str, uid_deleted: &str) -> bool {
    !uid.is_empty() && !uid_deleted.is_empty() && uid != uid_deleted
}

/// The longest time without a response of the server while waiting for a deletion.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Waits until finalizers and graceful termination have completed. A new object of the same name ends the wait.
async fn wait_until_gone(server: &Server, path: &str, shown: &str, uid_deleted: &str) -> anyhow::Result<()> {
    let mut pause = Duration::from_millis(20);
    let mut said = false;
    let mut silent_since = None;
    loop {
        let answer = server.get(path).await;
        match (deletion_state(&answer, uid_deleted), answer) {
            (DeletionState::Gone, _) => return Ok(()),
            (DeletionState::Unknown, Err(error)) => {
                let since = *silent_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= SILENCE_MAX {
                    let doing =
                        format!("{shown} was deleted, but the command cannot check whether it is gone");
                    return Err(anyhow::Error::new(error).context(doing));
                }
            }
            (_, Err(error)) => return Err(error.into()),
            (_, Ok(_)) => silent_since = None,
        }
        if pause > Duration::from_millis(500) && !said {
            output::note(format_args!(
                "waiting until {shown} is gone (Ctrl-C stops waiting, not the deletion)"
            ));
            said = true;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;
    use crate::server::api_error;

    #[test]
    fn only_not_found_means_gone() {
        let object = |uid: &str| Ok(json!({"metadata": {"uid": uid}}));
        let failure = |code: u16, reason: &str| {
            let body = json!({"kind": "Status", "status": "Failure", "message": "m", "reason": reason, "code": code});
            Err(api_error(StatusCode::from_u16(code).unwrap(), body.to_string().as_bytes()))
        };
        for (answer, expected) in [
            (object("1"), DeletionState::There),
            (object("2"), DeletionState::Gone),
            // A response without a uid (from a proxy, for example) does not indicate another object.
            (object(""), DeletionState::There),
            (Ok(Value::Null), DeletionState::There),
            (failure(404, "NotFound"), DeletionState::Gone),
            (failure(403, "Forbidden"), DeletionState::Refused),
            (failure(429, "TooManyRequests"), DeletionState::Unknown),
            (failure(503, "ServiceUnavailable"), DeletionState::Unknown),
            (Err(kube::Error::Service("connection reset".into())), DeletionState::Unknown),
        ] {
            assert_eq!(deletion_state(&answer, "1"), expected, "{answer:?}");
        }
        assert_eq!(
            deletion_state(&object("2"), ""),
            DeletionState::There,
            "nobody said which one was deleted"
        );
    }
}
