//! What happens to a component between its upload and its first call: it is looked at, and compiled.

use std::{collections::HashSet, path::Path, sync::Arc};

use mayfly_api::Revision;
use mayfly_informer::Informer;
use mayfly_runtime_wasm::WasmHost;
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// Says what an uploaded file is, or why it is refused. Blocks while it reads.
pub(crate) fn inspect(path: &Path) -> Result<serde_json::Value, String> {
    let content = std::fs::read(path).map_err(|error| format!("cannot read the upload: {error}"))?;
    let report = mayfly_runtime_wasm::inspect(&content).map_err(|refused| refused.to_string())?;
    let worlds: Vec<_> = report.worlds.iter().map(ToString::to_string).collect();
    Ok(json!({"worlds": worlds, "imports": report.imports, "exports": report.exports}))
}

/// Compiles the component of every revision as soon as the revision is there, so that no request has to
/// wait for it; also after an update of Mayfly, when what was compiled before cannot be used any more.
pub(crate) async fn compile_ahead(
    host: Arc<WasmHost>,
    revisions: Informer<Revision>,
    stop: CancellationToken,
) {
    let mut changes = revisions.subscribe();
    let mut compiled = HashSet::new();
    loop {
        let keys = tokio::select! {
            () = stop.cancelled() => return,
            keys = changes.next() => keys,
        };
        for key in keys {
            let digest = revisions.get(&key).and_then(|revision| revision.spec.source.component);
            let Some(digest) = digest.filter(|digest| !compiled.contains(digest)) else { continue };
            let result = tokio::select! {
                () = stop.cancelled() => return,
                result = host.precompile(&digest) => result,
            };
            match result {
                Ok(_) => drop(compiled.insert(digest)),
                // The first call says the same to whoever made it.
                Err(error) => {
                    tracing::warn!(revision = %key, %digest, %error, "could not compile a component")
                }
            }
        }
    }
}
