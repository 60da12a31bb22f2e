//! Builds the lookup table for requests from Ingresses, Services and EndpointSlices. Pure.
//!
//! The rules are upstream's (`networking.k8s.io/v1`): an exact host takes precedence over a wildcard, and a wildcard
//! over no host; the longest matching path wins, and among equal ones the type `Exact`. If two Ingresses have the same
//! rule, that of the older Ingress applies.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::Service,
        discovery::v1::EndpointSlice,
        networking::v1::{Ingress, IngressBackend as BackendSpec, IngressSpec},
    },
    wellknown,
};

use super::spin::SpinRoute;
use crate::function_services;

/// The class of Ingresses that are served here, in addition to those without a class.
pub(crate) const CLASS: &str = "mayfly";
/// The annotation for the class before the field existed.
const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";
/// The API group of functions in a backend's `resource`.
const FUNCTION_GROUP: &str = "mayfly.dev";

/// The routes of all Ingresses.
#[derive(Debug, Default)]
pub(crate) struct IngressTable {
    exact: HashMap<String, Vec<PathRoute>>,
    /// Routes by the host after the first label: `example.com` for `*.example.com`.
    wildcard: HashMap<String, Vec<PathRoute>>,
    any: Vec<PathRoute>,
    default: Option<Arc<IngressBackend>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathMatch {
    Exact,
    Prefix,
}

/// A path of a host. Sorted by precedence.
#[derive(Debug)]
struct PathRoute {
    path: String,
    kind: PathMatch,
    backend: Arc<IngressBackend>,
}

/// The target of a path.
#[derive(Debug)]
pub(crate) enum IngressBackend {
    Function {
        /// `namespace/name`
        key: Arc<str>,
        /// The route of a Spin application's component, which is described in request headers.
        spin: Option<SpinRoute>,
    },
    Endpoints(ServiceEndpoints),
}

/// The ready endpoints of a Service's port, used round-robin.
#[derive(Debug)]
pub(crate) struct ServiceEndpoints {
    /// `namespace/name`
    pub(crate) service: String,
    /// The reason why there are no endpoints, if so.
    pub(crate) missing: &'static str,
    endpoints: Vec<SocketAddr>,
    next: AtomicUsize,
}

impl ServiceEndpoints {
    /// The endpoints in the order in which one request tries them: each request starts at the next one.
    pub(crate) fn in_turn(&self) -> impl Iterator<Item = SocketAddr> + Clone + '_ {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let count = self.endpoints.len();
        (0..count).map(move |step| self.endpoints[first.wrapping_add(step) % count])
    }
}

/// Creates the backend of a path, or of requests without one; `None` if its kind is unknown.
type MakeBackend<'a> = dyn FnMut(&BackendSpec, Option<(&str, PathMatch)>) -> Option<Arc<IngressBackend>> + 'a;

/// The objects that a table is made from.
pub(crate) struct IngressObjects<'a> {
    pub(crate) ingresses: Vec<&'a Ingress>,
    pub(crate) service: &'a dyn Fn(&ObjectKey) -> Option<Arc<Service>>,
    pub(crate) slices: &'a dyn Fn(&ObjectKey) -> Vec<Arc<EndpointSlice>>,
    /// The number of the endpoint with which each Service begins. Different for each table: where endpoints change more
    /// often than requests arrive, the same ones would get all requests.
    pub(crate) turn: usize,
}

/// Whether an Ingress is served here.
pub(crate) fn is_served(ingress: &Ingress) -> bool {
    let class = ingress.spec.as_ref().and_then(|spec| spec.ingress_class_name.as_deref());
    let annotated = ingress.metadata.annotations.as_ref().and_then(|all| all.get(CLASS_ANNOTATION));
    let class = class.or(annotated.map(String::as_str));
    ingress.metadata.deletion_timestamp.is_none() && class.is_none_or(|class| class == CLASS)
}

