//! The endpoints of the Service `default/kubernetes`: the address at which the API listens (upstream's kubernetes
//! service controller).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use mayfly_store::{Write, WriteError};
use serde_json::{Value, json};

use crate::{
    meta, object::Object, registry::registry, schema::wire::canonicalise, server::ApiServer,
    server::ServerState, verbs,
};

const SERVICE: &str = "kubernetes";
const NAMESPACE: &str = "default";
/// The name of the port in the Service.
const PORT: &str = "https";

/// The Endpoints and the EndpointSlice, with their groups and plurals.
fn objects(address: SocketAddr) -> [(&'static str, &'static str, Value); 2] {
    let ip = match address.ip() {
        // Listening everywhere includes the loopback address, which is the one this node always has.
        ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip => ip,
    };
    let ports = json!([{"name": PORT, "port": address.port(), "protocol": "TCP"}]);
    let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
    let meta =
        |label: &str, value: &str| json!({"name": SERVICE, "namespace": NAMESPACE, "labels": {label: value}});
    [
        (
            "",
            "endpoints",
            json!({"apiVersion": "v1", "kind": "Endpoints",
                   "metadata": meta("endpointslice.kubernetes.io/skip-mirror", "true"),
                   "subsets": [{"addresses": [{"ip": ip}], "ports": ports}]}),
        ),
        (
            "discovery.k8s.io",
            "endpointslices",
            json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                   "metadata": meta("kubernetes.io/service-name", SERVICE),
                   "addressType": family, "ports": ports,
                   "endpoints": [{"addresses": [ip], "conditions": {"ready": true}}]}),
        ),
    ]
}

impl ApiServer {
    /// Makes `address`, at which the API is served, the only endpoint of the Service `default/kubernetes`.
    pub async fn publish_endpoint(&self, address: SocketAddr) -> Result<(), WriteError> {
        self.inner.publish_endpoint(address).await
    }
}

impl ServerState {
    async fn publish_endpoint(&self, address: SocketAddr) -> Result<(), WriteError> {
        let mut writes = Vec::new();
        for (group, plural, value) in objects(address) {
            let kind = registry().find(group, "v1", plural).expect("the row is there");
            let Value::Object(map) = value else { continue };
            let mut object = Object(map);
            let key = verbs::key(kind, NAMESPACE, SERVICE);
            let stored = self.store.get(&key);
            match stored.as_deref().and_then(|entry| Object::from_entry(entry).ok()) {
                Some(old) => {
                    for field in ["uid", "creationTimestamp", "generation"] {
                        if let Some(value) = old.at(&["metadata", field]).cloned() {
                            object.meta_mut().insert(field.into(), value);
                        }
                    }
                }
                None => meta::on_create(&mut object, kind, self.now()),
            }
            (kind.defaults)(&mut object);
            canonicalise(kind, &mut object.0);
            let value = kind.encode(&object);
            match stored {
                Some(entry) if entry.value == value => {}
                Some(_) => writes.push(Write::Update { key, value, expected: None }),
                None => writes.push(Write::Create { key, value }),
            }
        }
        if !writes.is_empty() {
            self.store.write_all(writes).await?;
        }
        Ok(())
    }
}
