//! The location and the limits of an engine.

use std::path::PathBuf;
use std::time::Duration;

use crate::executor::endpoint::AwsEndpoints;
use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_machine as machine;

/// The region of a configuration that names none.
pub const REGION_DEFAULT: &str = "us-east-1";
/// The account of a configuration that names none.
pub const ACCOUNT_DEFAULT: &str = "000000000000";

/// An engine's settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// The folder of the journal; `None` for a journal in memory.
    pub data_dir: Option<PathBuf>,
    /// First part of ARNs, `aws`.
    pub partition: String,
    /// Region of ARNs and events.
    pub region: String,
    /// Account of ARNs, twelve digits.
    pub account: String,
    /// Services that tasks reach at another endpoint.
    pub endpoints: AwsEndpoints,
    /// Bounds.
    pub limits: EngineLimits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: None,
            partition: "aws".to_owned(),
            region: REGION_DEFAULT.to_owned(),
            account: ACCOUNT_DEFAULT.to_owned(),
            endpoints: AwsEndpoints::default(),
            limits: EngineLimits::default(),
        }
    }
}

impl Config {
    /// Partition, region and account of the ARNs of a state machine's executions and map runs: those of its own ARN,
    /// which a request's signature may have taken from another region or account than the engine's. The engine's for a
    /// text of another form.
    pub(crate) fn scope_of<'a>(&'a self, machine: &'a StateMachineArn) -> [&'a str; 3] {
        let mut fields = machine.prefix().unwrap_or_default().split(':');
        let mut next = || fields.next().unwrap_or_default();
        match [next(), next(), next(), next(), next()] {
            ["arn", partition, "states", region, account] => [partition, region, account],
            _ => [&*self.partition, &*self.region, &*self.account],
        }
    }
}

/// Bounds of an engine.
#[derive(Debug, Clone)]
pub struct EngineLimits {
    /// Bounds of each execution.
    pub execution: machine::ExecutionLimits,
    /// Executions that are running: AWS's million.
    pub open_executions: usize,
    /// Effects that run at the same time. An effect that waits for a worker, a token or another execution is not
    /// counted.
    pub effects: usize,
    /// The same, of one execution.
    pub effects_per_execution: usize,
    /// The duration of a worker's poll for work: AWS's minute.
    pub activity_poll: Duration,
    /// The time after its end for which an execution can be redriven: AWS's fortnight.
    pub redrive_window: Duration,
    /// The time for which an execution that only waits stays in memory; after it, only its timers do.
    pub idle_in_memory: Duration,
    /// Records after which an execution's state is written down: resuming computes
    /// at most about so many again.
    pub checkpoint_records: u64,
    /// Bytes of the files that a distributed Map reads its items from; all items are in memory at once. For a longer
    /// file, `MaxItems` selects the beginning.
    pub item_bytes: usize,
    /// The time for which an ended execution is kept: AWS's 90 days.
    pub retention: Duration,
    /// State machines kept compiled.
    pub machines_cached: usize,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            execution: machine::ExecutionLimits::default(),
            open_executions: 1_000_000,
            effects: 1_024,
            effects_per_execution: 256,
            activity_poll: Duration::from_secs(60),
            redrive_window: Duration::from_secs(14 * 24 * 3_600),
            idle_in_memory: Duration::from_secs(10),
            checkpoint_records: 1_000,
            item_bytes: 256 << 20,
            retention: Duration::from_secs(90 * 24 * 3_600),
            machines_cached: 1_024,
        }
    }
}
