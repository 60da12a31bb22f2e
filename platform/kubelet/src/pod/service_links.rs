//! The environment variables through which containers find Services (upstream: `pkg/kubelet/envvars`). Pure.

use std::collections::BTreeMap;

use mayfly_api::k8s::api::core::v1::{Pod, Service, ServicePort};

/// The namespace of the API's Service, which every container finds.
const API_NAMESPACE: &str = "default";
/// The name of that Service.
const API_SERVICE: &str = "kubernetes";

/// The variables of the Services that the containers of `pod` find: those of its namespace that have an address, unless
/// `spec.enableServiceLinks` is false, and always `default/kubernetes`. A Service `kubernetes` in the pod's namespace
/// replaces the one in `default`. Where two Services define the same variable, the later one wins (`web` and
/// `web-service` both define `WEB_SERVICE_PORT`).
pub(crate) fn variables<'a>(
    pod: &Pod,
    services: impl IntoIterator<Item = &'a Service>,
) -> Vec<(String, String)> {
    let spec = pod.spec.as_ref();
    let links = spec.and_then(|spec| spec.enable_service_links).unwrap_or(true);
    let own_namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let (mut own, mut api) = (Vec::new(), None);
    for service in services {
        let Some(address) = cluster_address(service) else { continue };
        let name = service.metadata.name.as_deref().unwrap_or_default();
        let namespace = service.metadata.namespace.as_deref().unwrap_or_default();
        if (namespace, name) == (API_NAMESPACE, API_SERVICE) {
            api = Some((name, address, service));
        } else if namespace == own_namespace && links {
            own.push((name, address, service));
        }
    }
    let api = api.filter(|_| own.iter().all(|(name, ..)| *name != API_SERVICE));
    let all = api.into_iter().chain(own);
    let named: BTreeMap<_, _> =
        all.flat_map(|(name, address, service)| of_service(name, address, service)).collect();
    named.into_iter().collect()
}

/// The cluster IP of a Service; headless and ExternalName Services have none.
fn cluster_address(service: &Service) -> Option<&str> {
    let address = service.spec.as_ref()?.cluster_ip.as_deref()?;
    (!address.is_empty() && address != "None").then_some(address)
}

fn of_service(name: &str, address: &str, service: &Service) -> Vec<(String, String)> {
    let prefix = variable_name(name);
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    let mut all = vec![(format!("{prefix}_SERVICE_HOST"), address.to_owned())];
    if let Some(first) = ports.first() {
        all.push((format!("{prefix}_SERVICE_PORT"), first.port.to_string()));
        all.push((format!("{prefix}_PORT"), url(address, first)));
    }
    for port in ports {
        if let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) {
            all.push((format!("{prefix}_SERVICE_PORT_{}", variable_name(name)), port.port.to_string()));
        }
        // The variables of Docker links.
        let link = format!("{prefix}_PORT_{}_{}", port.port, protocol(port).to_uppercase());
        all.extend([
            (format!("{link}_PROTO"), protocol(port).to_lowercase()),
            (format!("{link}_PORT"), port.port.to_string()),
            (format!("{link}_ADDR"), address.to_owned()),
            (link, url(address, port)),
        ]);
    }
    all
}

fn protocol(port: &ServicePort) -> &str {
    port.protocol.as_deref().filter(|protocol| !protocol.is_empty()).unwrap_or("TCP")
}

