//! The connection from the API server to the kubelets: in one process, a call of the router.

use std::sync::{Arc, OnceLock};

use axum::{Router, body::Body};
use mayfly_apiserver::NodeConnector;
use tower::ServiceExt as _;

/// The nodes of this process. The API server is created before the kubelet that it calls, so the router
/// arrives later.
#[derive(Clone, Default)]
pub(crate) struct LocalNodes {
    local: Arc<OnceLock<(String, Router)>>,
}

impl LocalNodes {
    /// Makes this process's node reachable under its name. Once.
    pub(crate) fn attach(&self, name: &str, router: Router) {
        // A second attachment would be a second kubelet in this process, which `up` never starts.
        let _ = self.local.set((name.to_owned(), router));
    }

    pub(crate) fn connector(&self) -> NodeConnector {
        let local = self.local.clone();
        Arc::new(move |node: String, request: http::Request<Body>| {
            let router = local.get().filter(|(name, _)| *name == node).map(|(_, router)| router.clone());
            Box::pin(async move {
                let Some(router) = router else {
                    return Err(format!("node {node:?} is not reachable from here").into());
                };
                Ok(router.oneshot(request).await.unwrap_or_else(|never| match never {}))
            })
        })
    }
}
