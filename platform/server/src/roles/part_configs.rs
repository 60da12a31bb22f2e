//! The configurations of the components, derived from the operator's settings.

use std::sync::Arc;

use anyhow::Context as _;
use mayfly_api::wellknown::RUNTIME_CLASS_SLURM;
use mayfly_apiserver::{Audit, Identity};
use mayfly_cli::data_dir::{DataDir, Endpoints};
use mayfly_controllers::{LocalVolumes, Routes};
use mayfly_distribution::RegistryClient;
use mayfly_gateway::GatewayHandle;
use mayfly_kubelet::JobFiles;
use mayfly_runtime::logs::LogLayout;

use super::{listeners::Ports, open_files::Connections};
use crate::config::{NodeConfig, UpConfig};

/// The Kubernetes version whose kinds are served, shown as the node's version.
pub(super) const KUBERNETES_VERSION: &str = concat!("v1.33.0+mayfly-", env!("CARGO_PKG_VERSION"));

pub(super) fn gateway_config(config: &NodeConfig, connections: Connections) -> mayfly_gateway::Config {
    mayfly_gateway::Config {
        listen: config.http_listen,
        connections_max: connections.functions,
        trust_forwarded: config.trust_forwarded,
        ..Default::default()
    }
}

pub(super) fn controllers_config(
    endpoints: &Endpoints,
    identity: &Identity,
    gateway: GatewayHandle,
    registries: RegistryClient,
    containers: bool,
) -> mayfly_controllers::Config {
    let mut config = mayfly_controllers::Config::default();
    config.function.gateway_url = endpoints.http.clone();
    config.function.registries = Some(registries);
    config.function.containers = containers;
    config.namespace_defaults.root_ca_pem = Some(identity.ca_pem().to_owned());
    let signer = identity.clone();
    config.certificate_signing.sign = Some(Arc::new(move |request, usages, duration| {
        signer.sign(request, usages, duration, jiff::Timestamp::now()).map_err(|error| error.to_string())
    }));
    // A function becomes Ready once requests are routed to the revision that makes it ready.
    config.function.routes = Some(Routes {
        changes: gateway.changes(),
        follow: Arc::new(move |function, latest| gateway.follows(function, latest)),
    });
    config
}

/// Local PersistentVolumes are on this node. Their objects contain the path, so it must be absolute.
pub(super) fn local_volumes(config: &NodeConfig, data_dir: &DataDir) -> anyhow::Result<LocalVolumes> {
    let folder = std::path::absolute(data_dir.volumes()).context("the path of the data directory")?;
    Ok(LocalVolumes { node: config.name.clone(), folder })
}

/// Drivers are given absolute paths.
pub(super) fn kubelet_folder(config: &NodeConfig, data_dir: &DataDir) -> anyhow::Result<std::path::PathBuf> {
    let folder = config.kubelet_dir.clone().unwrap_or_else(|| data_dir.path().join("kubelet"));
    std::path::absolute(folder).context("the path of --kubelet-dir")
}

pub(super) fn kubelet_config(
    config: &NodeConfig,
    data_dir: &DataDir,
    logs: LogLayout,
    jobs: JobFiles,
) -> mayfly_kubelet::Config {
    let mut kubelet = mayfly_kubelet::Config::of_this_machine(&config.name, logs, KUBERNETES_VERSION);
    kubelet.jobs = Some(jobs);
    kubelet.upload_folder = data_dir.containers().join("uploads");
    kubelet.image_collection = config.images.collection.clone();
    kubelet.static_pods = Some(data_dir.containers().join("static-pods"));
    kubelet.volumes = Some(data_dir.containers().join("volumes"));
    kubelet.allowed_unsafe_sysctls.clone_from(&config.allowed_unsafe_sysctls);
    if let Some(folder) = &config.volume_plugin_dir {
        kubelet.volume_plugins.clone_from(folder);
    }
    kubelet
}

/// The audit log, if a policy is configured.
pub(super) fn audit(config: &UpConfig, data_dir: &DataDir) -> anyhow::Result<Option<Arc<Audit>>> {
    let Some(policy) = &config.audit_policy_file else { return Ok(None) };
    let text = std::fs::read_to_string(policy)
        .with_context(|| format!("cannot read --audit-policy-file {}", policy.display()))?;
    let log = config.audit_log_path.clone().unwrap_or_else(|| data_dir.path().join("audit.log"));
    let audit = Audit::create(&text, &log).with_context(|| {
        format!("cannot start the audit log {} with the policy {}", log.display(), policy.display())
    })?;
    Ok(Some(Arc::new(audit)))
}

pub(super) fn api_config(config: &UpConfig, ports: &Ports, identity: &Identity) -> mayfly_apiserver::Config {
    let mut api_config = mayfly_apiserver::Config::new(identity.token());
    api_config.artifact_bytes_max = config.artifact_bytes_max;
    api_config.connections = ports.api.clone();
    api_config.connection_metrics = ports.metrics.clone();
    api_config.service_account_key = Some(identity.service_account_key().to_vec());
    api_config.client_authority = Some(identity.client_authority());
    api_config.service_account_token_volumes = true;
    api_config.serving_authority_pem = Some(identity.ca_pem().to_owned());
    if config.slurm.is_some() {
        api_config.runtime_classes.push(RUNTIME_CLASS_SLURM.into());
    }
    api_config
}
