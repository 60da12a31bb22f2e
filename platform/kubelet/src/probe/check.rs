//! A single probe of a container, within its timeout.

use std::{net::IpAddr, sync::Arc, time::Duration};

use mayfly_api::k8s::api::core::v1::{Container, Pod, Probe};
use mayfly_runtime::{ContainerId, Runtime};
use tokio::time::timeout;

use super::{
    exec, grpc,
    http_get::{self, HttpAnswer, HttpGet, PROBE_AGENT},
    thresholds::ProbeTiming,
};

/// The container that is probed.
#[derive(Clone)]
pub(crate) struct ProbeTarget {
    pub(crate) pod: Arc<Pod>,
    pub(crate) container: Container,
    pub(crate) id: ContainerId,
    pub(crate) address: Option<IpAddr>,
    pub(crate) runtime: Arc<dyn Runtime>,
}

/// The result of a probe.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    Success,
    Failure(String),
    /// The check could not be executed: no verdict about the container.
    Unknown(String),
}

/// Executes one probe, within its timeout.
pub(crate) async fn check(probe: &Probe, timing: &ProbeTiming, target: &ProbeTarget) -> ProbeResult {
    let limit = timing.timeout;
    if let Some(action) = &probe.exec {
        let command = action.command.clone().unwrap_or_default();
        return command_result(&command, limit, target).await;
    }
    if let Some(action) = &probe.http_get {
        return match HttpGet::of(action, &target.container, target.address, PROBE_AGENT) {
            Ok(get) => http_result(&get, limit).await,
            Err(why) => ProbeResult::Unknown(why),
        };
    }
    if let Some(action) = &probe.tcp_socket {
        let port = match http_get::port_number(&action.port, &target.container) {
            Ok(port) => port,
            Err(why) => return ProbeResult::Unknown(why),
        };
        return match host(action.host.as_deref(), target.address) {
            Ok(host) => socket_result(&host, port, limit).await,
            Err(why) => ProbeResult::Unknown(why),
        };
    }
    if let Some(action) = &probe.grpc {
        let port = u16::try_from(action.port).unwrap_or_default();
        let service = action.service.as_deref().unwrap_or_default();
        return match host(None, target.address) {
            Ok(host) => grpc_result(&host, port, service, limit).await,
            Err(why) => ProbeResult::Unknown(why),
        };
    }
    ProbeResult::Unknown(format!("missing probe handler for container {:?}", target.container.name))
}

fn host(named: Option<&str>, address: Option<IpAddr>) -> Result<String, String> {
    match (named.filter(|host| !host.is_empty()), address) {
        (Some(host), _) => Ok(host.to_owned()),
        (None, Some(address)) => Ok(address.to_string()),
        (None, None) => Err("the pod has no address".into()),
    }
}

async fn command_result(command: &[String], limit: Duration, target: &ProbeTarget) -> ProbeResult {
    let done = timeout(limit, exec::output(&*target.runtime, &target.id, command.to_vec())).await;
    match done {
        Ok(Ok(output)) if output.exit_code == 0 => ProbeResult::Success,
        Ok(Ok(output)) => ProbeResult::Failure(output.text),
        Ok(Err(why)) => ProbeResult::Unknown(why),
        Err(_) => {
            let command = command.join(" ");
            ProbeResult::Failure(format!(
                "command timed out: {command:?} timed out after {}s",
                limit.as_secs()
            ))
        }
    }
}

async fn http_result(get: &HttpGet, limit: Duration) -> ProbeResult {
    match timeout(limit, get.send()).await {
        Ok(Ok(HttpAnswer::Status(status))) if (200..400).contains(&status.as_u16()) => ProbeResult::Success,
        Ok(Ok(HttpAnswer::Status(status))) => {
            ProbeResult::Failure(format!("HTTP probe failed with statuscode: {}", status.as_u16()))
        }
        Ok(Ok(HttpAnswer::RedirectAway(to))) => {
            tracing::debug!(to, "not following the redirect of a probe to another host");
            ProbeResult::Success
        }
        Ok(Err(why)) => ProbeResult::Failure(why),
        Err(_) => ProbeResult::Failure(get.timed_out()),
    }
}

