//! Orphaning: the owner goes, the dependents stay.

use kube::ResourceExt as _;
use mayfly_informer::reconcile::Outcome;
use serde_json::json;

use super::{
    FINALIZER_ORPHAN,
    item::{Error, Shared},
};

impl Shared {
    /// Takes the owner away from its dependents, then lets it go.
    pub(super) async fn orphan_dependents(&self, uid: &str) -> Result<Outcome, Error> {
        let Some(node) = self.graph.lock().get(uid).cloned() else { return Ok(Outcome::Done) };
        let dependents: Vec<_> =
            self.graph.lock().dependents(uid).map(|node| node.identity.clone()).collect();
        for dependent in dependents {
            let Some(live) = self.live(&dependent).await? else { continue };
            let references = live.owner_references();
            let kept: Vec<_> = references.iter().filter(|owner| owner.uid != uid).collect();
            if kept.len() < references.len() {
                self.patch(&dependent, &live, json!({"ownerReferences": kept})).await?;
            }
        }
        let Some(live) = self.live(&node.identity).await? else { return Ok(Outcome::Done) };
        if live.finalizers().iter().any(|finalizer| finalizer == FINALIZER_ORPHAN) {
            self.remove_finalizer(&node.identity, &live, FINALIZER_ORPHAN).await?;
        }
        Ok(Outcome::Done)
    }
}
