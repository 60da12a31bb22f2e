//! Connects to plugins: those that register, and those that the kubelet's plugin watcher finds.

use super::{rpc::connect, *};

/// Serves `v1beta1.Registration`.
#[derive(Clone)]
pub(super) struct Registrar(pub(super) Arc<DeviceManager>);

#[async_trait]
impl Registration for Registrar {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest { version, endpoint, resource_name, .. } = request.into_inner();
        if version != API_VERSION {
            let message =
                format!("version {version:?} is not supported; this kubelet supports {API_VERSION}");
            return Err(Status::invalid_argument(message));
        }
        if endpoint.is_empty() || endpoint.contains('/') || endpoint == KUBELET_SOCKET {
            return Err(Status::invalid_argument(format!(
                "{endpoint:?} is not a file name of a plugin's socket"
            )));
        }
        let manager = &self.0;
        manager.add(&resource_name, &endpoint, &manager.config.folder.join(&endpoint)).await?;
        Ok(Response::new(Empty {}))
    }
}

impl DeviceManager {
    /// Connects to a plugin, and follows its list of devices. `name` identifies the socket at `path`.
    pub(super) async fn add(&self, resource: &str, name: &str, path: &Path) -> Result<(), Status> {
        if !is_extended_resource(resource) {
            let message = format!("{resource:?} is not an extended resource name such as vendor.com/device");
            return Err(Status::invalid_argument(message));
        }
        let generation = self.book.lock().begin_connection();
        let (client, options) = connect(path).await.map_err(|error| {
            Status::failed_precondition(format!("cannot reach the plugin at {name}: {error}"))
        })?;
        if !self.book.lock().connect(generation, resource, name, options) {
            return Err(Status::aborted(format!("the plugin at {name} has registered again meanwhile")));
        }
        self.clients.lock().insert(generation, client.clone());
        tracing::info!(resource, socket = name, "a device plugin registered");
        let connected = Connected { resource: resource.to_owned(), generation, client };
        let sent = self.registered.send(connected).await;
        sent.map_err(|_| Status::unavailable("this kubelet is stopping"))
    }

    /// Disconnects the plugin with this socket.
    pub(super) fn remove(&self, resource: &str, name: &str) {
        let Some(generation) = self.book.lock().generation(resource, name) else { return };
        self.disconnected(resource, generation, "its socket was removed");
    }
}

/// Upstream's rule: a domain other than Kubernetes' own, and a name.
fn is_extended_resource(name: &str) -> bool {
    let Some((domain, own)) = name.split_once('/') else { return false };
    let is_reserved = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    !is_reserved
        && !domain.starts_with("requests.")
        && mayfly_api::names::dns_subdomain(domain).is_ok()
        && !own.is_empty()
        && own.len() <= mayfly_api::names::LABEL_BYTES_MAX
        && own.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter))
}
