//! ConfigMaps and Secrets for tests.

use std::{collections::BTreeMap, sync::Arc};

use mayfly_api::{
    env::EnvSources,
    k8s::api::core::v1::{ConfigMap, Secret},
};

/// The objects of every namespace, by name; none by default.
#[derive(Debug, Default)]
pub(crate) struct FixedObjects {
    pub(crate) config_maps: BTreeMap<&'static str, Arc<ConfigMap>>,
    pub(crate) secrets: BTreeMap<&'static str, Arc<Secret>>,
}

impl FixedObjects {
    /// With this ConfigMap and this Secret, each by its name and its JSON.
    pub(crate) fn new(
        (map, map_json): (&'static str, serde_json::Value),
        (secret, secret_json): (&'static str, serde_json::Value),
    ) -> Self {
        Self {
            config_maps: [(map, serde_json::from_value::<ConfigMap>(map_json).unwrap().into())].into(),
            secrets: [(secret, serde_json::from_value::<Secret>(secret_json).unwrap().into())].into(),
        }
    }
}

impl EnvSources for FixedObjects {
    fn config_map(&self, _: &str, name: &str) -> Option<Arc<ConfigMap>> {
        self.config_maps.get(name).cloned()
    }

    fn secret(&self, _: &str, name: &str) -> Option<Arc<Secret>> {
        self.secrets.get(name).cloned()
    }
}
