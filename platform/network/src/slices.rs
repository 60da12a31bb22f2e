//! EndpointSlices by their Service, and the endpoints that a node can reach.

use std::net::IpAddr;

use mayfly_api::{
    ObjectKey,
    k8s::api::discovery::v1::{Endpoint, EndpointSlice},
};
use mayfly_informer::{Index, Informer};

use crate::plan::SERVICE_NAME_LABEL;

/// The index of EndpointSlices by their Service.
const BY_SERVICE: &str = "network/service";

/// The slices of a Service are found by [`index_value`] of its key.
pub(crate) fn by_service(slices: &Informer<EndpointSlice>) -> Index<EndpointSlice> {
    slices.index(BY_SERVICE, |slice| service_of(slice).map(|key| index_value(&key)).into_iter().collect())
}

pub(crate) fn index_value(service: &ObjectKey) -> String {
    format!("{}/{}", service.namespace, service.name)
}

/// The Service that a slice names.
pub(crate) fn service_of(slice: &EndpointSlice) -> Option<ObjectKey> {
    let service = slice.metadata.labels.as_ref()?.get(SERVICE_NAME_LABEL)?;
    Some(ObjectKey::new(slice.metadata.namespace.clone().unwrap_or_default(), service))
}

/// Whether the node called `node` can reach an endpoint's address. Pods of components and of nodes without root have
/// loopback addresses, which are other pods' on another node. An endpoint without a node is one of every node.
pub(crate) fn is_reachable(endpoint: &Endpoint, address: IpAddr, node: &str) -> bool {
    !address.is_loopback() || endpoint.node_name.as_deref().is_none_or(|of| of == node)
}
