//! The deletion of a namespace: its contents are deleted, then the namespace.
//!
//! ```text
//! Active ──DELETE──▶ Terminating ──contents deleted──▶ (waits while objects have finalizers or grace)
//!                                        └── empty ──▶ finalizer "kubernetes" removed ──▶ deleted
//! ```
//! One task, level-triggered: each wake-up examines all terminating namespaces.

mod conditions;

use std::{sync::Arc, time::Duration};

use futures::future::try_join_all;
use mayfly_store::{ListOptions, Range, Watch};
use serde_json::Value;

use self::conditions::RemainingContents;
use crate::{
    access::User,
    meta,
    object::{Object, map_at},
    registry::{Backing, Kind, NAMESPACE_FINALIZER, registry},
    request::FieldValidation,
    server::ServerState,
    status::ApiError,
    subresources::namespaces,
    verbs::{DeleteOptions, Manager, ObjectUpdate, Part, WriteRequest},
};

/// The pause before contents that wait for finalizers or grace are checked again.
const RETRY: Duration = Duration::from_millis(250);
/// The maximum number of concurrent deletions.
const CONCURRENT_DELETES: usize = 16;

/// Runs until the server stops.
pub(crate) async fn run(server: Arc<ServerState>) {
    let stop = server.shutdown.clone();
    loop {
        let waiting = server.sweep().await;
        let mut watch = match server.store.watch(Range::resource("namespaces"), server.store.revision()) {
            Ok(watch) => watch,
            Err(_) => continue,
        };
        // Changes between the sweep and the watch are detected now.
        if server.terminating().is_empty() || waiting {
            let pause = if waiting { RETRY } else { Duration::MAX };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                closed = changed(&mut watch) => if closed { return },
            }
        }
        if stop.is_cancelled() {
            return;
        }
    }
}

/// Waits for a change of a namespace. Returns whether the store is closed.
async fn changed(watch: &mut Watch) -> bool {
    matches!(watch.next().await, Err(mayfly_store::WatchClosed::Closed))
}

impl ServerState {
    fn terminating(&self) -> Vec<String> {
        let list = self.store.list(&Range::resource("namespaces"), &ListOptions::default());
        let entries = list.map(|list| list.entries).unwrap_or_default();
        let objects = entries.iter().filter_map(|entry| Object::from_entry(entry).ok());
        objects.filter(Object::is_terminating).map(|object| object.name().to_owned()).collect()
    }

    /// Processes every terminating namespace. Returns whether some of them still have contents.
    async fn sweep(&self) -> bool {
        let mut waiting = false;
        for namespace in self.terminating() {
            match self.empty(&namespace).await {
                Ok(done) => waiting |= !done,
                Err(error) => {
                    tracing::warn!(%error, namespace, "cannot delete the contents of a namespace, will retry");
                    waiting = true;
                }
            }
        }
        waiting
    }

    /// Deletes the contents of a namespace, then the namespace. Returns whether it is removed.
    async fn empty(&self, namespace: &str) -> Result<bool, ApiError> {
        let mut remaining = RemainingContents::default();
        let emptied = self.delete_contents(namespace, &mut remaining).await;
        if let Err(error) = emptied {
            // The status is informational: the error is returned whether the status was written or not.
            let _ = self.write_remaining_status(namespace, &remaining, Some(&error.to_string())).await;
            return Err(error);
        }
        if !remaining.is_empty() {
            self.write_remaining_status(namespace, &remaining, None).await?;
            return Ok(false);
        }
        self.finalize(namespace).await
    }

    /// Deletes the contents of a namespace, and records in `remaining` the objects that have finalizers or grace.
    ///
    /// As upstream (`OrderedNamespaceDeletion`), nothing else is deleted while there are pods: they keep their
    /// NetworkPolicies, Secrets and ConfigMaps until they have ended.
    async fn delete_contents(
        &self,
        namespace: &str,
        remaining: &mut RemainingContents,
    ) -> Result<(), ApiError> {
        let served = self.custom.served();
        let kinds = served.kinds().filter(|kind| kind.namespaced && kind.backing == Backing::Stored);
        let (pods, others): (Vec<_>, Vec<_>) =
            kinds.partition(|kind| kind.group.is_empty() && kind.plural == "pods");
        self.delete_kinds(&pods, namespace, remaining).await?;
        if !remaining.is_empty() {
            return Ok(());
        }
        self.delete_kinds(&others, namespace, remaining).await
    }

