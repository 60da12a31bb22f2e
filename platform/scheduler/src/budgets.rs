//! The scheduler's copies of what preemption and namespace selectors read: disruption budgets and namespaces.

use std::collections::BTreeSet;

use mayfly_api::{
    ObjectKey,
    k8s::api::{core::v1::Namespace, policy::v1::PodDisruptionBudget},
    selector::Selector,
};
use mayfly_informer::{Changes, Informer, Informers};

use crate::{
    cache::{Cache, Effect},
    preemption::DisruptionBudget,
};

pub(crate) struct PolicyObjects {
    budgets: Informer<PodDisruptionBudget>,
    namespaces: Informer<Namespace>,
}

impl PolicyObjects {
    pub(crate) fn create(informers: &Informers) -> Self {
        Self { budgets: informers.of(), namespaces: informers.of() }
    }

    pub(crate) async fn synced(&self) {
        self.budgets.synced().await;
        self.namespaces.synced().await;
    }

    pub(crate) fn subscribe_namespaces(&self) -> Changes {
        self.namespaces.subscribe()
    }

    /// Updates the labels of changed namespaces in the cache.
    pub(crate) fn update_namespaces(&self, keys: BTreeSet<ObjectKey>, cache: &mut Cache) -> Effect {
        let mut effect = Effect::None;
        for key in keys {
            let namespace = self.namespaces.get(&key);
            let labels = namespace.map(|namespace| namespace.metadata.labels.clone().unwrap_or_default());
            effect = effect.max(cache.set_namespace(&key.name, labels.as_ref()));
        }
        effect
    }

    /// The current budgets. One whose status is not known allows no disruption.
    pub(crate) fn budgets(&self) -> Vec<DisruptionBudget> {
        let budgets = self.budgets.list();
        let known = budgets.iter().filter_map(|budget| {
            let selector = budget.spec.as_ref()?.selector.as_ref()?;
            Some(DisruptionBudget {
                namespace: budget.metadata.namespace.clone()?,
                selector: Selector::from_object(selector).ok()?,
                allowed: budget.status.as_ref().map_or(0, |status| status.disruptions_allowed),
            })
        });
        known.collect()
    }
}