/// Whether an Ingress of a namespace may have a host, which is in lower case: that of a function,
/// `NAME.NAMESPACE.fn.localhost`, is its own namespace's.
pub(super) fn may_claim(namespace: &str, host: &str) -> bool {
    let function =
        host.strip_suffix(wellknown::FUNCTION_HOST_SUFFIX).and_then(|labels| labels.split_once('.'));
    function.is_none_or(|(_, owner)| owner == namespace)
}

/// Builds the table; also returns the Services that it depends on.
pub(crate) fn plan(objects: &IngressObjects<'_>) -> (IngressTable, BTreeSet<ObjectKey>) {
    let mut served: Vec<&Ingress> =
        objects.ingresses.iter().copied().filter(|ingress| is_served(ingress)).collect();
    served.sort_by_key(|ingress| {
        let metadata = &ingress.metadata;
        (metadata.creation_timestamp.clone(), metadata.namespace.clone(), metadata.name.clone())
    });
    let mut table = IngressTable::default();
    let mut services = BTreeSet::new();
    for ingress in served {
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let Some(spec) = &ingress.spec else { continue };
        let annotations = ingress.metadata.annotations.as_ref();
        let is_spin = annotations
            .and_then(|all| all.get(wellknown::ANNOTATION_SPIN_ROUTES))
            .is_some_and(|value| value == "true");
        let mut backend = |of: &BackendSpec, path: Option<(&str, PathMatch)>| {
            let mut backend = backend(of, namespace, objects, &mut services)?;
            if let (IngressBackend::Function { spin, .. }, Some((path, kind)), true) =
                (&mut backend, path, is_spin)
            {
                *spin = SpinRoute::of(path, kind);
            }
            Some(Arc::new(backend))
        };
        table.add(spec, namespace, &mut backend);
    }
    let hosts = table.exact.values_mut().chain(table.wildcard.values_mut());
    for routes in hosts.chain([&mut table.any]) {
        // The sort is stable: among equal routes the older Ingress's stays first.
        routes.sort_by_key(|route| (std::cmp::Reverse(route.length()), route.kind != PathMatch::Exact));
    }
    (table, services)
}

impl IngressTable {
    pub(crate) fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.wildcard.is_empty() && self.any.is_empty() && self.default.is_none()
    }

    fn add(&mut self, spec: &IngressSpec, namespace: &str, backend: &mut MakeBackend<'_>) {
        if let Some(default) = &spec.default_backend
            && self.default.is_none()
        {
            self.default = backend(default, None);
        }
        for rule in spec.rules.iter().flatten() {
            let host = rule.host.as_deref().unwrap_or_default().to_ascii_lowercase();
            if !may_claim(namespace, &host) {
                continue;
            }
            let routes = match host.strip_prefix("*.") {
                Some(suffix) => self.wildcard.entry(suffix.to_owned()).or_default(),
                None if host.is_empty() => &mut self.any,
                None => self.exact.entry(host).or_default(),
            };
            for path in rule.http.iter().flat_map(|http| &http.paths) {
                let kind = if path.path_type == "Exact" { PathMatch::Exact } else { PathMatch::Prefix };
                let text = path.path.clone().unwrap_or_else(|| "/".to_owned());
                let Some(backend) = backend(&path.backend, Some((&text, kind))) else { continue };
                let path = text;
                routes.push(PathRoute { path, kind, backend });
            }
        }
    }

    /// The backend of a host in an Ingress rule; it takes precedence over functions.
    pub(crate) fn of_host(&self, host: &str, path: &str) -> Option<&Arc<IngressBackend>> {
        let host = host_name(host);
        // The asterisk matches exactly one label.
        let wildcard = || self.wildcard.get(host.split_once('.')?.1);
        first_match(self.exact.get(&host).or_else(wildcard)?, path)
    }

    /// The backend of requests without another route: paths of rules without a host, then the default backend.
    pub(crate) fn of_any_host(&self, path: &str) -> Option<&Arc<IngressBackend>> {
        first_match(&self.any, path).or(self.default.as_ref())
    }
}

