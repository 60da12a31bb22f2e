//! The common part of the load generators in `examples/`: flags, concurrent clients, results.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// The program's arguments as pairs of flag and value.
pub fn flags() -> impl Iterator<Item = Result<(String, String)>> {
    let mut arguments = std::env::args().skip(1);
    std::iter::from_fn(move || {
        let flag = arguments.next()?;
        let value = arguments.next().with_context(|| format!("{flag} needs a value"));
        Some(value.map(|value| (flag, value)))
    })
}

/// The durations of calls.
#[derive(Debug)]
pub struct Latencies(Vec<Duration>);

impl Latencies {
    pub fn new(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self(times)
    }

    /// Runs clients concurrently, each of which returns the durations of its calls; also returns the total duration.
    pub async fn of_clients<F>(clients: usize, client: impl Fn(usize) -> F) -> Result<(Self, Duration)>
    where
        F: Future<Output = Result<Vec<Duration>>> + Send + 'static,
    {
        let begin = Instant::now();
        let clients: Vec<_> = (0..clients).map(|number| tokio::spawn(client(number))).collect();
        let mut times = Vec::new();
        for client in clients {
            times.extend(client.await??);
        }
        Ok((Self::new(times), begin.elapsed()))
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The duration that this percentage of the calls did not exceed.
    fn at(&self, percent: usize) -> Option<Duration> {
        self.0.get((self.0.len() * percent / 100).min(self.0.len().saturating_sub(1))).copied()
    }

    /// An object with `p50`, `p99` and `max` in a unit, merged into the rest of the report.
    pub fn report(&self, unit: &str, of_one: Duration, mut report: Map<String, Value>) -> Value {
        for (name, percent) in [("p50", 50), ("p99", 99), ("max", 100)] {
            let value = self.at(percent).map(|time| time.as_secs_f64() / of_one.as_secs_f64());
            report.insert(format!("{name}_{unit}"), json!(value));
        }
        Value::Object(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_measured() {
        let latencies = Latencies::new((1..=200).rev().map(Duration::from_millis).collect());
        let report = latencies.report("ms", Duration::from_millis(1), Map::new());
        assert_eq!(report, json!({"p50_ms": 101.0, "p99_ms": 199.0, "max_ms": 200.0}));
        let none = Latencies::new(Vec::new()).report("us", Duration::from_micros(1), Map::new());
        assert_eq!(none, json!({"p50_us": null, "p99_us": null, "max_us": null}));
    }
}
