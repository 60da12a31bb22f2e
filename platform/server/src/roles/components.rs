//! The handling of a component between its upload and its first call: inspection and compilation.

use std::{path::Path, sync::Arc, time::Duration};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{ComponentState, ComponentStatus, Digest, ObjectKey, Revision};
use mayfly_informer::{
    Backoff, Change, Informer,
    reconcile::{self, Outcome, WorkQueue},
};
use mayfly_runtime::CallError;
use mayfly_runtime_wasm::{ComponentWorld, WasmHost};
use serde_json::json;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Describes an uploaded file, or returns the reason why it is refused. Blocks.
pub(crate) fn inspect(path: &Path) -> Result<serde_json::Value, String> {
    let content = std::fs::read(path).map_err(|error| format!("cannot read the upload: {error}"))?;
    let report = mayfly_runtime_wasm::inspect(&content).map_err(|refused| refused.to_string())?;
    let worlds: Vec<_> = report.worlds.iter().map(ToString::to_string).collect();
    Ok(json!({"worlds": worlds, "imports": report.imports, "exports": report.exports}))
}

/// Whether a component answers HTTP requests; the error says why the content is not a component that runs here.
pub(crate) fn answers_http(content: &[u8]) -> Result<bool, String> {
    let report = mayfly_runtime_wasm::inspect(content).map_err(|refused| refused.to_string())?;
    Ok(report.http().is_some())
}

/// Compiles the component of every revision as soon as the revision exists, so that no request waits for it; also after
/// an update of Mayfly that invalidates compiled files. The result is written into the revision's status, on which the
/// function's readiness depends.
pub(crate) async fn compile_ahead(
    host: Arc<WasmHost>,
    revisions: Informer<Revision>,
    client: Client,
    stop: CancellationToken,
) {
    tokio::select! {
        () = revisions.synced() => {}
        () = stop.cancelled() => return,
    }
    let queue = WorkQueue::new(RETRY);
    let (wakes, gone) = (queue.clone(), Arc::new(Notify::new()));
    let going = gone.clone();
    revisions.handle(move |change| {
        // A spec never changes, but a status that another client removed is written again.
        match change {
            Change::Added(revision) => wakes.add(ObjectKey::of(&**revision)),
            Change::Updated { new, .. } if component_status(new).is_none() => {
                wakes.add(ObjectKey::of(&**new));
            }
            Change::Updated { .. } => {}
            Change::Deleted(_) => going.notify_waiters(),
        }
    });
    let node = Arc::new(CompilingNode { host, revisions, client, gone });
    reconcile::run("compile ahead", queue, COMPILED_AT_ONCE, stop, move |key| {
        let node = node.clone();
        async move { node.prepare(&key).await }
    })
    .await;
}

/// The number of revisions whose component is awaited concurrently. The host orders and limits compilations, so it has
/// to know all waiting ones.
const COMPILED_AT_ONCE: usize = 512;
/// The interval of progress messages for a revision whose component is not ready. Most are ready before the first one.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);
/// Pauses before a retry for a component that is missing, or whose compilation failed for now.
const RETRY: Backoff = Backoff { first: Duration::from_millis(50), most: Duration::from_secs(2) };

struct CompilingNode {
    host: Arc<WasmHost>,
    revisions: Informer<Revision>,
    client: Client,
    /// Notified when a revision is deleted.
    gone: Arc<Notify>,
}

#[derive(Debug, thiserror::Error)]
enum PrepareError {
    #[error(transparent)]
    Compile(#[from] CallError),
    #[error("cannot write what came of it: {0}")]
    Api(#[from] kube::Error),
}

impl CompilingNode {
    async fn prepare(&self, key: &ObjectKey) -> Result<Outcome, PrepareError> {
        let Some(revision) = self.revisions.get(key) else { return Ok(Outcome::Done) };
        let Some(digest) = revision.spec.source.component else { return Ok(Outcome::Done) };
        let refused = |why: String| ComponentStatus { state: ComponentState::Refused, message: Some(why) };
        let Some(compiled) = self.compile(key, &revision, &digest).await? else { return Ok(Outcome::Done) };
        let found = match compiled {
            Ok(world) if world.answers_requests() => {
                ComponentStatus { state: ComponentState::Compiled, message: None }
            }
            Ok(world) => refused(format!(
                "component {digest} is a job ({world}), it answers no requests: run it in a Pod with \
                 runtimeClassName: wasm, or deploy a component that exports {}",
                ComponentWorld::HttpWasi0_2
            )),
            Err(CallError::ComponentInvalid(why)) => refused(why),
            // The function's status reports the missing component, which may still be uploaded.
            Err(CallError::ComponentMissing(_)) => return Ok(Outcome::RequeueAfter(RETRY.most)),
            Err(error) => return Err(error.into()),
        };
        if self.revisions.get(key).is_some_and(|now| component_status(&now) == Some(&found)) {
            return Ok(Outcome::Done);
        }
        self.write(key, &found).await.map(|()| Outcome::Done)
    }

    /// Waits for the component, and reports the progress meanwhile; `None` if the revision is deleted first.
    async fn compile(
        &self,
        key: &ObjectKey,
        revision: &Revision,
        digest: &Digest,
    ) -> Result<Option<Result<ComponentWorld, CallError>>, PrepareError> {
        let mut compiled = std::pin::pin!(self.host.precompile(digest, &key.namespace));
        loop {
            let mut gone = std::pin::pin!(self.gone.notified());
            // Registered before the check, so that no deletion is missed.
            gone.as_mut().enable();
            let uid = |revision: &Revision| revision.metadata.uid.clone();
            if self.revisions.get(key).is_none_or(|now| uid(&now) != uid(revision)) {
                return Ok(None);
            }
            tokio::select! {
                compiled = &mut compiled => return Ok(Some(compiled)),
                () = gone => {}
                () = tokio::time::sleep(PROGRESS_EVERY) => {
                    if let Some(progress) = self.host.compile_progress(digest) {
                        let message = Some(progress.to_string());
                        self.write(key, &ComponentStatus { state: ComponentState::Compiling, message }).await?;
                    }
                }
            }
        }
    }

    async fn write(&self, key: &ObjectKey, status: &ComponentStatus) -> Result<(), PrepareError> {
        let api: Api<Revision> = Api::namespaced(self.client.clone(), &key.namespace);
        let patch = json!({"status": {"component": {"state": status.state, "message": status.message}}});
        match api.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            result => Ok(result.map(drop)?),
        }
    }
}

fn component_status(revision: &Revision) -> Option<&ComponentStatus> {
    revision.status.as_ref()?.component.as_ref()
}
