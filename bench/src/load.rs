//! The load tool: `wrk`, with one thread and the given number of connections.

use std::{net::SocketAddr, process::Command, time::Duration};

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::{command, tools};
use serde_json::{Value, json};

/// The results of one run of the tool. Latencies in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    pub(super) per_second: f64,
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// Responses outside 2xx and 3xx, and failed connections.
    pub(super) errors: u64,
}

impl Load {
    pub(super) fn json(&self) -> Value {
        json!({"perSecond": self.per_second, "p50Ms": self.p50, "p99Ms": self.p99, "errors": self.errors})
    }
}

/// Installs `wrk` if it is missing.
pub(super) fn ensure() -> Result<()> {
    if tools::find("wrk").is_some() {
        return Ok(());
    }
    if tools::can_use_apt() {
        tools::apt_install(&["wrk"]).context("wrk, the load tool, is missing")?;
        return Ok(());
    }
    bail!("wrk, the load tool, is missing: `apt-get install wrk` as root")
}

/// Requests one path in a loop.
pub(super) fn run(address: SocketAddr, path: &str, connections: u32, duration: Duration) -> Result<Load> {
    let mut wrk = Command::new("wrk");
    wrk.args(["--latency", "--timeout", "30s", "-t", "1"]);
    wrk.args(["-c", &connections.to_string(), "-d", &format!("{}s", duration.as_secs())]);
    wrk.arg(format!("http://{address}{path}"));
    let text = command::output(&mut wrk)?;
    parse(&text).with_context(|| format!("unexpected output of wrk:\n{text}"))
}

fn parse(text: &str) -> Option<Load> {
    let field = |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name)).map(str::trim);
    let mut errors = field("Non-2xx or 3xx responses:").and_then(|n| n.parse().ok()).unwrap_or(0);
    if let Some(socket) = field("Socket errors:") {
        errors += socket.split([' ', ',']).filter_map(|word| word.parse::<u64>().ok()).sum::<u64>();
    }
    Some(Load {
        per_second: field("Requests/sec:")?.parse().ok()?,
        p50: milliseconds(field("50%")?)?,
        p99: milliseconds(field("99%")?)?,
        errors,
    })
}

fn milliseconds(text: &str) -> Option<f64> {
    for (unit, factor) in [("us", 1e-3), ("ms", 1.0), ("m", 60e3), ("s", 1e3)] {
        if let Some(number) = text.strip_suffix(unit) {
            return number.parse::<f64>().ok().map(|number| number * factor);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tools_report_is_read() {
        let text = "Running 2s test @ http://127.0.0.1:8080/
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   662.52us    1.20ms  28.40ms   95.36%
    Req/Sec   120.18k     9.77k  137.65k    70.00%
  Latency Distribution
     50%  480.00us
     75%  717.00us
     90%    1.06ms
     99%    1.02s
  239341 requests in 2.00s, 29.67MB read
  Socket errors: connect 1, read 2, write 0, timeout 3
  Non-2xx or 3xx responses: 10
Requests/sec: 119630.11
Transfer/sec:     14.83MB
";
        let expect = Load { per_second: 119_630.11, p50: 0.48, p99: 1020.0, errors: 16 };
        assert_eq!(parse(text), Some(expect));
        assert_eq!(parse("unable to connect"), None);
    }
}
