//! Connections between the gateways of a cluster, in memory.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex},
};

use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::{body::Incoming, client::conn as client, server::conn as server, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use mayfly_gateway::{LeaderCaller, NodeCallError, NodeCallFuture, NodeCaller, NodeRequests};
use mayfly_runtime::Body;

/// The state of the connections to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    Up,
    /// Connections are refused.
    Refused,
    /// Connections break after the request was sent.
    Breaks,
}

async fn over_http(
    requests: NodeRequests,
    request: Request<Body>,
    h2: bool,
) -> Result<Response<Body>, NodeCallError> {
    let service = service_fn(move |request: Request<Incoming>| {
        let requests = requests.clone();
        async move {
            let request = request.map(|body| body.map_err(Into::into).boxed_unsync());
            Ok::<_, Infallible>(requests.serve(request).await)
        }
    });
    let (near, far) = tokio::io::duplex(64 << 10);
    let (near, far) = (TokioIo::new(near), TokioIo::new(far));
    let unreachable = |error: hyper::Error| NodeCallError::Unreachable(error.into());
    let answered = if h2 {
        tokio::spawn(server::http2::Builder::new(TokioExecutor::new()).serve_connection(far, service));
        let handshake = client::http2::handshake(TokioExecutor::new(), near).await;
        let (mut sender, connection) = handshake.map_err(unreachable)?;
        tokio::spawn(connection);
        sender.send_request(request).await
    } else {
        tokio::spawn(server::http1::Builder::new().serve_connection(far, service));
        let (mut sender, connection) = client::http1::handshake(near).await.map_err(unreachable)?;
        tokio::spawn(connection);
        sender.send_request(request).await
    };
    let response = answered.map_err(|error| NodeCallError::Lost(error.into()))?;
    Ok(response.map(|body| body.map_err(Into::into).boxed_unsync()))
}

fn no_such_node() -> NodeCallFuture {
    Box::pin(async { Err(NodeCallError::Unreachable("there is no such node".into())) })
}

/// Delivers requests to the gateways of nodes by their names.
#[derive(Clone, Default)]
pub struct MemoryNetwork(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    nodes: HashMap<String, (NodeRequests, LinkState)>,
    /// `node METHOD path` for each request, without the readings of loads.
    calls: Vec<String>,
    deadlines_ms: Vec<u64>,
}

impl MemoryNetwork {
    pub fn attach(&self, node: &str, requests: NodeRequests) {
        self.0.lock().unwrap().nodes.insert(node.to_owned(), (requests, LinkState::Up));
    }

    pub fn set(&self, node: &str, link: LinkState) {
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

    /// Like `nodes`, with HTTP/1.1 or HTTP/2 over a connection of its own for each request.
    pub fn nodes_over_http(&self, h2: bool) -> NodeCaller {
        let network = self.clone();
        Arc::new(move |node, request| match network.0.lock().unwrap().nodes.get(node) {
            Some((requests, _)) => Box::pin(over_http(requests.clone(), request, h2)),
            None => no_such_node(),
        })
    }

    fn call(&self, node: &str, request: Request<Body>) -> NodeCallFuture {
        let mut state = self.0.lock().unwrap();
        if request.uri().path() != "/load" {
            state.calls.push(format!("{node} {} {}", request.method(), request.uri()));
            let left = request.headers()["mayfly-node-deadline-ms"].to_str().unwrap().parse();
            state.deadlines_ms.push(left.unwrap());
        }
        let Some((requests, link)) = state.nodes.get(node).cloned() else {
            return no_such_node();
        };
        Box::pin(async move {
            match link {
                LinkState::Up => Ok(requests.serve(request).await.map(BodyExt::boxed_unsync)),
                LinkState::Refused => Err(NodeCallError::Unreachable("connection refused".into())),
                LinkState::Breaks => {
                    let _ = request.into_body().collect().await;
                    Err(NodeCallError::Lost("connection reset".into()))
                }
            }
        })
    }
}
