//! Parses and checks the values of flags and of the config file.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, bail};
use jiff::{Span, SpanRelativeTo};
use mayfly_api::names;
use mayfly_workflows_engine::engine::{AwsEndpoints, Credentials};

use crate::aws_credentials::{self, FoundCredentials};

/// The number of nodes that can have distinct addresses.
const SIMULATED_NODES_MAX: u32 = 100_000;

/// Accepts names such as `localhost:8080`, which must be resolved to an address.
fn parse_address(text: &str) -> anyhow::Result<SocketAddr> {
    let text = text.replacen("localhost", "127.0.0.1", 1);
    Ok(match text.strip_prefix(':') {
        Some(port) => format!("127.0.0.1:{port}").parse()?,
        None => text.parse()?,
    })
}

/// The address of a flag, otherwise of the config file, otherwise the default.
///
/// # Errors
/// A text that is no address and port; the message names the flag `--name` and an example, the default.
pub(super) fn address(
    flag: Option<String>,
    file: Option<String>,
    default: &str,
    name: &str,
) -> anyhow::Result<SocketAddr> {
    let text = flag.or(file).unwrap_or_else(|| default.to_owned());
    parse_address(&text).with_context(|| {
        let variable = name.replace('-', "_").to_uppercase();
        format!(
            "--{name} {text} (or MAYFLY_{variable}, or {name} in the config file): expected an address and a port, such \
             as {default}"
        )
    })
}

pub(super) fn retention(text: &str) -> anyhow::Result<Duration> {
    let length = time_span("workflow-retention", text)?;
    anyhow::ensure!(
        !length.is_zero(),
        "--workflow-retention {text}: expected a duration, such as 90d or 36h"
    );
    Ok(length)
}

/// Parses a flag's duration; days have 24 hours.
pub(crate) fn time_span(flag: &str, text: &str) -> anyhow::Result<Duration> {
    let unclear = || format!("--{flag} {text}: expected a duration, such as 90d or 36h");
    let span: Span = text.parse().with_context(unclear)?;
    let length = span.to_duration(SpanRelativeTo::days_are_24_hours()).with_context(unclear)?;
    Duration::try_from(length).with_context(unclear)
}

/// The endpoints of the config file, overridden by those of the flags; signed by the given key, otherwise by the key
/// that AWS's own tools would take from `environment`.
pub(super) fn endpoints(
    file: BTreeMap<String, String>,
    flags: &[String],
    id: Option<String>,
    key: Option<String>,
    environment: &dyn Fn(&str) -> Option<String>,
) -> anyhow::Result<AwsEndpoints> {
    let mut endpoints = AwsEndpoints::default();
    for (service, url) in &file {
        endpoints.point(service, url).context("the config file's task-endpoint")?;
    }
    for flag in flags.iter().filter(|flag| !flag.is_empty()) {
        let (service, url) = flag.split_once('=').with_context(|| {
            format!("--task-endpoint {flag}: write SERVICE=URL, as in sqs=http://127.0.0.1:9324")
        })?;
        endpoints.point(service, url).with_context(|| format!("--task-endpoint {flag}"))?;
    }
    let found = match endpoints.is_empty() {
        true => FoundCredentials::default(),
        false => aws_credentials::find(environment)?,
    };
    if let Some(region) = found.region {
        endpoints.sign_for(region);
    }
    match (id, key) {
        (Some(access_key_id), Some(secret_access_key)) => {
            endpoints.sign_as(Credentials { access_key_id, secret_access_key, session_token: None });
        }
        (None, None) => {
            if let Some(credentials) = found.credentials {
                endpoints.sign_as(credentials);
            }
        }
        _ => bail!("--task-access-key-id and --task-secret-access-key belong together: give both or neither"),
    }
    Ok(endpoints)
}

/// Parses a size; one below `least` is refused with the reason `why`.
pub(super) fn bytes(flag: &str, text: &str, (least, why): (u64, &str)) -> anyhow::Result<u64> {
    let quantity = mayfly_api::k8s::apimachinery::pkg::api::resource::Quantity(text.to_owned());
    let bytes = mayfly_api::quantity::whole(&quantity).with_context(|| format!("--{flag} {text}"))?;
    anyhow::ensure!(bytes >= least, "--{flag} {text}: {why}");
    Ok(bytes)
}

/// Parses `COUNT[:CPU[:MEMORY[:PODS]]]`.
pub(super) fn simulated_nodes(text: &str) -> anyhow::Result<mayfly_simulated::Config> {
    const EXAMPLE: &str = "expected a number of nodes, and what each has: 100, or 100:32:256Gi:110";
    let unclear = || format!("--simulated-nodes {text}: {EXAMPLE}");
    let parts: Vec<_> = text.split(':').collect();
    anyhow::ensure!(parts.len() <= 4, unclear());
    let defaults = mayfly_simulated::Config::default();
    let quantity = |part: &str| mayfly_api::k8s::apimachinery::pkg::api::resource::Quantity(part.to_owned());
    let config = mayfly_simulated::Config {
        count: parts[0].parse().with_context(unclear)?,
        cpu_millis: match parts.get(1) {
            Some(cpu) => mayfly_api::quantity::millis(&quantity(cpu)).with_context(unclear)?,
            None => defaults.cpu_millis,
        },
        memory_bytes: match parts.get(2) {
            Some(memory) => mayfly_api::quantity::whole(&quantity(memory)).with_context(unclear)?,
            None => defaults.memory_bytes,
        },
        pods_max: match parts.get(3) {
            Some(pods) => pods.parse().with_context(unclear)?,
            None => defaults.pods_max,
        },
        ..defaults
    };
    anyhow::ensure!(
        (1..=SIMULATED_NODES_MAX).contains(&config.count),
        "--simulated-nodes {text}: between 1 and {SIMULATED_NODES_MAX} nodes can be simulated"
    );
    Ok(config)
}

pub(super) fn node_name(given: Option<String>) -> anyhow::Result<String> {
    if let Some(name) = given {
        if let Err(why) = is_node_name(&name) {
            bail!("--node-name {name:?}: {why}");
        }
        return Ok(name);
    }
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    Ok(if is_node_name(&host).is_ok() { host } else { "localhost".into() })
}

/// A node's name is also the value of one of its labels.
fn is_node_name(name: &str) -> Result<(), String> {
    names::dns_subdomain(name)?;
    if name.len() > names::LABEL_BYTES_MAX {
        return Err(format!("must be no more than {} bytes", names::LABEL_BYTES_MAX));
    }
    Ok(())
}
