//! An API server with Nodes and Pods, at the HTTP level: lists, watches, and patches of annotations.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures::{TryStreamExt as _, stream};
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::sync::mpsc;

type Answer = UnsyncBoxBody<Bytes, std::io::Error>;

/// The kinds that it has, by the last segment of a collection's path.
const KINDS: [(&str, &str); 2] = [("nodes", "Node"), ("pods", "Pod")];
/// The number of events that a watch has not read yet.
const EVENTS_MAX: usize = 1024;

#[derive(Clone, Default)]
pub(crate) struct NodeApi(Arc<Mutex<FakeObjects>>);

#[derive(Default)]
struct FakeObjects {
    revision: u64,
    /// By the collection and the name.
    objects: BTreeMap<(String, String), Value>,
    history: Vec<(u64, String, Value)>,
    watches: Vec<(String, mpsc::Sender<Value>)>,
}

impl NodeApi {
    pub(crate) fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move { Ok::<_, std::io::Error>(api.answer(request).await) }
        });
        Client::new(service, "default")
    }

    pub(crate) fn get(&self, collection: &str, name: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(&(collection.into(), name.into())).cloned()
    }

    /// Writes an object, which must have a name.
    pub(crate) fn put(&self, collection: &str, object: Value) {
        self.0.lock().unwrap().write(collection, object, "ADDED");
    }

    pub(crate) fn delete(&self, collection: &str, name: &str) {
        let mut objects = self.0.lock().unwrap();
        let object = objects.objects.remove(&(collection.into(), name.into())).unwrap();
        objects.write(collection, object, "DELETED");
    }

    async fn answer(&self, request: Request<Body>) -> Response<Answer> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let path: Vec<_> = parts.uri.path().trim_matches('/').split('/').collect();
        let query = parts.uri.query().unwrap_or_default();
        let mut objects = self.0.lock().unwrap();
        match (&parts.method, &path[..]) {
            (&Method::PATCH, [.., collection, name]) => {
                let patch: Value = serde_json::from_slice(&body).unwrap();
                let mut object = objects.objects[&(collection.to_string(), name.to_string())].clone();
                for (key, value) in patch["metadata"]["annotations"].as_object().unwrap() {
                    object["metadata"]["annotations"][key] = value.clone();
                }
                Response::new(full(&objects.write(collection, object, "MODIFIED")))
            }
            (&Method::GET, [.., collection]) if query.contains("watch=true") => {
                let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
                objects.watch(collection, from.and_then(|from| from.parse().ok()).unwrap())
            }
            (&Method::GET, [.., collection]) => Response::new(full(&objects.list(collection))),
            (method, path) => panic!("{method} {path:?}"),
        }
    }
}

impl FakeObjects {
    fn write(&mut self, collection: &str, mut object: Value, event: &str) -> Value {
        self.revision += 1;
        let kind = KINDS.iter().find(|(of, _)| *of == collection).unwrap().1;
        object["apiVersion"] = "v1".into();
        object["kind"] = kind.into();
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        if event != "DELETED" {
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            self.objects.insert((collection.into(), name), object.clone());
        }
        let event = json!({"type": event, "object": object});
        self.history.push((self.revision, collection.into(), event.clone()));
        self.watches.retain(|(of, watch)| of != collection || watch.try_send(event.clone()).is_ok());
        object
    }

    fn list(&self, collection: &str) -> Value {
        let items = self.objects.iter().filter(|((of, _), _)| of == collection);
        let items: Vec<_> = items.map(|(_, object)| object.clone()).collect();
        json!({"kind": "List", "apiVersion": "v1",
            "metadata": {"resourceVersion": self.revision.to_string()}, "items": items})
    }

    fn watch(&mut self, collection: &str, from: u64) -> Response<Answer> {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        for (_, _, event) in self.history.iter().filter(|(at, of, _)| *at > from && of == collection) {
            sender.try_send(event.clone()).unwrap();
        }
        self.watches.push((collection.into(), sender));
        let lines = stream::unfold(events, |mut events| async {
            let line = Bytes::from(format!("{}\n", events.recv().await?));
            Some((Ok::<_, std::io::Error>(line), events))
        });
        Response::new(StreamBody::new(lines.map_ok(Frame::data)).boxed_unsync())
    }
}

fn full(value: &Value) -> Answer {
    Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed_unsync()
}
