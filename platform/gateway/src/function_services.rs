//! Services over Functions: a Service whose selector names a function (`mayfly.dev/function: NAME`) is served here,
//! with the function's own rules, even while the function has no replica.
//!
//! Each such Service has its own listener; all requests on it go to the function, whatever their host. An EndpointSlice
//! of the Service directs the proxy of each node to the listener, which has the same address on all nodes: the leader
//! takes a free port and writes the EndpointSlice, a follower listens on the port in it.

use std::{
    collections::{BTreeSet, HashMap},
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
use mayfly_informer::{Changes, Informer};
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
/// The end of the name of a Service's EndpointSlice, after the name of the Service.
const SLICE_SUFFIX: &str = "-function";
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
    format!("{}{SLICE_SUFFIX}", key.name)
}

/// The Service of an EndpointSlice with such a name.
fn service_of(slice: &ObjectKey) -> Option<ObjectKey> {
    Some(ObjectKey::new(&slice.namespace, slice.name.strip_suffix(SLICE_SUFFIX)?))
}

fn check_count(served: &HashMap<ObjectKey, ServedFunction>) -> Result<(), String> {
    if served.len() < SERVICES_MAX {
        return Ok(());
    }
    Err(format!("there are {SERVICES_MAX} Services over functions already"))
}

/// The origin of the listeners' ports.
pub(crate) enum ServicePorts {
    /// A free port, which is written to the Service's EndpointSlice.
    Written(Client),
    /// The port in the EndpointSlice that the leader has written.
    Read(Informer<EndpointSlice>),
}

/// The port of the listener in a Service's EndpointSlice.
fn port_in(slice: &EndpointSlice) -> Option<u16> {
    let is_ours = slice
        .endpoints
        .iter()
        .flat_map(|endpoint| &endpoint.addresses)
        .any(|address| *address == LISTEN.to_string());
    let port = slice.ports.iter().flatten().find_map(|port| port.port).filter(|_| is_ours)?;
    u16::try_from(port).ok()
}

/// The next changes, if there are any to wait for.
async fn next_of(changes: &mut Option<Changes>) -> BTreeSet<ObjectKey> {
    match changes {
        Some(changes) => changes.next().await,
        None => std::future::pending().await,
    }
}

/// Keeps a listener for each Service over a function.
pub(crate) struct FunctionServices {
    pub(crate) services: Informer<Service>,
    pub(crate) ports: ServicePorts,
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
        let mut slices = match &self.ports {
            ServicePorts::Written(_) => None,
            ServicePorts::Read(slices) => Some(slices.subscribe()),
        };
        let mut served: HashMap<ObjectKey, ServedFunction> = HashMap::new();
        let mut failed: Vec<ObjectKey> = Vec::new();
        let keeping = async {
            loop {
                let dirty = tokio::select! {
                    dirty = changes.next() => dirty,
                    slices = next_of(&mut slices) => slices.iter().filter_map(service_of).collect(),
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
        let client = match &self.ports {
            ServicePorts::Written(client) => client,
            ServicePorts::Read(slices) => {
                let slice = slices.get(&ObjectKey::new(&key.namespace, slice_name(key)));
                let port = slice.and_then(|slice| port_in(&slice));
                let wanted = wanted.and_then(|(_, function)| Some((function, port?)));
                return self.listen_on(key, wanted, served);
            }
        };
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), &key.namespace);
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
            check_count(served)?;
            served.insert(key.clone(), self.serve(function, 0)?);
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

    /// Serves a function on the given port, or ends that.
    fn listen_on(
        &self,
        key: &ObjectKey,
        wanted: Option<(Arc<str>, u16)>,
        served: &mut HashMap<ObjectKey, ServedFunction>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let known = served.get(key).map(|known| (known.function.clone(), known.listener.port()));
        if known == wanted {
            return Ok(());
        }
        served.remove(key);
        if let Some((function, port)) = wanted {
            check_count(served)?;
            served.insert(key.clone(), self.serve(function, port)?);
        }
        Ok(())
    }

    /// Listens for a function's requests. Port 0 selects a free port.
    fn serve(&self, function: Arc<str>, port: u16) -> std::io::Result<ServedFunction> {
        let listener: TcpListener = {
            let _in_requests = self.requests.enter();
            listen::bind(SocketAddr::new(LISTEN, port))?
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
        // A follower finds the port, and the Service.
        assert_eq!(port_in(&slice), Some(40000));
        let name = ObjectKey::new("shop", slice.metadata.name.clone().unwrap());
        assert_eq!(service_of(&name), Some(key));
        let other: EndpointSlice = serde_json::from_value(json!({"addressType": "IPv4",
            "endpoints": [{"addresses": ["10.1.2.3"]}], "ports": [{"port": 80}]}))
        .unwrap();
        assert_eq!(port_in(&other), None);
    }
}
