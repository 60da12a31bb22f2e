//! The names of simulated nodes, and their reports to an API that is a map of objects.

use std::{convert::Infallible, sync::Arc};

use http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;

/// Objects by their path, and the writes so far.
#[derive(Clone, Debug, Default)]
struct Objects {
    by_path: BTreeMap<String, Value>,
    writes: Vec<String>,
}

/// The few requests that simulated nodes send.
#[derive(Clone)]
struct FakeApi(Arc<watch::Sender<Objects>>);

impl FakeApi {
    fn new() -> Self {
        Self(Arc::new(watch::Sender::default()))
    }

    fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move {
                let (parts, body) = request.into_parts();
                let sent = body.collect_bytes().await.unwrap_or_default();
                let sent = serde_json::from_slice(&sent).unwrap_or_default();
                let (code, answer) = api.answer(&parts.method, parts.uri.path(), sent);
                let response = Response::builder().status(code).header("content-type", "application/json");
                Ok::<_, Infallible>(response.body(Body::from(answer.to_string().into_bytes())).unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn answer(&self, method: &Method, path: &str, sent: Value) -> (StatusCode, Value) {
        let object = path.strip_suffix("/status").unwrap_or(path).to_owned();
        let absent = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
        if method == Method::GET {
            let objects = self.0.borrow();
            if path.ends_with("/nodes") {
                let nodes = objects.by_path.iter().filter(|(known, _)| known.starts_with(path));
                let nodes: Vec<_> = nodes.map(|(_, node)| node.clone()).collect();
                return (StatusCode::OK, json!({"metadata": {}, "items": nodes}));
            }
            return match objects.by_path.get(&object) {
                Some(found) => (StatusCode::OK, found.clone()),
                None => (StatusCode::NOT_FOUND, absent),
            };
        }
        let mut answer = (StatusCode::NOT_FOUND, absent);
        self.0.send_modify(|objects| {
            let key = match method == Method::POST {
                true => format!("{object}/{}", sent["metadata"]["name"].as_str().unwrap()),
                false => object,
            };
            objects.writes.push(format!("{method} {path}"));
            let mut known = objects.by_path.get(&key).cloned();
            if method == Method::POST {
                known = Some(sent.clone());
            }
            let Some(mut known) = known else { return };
            for part in ["spec", "status"] {
                for (field, value) in sent[part].as_object().into_iter().flatten() {
                    known[part][field] = value.clone();
                }
            }
            objects.by_path.insert(key, known.clone());
            answer = (StatusCode::OK, known);
        });
        answer
    }

    /// Waits until the objects fulfil a condition. The clock of the test is paused, and advances to the next timer
    /// when nothing else is to be done.
    async fn until(&self, holds: impl FnMut(&Objects) -> bool) -> Objects {
        self.0.subscribe().wait_for(holds).await.unwrap().clone()
    }
}

fn ready(objects: &Objects, node: &str) -> Option<String> {
    let conditions =
        objects.by_path.get(&format!("/api/v1/nodes/{node}"))?["status"]["conditions"].as_array()?;
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready")?;
    Some(ready["status"].as_str()?.to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_silent_for_longer_than_its_lease_becomes_ready_again() {
    let (api, stop) = (FakeApi::new(), CancellationToken::new());
    let config = Config { count: 2, ..Config::default() };
    let kept = {
        let (client, stop) = (api.client(), stop.clone());
        tokio::spawn(async move { keep(&config, &client, &stop).await })
    };
    let (one, two) = (name(1), name(2));
    let lease = |node: &str| format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}");
    api.until(|objects| {
        objects.by_path.contains_key(&lease(&one)) && objects.by_path.contains_key(&lease(&two))
    })
    .await;
    // The node controller's writes about a node whose lease has expired.
    api.0.send_modify(|objects| {
        objects.writes.clear();
        let node = objects.by_path.get_mut(&format!("/api/v1/nodes/{one}")).unwrap();
        for condition in node["status"]["conditions"].as_array_mut().unwrap() {
            condition["status"] = "Unknown".into();
            condition["reason"] = "NodeStatusUnknown".into();
        }
    });
    let objects = api.until(|objects| ready(objects, &one).as_deref() == Some("True")).await;
    let conditions = objects.by_path[&format!("/api/v1/nodes/{one}")]["status"]["conditions"].clone();
    for condition in conditions.as_array().unwrap() {
        assert_ne!(condition["status"], "Unknown", "{conditions}");
    }
    // Its lease was renewed before, so that the node controller does not take it for silent again; the other node,
    // which was ready all the time, renewed its lease only.
    let at = |write: &str| objects.writes.iter().position(|known| known == write);
    let renewed = at(&format!("PATCH {}", lease(&one))).expect("the lease is renewed");
    assert!(renewed < at(&format!("PATCH /api/v1/nodes/{one}/status")).unwrap(), "{:?}", objects.writes);
    assert_eq!(at(&format!("PATCH /api/v1/nodes/{two}/status")), None, "{:?}", objects.writes);
    assert!(at(&format!("PATCH {}", lease(&two))).is_some(), "{:?}", objects.writes);
    assert_eq!(ready(&objects, &two).as_deref(), Some("True"));
    stop.cancel();
    kept.await.unwrap();
}

#[test]
fn names_and_addresses_belong_to_one_node() {
    assert_eq!((name(1), name(123_456)), ("sim-00001".into(), "sim-123456".into()));
    for known in [1, 99_999, 100_000, 131_071] {
        assert_eq!(number(&name(known)), Some(known));
    }
    for foreign in ["sim-1", "sim-00000", "sim-000001", "node-00001", "sim-0000a"] {
        assert_eq!(number(foreign), None, "{foreign}");
    }
    assert_eq!((address(1), address(65_536)), ("198.18.0.1".into(), "198.19.0.0".into()));
}
