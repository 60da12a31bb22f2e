//! The connection from the API server to the kubelets: within one process, a call of the router.

use std::{collections::HashMap, sync::Arc};

use axum::{Router, body::Body};
use mayfly_apiserver::NodeConnector;
use parking_lot::Mutex;
use tower::ServiceExt as _;

/// The nodes of this process: this machine, and the node that represents a Slurm cluster. The API server is created
/// before the kubelets that it calls, so the routers are attached later.
#[derive(Clone, Default)]
pub(crate) struct LocalNodes {
    routers: Arc<Mutex<HashMap<String, Router>>>,
}

impl LocalNodes {
    /// Makes a node of this process reachable by its name.
    pub(crate) fn attach(&self, name: &str, router: Router) {
        self.routers.lock().insert(name.to_owned(), router);
    }

    pub(crate) fn connector(&self) -> NodeConnector {
        let routers = self.routers.clone();
        Arc::new(move |node: String, request: http::Request<Body>| {
            let router = routers.lock().get(&node).cloned();
            Box::pin(async move {
                let Some(router) = router else {
                    return Err(format!("node {node:?} is not reachable from here").into());
                };
                Ok(router.oneshot(request).await.unwrap_or_else(|never| match never {}))
            })
        })
    }
}
