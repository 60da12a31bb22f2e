//! The informer against a fake API at the HTTP level: lists, watches, outages, a history that is gone.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures::{TryStreamExt as _, stream};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::{Client, client::Body};
use mayfly_api::{ObjectKey, env::EnvSources as _, k8s::api::core::v1::ConfigMap};
use mayfly_informer::{Change, Changes, EnvObject, EnvObjects, Informer, Informers};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

type Answer = UnsyncBoxBody<Bytes, std::io::Error>;

/// An API server with one kind of objects. Watches get what is written while they are open, nothing else.
#[derive(Clone, Default)]
struct FakeApi {
    state: Arc<Mutex<FakeState>>,
    down: watch::Sender<bool>,
}

#[derive(Default)]
struct FakeState {
    objects: BTreeMap<String, Value>,
    revision: u64,
    /// Events from this revision on can be watched.
    history: Vec<(u64, Value)>,
    compacted: u64,
    watches: Vec<mpsc::Sender<Value>>,
    lists: usize,
}

impl FakeApi {
    fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move { Ok::<_, std::io::Error>(api.answer(request)) }
        });
        Client::new(service, "default")
    }

    fn put(&self, name: &str, value: &str) {
        self.write(name, |object, revision| {
            let kind = if object.is_some() { "MODIFIED" } else { "ADDED" };
            (kind, Some(config_map(name, value, revision)))
        });
    }

    fn delete(&self, name: &str) {
        self.write(name, |_, _| ("DELETED", None));
    }

    fn write(&self, name: &str, change: impl FnOnce(Option<&Value>, u64) -> (&'static str, Option<Value>)) {
        let mut state = self.state.lock().unwrap();
        state.revision += 1;
        let revision = state.revision;
        let old = state.objects.remove(name);
        let (kind, new) = change(old.as_ref(), revision);
        let mut object = new.clone().or(old).expect("only what exists is deleted");
        object["metadata"]["resourceVersion"] = json!(revision.to_string());
        if let Some(new) = new {
            state.objects.insert(name.into(), new);
        }
        let event = json!({"type": kind, "object": object});
        state.history.push((revision, event.clone()));
        state.watches.retain(|watch| watch.try_send(event.clone()).is_ok());
    }

    /// Drops the history and cuts every watch: the next one is answered with 410.
    fn compact(&self) {
        let mut state = self.state.lock().unwrap();
        state.history.clear();
        state.compacted = state.revision;
        state.watches.clear();
    }

    fn set_down(&self, down: bool) {
        self.down.send_replace(down);
        self.state.lock().unwrap().watches.clear();
    }

    fn answer(&self, request: Request<Body>) -> Response<Answer> {
        let query = request.uri().query().unwrap_or_default();
        if *self.down.borrow() {
            return status(StatusCode::SERVICE_UNAVAILABLE, "away");
        }
        let mut state = self.state.lock().unwrap();
        if request.uri().path().ends_with("/secrets") {
            return no_secrets(query.contains("watch=true"));
        }
        if !query.contains("watch=true") {
            state.lists += 1;
            let items: Vec<_> = state.objects.values().cloned().collect();
            let list = json!({"kind": "ConfigMapList", "apiVersion": "v1",
                "metadata": {"resourceVersion": state.revision.to_string()}, "items": items});
            return Response::new(full(&list));
        }
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        let from: u64 = from.and_then(|from| from.parse().ok()).expect("a watch names where it starts");
        if from < state.compacted {
            return status(StatusCode::GONE, "too old resource version");
        }
        let (sender, events) = mpsc::channel(64);
        for (_, event) in state.history.iter().filter(|(revision, _)| *revision > from) {
            sender.try_send(event.clone()).expect("the tests write less than this");
        }
        state.watches.push(sender);
        let lines = stream::unfold(events, |mut events| async {
            let line = Bytes::from(format!("{}\n", events.recv().await?));
            Some((Ok::<_, std::io::Error>(line), events))
        });
        Response::new(StreamBody::new(lines.map_ok(Frame::data)).boxed_unsync())
    }
}

fn config_map(name: &str, value: &str, revision: u64) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "data": {"value": value}, "metadata": {
        "name": name, "namespace": "ns", "uid": name, "resourceVersion": revision.to_string(),
        "managedFields": [{"manager": "test", "operation": "Update"}]}})
}

/// The kind that this API has no objects of.
fn no_secrets(watched: bool) -> Response<Answer> {
    if watched {
        return Response::new(StreamBody::new(stream::pending()).boxed_unsync());
    }
    let list =
        json!({"kind": "SecretList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []});
    Response::new(full(&list))
}

fn status(code: StatusCode, message: &str) -> Response<Answer> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message,
        "reason": "Test", "code": code.as_u16()});
    let mut response = Response::new(full(&status));
    *response.status_mut() = code;
    response
}

fn full(value: &Value) -> Answer {
    Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed_unsync()
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("ns", name)
}

fn value(informer: &Informer<ConfigMap>, name: &str) -> Option<String> {
    informer.get(&key(name)).and_then(|map| map.data.as_ref()?.get("value").cloned())
}

