//! The informers that one process shares.

use std::{
    any::{Any, TypeId},
    collections::HashMap,
    fmt,
    sync::Arc,
};

use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::{Informer, WatchConfig};

/// One [`Informer`] for each kind in use in this process. Cheap to clone.
#[derive(Clone)]
pub struct Informers {
    client: Client,
    stop: CancellationToken,
    kinds: Arc<Mutex<HashMap<TypeId, Box<dyn Any + Send + Sync>>>>,
}

impl std::fmt::Debug for Informers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informers").finish_non_exhaustive()
    }
}

impl Informers {
    /// Starts nothing yet. All informers stop when `stop` does.
    pub fn create(client: Client, stop: CancellationToken) -> Self {
        Self { client, stop, kinds: Arc::default() }
    }

    /// The informer of a kind over all namespaces, started at the first call. Must be called inside a
    /// tokio runtime.
    pub fn of<K>(&self) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static,
    {
        self.selected(WatchConfig::default())
    }

    /// [`Self::of`], limited by `config` if this is the first call for the kind: for example, on a machine that is
    /// only a node, to the pods bound to it.
    pub fn selected<K>(&self, config: WatchConfig) -> Informer<K>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static,
    {
        let mut kinds = self.kinds.lock();
        let informer = kinds.entry(TypeId::of::<K>()).or_insert_with(|| {
            Box::new(Informer::<K>::start(Api::all(self.client.clone()), config, self.stop.clone()))
        });
        match informer.downcast_ref::<Informer<K>>() {
            Some(informer) => informer.clone(),
            None => unreachable!("the map's keys are the types of its values"),
        }
    }
}
