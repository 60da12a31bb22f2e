//! The deletion of a definition: first of its objects, then of the definition. One level-triggered task, as for
//! namespaces.

use std::{sync::Arc, time::Duration};

use futures::future::try_join_all;
use mayfly_store::{ListOptions, Range, WatchClosed};
use serde_json::Value;

use super::{CLEANUP_FINALIZER, DEFINITIONS, definitions, is_definition, names};
use crate::{
    meta,
    object::Object,
    registry::{Kind, registry},
    server::ServerState,
    status::ApiError,
    verbs::{Manager, ObjectUpdate, Part},
};

/// The pause before objects that wait for their finalizers are checked again.
const RETRY: Duration = Duration::from_millis(250);
/// The maximum number of concurrent deletions.
const CONCURRENT_DELETES: usize = 16;

/// Runs until the server stops.
pub(crate) async fn run(server: Arc<ServerState>) {
    let stop = server.shutdown.clone();
    loop {
        let Ok(mut watch) = server.store.watch(Range::resource(DEFINITIONS), server.store.revision()) else {
            continue;
        };
        // Changes after this point are seen by the watch.
        let waiting = server.remove_terminating_definitions().await;
        server.accept_all_names().await;
        let pause = if waiting { RETRY } else { Duration::MAX };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
            next = watch.next() => if matches!(next, Err(WatchClosed::Closed)) { return },
        }
    }
}

fn definition_kind() -> &'static Kind {
    registry().kinds().find(|kind| is_definition(kind)).expect("the row is there")
}

impl ServerState {
    /// Processes all definitions that are being deleted. Returns whether some of them still have objects.
    async fn remove_terminating_definitions(&self) -> bool {
        let mut waiting = false;
        for definition in definitions(&self.store).into_iter().filter(Object::is_terminating) {
            match self.remove_objects(&definition).await {
                Ok(done) => waiting |= !done,
                Err(error) => {
                    let name = definition.name();
                    tracing::warn!(%error, name, "cannot delete the objects of a definition, will retry");
                    waiting = true;
                }
            }
        }
        waiting
    }

    /// Deletes the objects of a definition, and removes its finalizer when none is left. Returns whether it did.
    async fn remove_objects(&self, definition: &Object) -> Result<bool, ApiError> {
        if !definition.finalizers().contains(&CLEANUP_FINALIZER) {
            return Ok(true);
        }
        let (group, plural) =
            (definition.str_at(&["spec", "group"]), definition.str_at(&["spec", "names", "plural"]));
        let range = Range::resource(format!("{plural}.{group}"));
        let served = self.custom.served();
        let kind = served
            .kinds()
            .find(|kind| kind.definition.is_some() && (kind.group, kind.plural) == (group, plural));
        let entries = self.store.list(&range, &ListOptions::default()).map_err(ApiError::internal)?.entries;
        if let Some(kind) = kind {
            for chunk in entries.chunks(CONCURRENT_DELETES) {
                try_join_all(chunk.iter().map(|entry| async {
                    let request = self.own_request(kind, &entry.key.namespace);
                    self.delete_if_there(&request, &entry.key.name).await
                }))
                .await?;
            }
            if !self
                .store
                .list(&range, &ListOptions::default())
                .map_err(ApiError::internal)?
                .entries
                .is_empty()
            {
                return Ok(false);
            }
        } else if !entries.is_empty() {
            return Ok(false);
        }
        let request = self.own_request(definition_kind(), "");
        let now = meta::timestamp(request.now);
        let without_finalizer = |current: &Object| {
            let mut object = current.clone();
            if let Some(Value::Array(list)) = object.meta_mut().get_mut("finalizers") {
                list.retain(|finalizer| finalizer != CLEANUP_FINALIZER);
            }
            names::set_terminated(&mut object, &now);
            Ok(ObjectUpdate::new(object))
        };
        match self.change(&request, definition.name(), Part::Whole, without_finalizer).await {
            Err(error) if !error.has_reason("NotFound") => Err(error),
            _ => Ok(true),
        }
    }

    /// Accepts names that became free, and names whose acceptance a restart interrupted.
    async fn accept_all_names(&self) {
        for definition in definitions(&self.store) {
            if !names::are_accepted(&definition) {
                self.accept_definition_names(definition.name()).await;
            }
        }
    }

    /// Accepts the names of a definition, if they are free, in a write of its own, as upstream. The kinds are served
    /// when this returns.
    pub(crate) async fn accept_definition_names(&self, name: &str) {
        let _accepting = self.custom.accepting.lock().await;
        let mut request = self.own_request(definition_kind(), "");
        request.manager = Manager { name: "kube-apiserver".into(), explicit: false, tracked: true };
        let now = meta::timestamp(request.now);
        let with_accepted_names = |current: &Object| {
            let mut object = current.clone();
            super::accept_names(&mut object, &self.store, &now);
            Ok(ObjectUpdate::new(object))
        };
        // If this fails, the background task tries again.
        if let Err(error) = self.change(&request, name, Part::Status, with_accepted_names).await {
            tracing::debug!(%error, "cannot write the status of a definition");
        }
    }
}
