//! The parts of a process that run functions: the wasm host, and what its gateway is made from.

use std::sync::Arc;

use anyhow::Context as _;
use mayfly_artifacts::Artifacts;
use mayfly_cli::data_dir::DataDir;
use mayfly_gateway::{GatewayDeps, GatewayRole, HttpsDeps};
use mayfly_informer::{EnvObjects, Informers};
use mayfly_runtime::logs::{LogLayout, LogWriter};
use mayfly_runtime_wasm::{CompileIn, WasmHost};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use super::runtimes::Handles;
use crate::config::NodeConfig;

/// The host of components, which runs no function yet.
pub(super) fn create_host(
    config: &NodeConfig,
    artifacts: &Artifacts,
    data_dir: &DataDir,
    metrics: &mut Registry,
) -> anyhow::Result<Arc<WasmHost>> {
    let writer = LogWriter::start().context("cannot start the log writer")?;
    let host_config = mayfly_runtime_wasm::Config {
        memory_bytes_max: config.function_memory_bytes,
        instances_max: config.instances_max,
        function_instances_max: config.function_instances_max,
        // The running program, even if its file was replaced meanwhile.
        compile_in: CompileIn::Process("/proc/self/exe".into()),
        compile_speed_file: Some(data_dir.compile_speed()),
        ..Default::default()
    };
    let host =
        WasmHost::create(host_config, artifacts.clone(), writer, LogLayout::new(data_dir.logs()), metrics);
    host.map(Arc::new).context("cannot start the wasm host")
}

/// What a gateway is made from.
pub(super) fn gateway_deps(
    informers: &Informers,
    host: Arc<WasmHost>,
    client: kube::Client,
    handles: &Handles,
    https: Option<HttpsDeps>,
    role: GatewayRole,
    stop: &CancellationToken,
) -> GatewayDeps {
    GatewayDeps {
        functions: informers.of(),
        revisions: informers.of(),
        role,
        pods: informers.of(),
        services: informers.of(),
        slices: informers.of(),
        ingresses: informers.of(),
        https,
        env: EnvObjects::create(informers),
        host,
        client,
        requests: handles.requests.clone(),
        stop: stop.clone(),
    }
}
