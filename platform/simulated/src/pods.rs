//! The task that simulates the pods of all nodes: a queue by due time, and writes beside it.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use mayfly_api::{
    ObjectKey,
    k8s::{api::core::v1::Pod, jiff::Timestamp},
};
use mayfly_informer::{Informer, Informers};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::{
    Config, nodes,
    plan::{self, PodStep},
};

/// The pause before a failed write is retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const FIELD_MANAGER: &str = "simulated-nodes";
/// Pods get addresses of the shared address space (RFC 6598), one after the other.
const ADDRESSES: u32 = 1 << 22;

pub(crate) struct SimulatedPods {
    client: Client,
    pods: Informer<Pod>,
    nodes: u32,
    writes_max: usize,
}

/// The pods that wait for their next step.
#[derive(Default)]
struct Due {
    by_time: BTreeSet<(Instant, ObjectKey)>,
    at: HashMap<ObjectKey, Instant>,
}

impl Due {
    fn set(&mut self, key: ObjectKey, at: Option<Instant>) {
        if let Some(before) = self.at.remove(&key) {
            self.by_time.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.at.insert(key.clone(), at);
            self.by_time.insert((at, key));
        }
    }

    fn next(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| *at)
    }

    fn pop(&mut self, now: Instant) -> Option<ObjectKey> {
        let (at, key) = self.by_time.first()?.clone();
        if at > now {
            return None;
        }
        self.set(key.clone(), None);
        Some(key)
    }
}

/// The pods with a write in progress, and whether their object changed meanwhile.
type Writing = HashMap<ObjectKey, bool>;

impl SimulatedPods {
    pub(crate) fn create(config: &Config, client: Client, informers: &Informers) -> Self {
        Self { client, pods: informers.of(), nodes: config.count, writes_max: config.writes_max }
    }

    pub(crate) async fn run(&self, stop: &CancellationToken) {
        let mut changes = self.pods.subscribe();
        let (mut due, mut writing) = (Due::default(), Writing::new());
        let mut writes: FuturesUnordered<BoxFuture<'_, (ObjectKey, kube::Result<()>)>> =
            FuturesUnordered::new();
        let mut addresses = 0;
        loop {
            while writes.len() < self.writes_max
                && let Some(key) = due.pop(Instant::now())
            {
                addresses = (addresses + 1) % ADDRESSES;
                if let Some(write) = self.step(&key, addresses) {
                    writing.insert(key.clone(), false);
                    writes.push(write.map(move |result| (key, result)).boxed());
                }
            }
            let wake = due.next().filter(|_| writes.len() < self.writes_max);
            tokio::select! {
                () = stop.cancelled() => return,
                changed = changes.next() => {
                    for key in changed {
                        match writing.get_mut(&key) {
                            Some(is_changed) => *is_changed = true,
                            None => due.set(key.clone(), self.due(&key)),
                        }
                    }
                }
                Some((key, result)) = writes.next() => {
                    let is_changed = writing.remove(&key).unwrap_or(false);
                    if let Err(error) = result {
                        tracing::debug!(pod = %key, %error, "cannot write a simulated pod; will retry");
                        due.set(key, Some(Instant::now() + RETRY_AFTER));
                    } else if is_changed {
                        due.set(key.clone(), self.due(&key));
                    }
                }
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
        }
    }

    /// The pod and the number of its node, if it is one of ours.
    fn own(&self, key: &ObjectKey) -> Option<(Arc<Pod>, u32)> {
        let pod = self.pods.get(key)?;
        let node = pod.spec.as_ref()?.node_name.as_deref().and_then(nodes::number)?;
        (node <= self.nodes).then_some((pod, node))
    }

    /// The time of the pod's next step.
    fn due(&self, key: &ObjectKey) -> Option<Instant> {
        let (pod, _) = self.own(key)?;
        let now = Timestamp::now();
        let due = plan::next(&pod, "", "", now)?;
        let pause = Duration::try_from(due.at.duration_since(now)).unwrap_or_default();
        Some(Instant::now() + pause)
    }

    fn step(
        &self,
        key: &ObjectKey,
        address: u32,
    ) -> Option<impl Future<Output = kube::Result<()>> + Send + use<>> {
        let (pod, node) = self.own(key)?;
        let [_, b, c, d] = address.to_be_bytes();
        let address = format!("100.{}.{c}.{d}", 64 + (b & 0x3f));
        let due = plan::next(&pod, &nodes::address(node), &address, Timestamp::now())?;
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        Some(carry_out(api, pod, due.step))
    }
}

async fn carry_out(api: Api<Pod>, pod: Arc<Pod>, step: PodStep) -> kube::Result<()> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let result = match step {
        PodStep::WriteStatus(status) => {
            let seen = serde_json::json!({"uid": pod.metadata.uid});
            let patch = Patch::Merge(serde_json::json!({"metadata": seen, "status": status}));
            let params = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
            api.patch_status(name, &params, &patch).await.map(|_| ())
        }
        PodStep::Remove => {
            let preconditions = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
            let params = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            };
            api.delete(name, &params).await.map(|_| ())
        }
    };
    match result {
        // The pod was removed, or another one has its name.
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        result => result,
    }
}
