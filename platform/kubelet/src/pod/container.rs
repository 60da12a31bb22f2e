//! Resolves a container of a pod's spec into a runtime's specification.

use mayfly_api::{
    ObjectKey,
    env::{self, EnvError, EnvSources},
    k8s::api::core::v1::{Container, EnvVar, Pod},
    quantity, wellknown,
};
use mayfly_runtime::{ContainerId, ContainerSpec, PodUid, SandboxSpec, logs::LogLayout};

use super::{
    dns::ClusterDnsServer,
    fields::{self, NodeView},
    options,
};

pub(crate) fn sandbox(
    pod: &Pod,
    address: Option<std::net::IpAddr>,
    cluster_dns: Option<&ClusterDnsServer>,
) -> SandboxSpec {
    SandboxSpec {
        uid: PodUid(pod.metadata.uid.clone().unwrap_or_default()),
        pod: ObjectKey::of(pod),
        labels: pod.metadata.labels.clone().unwrap_or_default(),
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
        address,
        host: options::host(pod, cluster_dns),
    }
}

/// Whether a container's environment takes values from ConfigMaps or Secrets.
pub(crate) fn names_sources(container: &Container) -> bool {
    let variables = container.env.as_deref().unwrap_or_default();
    container.env_from.as_ref().is_some_and(|sources| !sources.is_empty())
        || env::references(variables).next().is_some()
}

/// The sources of the environment of a pod's containers, besides the pod itself.
pub(crate) struct EnvironmentSources<'a, S> {
    pub(crate) objects: &'a S,
    pub(crate) node: NodeView<'a>,
    /// The pod's addresses, the primary one first.
    pub(crate) addresses: &'a [std::net::IpAddr],
    /// The variables of Services; every other source overrides them.
    pub(crate) services: Vec<(String, String)>,
}

/// Resolves one container. Fails when its environment refers to something that does not exist.
pub(crate) fn resolve(
    pod: &Pod,
    container: &Container,
    attempt: u32,
    sources: EnvironmentSources<'_, impl EnvSources>,
    logs: &LogLayout,
) -> Result<ContainerSpec, EnvError> {
    let EnvironmentSources { objects, node, addresses, services } = sources;
    let key = ObjectKey::of(pod);
    let pod_fields = |variable: &EnvVar| field(pod, container, variable, addresses, node);
    let variables: Vec<EnvVar> = container
        .env
        .iter()
        .flatten()
        .map(|variable| pod_fields(variable).unwrap_or_else(|| variable.clone()))
        .collect();
    let mut resolved = services;
    override_with(&mut resolved, env_from(&key, container, objects)?);
    let own = env::resolve(&key.namespace, &variables, &resolved, objects)?;
    override_with(&mut resolved, own);
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    let limit = |name: &str| limits.and_then(|limits| limits.get(name));
    // A limit of zero is none, as upstream.
    let limited = |amount: &u64| *amount > 0;
    let id = ContainerId {
        pod: PodUid(pod.metadata.uid.clone().unwrap_or_default()),
        name: container.name.clone(),
        attempt,
    };
    let expanded = |texts: &Option<Vec<String>>| -> Vec<String> {
        let value =
            |name: &str| resolved.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        texts.iter().flatten().map(|text| env::expand(text, value)).collect()
    };
    Ok(ContainerSpec {
        image: container.image.clone().unwrap_or_default(),
        command: expanded(&container.command),
        args: expanded(&container.args),
        env: resolved,
        memory_bytes_max: limit("memory").and_then(|value| quantity::whole(value).ok()).filter(limited),
        cpu_millis_max: limit("cpu").and_then(|value| quantity::millis(value).ok()).filter(limited),
        ports: container
            .ports
            .iter()
            .flatten()
            .filter_map(|port| u16::try_from(port.container_port).ok())
            .collect(),
        log_path: log_path(pod, &id, logs),
        files: None,
        process: options::process(pod, container, Vec::new(), memory_bytes()),
        id,
    })
}

/// Adds variables; they replace those of the same name.
fn override_with(variables: &mut Vec<(String, String)>, stronger: Vec<(String, String)>) {
    variables.retain(|(name, _)| stronger.iter().all(|(other, _)| other != name));
    variables.extend(stronger);
}

