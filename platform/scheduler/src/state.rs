//! The state of the scheduler's task: cache, snapshot, queue and planner, kept consistent.

use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};

use crate::{
    cache::{Cache, Effect},
    plan::{Decision, Planner},
    queue::Queue,
    request::{PodRequest, wants_node},
    snapshot::Snapshot,
    volumes::VolumeNeeds,
};

#[derive(Default)]
pub(crate) struct State {
    pub(crate) cache: Cache,
    pub(crate) queue: Queue,
    snapshot: Snapshot,
    planner: Planner,
}

impl State {
    /// A pod as the API shows it, and what its claims demand.
    pub(crate) fn take_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>, volumes: VolumeNeeds) -> Effect {
        let effect = self.cache.set_pod(key, pod);
        let waiting = pod.filter(|pod| wants_node(pod));
        let waiting = waiting.map(|pod| PodRequest::of(pod).with_volumes(volumes));
        // One that is assumed has its node already; its binding is on the way.
        let waiting = waiting.filter(|request| !self.cache.holds(key, &request.uid));
        self.queue.set(key, waiting);
        effect
    }

    /// Decides, and books the pod on its node. A pod whose claims have to be bound first is not booked, and decided
    /// again after that.
    pub(crate) fn decide(&mut self, request: &PodRequest) -> Decision {
        self.snapshot.update(&mut self.cache);
        let decision = self.planner.plan(&mut self.snapshot, request);
        if let Decision::Place { node } = &decision
            && request.volumes.unbound.is_empty()
        {
            self.cache.assume(request, node);
        }
        decision
    }
}
