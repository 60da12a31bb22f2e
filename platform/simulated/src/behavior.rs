//! The behaviour of a simulated pod, from its annotations.

use std::{collections::BTreeMap, time::Duration};

use mayfly_api::k8s::api::core::v1::Pod;

/// The pause before the pod's containers run.
pub const ANNOTATION_START: &str = "simulated.mayfly.dev/start-seconds";
/// The pause between running and ready.
pub const ANNOTATION_READY: &str = "simulated.mayfly.dev/ready-seconds";
/// The time for which the containers run; without it, until the pod is deleted.
pub const ANNOTATION_RUN: &str = "simulated.mayfly.dev/run-seconds";
/// The exit code of containers that end by themselves.
pub const ANNOTATION_EXIT_CODE: &str = "simulated.mayfly.dev/exit-code";
/// The pause between deletion and the end; at most the grace period.
pub const ANNOTATION_STOP: &str = "simulated.mayfly.dev/stop-seconds";
/// The reason why the containers cannot start.
pub const ANNOTATION_START_ERROR: &str = "simulated.mayfly.dev/start-error";

/// The life of a simulated pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Behavior {
    pub start: Duration,
    pub ready: Duration,
    pub run: Option<Duration>,
    pub exit_code: i32,
    pub stop: Duration,
    pub start_error: Option<String>,
}

impl Behavior {
    /// An annotation that is not a number counts as absent.
    pub fn of(pod: &Pod) -> Self {
        let none = BTreeMap::new();
        let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let seconds = |name: &str| {
            let seconds: f64 = annotations.get(name)?.parse().ok()?;
            Duration::try_from_secs_f64(seconds).ok()
        };
        Self {
            start: seconds(ANNOTATION_START).unwrap_or_default(),
            ready: seconds(ANNOTATION_READY).unwrap_or_default(),
            run: seconds(ANNOTATION_RUN),
            exit_code: annotations.get(ANNOTATION_EXIT_CODE).and_then(|code| code.parse().ok()).unwrap_or(0),
            stop: seconds(ANNOTATION_STOP).unwrap_or_default(),
            start_error: annotations.get(ANNOTATION_START_ERROR).cloned(),
        }
    }
}
