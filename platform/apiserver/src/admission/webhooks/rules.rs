//! A webhook as its configuration describes it.

use std::{net::SocketAddr, time::Duration};

use base64::Engine as _;
use serde_json::Value;

use crate::{
    admission::matching::{MatchConditions, MatchResources},
    object::Object,
    registry::rules_items as items,
};

/// The operation of a request, with the names of AdmissionReviews.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionOperation {
    Create,
    Update,
    Delete,
    /// A connection to a pod, such as `exec`.
    Connect,
}

impl AdmissionOperation {
    pub(in crate::admission) fn name(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
            Self::Connect => "CONNECT",
        }
    }
}

/// One webhook of a configuration.
#[derive(Debug)]
pub(super) struct Webhook {
    pub(super) name: String,
    /// The URL to post reviews to; of a Service the one with its DNS name.
    pub(super) url: String,
    pub(super) service: Option<ServiceReference>,
    /// PEM certificates of the authorities that may sign the server's certificate; the system's ones if empty.
    pub(super) ca_bundle: Vec<u8>,
    pub(super) timeout: Duration,
    pub(super) ignores_failures: bool,
    pub(super) reinvoke: bool,
    pub(super) resources: MatchResources,
    pub(super) conditions: MatchConditions,
}

/// The Service of a webhook.
#[derive(Debug)]
pub(super) struct ServiceReference {
    pub(super) namespace: String,
    pub(super) name: String,
    port: i64,
}

impl Webhook {
    /// The webhooks of a MutatingWebhookConfiguration or a ValidatingWebhookConfiguration, which was validated.
    pub(super) fn of_configuration(configuration: &Object) -> Vec<Self> {
        items(configuration.at(&["webhooks"]).unwrap_or(&Value::Null)).map(Self::parse).collect()
    }

    fn parse(webhook: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        let config = &webhook["clientConfig"];
        let service = config["service"].is_object().then(|| ServiceReference {
            namespace: text(&config["service"]["namespace"]),
            name: text(&config["service"]["name"]),
            port: config["service"]["port"].as_i64().unwrap_or(443),
        });
        let url = service.as_ref().map_or_else(
            || text(&config["url"]),
            |service| {
                let path = text(&config["service"]["path"]);
                format!("https://{}.{}.svc:{}{path}", service.name, service.namespace, service.port)
            },
        );
        let seconds = webhook["timeoutSeconds"].as_u64().unwrap_or(10);
        Self {
            name: text(&webhook["name"]),
            url,
            service,
            ca_bundle: base64::engine::general_purpose::STANDARD
                .decode(config["caBundle"].as_str().unwrap_or(""))
                .unwrap_or_default(),
            timeout: Duration::from_secs(seconds),
            ignores_failures: webhook["failurePolicy"] == "Ignore",
            reinvoke: webhook["reinvocationPolicy"] == "IfNeeded",
            resources: MatchResources::of_webhook(webhook),
            conditions: MatchConditions::parse(&webhook["matchConditions"]),
        }
    }
}

impl ServiceReference {
    /// The address of a ready endpoint for the reference's port, chosen at random.
    pub(super) fn endpoint(&self, service: Option<&Object>, slices: &[Object]) -> Result<SocketAddr, String> {
        let Self { namespace, name, port } = self;
        let service = service.ok_or_else(|| format!("service {name:?} not found"))?;
        let ports = service.at(&["spec", "ports"]).unwrap_or(&Value::Null);
        let of_service = items(ports)
            .find(|candidate| candidate["port"].as_i64() == Some(*port))
            .ok_or_else(|| format!("no service port {port} found for service {name:?}"))?;
        let port_name = of_service["name"].as_str().unwrap_or("");
        let mut addresses = Vec::new();
        let label = ["metadata", "labels", "kubernetes.io/service-name"];
        for slice in slices.iter().filter(|slice| slice.str_at(&label) == name) {
            let ports = slice.at(&["ports"]).unwrap_or(&Value::Null);
            let target = items(ports)
                .find(|candidate| candidate["name"].as_str().unwrap_or("") == port_name)
                .and_then(|candidate| u16::try_from(candidate["port"].as_u64()?).ok());
            let Some(target) = target else { continue };
            let endpoints = slice.at(&["endpoints"]).unwrap_or(&Value::Null);
            let ready = items(endpoints).filter(|endpoint| endpoint["conditions"]["ready"] != false);
            let ips = ready.flat_map(|endpoint| items(&endpoint["addresses"])).filter_map(Value::as_str);
            addresses.extend(ips.filter_map(|ip| Some(SocketAddr::new(ip.parse().ok()?, target))));
        }
        use rand::seq::IndexedRandom as _;
        addresses
            .choose(&mut rand::rng())
            .copied()
            .ok_or_else(|| format!("no endpoints available for service \"{namespace}/{name}\""))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Object {
        let Value::Object(map) = value else { unreachable!("tests give objects") };
        Object(map)
    }

    #[test]
    fn a_ready_endpoint_of_the_services_port_is_chosen() {
        let reference = ServiceReference { namespace: "n".into(), name: "hooks".into(), port: 443 };
        let service = object(
            json!({"spec": {"ports": [{"name": "metrics", "port": 80}, {"name": "https", "port": 443}]}}),
        );
        let slice = |service: &str, ready: bool, port: u16| {
            object(json!({"metadata": {"labels": {"kubernetes.io/service-name": service}},
                "ports": [{"name": "metrics", "port": 1}, {"name": "https", "port": port}],
                "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}]}))
        };
        let slices = [slice("other", true, 2), slice("hooks", false, 3), slice("hooks", true, 8443)];
        let found = reference.endpoint(Some(&service), &slices).unwrap();
        assert_eq!(found, "10.0.0.1:8443".parse().unwrap());
        let none = reference.endpoint(Some(&service), &slices[..2]).unwrap_err();
        assert_eq!(none, "no endpoints available for service \"n/hooks\"");
        reference.endpoint(None, &slices).unwrap_err();
        let other_port = ServiceReference { port: 444, ..reference };
        other_port.endpoint(Some(&service), &slices).unwrap_err();
    }
}
