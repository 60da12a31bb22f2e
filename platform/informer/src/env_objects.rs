//! The ConfigMaps and Secrets that environments are made from.
//!
//! A cluster may hold many that no environment refers to (certificates, release records of package managers, locks
//! that change all day). So they are watched only once an environment refers to one: until then none is cached, and a
//! write of one costs nothing here.

use std::sync::{Arc, OnceLock, Weak};

use mayfly_api::{
    ObjectKey,
    env::{EnvSources, Reference},
    k8s::api::core::v1::{ConfigMap, Secret},
};
use parking_lot::Mutex;

use crate::{Change, Changes, Informer, Informers, changes::Dirty};

/// A ConfigMap or a Secret, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EnvObject {
    ConfigMap(ObjectKey),
    Secret(ObjectKey),
}

/// The cached objects of both kinds. Cheap to clone.
#[derive(Clone)]
pub struct EnvObjects {
    informers: Informers,
    followed: Arc<OnceLock<Followed>>,
    listeners: Arc<Mutex<Vec<Listener>>>,
}

impl std::fmt::Debug for EnvObjects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnvObjects").finish_non_exhaustive()
    }
}

struct Followed {
    config_maps: Informer<ConfigMap>,
    secrets: Informer<Secret>,
}

type Listener = Box<dyn Fn(&EnvObject) + Send>;

impl EnvObject {
    /// The object that a variable of an object in `namespace` refers to.
    pub fn named(reference: Reference<'_>, namespace: &str) -> Self {
        match reference {
            Reference::ConfigMap(name) => Self::ConfigMap(ObjectKey::new(namespace, name)),
            Reference::Secret(name) => Self::Secret(ObjectKey::new(namespace, name)),
        }
    }

    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::ConfigMap(key) | Self::Secret(key) => key,
        }
    }
}

impl EnvObjects {
    /// Does not watch either kind yet.
    pub fn create(informers: &Informers) -> Self {
        Self { informers: informers.clone(), followed: Arc::default(), listeners: Arc::default() }
    }

    /// Watches both kinds from now on, and returns when the first lists are complete. Called before an environment is
    /// made that refers to one, from the runtime on which the informers are to run.
    pub async fn follow(&self) {
        let followed = self.followed.get_or_init(|| {
            let followed = Followed { config_maps: self.informers.of(), secrets: self.informers.of() };
            tell(&followed.config_maps, &self.listeners, EnvObject::ConfigMap);
            tell(&followed.secrets, &self.listeners, EnvObject::Secret);
            followed
        });
        followed.config_maps.synced().await;
        followed.secrets.synced().await;
    }

    /// Calls `listener` with each object that is present when watching begins, and with each that changes or is
    /// removed later. It must not block.
    pub fn listen(&self, listener: impl Fn(&EnvObject) + Send + 'static) {
        self.listeners.lock().push(Box::new(listener));
    }

    /// The same changes as [`Self::listen`], as a set of keys.
    pub fn subscribe(&self) -> Changes<EnvObject> {
        let dirty = Arc::new(Dirty::default());
        let weak: Weak<Dirty<EnvObject>> = Arc::downgrade(&dirty);
        self.listen(move |object| {
            if let Some(dirty) = weak.upgrade() {
                dirty.mark(object.clone());
            }
        });
        Changes::of(dirty)
    }
}

fn tell<K: kube::Resource + 'static>(
    informer: &Informer<K>,
    listeners: &Arc<Mutex<Vec<Listener>>>,
    named: fn(ObjectKey) -> EnvObject,
) {
    let listeners = listeners.clone();
    informer.handle(move |change: Change<'_, K>| {
        let object = named(ObjectKey::of(&**change.latest()));
        listeners.lock().iter().for_each(|listener| listener(&object));
    });
}

/// Objects that are not watched count as absent.
impl EnvSources for EnvObjects {
    fn config_map(&self, namespace: &str, name: &str) -> Option<Arc<ConfigMap>> {
        self.followed.get()?.config_maps.get(&ObjectKey::new(namespace, name))
    }

    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.followed.get()?.secrets.get(&ObjectKey::new(namespace, name))
    }
}
