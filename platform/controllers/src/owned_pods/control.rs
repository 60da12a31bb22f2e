//! The writes: adopting and releasing, creating, deleting.

use std::sync::Arc;

use futures::future::join_all;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};
use mayfly_informer::EventRecorder;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    Error, OwnedPods, PodOwner, PodVerb,
    claim::{Claim, claim},
    reference,
};
use crate::metadata::{api_message, is_gone, only, uid};

impl<O: PodOwner> OwnedPods<O> {
    fn api(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The owner's own pods, after adopting and releasing.
    pub(crate) async fn claimed(&self, owner: &O) -> Result<Vec<Arc<Pod>>, Error> {
        let selector = owner.selector()?;
        let namespace = owner.namespace().unwrap_or_default();
        let candidates = self.by_controller.get(uid(owner)).into_iter().chain(self.orphans.get(&namespace));
        let Claim { mut owned, adopt, release } = claim(owner, &selector, candidates);
        let pods = self.api(&namespace);
        for pod in release {
            let left: Vec<_> =
                pod.owner_references().iter().filter(|known| known.uid != uid(owner)).collect();
            let is_own = |name: &str| [O::FINALIZER, O::LATE_FINALIZER].contains(&Some(name));
            let finalizers: Vec<_> = pod.finalizers().iter().filter(|name| !is_own(name)).collect();
            let wanted = json!({"ownerReferences": left, "finalizers": finalizers});
            let result = change(&pods, &pod, wanted).await;
            if !is_gone(&result) {
                result?;
            }
        }
        if !adopt.is_empty() && self.may_adopt(owner, &namespace).await? {
            for pod in adopt {
                let owners: Vec<_> = pod.owner_references().iter().cloned().chain(reference(owner)).collect();
                let known = pod.finalizers().iter().map(String::as_str);
                let known = known.filter(|name| Some(*name) != O::FINALIZER);
                let finalizers: Vec<_> = known.chain(O::FINALIZER).collect();
                let wanted = json!({"ownerReferences": owners, "finalizers": finalizers});
                match change(&pods, &pod, wanted).await {
                    Err(kube::Error::Api(status)) if status.is_not_found() => {}
                    result => owned.push(Arc::new(result?)),
                }
            }
        }
        Ok(owned)
    }

    /// The informer may be behind a deletion or replacement of the owner: read it before adopting.
    async fn may_adopt(&self, owner: &O, namespace: &str) -> Result<bool, Error> {
        let owners: Api<O> = Api::namespaced(self.client.clone(), namespace);
        let live = owners.get_opt(&owner.name_any()).await?;
        Ok(live.is_some_and(|live| uid(&live) == uid(owner) && live.meta().deletion_timestamp.is_none()))
    }

    /// Removes a finalizer from pods.
    pub(crate) async fn without_finalizer(
        &self,
        namespace: &str,
        pods: impl IntoIterator<Item = &Arc<Pod>>,
        finalizer: &str,
    ) -> kube::Result<()> {
        let api = self.api(namespace);
        let changes = pods.into_iter().map(|pod| {
            let left: Vec<_> = pod.finalizers().iter().filter(|name| *name != finalizer).collect();
            change(&api, pod, json!({"finalizers": left}))
        });
        for result in join_all(changes).await {
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(())
    }

    /// Replaces the owner's finalizer of pods with [`PodOwner::LATE_FINALIZER`].
    pub(crate) async fn with_late_finalizer(
        &self,
        namespace: &str,
        pods: impl IntoIterator<Item = &Arc<Pod>>,
    ) -> kube::Result<()> {
        let api = self.api(namespace);
        let changes = pods.into_iter().map(|pod| {
            let others = pod.finalizers().iter().map(String::as_str);
            let others = others.filter(|name| Some(*name) != O::FINALIZER);
            let finalizers: Vec<_> = others.chain(O::LATE_FINALIZER).collect();
            change(&api, pod, json!({"finalizers": finalizers}))
        });
        for result in join_all(changes).await {
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(())
    }

    /// Creates pods, batch after batch while all succeed.
    pub(crate) async fn create_pods(
        &self,
        owner: &O,
        wanted: &[Pod],
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let key = ObjectKey::of(owner);
        let pods = self.api(&key.namespace);
        self.expectations.lock().begin(&key, Instant::now());
        let mut result = Ok(());
        for batch in batches(wanted) {
            let params = PostParams::default();
            let created = join_all(batch.iter().map(|pod| pods.create(&params, pod))).await;
            for (pod, created) in batch.iter().zip(created) {
                match created {
                    Ok(pod) => {
                        self.expectations.lock().created(&key, uid(&pod));
                        let message = owner.event_message(PodVerb::Create, &pod.name_any(), None);
                        events.normal(owner, "SuccessfulCreate", message);
                    }
                    Err(error) => {
                        let why = api_message(&error);
                        let message = owner.event_message(PodVerb::Create, &pod.name_any(), Some(&why));
                        events.warning(owner, "FailedCreate", message);
                        result = Err(Error::Create(error));
                    }
                }
            }
            if result.is_err() {
                break;
            }
        }
        self.expectations.lock().end(&key);
        result
    }

    /// Deletes pods.
    pub(crate) async fn delete_pods(
        &self,
        owner: &O,
        doomed: &[Arc<Pod>],
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let key = ObjectKey::of(owner);
        let pods = &self.api(&key.namespace);
        {
            let mut expectations = self.expectations.lock();
            expectations.begin(&key, Instant::now());
            doomed.iter().for_each(|pod| expectations.deleting(&key, uid(&**pod)));
        }
        let deletions = doomed.iter().map(|pod| async move {
            let result = pods.delete(&pod.name_any(), &only(uid(&**pod))).await;
            (pod, if is_gone(&result) { Ok(()) } else { result.map(|_| ()) })
        });
        let mut result = Ok(());
        for (pod, deleted) in join_all(deletions).await {
            match deleted {
                Ok(()) => {
                    let message = owner.event_message(PodVerb::Delete, &pod.name_any(), None);
                    events.normal(owner, "SuccessfulDelete", message);
                }
                Err(error) => {
                    self.expectations.lock().not_deleted(&key, uid(&**pod));
                    let why = api_message(&error);
                    let message = owner.event_message(PodVerb::Delete, &pod.name_any(), Some(&why));
                    events.warning(owner, "FailedDelete", message);
                    result = Err(Error::Api(error));
                }
            }
        }
        self.deleted(&key, doomed);
        result
    }

    /// Pods that did not exist any more send no event: none is expected.
    fn deleted(&self, key: &ObjectKey, doomed: &[Arc<Pod>]) {
        let mut expectations = self.expectations.lock();
        for pod in doomed {
            let known = self.pods.get(&ObjectKey::of(&**pod)).filter(|known| uid(&**known) == uid(&**pod));
            if known.is_none_or(|known| known.metadata.deletion_timestamp.is_some()) {
                expectations.not_deleted(key, uid(&**pod));
            }
        }
        expectations.end(key);
    }
}

/// Batches of 1, 2, 4, …: a template that cannot work fails once, not five hundred times.
fn batches<T>(all: &[T]) -> impl Iterator<Item = &[T]> {
    let (mut rest, mut size) = (all, 1);
    std::iter::from_fn(move || {
        let (batch, later) = rest.split_at(size.min(rest.len()));
        (rest, size) = (later, size * 2);
        (!batch.is_empty()).then_some(batch)
    })
}

/// Changes a pod's metadata, conditional on the known version.
async fn change(pods: &Api<Pod>, pod: &Pod, mut metadata: Value) -> kube::Result<Pod> {
    metadata["uid"] = json!(pod.metadata.uid);
    metadata["resourceVersion"] = json!(pod.metadata.resource_version);
    let patch = Patch::Merge(json!({"metadata": metadata}));
    pods.patch(&pod.name_any(), &PatchParams::default(), &patch).await
}

#[cfg(test)]
mod tests {
    use super::batches;

    #[test]
    fn batches_grow() {
        let sizes = |all: usize| batches(&vec![(); all]).map(<[()]>::len).collect::<Vec<_>>();
        assert_eq!(sizes(20), [1, 2, 4, 8, 5]);
        assert_eq!(sizes(1), [1]);
        assert!(sizes(0).is_empty());
    }
}
