//! The connection from the API server to the kubelets: within one process, a call of the router; otherwise a request
//! over mutual TLS.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use axum::{Router, body::Body};
use mayfly_apiserver::NodeConnector;
use mayfly_node_link::RemoteConnector;
use parking_lot::Mutex;
use tower::ServiceExt as _;

/// The nodes of this process: this machine, and the node that represents a Slurm cluster. The API server is created
/// before the kubelets that it calls, so the routers are attached later.
#[derive(Clone, Default)]
pub(crate) struct LocalNodes {
    routers: Arc<Mutex<HashMap<String, Router>>>,
    /// The nodes of other machines. Without it there are none.
    others: Arc<OnceLock<RemoteConnector>>,
}

impl LocalNodes {
    /// Makes a node of this process reachable by its name.
    pub(crate) fn attach(&self, name: &str, router: Router) {
        self.routers.lock().insert(name.to_owned(), router);
    }

    /// Makes the nodes of other machines reachable.
    pub(crate) fn attach_others(&self, others: RemoteConnector) {
        let _ = self.others.set(others);
    }

    pub(crate) fn connector(&self) -> NodeConnector {
        let Self { routers, others } = self.clone();
        Arc::new(move |node: String, request: http::Request<Body>| {
            let router = routers.lock().get(&node).cloned();
            let others = others.clone();
            Box::pin(async move {
                match (router, others.get()) {
                    (Some(router), _) => {
                        Ok(router.oneshot(request).await.unwrap_or_else(|never| match never {}))
                    }
                    (None, Some(others)) => others(node, request).await,
                    (None, None) => Err(format!("node {node:?} is not reachable from here").into()),
                }
            })
        })
    }
}