/// The memory of this machine.
fn memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    system.totalram.saturating_mul(u64::from(system.mem_unit))
}

/// The log file of a container: a function's replica writes into its revision's file.
pub(crate) fn log_path(pod: &Pod, id: &ContainerId, logs: &LogLayout) -> std::path::PathBuf {
    let labels = pod.metadata.labels.as_ref();
    let label = |name: &str| labels.and_then(|labels| labels.get(name));
    match (label(wellknown::LABEL_FUNCTION), label(wellknown::LABEL_REVISION)) {
        (Some(function), Some(revision)) => {
            logs.revision(pod.metadata.namespace.as_deref().unwrap_or_default(), function, revision)
        }
        _ => logs.container(id),
    }
}

/// `envFrom`: whole ConfigMaps and Secrets, with a prefix.
fn env_from(
    key: &ObjectKey,
    container: &Container,
    sources: &impl EnvSources,
) -> Result<Vec<(String, String)>, EnvError> {
    let mut all: Vec<(String, String)> = Vec::new();
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or("");
        let missing = |kind, name: &str, optional: Option<bool>| match optional {
            Some(true) => Ok(()),
            _ => Err(EnvError::SourceMissing {
                kind,
                namespace: key.namespace.clone(),
                name: name.into(),
                variable: format!("{prefix}*"),
            }),
        };
        let mut add = |name: &String, value: String| {
            let name = format!("{prefix}{name}");
            all.retain(|(known, _)| *known != name);
            all.push((name, value));
        };
        if let Some(reference) = &source.config_map_ref {
            match sources.config_map(&key.namespace, &reference.name) {
                Some(map) => map.data.iter().flatten().for_each(|(name, value)| add(name, value.clone())),
                None => missing("configmap", &reference.name, reference.optional)?,
            }
        }
        if let Some(reference) = &source.secret_ref {
            match sources.secret(&key.namespace, &reference.name) {
                Some(secret) => secret
                    .data
                    .iter()
                    .flatten()
                    .for_each(|(name, value)| add(name, String::from_utf8_lossy(&value.0).into_owned())),
                None => missing("secret", &reference.name, reference.optional)?,
            }
        }
    }
    Ok(all)
}

/// The value of a `fieldRef` or `resourceFieldRef`, as a literal.
fn field(
    pod: &Pod,
    container: &Container,
    variable: &EnvVar,
    addresses: &[std::net::IpAddr],
    node: NodeView<'_>,
) -> Option<EnvVar> {
    let source = variable.value_from.as_ref()?;
    let value = match (&source.field_ref, &source.resource_field_ref) {
        (Some(field), _) => fields::of_pod(pod, &field.field_path, addresses, node)?,
        (None, Some(selector)) => {
            fields::of_resources(pod, Some(container), selector, node.allocatable).ok()?
        }
        (None, None) => return None,
    };
    Some(EnvVar { name: variable.name.clone(), value: Some(value), value_from: None })
}

#[cfg(test)]
mod tests {
    use mayfly_api::resources::Amounts;
    use serde_json::{Value, json};

    use super::*;
    use crate::test_objects::FixedObjects;

    fn resolved(container: Value) -> ContainerSpec {
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [container]}}),
        )
        .unwrap();
        let sources = EnvironmentSources {
            objects: &FixedObjects::default(),
            node: NodeView { name: "n", address: [127, 0, 0, 1].into(), allocatable: &Amounts::default() },
            addresses: &[],
            services: Vec::new(),
        };
        let container = &pod.spec.as_ref().unwrap().containers[0];
        resolve(&pod, container, 0, sources, &LogLayout::new("/logs")).unwrap()
    }

    #[test]
    fn a_limit_of_zero_is_none() {
        for (limits, cpu, memory) in [
            (json!({"cpu": "250m", "memory": "64Mi"}), Some(250), Some(64 << 20)),
            (json!({"cpu": "0", "memory": "0"}), None, None),
            (json!({}), None, None),
        ] {
            let spec = resolved(json!({"name": "c", "resources": {"limits": limits}}));
            assert_eq!((spec.cpu_millis_max, spec.memory_bytes_max), (cpu, memory), "{limits}");
        }
    }
}
