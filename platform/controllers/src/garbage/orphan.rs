//! Orphaning: the owner is deleted, its dependents stay.

use std::time::Duration;

use futures::StreamExt as _;
use kube::{Api, ResourceExt as _, api::ListParams};
use mayfly_api::k8s::jiff::Timestamp;
use mayfly_informer::reconcile::Outcome;
use serde_json::json;

use super::{
    FINALIZER_ORPHAN,
    graph::ObjectIdentity,
    item::{CollectorContext, Error, Live},
    kinds::CollectedKind,
};

/// The number of kinds that are listed at the same time.
const LISTS_MAX: usize = 8;

/// The number of objects in one page of a list.
const PAGE: u32 = 500;

/// The dependents of one owner.
#[derive(Default)]
struct DependentLists {
    found: Vec<(ObjectIdentity, Live)>,
    /// The kinds that could not be listed, and why.
    unlisted: Vec<(CollectedKind, kube::Error)>,
}

impl CollectorContext {
    /// Removes the owner reference from every dependent of `uid`, then the finalizer `orphan` from the owner.
    ///
    /// The dependents are listed at the API. The graph may lack one: each kind has its own watch, and the watch of the
    /// dependents' kind may be behind that of the owner's. Such a dependent would be deleted after its owner (upstream,
    /// which reads its graph alone, has this race). For a kind that cannot be listed the owner waits a limited time;
    /// then the graph counts.
    pub(super) async fn orphan_dependents(&self, uid: &str) -> Result<Outcome, Error> {
        let Some(node) = self.graph.lock().get(uid).cloned() else { return Ok(Outcome::Done) };
        let DependentLists { found, unlisted } = self.list_dependents(&node.identity).await;
        let mut failed = None;
        for (dependent, listed) in found {
            // A dependent that cannot be changed does not hold the others up.
            failed = self.disown(&dependent, &listed, uid).await.err().or(failed);
        }
        let Some(live) = self.live(&node.identity).await? else { return Ok(Outcome::Done) };
        if let Some(error) = failed {
            return Err(error);
        }
        if !unlisted.is_empty() {
            self.disown_known(uid, unlisted, &live).await?;
        }
        if live.finalizers().iter().any(|finalizer| finalizer == FINALIZER_ORPHAN) {
            self.remove_finalizer(&node.identity, &live, FINALIZER_ORPHAN).await?;
        }
        Ok(Outcome::Done)
    }

    /// Removes the owner references of the dependents that the graph knows, of kinds that could not be listed. An error
    /// until the owner has waited long enough for the lists.
    async fn disown_known(
        &self,
        uid: &str,
        mut unlisted: Vec<(CollectedKind, kube::Error)>,
        owner: &Live,
    ) -> Result<(), Error> {
        let since =
            owner.metadata.deletion_timestamp.as_ref().map(|time| Timestamp::now().duration_since(time.0));
        let waited = since.and_then(|since| Duration::try_from(since).ok()).unwrap_or_default();
        if waited < self.unlisted_max
            && let Some((_, error)) = unlisted.pop()
        {
            return Err(error.into());
        }
        let is_unlisted = |dependent: &ObjectIdentity| {
            let mut kinds = unlisted.iter().map(|(kind, _)| &kind.resource);
            kinds.any(|kind| kind.api_version == dependent.api_version && kind.kind == dependent.kind)
        };
        let known: Vec<_> = {
            let graph = self.graph.lock();
            graph.dependents(uid).map(|node| node.identity.clone()).filter(is_unlisted).collect()
        };
        for dependent in known {
            if let Some(live) = self.live(&dependent).await? {
                self.disown(&dependent, &live, uid).await?;
            }
        }
        let kinds: Vec<_> = unlisted.iter().map(|(kind, _)| kind.resource.plural.as_str()).collect();
        tracing::warn!(?kinds, owner = %owner.name_any(), "keeping the known dependents of an owner only: some kinds cannot be listed");
        Ok(())
    }

    /// Removes an owner from a dependent's owner references.
    async fn disown(&self, dependent: &ObjectIdentity, live: &Live, uid: &str) -> Result<(), Error> {
        let kept: Vec<_> = live.owner_references().iter().filter(|owner| owner.uid != uid).collect();
        self.patch(dependent, live, json!({"ownerReferences": kept})).await
    }

    /// Every object that names `owner` in its owner references, in all kinds whose references can be changed: in the
    /// owner's namespace, or anywhere for a cluster-scoped owner.
    async fn list_dependents(&self, owner: &ObjectIdentity) -> DependentLists {
        let kinds = self.kinds.read().clone();
        let can_depend =
            |kind: &&CollectedKind| kind.patchable && (kind.namespaced || owner.namespace.is_empty());
        let kinds: Vec<CollectedKind> = kinds.collected().iter().filter(can_depend).cloned().collect();
        let lists = kinds.into_iter().map(|kind| async move {
            let listed = self.list_dependents_of_kind(kind.clone(), owner).await;
            (kind, listed)
        });
        let mut lists = futures::stream::iter(lists).buffer_unordered(LISTS_MAX);
        let mut all = DependentLists::default();
        while let Some((kind, listed)) = lists.next().await {
            match listed {
                Ok(found) => all.found.extend(found),
                // The kind is not served any more: discovery will tell.
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(error) => all.unlisted.push((kind, error)),
            }
        }
        all
    }

    async fn list_dependents_of_kind(
        &self,
        kind: CollectedKind,
        owner: &ObjectIdentity,
    ) -> kube::Result<Vec<(ObjectIdentity, Live)>> {
        let client = self.client.clone();
        let api = if owner.namespace.is_empty() {
            Api::all_with(client, &kind.resource)
        } else {
            kind.api(client, owner)
        };
        let mut page = ListParams::default().limit(PAGE);
        let mut dependents = Vec::new();
        loop {
            let list = api.list_metadata(&page).await?;
            let next = list.metadata.continue_.filter(|token| !token.is_empty());
            let names_owner =
                |object: &Live| object.owner_references().iter().any(|named| named.uid == owner.uid);
            let found = list.items.into_iter().filter(names_owner);
            dependents.extend(found.map(|object| (kind.identity(&object), object)));
            match next {
                Some(token) => page = page.continue_token(&token),
                None => return Ok(dependents),
            }
        }
    }
}
