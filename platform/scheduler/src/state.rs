//! What the scheduler's task owns: cache, snapshot, queue and planner, in step with each other.

use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};

use crate::{
    cache::{Cache, Effect},
    plan::{Decision, Planner},
    queue::Queue,
    request::{PodRequest, wants_node},
    snapshot::Snapshot,
};

#[derive(Default)]
pub(crate) struct State {
    pub(crate) cache: Cache,
    pub(crate) queue: Queue,
    snapshot: Snapshot,
    planner: Planner,
}

impl State {
    /// A pod as the API shows it.
    pub(crate) fn take_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>) -> Effect {
        let effect = self.cache.set_pod(key, pod);
        let waiting = pod.filter(|pod| wants_node(pod)).map(PodRequest::of);
        // One that is assumed has its node already; its binding is on the way.
        let waiting = waiting.filter(|request| !self.cache.holds(key, &request.uid));
        self.queue.set(key, waiting);
        effect
    }

    /// Decides, and books the pod where it shall go.
    pub(crate) fn decide(&mut self, request: &PodRequest) -> Decision {
        self.snapshot.update(&mut self.cache);
        let decision = self.planner.plan(&mut self.snapshot, request);
        if let Decision::Place { node } = &decision {
            self.cache.assume(request, node);
        }
        decision
    }
}
