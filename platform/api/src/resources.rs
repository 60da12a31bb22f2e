//! The resource requests of a pod, summed over its containers.

use std::collections::BTreeMap;

use crate::{
    k8s::{
        api::core::v1::{Container, PodSpec},
        apimachinery::pkg::api::resource::Quantity,
    },
    quantity,
};

/// Amounts by resource name: CPU in thousandths of a core, everything else in whole units (bytes, devices).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amounts(pub BTreeMap<String, u64>);

impl Amounts {
    /// Reads a resource list; an entry that is not a quantity counts as nothing (validation refuses it).
    pub fn from_quantities(quantities: &BTreeMap<String, Quantity>) -> Self {
        Self(quantities.iter().map(|(name, value)| (name.clone(), amount(name, value))).collect())
    }

    /// A pod's effective requests (upstream: `component-helpers/resource`): the sum of its containers and sidecars, or
    /// its largest init container with the sidecars that start before it where that is more, and the overhead. A limit
    /// without a request counts as the request.
    pub fn of_pod(spec: &PodSpec) -> Self {
        let mut total = Self::sum(spec, Self::of_container);
        if let Some(overhead) = &spec.overhead {
            total.add(&Self::from_quantities(overhead));
        }
        total
    }

    /// A pod's effective limits, summed as its requests are. The overhead is added only to limits that are set.
    pub fn limits_of_pod(spec: &PodSpec) -> Self {
        let mut total = Self::sum(spec, Self::limits_of_container);
        let mut overhead = Self::from_quantities(spec.overhead.as_ref().unwrap_or(&BTreeMap::new()));
        overhead.0.retain(|name, _| total.get(name) > 0);
        total.add(&overhead);
        total
    }

    fn sum(spec: &PodSpec, of_container: fn(&Container) -> Self) -> Self {
        let mut total = Self::default();
        for container in &spec.containers {
            total.add(&of_container(container));
        }
        let (mut sidecars, mut largest) = (Self::default(), Self::default());
        for container in spec.init_containers.iter().flatten() {
            let mut needed = of_container(container);
            if container.restart_policy.as_deref() == Some("Always") {
                total.add(&needed);
                sidecars.add(&needed);
                largest.max(&sidecars);
            } else {
                needed.add(&sidecars);
                largest.max(&needed);
            }
        }
        total.max(&largest);
        total
    }

    /// A container's requests. A limit without a request counts as the request.
    pub fn of_container(container: &Container) -> Self {
        let mut amounts = Self::limits_of_container(container);
        if let Some(requests) = container.resources.as_ref().and_then(|resources| resources.requests.as_ref())
        {
            amounts.0.extend(Self::from_quantities(requests).0);
        }
        amounts
    }

    pub fn limits_of_container(container: &Container) -> Self {
        let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
        Self::from_quantities(limits.unwrap_or(&BTreeMap::new()))
    }

    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    pub fn add(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let sum = self.0.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }

    pub fn subtract(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            if let Some(left) = self.0.get_mut(name) {
                *left = left.saturating_sub(*amount);
            }
        }
    }

    fn max(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let most = self.0.entry(name.clone()).or_default();
            *most = (*most).max(*amount);
        }
    }
}

fn amount(name: &str, value: &Quantity) -> u64 {
    if name == "cpu" { quantity::millis(value) } else { quantity::whole(value) }.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_containers_and_takes_the_largest_init_container() {
        let spec: PodSpec = serde_json::from_value(serde_json::json!({
            "containers": [
                {"name": "a", "resources": {"requests": {"cpu": "500m", "memory": "1Mi"}}},
                {"name": "b", "resources": {"limits": {"cpu": "1", "memory": "2Mi"}, "requests": {"cpu": "250m"}}}
            ],
            "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "2", "memory": "1Mi"}}}],
            "overhead": {"memory": "1Mi"}
        }))
        .unwrap();
        let amounts = Amounts::of_pod(&spec);
        assert_eq!(amounts.get("cpu"), 2000);
        assert_eq!(amounts.get("memory"), 4 << 20);
        assert_eq!(amounts.get("nvidia.com/gpu"), 0);
        let limits = Amounts::limits_of_pod(&spec);
        assert_eq!((limits.get("cpu"), limits.get("memory")), (1000, 3 << 20));
    }

    #[test]
    fn a_sidecar_runs_beside_later_init_containers_and_the_containers() {
        let container = |name: &str, cpu: &str, policy: Option<&str>| serde_json::json!({"name": name, "restartPolicy": policy, "resources": {"requests": {"cpu": cpu}}});
        let cpu = |init: &[serde_json::Value]| {
            let spec = serde_json::json!({"containers": [container("a", "1", None)], "initContainers": init});
            Amounts::of_pod(&serde_json::from_value(spec).unwrap()).get("cpu")
        };
        let (early, sidecar) = (container("i", "3", None), container("s", "500m", Some("Always")));
        assert_eq!(
            cpu(&[early.clone(), sidecar.clone()]),
            3000,
            "the init container ends before the sidecar starts"
        );
        assert_eq!(cpu(&[sidecar.clone(), early]), 3500);
        assert_eq!(cpu(&[sidecar]), 1500);
    }
}