fn url(address: &str, port: &ServicePort) -> String {
    let scheme = protocol(port).to_lowercase();
    // Only an IPv6 address has colons.
    match address.contains(':') {
        true => format!("{scheme}://[{address}]:{}", port.port),
        false => format!("{scheme}://{address}:{}", port.port),
    }
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(namespace: &str, name: &str, address: &str, ports: Value) -> Service {
        let metadata = json!({"namespace": namespace, "name": name});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"clusterIP": address, "ports": ports}}))
            .unwrap()
    }

    fn found(links: Option<bool>, services: &[Service]) -> BTreeMap<String, String> {
        let spec = json!({"containers": [], "enableServiceLinks": links});
        let pod = json!({"metadata": {"namespace": "shop", "name": "p"}, "spec": spec});
        let pod = serde_json::from_value(pod).unwrap();
        variables(&pod, services).into_iter().collect()
    }

    fn api() -> Service {
        service("default", "kubernetes", "10.96.0.1", json!([{"name": "https", "port": 443}]))
    }

    /// The cases of upstream's `TestFromServices`.
    #[test]
    fn a_service_has_upstreams_variables() {
        let services = [
            service("shop", "foo-bar", "1.2.3.4", json!([{"port": 8080, "protocol": "TCP"}])),
            service(
                "shop",
                "q-u-u-x",
                "9.8.7.6",
                json!([{"port": 8081, "protocol": "TCP", "name": "u-d-p"}, {"port": 53, "protocol": "UDP", "name": "dns"}]),
            ),
            service("shop", "v6", "2001:db8::1", json!([{"port": 80}])),
            service("shop", "headless", "None", json!([{"port": 80}])),
            service("shop", "alias", "", json!([{"port": 80}])),
            service("other", "far", "1.1.1.1", json!([{"port": 80}])),
        ];
        let expected = [
            ("FOO_BAR_SERVICE_HOST", "1.2.3.4"),
            ("FOO_BAR_SERVICE_PORT", "8080"),
            ("FOO_BAR_PORT", "tcp://1.2.3.4:8080"),
            ("FOO_BAR_PORT_8080_TCP", "tcp://1.2.3.4:8080"),
            ("FOO_BAR_PORT_8080_TCP_PROTO", "tcp"),
            ("FOO_BAR_PORT_8080_TCP_PORT", "8080"),
            ("FOO_BAR_PORT_8080_TCP_ADDR", "1.2.3.4"),
            ("Q_U_U_X_SERVICE_HOST", "9.8.7.6"),
            ("Q_U_U_X_SERVICE_PORT", "8081"),
            ("Q_U_U_X_SERVICE_PORT_U_D_P", "8081"),
            ("Q_U_U_X_SERVICE_PORT_DNS", "53"),
            ("Q_U_U_X_PORT", "tcp://9.8.7.6:8081"),
            ("Q_U_U_X_PORT_8081_TCP", "tcp://9.8.7.6:8081"),
            ("Q_U_U_X_PORT_8081_TCP_PROTO", "tcp"),
            ("Q_U_U_X_PORT_8081_TCP_PORT", "8081"),
            ("Q_U_U_X_PORT_8081_TCP_ADDR", "9.8.7.6"),
            ("Q_U_U_X_PORT_53_UDP", "udp://9.8.7.6:53"),
            ("Q_U_U_X_PORT_53_UDP_PROTO", "udp"),
            ("Q_U_U_X_PORT_53_UDP_PORT", "53"),
            ("Q_U_U_X_PORT_53_UDP_ADDR", "9.8.7.6"),
            ("V6_SERVICE_HOST", "2001:db8::1"),
            ("V6_SERVICE_PORT", "80"),
            ("V6_PORT", "tcp://[2001:db8::1]:80"),
            ("V6_PORT_80_TCP", "tcp://[2001:db8::1]:80"),
            ("V6_PORT_80_TCP_PROTO", "tcp"),
            ("V6_PORT_80_TCP_PORT", "80"),
            ("V6_PORT_80_TCP_ADDR", "2001:db8::1"),
        ];
        let expected: BTreeMap<_, _> =
            expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        assert_eq!(found(None, &services), expected);
    }

    #[test]
    fn the_api_is_found_in_any_case() {
        let web = service("shop", "web", "10.96.0.9", json!([{"port": 80}]));
        let names = |links| found(links, &[api(), web.clone()]).into_keys().collect::<Vec<_>>();
        let hosts = |names: &[String]| names.iter().filter(|name| name.ends_with("_HOST")).cloned().collect();
        let of = |links| -> Vec<String> { hosts(&names(links)) };
        assert_eq!(of(Some(false)), ["KUBERNETES_SERVICE_HOST"]);
        assert_eq!(of(Some(true)), ["KUBERNETES_SERVICE_HOST", "WEB_SERVICE_HOST"]);
        assert_eq!(of(None), of(Some(true)));
    }

    #[test]
    fn a_service_of_the_same_name_takes_the_apis_place() {
        let own = service("shop", "kubernetes", "10.96.0.9", json!([{"port": 1}]));
        let host = |links| found(Some(links), &[own.clone(), api()])["KUBERNETES_SERVICE_HOST"].clone();
        assert_eq!((host(true), host(false)), ("10.96.0.9".into(), "10.96.0.1".into()));
    }

    #[test]
    fn one_name_of_two_services_is_there_once() {
        let services =
            ["web", "web-service"].map(|name| service("shop", name, "10.96.0.9", json!([{"port": 80}])));
        let pod = json!({"metadata": {"namespace": "shop", "name": "p"}, "spec": {"containers": []}});
        let variables = variables(&serde_json::from_value(pod).unwrap(), &services);
        let of_both: Vec<_> = variables.iter().filter(|(name, _)| name == "WEB_SERVICE_PORT").collect();
        assert_eq!(of_both, [&("WEB_SERVICE_PORT".into(), "tcp://10.96.0.9:80".into())]);
    }
}
