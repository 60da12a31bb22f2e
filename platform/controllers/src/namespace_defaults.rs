//! The objects of every namespace: the ServiceAccount `default`, and the ConfigMap `kube-root-ca.crt` with the
//! certificate by which pods verify the API server.
//!
//! (Behaviour: upstream `pkg/controller/serviceaccount`, `pkg/controller/certificates/rootcacertpublisher`.)

use std::{collections::BTreeMap, fmt::Debug, sync::Arc};

use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
    core::NamespaceResourceScope,
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{ConfigMap, Namespace, ServiceAccount},
        apimachinery::pkg::apis::meta::v1::ObjectMeta,
    },
};
use mayfly_informer::{
    Informer, Informers, WatchConfig,
    reconcile::{self, Outcome, WorkQueue},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const SERVICE_ACCOUNT: &str = "default";
const ROOT_CA: &str = "kube-root-ca.crt";
const ROOT_CA_KEY: &str = "ca.crt";
const ANNOTATION_DESCRIPTION: &str = "kubernetes.io/description";
const ROOT_CA_DESCRIPTION: &str = "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions of Kubernetes clusters.";

/// Settings of the controller of namespaces' default objects.
#[derive(Clone, Debug)]
pub struct Config {
    /// The certificate of the authority that signs the API server's own; without it no ConfigMap is made.
    pub root_ca_pem: Option<String>,
    /// The largest number of namespaces that are reconciled at the same time.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { root_ca_pem: None, workers_max: 4 }
    }
}

/// Creates the default objects of every namespace, and restores them when they are deleted or changed.
pub(crate) struct NamespaceDefaultsController {
    config: Config,
    client: Client,
    namespaces: Informer<Namespace>,
}

/// The informers of both kinds, limited to the objects with these names in all namespaces.
struct Known {
    accounts: Informer<ServiceAccount>,
    root_cas: Informer<ConfigMap>,
}

/// The missing objects of a namespace.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    CreateAccount,
    CreateRootCa,
    /// The ConfigMap's data differs.
    RestoreRootCa,
}

fn plan(
    namespace: &Namespace,
    account: Option<&ServiceAccount>,
    root_ca: Option<&ConfigMap>,
    pem: Option<&str>,
) -> Vec<Step> {
    let phase = namespace.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase == Some("Terminating") || namespace.metadata.deletion_timestamp.is_some() {
        return Vec::new();
    }
    let root_ca = pem.and_then(|pem| match root_ca {
        None => Some(Step::CreateRootCa),
        Some(known) if known.data.as_ref() == Some(&root_ca_data(pem)) => None,
        Some(_) => Some(Step::RestoreRootCa),
    });
    account.is_none().then_some(Step::CreateAccount).into_iter().chain(root_ca).collect()
}

fn root_ca_data(pem: &str) -> BTreeMap<String, String> {
    [(ROOT_CA_KEY.to_owned(), pem.to_owned())].into()
}

/// A merge patch of the data: foreign entries are removed.
fn restored(known: Option<&ConfigMap>, pem: &str) -> Value {
    let known = known.and_then(|known| known.data.as_ref()).into_iter().flatten();
    let mut data: serde_json::Map<_, _> = known.map(|(name, _)| (name.clone(), Value::Null)).collect();
    data.insert(ROOT_CA_KEY.into(), json!(pem));
    Value::Object(data)
}

fn named(name: &str) -> WatchConfig {
    WatchConfig::default().fields(&format!("metadata.name={name}"))
}

impl NamespaceDefaultsController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self { config, client, namespaces: informers.of() }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let known = Known {
            accounts: Informer::start(Api::all(self.client.clone()), named(SERVICE_ACCOUNT), stop.clone()),
            root_cas: Informer::start(Api::all(self.client.clone()), named(ROOT_CA), stop.clone()),
        };
        let synced = async {
            self.namespaces.synced().await;
            known.accounts.synced().await;
            known.root_cas.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.namespaces.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        wake(&known.accounts, &queue);
        wake(&known.root_cas, &queue);
        let workers_max = self.config.workers_max;
        let controller = Arc::new((self, known));
        reconcile::run("namespace-defaults", queue, workers_max, stop, move |key| {
            let controller = controller.clone();
            async move { controller.0.reconcile(key, &controller.1).await }
        })
        .await;
    }

    async fn reconcile(&self, key: ObjectKey, known: &Known) -> kube::Result<Outcome> {
        let Some(namespace) = self.namespaces.get(&key) else { return Ok(Outcome::Done) };
        let account = known.accounts.get(&ObjectKey::new(&key.name, SERVICE_ACCOUNT));
        let root_ca = known.root_cas.get(&ObjectKey::new(&key.name, ROOT_CA));
        let pem = self.config.root_ca_pem.as_deref();
        for step in plan(&namespace, account.as_deref(), root_ca.as_deref(), pem) {
            match step {
                Step::CreateAccount => {
                    self.make(
                        &key.name,
                        ServiceAccount { metadata: metadata(SERVICE_ACCOUNT), ..Default::default() },
                    )
                    .await?;
                }
                Step::CreateRootCa => self.make(&key.name, new_root_ca(pem.unwrap_or_default())).await?,
                Step::RestoreRootCa => {
                    let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &key.name);
                    let patch =
                        Patch::Merge(json!({"data": restored(root_ca.as_deref(), pem.unwrap_or_default())}));
                    api.patch(ROOT_CA, &PatchParams::default(), &patch).await?;
                }
            }
        }
        Ok(Outcome::Done)
    }

    /// Creates an object, unless it exists or the namespace is being deleted.
    async fn make<K>(&self, namespace: &str, object: K) -> kube::Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + Debug + DeserializeOwned + Serialize,
    {
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        match api.create(&PostParams::default(), &object).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() || status.is_not_found() => Ok(()),
            result => result.map(|_| ()),
        }
    }
}

fn metadata(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() }
}

fn new_root_ca(pem: &str) -> ConfigMap {
    let mut metadata = metadata(ROOT_CA);
    metadata.annotations = Some([(ANNOTATION_DESCRIPTION.to_owned(), ROOT_CA_DESCRIPTION.to_owned())].into());
    ConfigMap { metadata, data: Some(root_ca_data(pem)), ..ConfigMap::default() }
}

fn wake<K: Resource + 'static>(informer: &Informer<K>, queue: &WorkQueue<ObjectKey>) {
    let queue = queue.clone();
    informer.handle(move |change| {
        queue.add(ObjectKey::cluster(ObjectKey::of(&**change.latest()).namespace));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn makes_what_is_missing_and_restores_what_differs() {
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "a"}})).unwrap();
        let account = ServiceAccount::default();
        let (good, bad) = (new_root_ca("pem"), new_root_ca("other"));
        assert_eq!(plan(&namespace, None, None, Some("pem")), [Step::CreateAccount, Step::CreateRootCa]);
        assert_eq!(plan(&namespace, None, None, None), [Step::CreateAccount]);
        assert_eq!(plan(&namespace, Some(&account), Some(&bad), Some("pem")), [Step::RestoreRootCa]);
        assert_eq!(plan(&namespace, Some(&account), Some(&good), Some("pem")), []);
        let going = json!({"metadata": {"name": "a"}, "status": {"phase": "Terminating"}});
        let going: Namespace = serde_json::from_value(going).unwrap();
        assert_eq!(plan(&going, None, None, Some("pem")), []);
    }
}
