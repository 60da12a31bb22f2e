//! Components that serve HTTP/1.1 in their own pod, on the pod's address.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use mayfly_api::{Digest, function::Isolation, wellknown};
use mayfly_runtime::{
    BodyError, CallError, ContainerSpec, HostedSpec, RuntimeError, SandboxSpec,
    wire::{DrainOnDrop, FlushBeforeError},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::Instant,
};

use super::{
    ContainerExit, Meter, Pods, RunningTask,
    command::{egress, rules},
    task::StopRequest,
};
use crate::{
    capability::{output::ProgramLog, policy::PodPolicies},
    function::Function,
    guest::GuestProgram,
};

/// The time limit of one response. A pod's spec has none; most proxies time out sooner.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
const ANSWER_BYTES_MAX: u64 = 1 << 30;
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Binds the pod's port and serves.
pub(super) async fn start(
    pods: &Arc<Pods>,
    sandbox: &SandboxSpec,
    spec: ContainerSpec,
    component: Digest,
) -> Result<RunningTask, RuntimeError> {
    let address = sandbox.address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let port = spec.ports.first().copied().unwrap_or(wellknown::FUNCTION_PORT);
    let address = SocketAddr::new(address, port);
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| RuntimeError::Internal(format!("cannot listen on {address}: {error}")))?;
    let function = function(pods, sandbox, &spec, component)?;
    let connections = Arc::new(Semaphore::new(pods.shared.config.pod_connections_max));
    let meter = Meter::of_memory(function.program().clone());
    let stall_timeout = pods.shared.config.pod_stall_timeout;
    let pod_listener =
        PodListener { listener, port, policies: pods.shared.policies.of_pod(sandbox), connections };
    let serving = |stopping| serve(pod_listener, function, stall_timeout, stopping);
    Ok(RunningTask::spawn(pods, spec.id, meter, serving, || {}))
}

fn function(
    pods: &Pods,
    sandbox: &SandboxSpec,
    spec: &ContainerSpec,
    component: Digest,
) -> Result<Arc<Function>, RuntimeError> {
    let shared = &pods.shared;
    let memory_bytes_max = spec.memory_bytes_max.unwrap_or(shared.config.pod_memory_bytes_default);
    let hosted = HostedSpec {
        revision: sandbox.pod.clone(),
        // One name for all pods, so that the number of metrics does not grow with them.
        function: "(pod)".into(),
        component,
        env: spec.env.clone(),
        memory_bytes_max,
        timeout: ANSWER_TIMEOUT,
        response_bytes_max: ANSWER_BYTES_MAX,
        log_bytes_per_second: None,
        isolation: Isolation::Fresh,
        egress: rules(sandbox)?,
        files: None,
    };
    let log = ProgramLog::new(
        &shared.logs,
        spec.log_path.clone(),
        shared.config.log_bytes_per_second,
        &shared.metrics.log_lines_dropped,
    );
    let program = GuestProgram::new(
        spec.args.clone(),
        spec.env.clone(),
        memory_bytes_max,
        log,
        Arc::new(egress(pods, sandbox)?),
        shared.lane(&sandbox.pod.namespace, &sandbox.pod.name),
        shared.budget.clone(),
    );
    Ok(Function::new(hosted, shared.clone(), program))
}

/// The pod's listener, with the policies for its connections.
struct PodListener {
    listener: TcpListener,
    port: u16,
    policies: PodPolicies,
    /// A permit for each connection that may be open at the same time.
    connections: Arc<Semaphore>,
}

/// Serves until it is asked to stop, then finishes the running requests. Dropping the future ends everything.
async fn serve(
    pod_listener: PodListener,
    function: Arc<Function>,
    stall_timeout: Duration,
    mut stopping: StopRequest,
) -> ContainerExit {
    let graceful = GracefulShutdown::new();
    // Created before the connections: dropped after them, it ends guests that they leave behind.
    let _stop = StopOnDrop(function.clone());
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            // An error means that the pod and the sender of stop requests are gone.
            _ = stopping.wait_for(Option::is_some) => break,
            Some(_) = open.join_next(), if !open.is_empty() => continue,
            accepted = pod_listener.accept() => accepted,
        };
        let (stream, client, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, for example: other connections may be closed meanwhile.
                tracing::warn!(%error, "cannot accept a connection for a pod");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        prepare(&stream, stall_timeout);
        let function = function.clone();
        let service = service_fn(move |request| answer(function.clone(), request));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        let (policies, port) = (pod_listener.policies.clone(), pod_listener.port);
        open.spawn(async move {
            // Others are closed before a byte is read.
            if policies.admits(port, client).await {
                // Errors of a client's connection are not errors of the pod.
                connection.await.ok();
            }
            drop(permit);
        });
    }
    drop(pod_listener);
    graceful.shutdown().await;
    ContainerExit::completed()
}

/// Sets the kernel's timeout for a peer that leaves its answer unread, and disables Nagle's algorithm. A failure
/// costs latency, or a connection for as long as such a peer keeps it.
fn prepare(stream: &TcpStream, stall_timeout: Duration) {
    stream.set_nodelay(true).ok();
    let timeout_ms = u32::try_from(stall_timeout.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(stream, timeout_ms).ok();
}

/// Ends guests of a pod that continue after their answers.
struct StopOnDrop(Arc<Function>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.program().end();
    }
}

impl PodListener {
    /// Accepts the next connection once there is a permit for it.
    async fn accept(&self) -> io::Result<(TcpStream, IpAddr, OwnedSemaphorePermit)> {
        let permit = self.connections.clone().acquire_owned().await.map_err(io::Error::other)?;
        let (stream, client) = self.listener.accept().await?;
        Ok((stream, client.ip(), permit))
    }
}

async fn answer(
    function: Arc<Function>,
    request: Request<Incoming>,
) -> Result<Response<FlushBeforeError>, std::convert::Infallible> {
    let request = DrainOnDrop::wrap(request)
        .map(|body| body.map_err(|error| Box::new(error) as BodyError).boxed_unsync());
    let deadline = Instant::now() + function.spec.timeout;
    match function.call(request, deadline).await {
        Ok(answer) => Ok(answer.response.map(FlushBeforeError::new)),
        Err(error) => {
            let status = match &error {
                CallError::Overloaded { .. } | CallError::NoSlot { .. } | CallError::ShuttingDown => {
                    StatusCode::SERVICE_UNAVAILABLE
                }
                CallError::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
                _ => StatusCode::BAD_GATEWAY,
            };
            let body = Full::from(format!("{error}\n")).map_err(|never| match never {}).boxed_unsync();
            let mut response = Response::new(FlushBeforeError::new(body));
            *response.status_mut() = status;
            Ok(response)
        }
    }
}
