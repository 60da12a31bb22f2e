//! A followed log of one container: it stays open while its pod runs, and ends after the last line.
//!
//! ```text
//!           reporting ⇄ silent         another replica of the revision reports, or no longer
//!               └──┬────┘
//!                  ▼
//!                 over ──▶ the last lines, then the end
//! ```

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Pod, PodStatus},
};
use mayfly_runtime::{
    ContainerId,
    logs::{LogOptions, LogReader, LogStream},
};
use tokio::time::{Interval, MissedTickBehavior};

use crate::{http::Logs, pod::container::log_path};

/// The interval of checks of the pod behind a followed log.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Checks without a new line after which the log of a container that has ended is complete: lines are written with a
/// delay.
const LAST_LOOKS: u32 = 2;

/// The log of one container, streamed as lines arrive.
pub(crate) struct Followed {
    logs: Logs,
    pod: Arc<Pod>,
    id: ContainerId,
    options: LogOptions,
    /// A note that is sent instead of lines that another replica's log contains.
    said: Option<Bytes>,
    /// `None` while another replica streams the lines.
    lines: Option<LogReader>,
    is_over: bool,
    /// Checks without a new line since the container ended.
    quiet_looks: u32,
    looks: Interval,
}

impl Followed {
    /// `said` is sent first when another replica streams the lines.
    pub(crate) async fn open(
        logs: Logs,
        pod: Arc<Pod>,
        id: ContainerId,
        options: LogOptions,
        said: Option<String>,
    ) -> io::Result<LogStream> {
        let lines = match said {
            Some(_) => None,
            None => Some(open(&logs, &pod, &id, options.clone()).await?),
        };
        let mut looks = tokio::time::interval(POLL_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let said = said.map(Bytes::from);
        let followed = Self { logs, pod, id, options, said, lines, is_over: false, quiet_looks: 0, looks };
        let lines = stream::unfold(followed, |mut followed| async move {
            let line = followed.next().await?;
            Some((line, followed))
        });
        Ok(lines.boxed())
    }

    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if let Some(said) = self.said.take() {
            return Some(Ok(said));
        }
        loop {
            tokio::select! {
                biased;
                _ = self.looks.tick() => {
                    if self.is_over && self.lines.as_ref().is_none_or(LogReader::is_live) {
                        self.quiet_looks += 1;
                    }
                    if let Err(error) = self.poll().await {
                        return Some(Err(error));
                    }
                    let quiet = self.lines.is_none() || self.quiet_looks > LAST_LOOKS;
                    if self.is_over && quiet {
                        return None;
                    }
                }
                line = next_of(&mut self.lines) => {
                    self.quiet_looks = 0;
                    return line;
                }
            }
        }
    }

    /// Reads the pod's state, and which replica streams the lines.
    async fn poll(&mut self) -> io::Result<()> {
        self.is_over = self.is_over || self.has_ended();
        let is_anothers = self.logs.reporting_replica(&self.pod).is_some();
        if is_anothers {
            self.lines = None;
        } else if self.lines.is_none() && !self.is_over {
            // Earlier lines are in the log of the previous container.
            let options = LogOptions { tail_lines: Some(0), ..self.options.clone() };
            self.lines = Some(open(&self.logs, &self.pod, &self.id, options).await?);
        }
        Ok(())
    }

    /// Whether the pod is deleted or finished, or this run of the container has ended.
    fn has_ended(&self) -> bool {
        let metadata = &self.pod.metadata;
        let key = ObjectKey::new(
            metadata.namespace.clone().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default(),
        );
        let Some(now) = self.logs.pods.get(&key).filter(|now| now.metadata.uid == metadata.uid) else {
            return true;
        };
        now.status.as_ref().is_some_and(|status| is_over(status, &self.id))
    }
}

/// Whether the pod, or this run of its container, has ended.
fn is_over(status: &PodStatus, id: &ContainerId) -> bool {
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return true;
    }
    let all = status.container_statuses.iter().chain(&status.init_container_statuses);
    let mut all = all.chain(&status.ephemeral_container_statuses).flatten();
    all.find(|container| container.name == id.name).is_some_and(|container| {
        let attempt = u32::try_from(container.restart_count).unwrap_or(0);
        let ended = container.state.as_ref().is_some_and(|state| state.terminated.is_some());
        attempt > id.attempt || ended
    })
}

async fn open(logs: &Logs, pod: &Pod, id: &ContainerId, options: LogOptions) -> io::Result<LogReader> {
    LogReader::open(vec![log_path(pod, id, &logs.layout)], options).await
}

/// The next line; pends forever while another replica streams the lines.
async fn next_of(lines: &mut Option<LogReader>) -> Option<io::Result<Bytes>> {
    match lines {
        Some(lines) => lines.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::PodUid;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_log_ends_with_its_container_of_whatever_kind() {
        let id = ContainerId { pod: PodUid("u".into()), name: "c".into(), attempt: 1 };
        let of = |list: &str, restarts: u32, state: &str| -> bool {
            let container = json!({"name": "c", "image": "", "imageID": "", "ready": false,
                "restartCount": restarts, "state": {state: {"exitCode": 0}}});
            let status = json!({"phase": "Running", list: [container]});
            is_over(&serde_json::from_value(status).unwrap(), &id)
        };
        for list in ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"] {
            assert!(!of(list, 1, "running"), "{list}");
            assert!(of(list, 1, "terminated"), "{list}");
            assert!(of(list, 2, "running"), "{list}");
        }
        let ended = PodStatus { phase: Some("Failed".into()), ..PodStatus::default() };
        assert!(is_over(&ended, &id) && !is_over(&PodStatus::default(), &id));
    }
}
