//! What a machine serves the cluster's other machines: its kubelet's API, and requests of their gateways.

use axum::{Router, body::Body, extract::Request, http::Uri};
use http_body_util::BodyExt as _;
use mayfly_gateway::NodeRequests;
use tower::ServiceExt as _;

/// The prefix of the paths of requests between gateways.
const GATEWAY: &str = "/gateway";

/// The path, below [`GATEWAY`], of a request to another gateway.
pub(super) fn gateway_uri(uri: &Uri) -> Uri {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    // A valid path stays valid behind a prefix.
    format!("{GATEWAY}{path}").parse().unwrap_or_default()
}

/// The path of a request of another gateway, without the prefix; `None` if the request is another one.
fn gateway_path(uri: &Uri) -> Option<Uri> {
    let path = uri.path_and_query()?.as_str().strip_prefix(GATEWAY)?;
    path.starts_with('/').then(|| path.parse().ok()).flatten()
}

/// Serves requests of gateways, and passes all others to `kubelet`.
pub(super) fn router(kubelet: Router, gateways: NodeRequests) -> Router {
    let service = tower::service_fn(move |mut request: Request| {
        let (kubelet, gateways) = (kubelet.clone(), gateways.clone());
        async move {
            let Some(uri) = gateway_path(request.uri()) else {
                return kubelet.oneshot(request).await;
            };
            *request.uri_mut() = uri;
            let request = request.map(|body| body.map_err(Into::into).boxed_unsync());
            Ok(gateways.serve(request).await.map(Body::new))
        }
    });
    Router::new().fallback_service(service)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_comes_back_as_it_was_sent() {
        for path in ["/", "/a/b?c=d", "//a", "/a%2Fb//", "/gateway/x", "/?q"] {
            let sent = gateway_uri(&path.parse().unwrap());
            assert!(sent.path().starts_with("/gateway/"), "{sent}");
            assert_eq!(gateway_path(&sent).unwrap().to_string(), path);
        }
        for other in ["/pods", "/gatewayed", "/gateway", "/"] {
            assert_eq!(gateway_path(&other.parse().unwrap()), None, "{other}");
        }
    }
}