async fn socket_result(host: &str, port: u16, limit: Duration) -> ProbeResult {
    match timeout(limit, http_get::connect(host, port)).await {
        Ok(Ok(_)) => ProbeResult::Success,
        Ok(Err(why)) => ProbeResult::Failure(why),
        Err(_) => ProbeResult::Failure(format!("dial tcp {host}:{port}: i/o timeout")),
    }
}

async fn grpc_result(host: &str, port: u16, service: &str, limit: Duration) -> ProbeResult {
    match timeout(limit, grpc::check(host, port, service)).await {
        Ok(Ok(())) => ProbeResult::Success,
        Ok(Err(why)) => ProbeResult::Failure(why),
        Err(_) => {
            let seconds = limit.as_secs();
            ProbeResult::Failure(format!("timeout: health rpc did not complete within {seconds}s"))
        }
    }
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::{PodUid, simulated::SimulatedRuntime};
    use serde_json::{Value, json};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    async fn probe(probe: Value) -> ProbeResult {
        let probe: Probe = serde_json::from_value(probe).unwrap();
        let target = ProbeTarget {
            pod: Arc::default(),
            container: Container { name: "c".into(), ..Container::default() },
            id: ContainerId { pod: PodUid("u".into()), name: "c".into(), attempt: 0 },
            address: Some("127.0.0.1".parse().unwrap()),
            runtime: Arc::new(SimulatedRuntime::new("")),
        };
        check(&probe, &ProbeTiming::of(&probe), &target).await
    }

    /// A server that sends `answer` on each connection, or never answers if it is empty.
    async fn server(answer: &'static str) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let mut silent = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = vec![0; 4096];
                let _ = stream.read(&mut request).await;
                if answer.is_empty() {
                    silent.push(stream);
                    continue;
                }
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        port
    }

    fn failed(result: &ProbeResult, text: &str) {
        assert!(matches!(result, ProbeResult::Failure(why) if why.contains(text)), "{result:?}, not {text}");
    }

    #[tokio::test]
    async fn http_probes_succeed_by_status() {
        let get = |port: u16| json!({"httpGet": {"port": port, "path": "/x"}});
        let ok = server("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(probe(get(ok)).await, ProbeResult::Success);
        let error = server("HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n").await;
        failed(&probe(get(error)).await, "HTTP probe failed with statuscode: 503");
        let away =
            server("HTTP/1.1 302 Found\r\nlocation: http://example.org/\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(probe(get(away)).await, ProbeResult::Success);
        let circle = server("HTTP/1.1 302 Found\r\nlocation: /y\r\ncontent-length: 0\r\n\r\n").await;
        failed(&probe(get(circle)).await, "stopped after 10 redirects");
    }

    #[tokio::test]
    async fn a_probe_of_a_closed_port_names_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let socket = json!({"tcpSocket": {"port": port}});
        assert_eq!(probe(socket.clone()).await, ProbeResult::Success);
        drop(listener);
        let refused = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
        failed(&probe(socket).await, &refused);
        failed(&probe(json!({"httpGet": {"port": port}})).await, &refused);
        failed(&probe(json!({"grpc": {"port": port}})).await, &refused);
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_hangs_ends_at_its_timeout() {
        let silent = server("").await;
        for action in ["httpGet", "grpc"] {
            let hung = probe(json!({action: {"port": silent}, "timeoutSeconds": 2})).await;
            assert!(matches!(hung, ProbeResult::Failure(_)), "{action}: {hung:?}");
        }
    }

    #[tokio::test]
    async fn a_runtime_without_commands_has_no_exec_probes() {
        let exec = probe(json!({"exec": {"command": ["true"]}})).await;
        assert!(matches!(&exec, ProbeResult::Unknown(why) if why.contains("no commands")), "{exec:?}");
        assert!(matches!(probe(json!({})).await, ProbeResult::Unknown(_)));
    }
}