    /// Deletes the objects of some kinds in a namespace.
    async fn delete_kinds(
        &self,
        kinds: &[&'static Kind],
        namespace: &str,
        remaining: &mut RemainingContents,
    ) -> Result<(), ApiError> {
        for kind in kinds.iter().copied() {
            let range = Range::namespace(registry().store_resource(kind), namespace);
            let list = self.store.list(&range, &ListOptions::default()).map_err(ApiError::internal)?;
            let request = self.own_request(kind, namespace);
            for entries in list.entries.chunks(CONCURRENT_DELETES) {
                try_join_all(entries.iter().map(|entry| self.delete_if_there(&request, &entry.key.name)))
                    .await?;
            }
            let list = self.store.list(&range, &ListOptions::default()).map_err(ApiError::internal)?;
            for entry in list.entries {
                remaining.add(kind, &Object::from_entry(&entry).map_err(ApiError::internal)?);
            }
        }
        Ok(())
    }

    /// Writes the remaining contents into the namespace's status, where `kubectl describe` shows them.
    async fn write_remaining_status(
        &self,
        namespace: &str,
        remaining: &RemainingContents,
        failure: Option<&str>,
    ) -> Result<(), ApiError> {
        let request = self.own_request_as("kube-controller-manager", namespaces(), "");
        let now = meta::timestamp(request.now);
        let with_conditions = |current: &Object| {
            let mut object = current.clone();
            let status = map_at(&mut object.0, "status");
            let old = status.get("conditions").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let conditions = remaining.conditions(failure, old, &now);
            status.insert("conditions".into(), conditions.into());
            Ok(ObjectUpdate::new(object))
        };
        match self.change(&request, namespace, Part::Status, with_conditions).await {
            Err(error) if !error.has_reason("NotFound") => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes the finalizer of an empty namespace. Returns whether the namespace is removed.
    async fn finalize(&self, namespace: &str) -> Result<bool, ApiError> {
        let request = self.own_request(namespaces(), "");
        let without_finalizer = |current: &Object| {
            let mut object = current.clone();
            if let Some(Value::Array(list)) = map_at(&mut object.0, "spec").get_mut("finalizers") {
                list.retain(|finalizer| finalizer != NAMESPACE_FINALIZER);
            }
            Ok(ObjectUpdate::new(object))
        };
        match self.change(&request, namespace, Part::Finalize, without_finalizer).await {
            Err(error) if error.has_reason("NotFound") => Ok(true),
            Err(error) => Err(error),
            Ok(outcome) => Ok(outcome.is_deleted()),
        }
    }

    pub(crate) async fn delete_if_there(&self, request: &WriteRequest, name: &str) -> Result<(), ApiError> {
        match self.delete(request, name, &DeleteOptions::default()).await {
            Err(error) if !error.has_reason("NotFound") => Err(error),
            _ => Ok(()),
        }
    }

    /// [`Self::own_request`] for a write that a component of upstream does, whose name is the field manager.
    pub(crate) fn own_request_as(&self, manager: &str, kind: &'static Kind, namespace: &str) -> WriteRequest {
        let manager = Manager { name: manager.to_owned(), explicit: false, tracked: false };
        WriteRequest { manager, ..self.own_request(kind, namespace) }
    }

    /// The request of a write by the server itself.
    pub(crate) fn own_request(&self, kind: &'static Kind, namespace: &str) -> WriteRequest {
        WriteRequest {
            kind,
            namespace: namespace.to_owned(),
            now: self.now(),
            dry_run: false,
            validation: FieldValidation::Ignore,
            manager: Manager { name: "mayfly".into(), explicit: false, tracked: false },
            user: User::in_process("system:apiserver"),
        }
    }
}
