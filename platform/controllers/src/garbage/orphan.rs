//! Orphaning: the owner is deleted, its dependents stay.

use futures::{StreamExt as _, TryStreamExt as _};
use kube::{Api, ResourceExt as _, api::ListParams};
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

impl CollectorContext {
    /// Removes the owner reference from every dependent of `uid`, then the finalizer `orphan` from the owner.
    ///
    /// The dependents are listed at the API. The graph may lack one: each kind has its own watch, and the watch of the
    /// dependents' kind may be behind that of the owner's. Such a dependent would be deleted after its owner (upstream,
    /// which reads its graph alone, has this race).
    pub(super) async fn orphan_dependents(&self, uid: &str) -> Result<Outcome, Error> {
        let Some(node) = self.graph.lock().get(uid).cloned() else { return Ok(Outcome::Done) };
        for (dependent, listed) in self.list_dependents(&node.identity).await? {
            let references = listed.owner_references();
            let kept: Vec<_> = references.iter().filter(|owner| owner.uid != uid).collect();
            self.patch(&dependent, &listed, json!({"ownerReferences": kept})).await?;
        }
        let Some(live) = self.live(&node.identity).await? else { return Ok(Outcome::Done) };
        if live.finalizers().iter().any(|finalizer| finalizer == FINALIZER_ORPHAN) {
            self.remove_finalizer(&node.identity, &live, FINALIZER_ORPHAN).await?;
        }
        Ok(Outcome::Done)
    }

    /// Every object that names `owner` in its owner references, in all collected kinds: in the owner's namespace, or
    /// anywhere for a cluster-scoped owner.
    async fn list_dependents(&self, owner: &ObjectIdentity) -> Result<Vec<(ObjectIdentity, Live)>, Error> {
        let kinds = self.kinds.read().clone();
        let can_depend = |kind: &&CollectedKind| kind.namespaced || owner.namespace.is_empty();
        let kinds: Vec<CollectedKind> = kinds.collected().iter().filter(can_depend).cloned().collect();
        let lists = kinds.into_iter().map(|kind| self.list_dependents_of_kind(kind, owner));
        let found: Vec<Vec<_>> =
            futures::stream::iter(lists).buffer_unordered(LISTS_MAX).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    async fn list_dependents_of_kind(
        &self,
        kind: CollectedKind,
        owner: &ObjectIdentity,
    ) -> Result<Vec<(ObjectIdentity, Live)>, Error> {
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
