//! Connections between the gateways of a cluster, in memory.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use http::Request;
use http_body_util::BodyExt;
use mayfly_gateway::{LeaderCaller, NodeCallError, NodeCallFuture, NodeCaller, NodeRequests};
use mayfly_runtime::Body;

/// The state of the connections to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Up,
    /// Connections are refused.
    Refused,
    /// Connections break after the request was sent.
    Breaks,
}

/// Delivers requests to the gateways of nodes by their names.
#[derive(Clone, Default)]
pub struct MemoryNetwork(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    nodes: HashMap<String, (NodeRequests, Link)>,
    /// `node METHOD path` for each request, without the readings of loads.
    calls: Vec<String>,
    deadlines_ms: Vec<u64>,
}

impl MemoryNetwork {
    pub fn attach(&self, node: &str, requests: NodeRequests) {
        self.0.lock().unwrap().nodes.insert(node.to_owned(), (requests, Link::Up));
    }

    pub fn set(&self, node: &str, link: Link) {
        self.0.lock().unwrap().nodes.get_mut(node).expect("it is attached").1 = link;
    }

    pub fn calls(&self) -> Vec<String> {
        self.0.lock().unwrap().calls.clone()
    }

    /// The times that were left for the requests, in milliseconds.
    pub fn deadlines_ms(&self) -> Vec<u64> {
        self.0.lock().unwrap().deadlines_ms.clone()
    }

    pub fn nodes(&self) -> NodeCaller {
        let network = self.clone();
        Arc::new(move |node, request| network.call(node, request))
    }

    pub fn leader(&self, node: &'static str) -> LeaderCaller {
        let network = self.clone();
        Arc::new(move |request| network.call(node, request))
    }

    fn call(&self, node: &str, request: Request<Body>) -> NodeCallFuture {
        let mut state = self.0.lock().unwrap();
        if request.uri().path() != "/load" {
            state.calls.push(format!("{node} {} {}", request.method(), request.uri()));
            let left = request.headers()["mayfly-node-deadline-ms"].to_str().unwrap().parse();
            state.deadlines_ms.push(left.unwrap());
        }
        let Some((requests, link)) = state.nodes.get(node).cloned() else {
            return Box::pin(async { Err(NodeCallError::Unreachable("there is no such node".into())) });
        };
        Box::pin(async move {
            match link {
                Link::Up => Ok(requests.serve(request).await.map(BodyExt::boxed_unsync)),
                Link::Refused => Err(NodeCallError::Unreachable("connection refused".into())),
                Link::Breaks => {
                    let _ = request.into_body().collect().await;
                    Err(NodeCallError::Lost("connection reset".into()))
                }
            }
        })
    }
}
