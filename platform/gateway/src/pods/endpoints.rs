//! The choice of a pod for each request. Neither locks nor a clock.

use std::net::IpAddr;

use mayfly_api::k8s::api::core::v1::Pod;

/// A pod that may receive requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodAddress {
    pub(super) uid: String,
    pub(super) ip: IpAddr,
}

impl PodAddress {
    /// The pod's address, if requests may be sent to it: it is running, and is not being deleted.
    pub(super) fn of(pod: &Pod) -> Option<Self> {
        let status = pod.status.as_ref()?;
        let ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        if ended || pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        Some(Self { uid: pod.metadata.uid.clone()?, ip: status.pod_ip.as_deref()?.parse().ok()? })
    }
}

/// The pods of one revision with their numbers of requests.
#[derive(Debug)]
pub(super) struct PodEndpoints {
    pub(super) pods: Vec<PodEndpoint>,
    pub(super) concurrency: u32,
}

#[derive(Debug)]
pub(super) struct PodEndpoint {
    pod: PodAddress,
    /// Whether it has accepted a connection.
    pub(super) answers: bool,
    in_flight: u32,
}

impl PodEndpoints {
    /// Replaces the list of pods; returns new ones, which have to be probed.
    pub(super) fn set(&mut self, pods: Vec<PodAddress>) -> Vec<PodAddress> {
        self.pods.retain(|endpoint| pods.contains(&endpoint.pod));
        let new: Vec<_> = pods.into_iter().filter(|pod| !self.has(pod)).collect();
        let endpoint = |pod: &PodAddress| PodEndpoint { pod: pod.clone(), answers: false, in_flight: 0 };
        self.pods.extend(new.iter().map(endpoint));
        new
    }

    fn has(&self, pod: &PodAddress) -> bool {
        self.pods.iter().any(|endpoint| endpoint.pod == *pod)
    }

    pub(super) fn find(&mut self, pod: &PodAddress) -> Option<&mut PodEndpoint> {
        self.pods.iter_mut().find(|endpoint| endpoint.pod == *pod)
    }

    /// The pod with the fewest requests, if it has room for another; counts the request.
    pub(super) fn acquire(&mut self) -> Option<PodAddress> {
        let concurrency = self.concurrency;
        let free = self.pods.iter_mut().filter(|pod| pod.answers && pod.in_flight < concurrency);
        let least = free.min_by_key(|pod| pod.in_flight)?;
        least.in_flight += 1;
        Some(least.pod.clone())
    }

    /// A request of this pod has ended.
    pub(super) fn release(&mut self, pod: &PodAddress) {
        if let Some(endpoint) = self.find(pod) {
            endpoint.in_flight = endpoint.in_flight.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> PodAddress {
        PodAddress { uid: name.into(), ip: [127, 0, 0, 1].into() }
    }

    #[test]
    fn the_least_loaded_pod_that_answers_and_has_room_is_taken() {
        let mut endpoints = PodEndpoints { pods: Vec::new(), concurrency: 2 };
        assert_eq!(endpoints.set(vec![pod("a"), pod("b")]).len(), 2);
        assert_eq!(endpoints.acquire(), None, "none answers yet");
        endpoints.find(&pod("a")).unwrap().answers = true;
        assert_eq!(endpoints.acquire(), Some(pod("a")));
        endpoints.find(&pod("b")).unwrap().answers = true;
        assert_eq!(endpoints.acquire(), Some(pod("b")), "it has less to do");
        assert!(endpoints.acquire().is_some() && endpoints.acquire().is_some());
        assert_eq!(endpoints.acquire(), None, "both are full");
        endpoints.release(&pod("b"));
        assert_eq!(endpoints.acquire(), Some(pod("b")));
        assert_eq!(endpoints.set(vec![pod("b"), pod("c")]), [pod("c")], "the known one keeps its count");
        assert_eq!(endpoints.acquire(), None);
        endpoints.release(&pod("a"));
        assert_eq!(endpoints.acquire(), None, "a pod that went gives no room");
    }
}