async fn until(changes: &mut Changes, what: impl Fn() -> bool) {
    tokio::time::timeout(Duration::from_secs(20), async {
        while !what() {
            changes.next().await;
        }
    })
    .await
    .expect("it never happened");
}

fn started(api: &FakeApi) -> (Informers, Informer<ConfigMap>, CancellationToken) {
    let stop = CancellationToken::new();
    let informers = Informers::create(api.client(), stop.clone());
    let informer = informers.of::<ConfigMap>();
    (informers, informer, stop)
}

#[tokio::test]
async fn follows_writes_and_deletions() {
    let api = FakeApi::default();
    api.put("a", "1");
    let (informers, informer, _stop) = started(&api);
    let by_value = informer
        .index("value", |map: &ConfigMap| map.data.iter().flatten().map(|(_, v)| v.clone()).collect());
    informer.synced().await;
    let mut changes = informer.subscribe();
    assert_eq!(changes.next().await, [key("a")].into(), "a subscriber starts with what there is");
    assert_eq!(informer.get(&key("a")).unwrap().metadata.managed_fields, None);
    api.put("a", "2");
    api.put("b", "2");
    until(&mut changes, || value(&informer, "b").is_some()).await;
    assert_eq!(value(&informer, "a").as_deref(), Some("2"));
    assert_eq!((by_value.count("1"), by_value.get("2").len()), (0, 2));
    api.delete("a");
    until(&mut changes, || informer.len() == 1).await;
    assert_eq!(informers.of::<ConfigMap>().keys(), [key("b")]);
    assert_eq!(api.state.lock().unwrap().lists, 1, "one copy for everyone");
}

#[tokio::test(start_paused = true)]
async fn keeps_the_last_snapshot_while_the_api_is_away() {
    let api = FakeApi::default();
    api.put("a", "1");
    let (_informers, informer, _stop) = started(&api);
    let mut changes = informer.subscribe();
    informer.synced().await;
    api.set_down(true);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(value(&informer, "a").as_deref(), Some("1"));
    assert!(informer.is_synced());
    api.put("a", "2");
    api.set_down(false);
    until(&mut changes, || value(&informer, "a").as_deref() == Some("2")).await;
    assert_eq!(api.state.lock().unwrap().lists, 1, "the watch resumes at its last revision");
}

#[tokio::test(start_paused = true)]
async fn lists_again_when_history_is_gone_and_tells_only_the_difference() {
    let api = FakeApi::default();
    for name in ["same", "changed", "deleted"] {
        api.put(name, "1");
    }
    let (_informers, informer, _stop) = started(&api);
    let (told, mut telling) = mpsc::channel(64);
    informer.synced().await;
    informer.handle(move |change| {
        let what = match &change {
            Change::Added(_) => "added",
            Change::Updated { .. } => "updated",
            Change::Deleted(_) => "deleted",
        };
        let name = change.latest().metadata.name.clone().unwrap_or_default();
        told.try_send(format!("{what} {name}")).expect("there is room");
    });
    for expected in ["added changed", "added deleted", "added same"] {
        assert_eq!(telling.recv().await.unwrap(), expected);
    }
    api.set_down(true);
    api.put("changed", "2");
    api.delete("deleted");
    api.put("new", "1");
    api.compact();
    api.set_down(false);
    for expected in ["deleted deleted", "updated changed", "added new"] {
        assert_eq!(telling.recv().await.unwrap(), expected);
    }
    api.put("same", "2");
    assert_eq!(telling.recv().await.unwrap(), "updated same");
    assert_eq!(api.state.lock().unwrap().lists, 2);
}

#[tokio::test]
async fn a_slow_subscriber_holds_each_key_once() {
    let api = FakeApi::default();
    let (_informers, informer, _stop) = started(&api);
    informer.synced().await;
    let (mut slow, mut fast) = (informer.subscribe(), informer.subscribe());
    for round in 0..20 {
        api.put("a", &round.to_string());
        api.put("b", &round.to_string());
    }
    until(&mut fast, || value(&informer, "b").as_deref() == Some("19")).await;
    assert_eq!(slow.next().await, [key("a"), key("b")].into());
    assert!(slow.take().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_environments_are_made_from_is_followed_once_one_is_named() {
    let api = FakeApi::default();
    api.put("settings", "1");
    let stop = CancellationToken::new();
    let informers = Informers::create(api.client(), stop.clone());
    let sources = EnvObjects::create(&informers);
    let mut changes = sources.subscribe();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(api.state.lock().unwrap().lists, 0, "no environment refers to one");
    assert!(sources.config_map("ns", "settings").is_none());

    sources.follow().await;
    let value = |sources: &EnvObjects| {
        let map = sources.config_map("ns", "settings").expect("there");
        map.data.as_ref().expect("data")["value"].clone()
    };
    assert_eq!(value(&sources), "1", "all are known when following has begun");
    let named = EnvObject::ConfigMap(key("settings"));
    assert!(changes.take().contains(&named));
    api.put("settings", "2");
    while !changes.next().await.contains(&named) {}
    assert_eq!(value(&sources), "2");

    let lists = api.state.lock().unwrap().lists;
    sources.follow().await;
    EnvObjects::create(&informers).follow().await;
    assert_eq!(api.state.lock().unwrap().lists, lists, "one copy for all");
    stop.cancel();
}
