//! Services over Functions: a Service whose selector names a function (`mayfly.dev/function: NAME`) is served here,
//! with the function's own rules, even while the function has no replica.
//!
//! Each such Service has its own listener; all requests on it go to the function, whatever their host. An EndpointSlice
//! of the Service directs the node's proxy to the listener.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::api::{core::v1::Service, discovery::v1::EndpointSlice},
    wellknown,
};
use mayfly_informer::Informer;
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Handle};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::{Config, headers::Entrance, listen, proxy::Proxy};

/// The node's address for these listeners, at any port: valid for endpoints, and never assigned to a pod.
const LISTEN: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 95, 255, 254));
/// The number of Services over functions on one node: each holds a socket.
const SERVICES_MAX: usize = 4096;
/// The number of concurrent connections of one Service; further ones wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 4096;
const FIELD_MANAGER: &str = "mayfly-gateway";
/// The pause before a failed step is retried.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The function that a Service selects, as `namespace/name`.
pub(crate) fn function_of(service: &Service) -> Option<Arc<str>> {
    let spec = service.spec.as_ref()?;
    if spec.type_.as_deref() == Some("ExternalName") || service.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let name = spec.selector.as_ref()?.get(wellknown::LABEL_FUNCTION)?;
    let namespace = service.metadata.namespace.as_deref().unwrap_or_default();
    Some(format!("{namespace}/{name}").into())
}

/// The EndpointSlice that refers to a listener; it is garbage-collected with the Service.
fn slice(service: &Service, key: &ObjectKey, listener: SocketAddr) -> Value {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let ports = ports.filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP");
    let ports: Vec<_> = ports
        .map(|port| json!({"name": port.name.as_deref().unwrap_or_default(), "port": listener.port(), "protocol": "TCP"}))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": slice_name(key), "namespace": key.namespace,
            "labels": {
                "kubernetes.io/service-name": key.name,
                "endpointslice.kubernetes.io/managed-by": FIELD_MANAGER,
            },
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": key.name,
                "uid": service.metadata.uid, "controller": true, "blockOwnerDeletion": false}],
        },
        "ports": ports,
        "endpoints": [{"addresses": [listener.ip().to_string()], "conditions": {"ready": true}}],
    })
}

fn slice_name(key: &ObjectKey) -> String {
    format!("{}-function", key.name)
}

/// Keeps a listener for each Service over a function.
pub(crate) struct FunctionServices {
    pub(crate) services: Informer<Service>,
    pub(crate) client: Client,
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) config: Config,
    /// The runtime that serves connections.
    pub(crate) requests: Handle,
    /// Starts the graceful shutdown: requests in flight finish.
    pub(crate) drain: CancellationToken,
    /// Cancels the remaining requests.
    pub(crate) cut: CancellationToken,
    pub(crate) serving: TaskTracker,
}

/// A Service that is served until this is dropped.
struct ServedFunction {
    function: Arc<str>,
    listener: SocketAddr,
    /// The EndpointSlice as last written.
    slice: Value,
    _stop: DropGuard,
}

impl FunctionServices {
    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut changes = self.services.subscribe();
        let mut served: HashMap<ObjectKey, ServedFunction> = HashMap::new();
        let mut failed: Vec<ObjectKey> = Vec::new();
        let keeping = async {
            loop {
                let dirty = tokio::select! {
                    dirty = changes.next() => dirty,
                    () = tokio::time::sleep(RETRY_PAUSE), if !failed.is_empty() => failed.drain(..).collect(),
                };
                for key in dirty {
                    if let Err(error) = self.update(&key, &mut served).await {
                        tracing::warn!(%error, service = %key, "cannot serve a Service over a function; will try again");
                        failed.push(key);
                    }
                }
            }
        };
        let _: Option<()> = stop.run_until_cancelled(keeping).await;
    }

    async fn update(
        &self,
        key: &ObjectKey,
        served: &mut HashMap<ObjectKey, ServedFunction>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let service = self.services.get(key);
        let wanted = service.as_ref().and_then(|service| Some((service, function_of(service)?)));
        let slices: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &key.namespace);
        let Some((service, function)) = wanted else {
            if served.contains_key(key) {
                let deleted = slices.delete(&slice_name(key), &DeleteParams::default()).await;
                match deleted {
                    Err(kube::Error::Api(status)) if status.code == 404 => {}
                    deleted => drop(deleted?),
                }
                served.remove(key);
            }
            return Ok(());
        };
        if served.get(key).is_some_and(|known| known.function != function) {
            served.remove(key);
        }
        if !served.contains_key(key) {
            if served.len() >= SERVICES_MAX {
                return Err(format!("there are {SERVICES_MAX} Services over functions already").into());
            }
            served.insert(key.clone(), self.serve(function)?);
        }
        let Some(known) = served.get_mut(key) else { return Ok(()) };
        let wanted = slice(service, key, known.listener);
        if known.slice != wanted {
            let parameters = PatchParams::apply(FIELD_MANAGER).force();
            slices.patch(&slice_name(key), &parameters, &Patch::Apply(&wanted)).await?;
            known.slice = wanted;
        }
        Ok(())
    }

    /// Listens for a function's requests.
    fn serve(&self, function: Arc<str>) -> std::io::Result<ServedFunction> {
        let listener: TcpListener = {
            let _in_requests = self.requests.enter();
            listen::bind(SocketAddr::new(LISTEN, 0))?
        };
        let address = listener.local_addr()?;
        let stop = self.drain.child_token();
        let config = Config { connections_max: CONNECTIONS_MAX, ..self.config.clone() };
        let entrance = Entrance::of_function(function.clone());
        let serving =
            listen::serve(listener, self.proxy.clone(), config, entrance, stop.clone(), self.cut.clone());
        // Detached: the task ends when the guard cancels its token.
        drop(self.serving.spawn_on(serving, &self.requests));
        Ok(ServedFunction { function, listener: address, slice: Value::Null, _stop: stop.drop_guard() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_selector_names_the_function() {
        let service = |spec: Value| -> Service {
            serde_json::from_value(
                json!({"metadata": {"namespace": "shop", "name": "web", "uid": "u"}, "spec": spec}),
            )
            .unwrap()
        };
        let over = service(json!({"selector": {"mayfly.dev/function": "hello"},
            "ports": [{"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"}]}));
        assert_eq!(function_of(&over).as_deref(), Some("shop/hello"));
        for other in [
            json!({"selector": {"app": "x"}}),
            json!({}),
            json!({"type": "ExternalName", "selector": {"mayfly.dev/function": "hello"}}),
        ] {
            assert_eq!(function_of(&service(other)), None);
        }
        let key = ObjectKey::new("shop", "web");
        let slice: EndpointSlice =
            serde_json::from_value(slice(&over, &key, "127.95.255.254:40000".parse().unwrap())).unwrap();
        let ports: Vec<_> =
            slice.ports.iter().flatten().map(|port| (port.name.as_deref(), port.port)).collect();
        assert_eq!(ports, [(Some("http"), Some(40000))]);
    }
}
