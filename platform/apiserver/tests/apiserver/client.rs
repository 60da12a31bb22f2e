//! The `kube` client: in process and over TLS, with its watcher; and how the server stops.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{WatchStreamExt, watcher},
};
use mayfly_api::Function;
use mayfly_apiserver::Identity;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::support::{self, Fixture};

fn map(name: &str) -> ConfigMap {
    let mut map = ConfigMap { data: Some([("k".to_owned(), "v".to_owned())].into()), ..ConfigMap::default() };
    map.metadata.name = Some(name.into());
    map
}

/// Everything a controller does with a client.
async fn exercise(client: Client) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let created = maps.create(&PostParams::default(), &map("a")).await.unwrap();
    assert!(created.uid().is_some() && created.creation_timestamp().is_some());
    let error = maps.create(&PostParams::default(), &map("a")).await.unwrap_err();
    assert!(matches!(&error, kube::Error::Api(status) if status.is_already_exists()), "{error}");
    let mut changed = created.clone();
    changed.data = Some(BTreeMap::from([("k".into(), "w".into())]));
    let replaced = maps.replace("a", &PostParams::default(), &changed).await.unwrap();
    assert_ne!(replaced.resource_version(), created.resource_version());
    let error = maps.replace("a", &PostParams::default(), &changed).await.unwrap_err();
    assert!(matches!(&error, kube::Error::Api(status) if status.is_conflict()), "{error}");
    let patch = Patch::Merge(json!({"metadata": {"labels": {"l": "m"}}}));
    maps.patch("a", &PatchParams::default(), &patch).await.unwrap();
    let listed = maps.list(&ListParams::default().labels("l=m")).await.unwrap();
    assert_eq!(listed.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["a"]);
    assert_eq!(
        maps.list_metadata(&ListParams::default().fields("metadata.name=a")).await.unwrap().items.len(),
        1
    );
    assert_eq!(maps.get_opt("absent").await.unwrap(), None);
    assert!(maps.delete("a", &DeleteParams::default()).await.unwrap().is_right());

    let functions: Api<Function> = Api::default_namespaced(client.clone());
    let function: Function = serde_json::from_value(support::function("f")).unwrap();
    let created = functions.create(&PostParams::default(), &function).await.unwrap();
    assert_eq!(created.metadata.generation, Some(1));
    let status = Patch::Merge(json!({"status": {"url": "http://x", "readyReplicas": 1}}));
    let written = functions.patch_status("f", &PatchParams::default(), &status).await.unwrap();
    assert_eq!(written.status.unwrap().url.as_deref(), Some("http://x"));
    functions.delete("f", &DeleteParams::background()).await.unwrap();
}

/// A watcher sees existing objects, additions, changes and deletions.
async fn follow(client: Client, streaming: bool) {
    let pods: Api<Pod> = Api::default_namespaced(client);
    let pod = |name: &str| serde_json::from_value::<Pod>(support::pod(name)).unwrap();
    pods.create(&PostParams::default(), &pod("first")).await.unwrap();
    let config =
        if streaming { watcher::Config::default().streaming_lists() } else { watcher::Config::default() };
    let mut events = pin!(watcher(pods.clone(), config).default_backoff());
    let mut seen = Vec::new();
    while let Some(event) =
        tokio::time::timeout(Duration::from_secs(20), events.try_next()).await.unwrap().unwrap()
    {
        match event {
            watcher::Event::Init => seen.push("init".to_owned()),
            watcher::Event::InitApply(pod) => seen.push(format!("was {}", pod.name_any())),
            watcher::Event::InitDone => {
                seen.push("ready".into());
                pods.create(&PostParams::default(), &pod("second")).await.unwrap();
                pods.delete("first", &DeleteParams::default()).await.unwrap();
            }
            // Requests of users mark a pod before it is removed; those of the platform do not.
            watcher::Event::Apply(pod) if pod.metadata.deletion_timestamp.is_some() => {}
            watcher::Event::Apply(pod) => seen.push(format!("now {}", pod.name_any())),
            watcher::Event::Delete(pod) => {
                seen.push(format!("gone {}", pod.name_any()));
                break;
            }
        }
    }
    assert_eq!(seen, ["init", "was first", "ready", "now second", "gone first"]);
    pods.delete("second", &DeleteParams::default()).await.unwrap();
}

#[tokio::test]
async fn in_process() {
    let server = Fixture::new().await;
    exercise(server.client()).await;
    follow(server.client(), false).await;
    follow(server.client(), true).await;
}

#[tokio::test]
async fn over_tls_until_it_stops() {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity::load_or_create(folder.path(), &[], Timestamp::now()).unwrap();
    let server = Fixture::with(|config| config.token = identity.token().into(), |_| {}).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let stop = CancellationToken::new();
    let serving = {
        let (api, tls, stop) = (server.server.clone(), identity.tls(), stop.clone());
        tokio::spawn(async move { api.serve(listener, tls, stop).await })
    };
    let kubeconfig = Kubeconfig::from_yaml(&identity.kubeconfig(&url)).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let client = Client::try_from(config).unwrap();
    exercise(client.clone()).await;
    follow(client.clone(), true).await;

    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let mut watch = pin!(maps.watch(&Default::default(), "0").await.unwrap());
    stop.cancel();
    assert!(watch.next().await.is_none(), "watches end when the server stops");
    tokio::time::timeout(Duration::from_secs(5), serving).await.expect("it stops at once").unwrap();
    assert!(maps.get("a").await.is_err());
}

#[tokio::test]
async fn another_authority_is_not_trusted() {
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let identity = Identity::load_or_create(ours.path(), &[], Timestamp::now()).unwrap();
    let stranger = Identity::load_or_create(theirs.path(), &[], Timestamp::now()).unwrap();
    let server = Fixture::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let (api, tls, token) = (server.server.clone(), identity.tls(), stop.clone());
    let serving = tokio::spawn(async move { api.serve(listener, tls, token).await });
    let kubeconfig = Kubeconfig::from_yaml(&stranger.kubeconfig(&url)).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let maps: Api<ConfigMap> = Api::default_namespaced(Client::try_from(config).unwrap());
    let error = maps.get("a").await.unwrap_err();
    assert!(!matches!(error, kube::Error::Api(_)), "{error}");
    stop.cancel();
    serving.await.unwrap();
}