impl PathRoute {
    /// The length of the path; the final slash of a prefix is ignored.
    fn length(&self) -> usize {
        match self.kind {
            PathMatch::Exact => self.path.len(),
            PathMatch::Prefix => self.path.trim_end_matches('/').len(),
        }
    }

    fn matches(&self, path: &str) -> bool {
        match self.kind {
            PathMatch::Exact => self.path == path,
            // Compared by path segments: `/foo` is not a prefix of `/foobar`.
            PathMatch::Prefix => {
                let rest = path.strip_prefix(self.path.trim_end_matches('/'));
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
        }
    }
}

fn first_match<'a>(routes: &'a [PathRoute], path: &str) -> Option<&'a Arc<IngressBackend>> {
    routes.iter().find(|route| route.matches(path)).map(|route| &route.backend)
}

/// A host in the table's form: without the port and the final dot, in lower case.
pub(crate) fn host_name(host: &str) -> String {
    let host = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    host.trim_end_matches('.').to_ascii_lowercase()
}

/// Creates a backend; `None` if its kind is unknown.
fn backend(
    of: &BackendSpec,
    namespace: &str,
    objects: &IngressObjects<'_>,
    services: &mut BTreeSet<ObjectKey>,
) -> Option<IngressBackend> {
    if let Some(resource) = &of.resource {
        let is_function =
            resource.kind == "Function" && resource.api_group.as_deref() == Some(FUNCTION_GROUP);
        return is_function.then(|| IngressBackend::Function {
            key: format!("{namespace}/{}", resource.name).into(),
            spin: None,
        });
    }
    let named = of.service.as_ref()?;
    let key = ObjectKey::new(namespace, &named.name);
    services.insert(key.clone());
    let endpoints = |missing, endpoints| {
        let service = key.to_string();
        Some(IngressBackend::Endpoints(ServiceEndpoints {
            service,
            missing,
            endpoints,
            next: AtomicUsize::new(objects.turn),
        }))
    };
    let Some(service) = (objects.service)(&key) else {
        return endpoints("there is no such Service", Vec::new());
    };
    if let Some(function) = function_services::function_of(&service) {
        return Some(IngressBackend::Function { key: function, spin: None });
    }
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let wanted = named.port.as_ref();
    let mut ports = ports.filter(|port| {
        let (name, number) = wanted.map(|of| (of.name.as_deref(), of.number)).unwrap_or_default();
        number.map_or(name.is_some() && port.name.as_deref() == name, |number| port.port == number)
    });
    let Some(port) = ports.next() else { return endpoints("the Service has no such port", Vec::new()) };
    let port = port.name.as_deref().unwrap_or_default();
    let found = ready_endpoints(&(objects.slices)(&key), port);
    endpoints("the Service has no ready endpoint", found)
}

/// The ready endpoints of a named port; if there are none, the terminating endpoints that still serve.
fn ready_endpoints(slices: &[Arc<EndpointSlice>], port: &str) -> Vec<SocketAddr> {
    let (mut ready, mut terminating) = (BTreeSet::new(), BTreeSet::new());
    for slice in slices {
        let mut ports = slice.ports.iter().flatten();
        let number = ports.find(|of| of.name.as_deref().unwrap_or_default() == port).and_then(|of| of.port);
        let Some(number) = number.and_then(|number| u16::try_from(number).ok()) else { continue };
        for endpoint in &slice.endpoints {
            let conditions = endpoint.conditions.clone().unwrap_or_default();
            let is_ready = conditions.ready.unwrap_or(true);
            let still_serves =
                conditions.serving.unwrap_or(is_ready) && conditions.terminating.unwrap_or(false);
            let addresses = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
            let addresses = addresses.map(|address| SocketAddr::new(address, number));
            match (is_ready, still_serves) {
                (true, _) => ready.extend(addresses),
                (false, true) => terminating.extend(addresses),
                (false, false) => {}
            }
        }
    }
    if ready.is_empty() { terminating } else { ready }.into_iter().collect()
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
