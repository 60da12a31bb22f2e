//! The statistics of the pods' volumes: measured in the background, shown in the summary and as metrics.
//!
//! ```text
//! found ──▶ due ──▶ being measured ──▶ known, due again after a minute
//!                        │                 ▲
//!                        └──▶ failed ──────┘  the last figures stay
//! ```
//! A volume is measured on its own, once at a time, and a driver answers a few calls at a time: a driver that does not
//! answer delays the figures of its own volumes only. (Behaviour: upstream
//! `pkg/kubelet/server/stats/volume_stat_calculator.go` and `pkg/kubelet/metrics/collectors/volume_stats.go`.)

mod schedule;
mod shown;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{StreamExt as _, stream::FuturesUnordered};
use mayfly_api::{
    ObjectKey,
    k8s::{api::core::v1::Pod, jiff::Timestamp},
    volume_claims::claim_of,
};
use mayfly_runtime::PodUid;
use parking_lot::Mutex;
use tokio::{
    task::spawn_blocking,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use self::schedule::MeasureSchedule;
pub(crate) use self::shown::{metrics, summaries};
use crate::{
    pod::worker::Worker,
    volumes::statistics::{MeasurableVolume, VolumeHealth, VolumeStatistics},
};

/// The interval of the search for new volumes and volumes that are due.
const SEARCH_EVERY: Duration = Duration::from_secs(5);
/// The reason of the event about a volume whose driver reports a problem (upstream's).
const REASON_ABNORMAL: &str = "VolumeConditionAbnormal";

/// A volume of a pod: the pod, and the volume's name in its spec.
pub(crate) type PodVolume = (PodUid, String);

/// The last measurements of the volumes of running pods.
pub(crate) type MeasuredVolumes = Mutex<BTreeMap<PodVolume, MeasuredVolume>>;

/// The last measurement of a volume.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MeasuredVolume {
    /// The claim behind the volume; `None`: the pod's spec has the volume itself.
    pub(crate) claim: Option<ObjectKey>,
    pub(crate) at: Timestamp,
    pub(crate) statistics: VolumeStatistics,
}

/// A volume that can be measured now.
#[derive(Clone)]
struct FoundVolume {
    pod: Arc<Pod>,
    claim: Option<ObjectKey>,
    volume: MeasurableVolume,
}

impl Worker {
    /// Measures the volumes of running pods until `stop`.
    pub(crate) async fn measure_volumes(&self, measured: &MeasuredVolumes, stop: &CancellationToken) {
        let Some(volumes) = &self.volumes else { return };
        let mut schedule = MeasureSchedule::default();
        let mut calls = FuturesUnordered::new();
        let mut search = interval(SEARCH_EVERY);
        search.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = search.tick() => {
                    // The claims of pods are not known while the API does not answer.
                    let found = stop.run_until_cancelled(self.found_volumes()).await;
                    let Some(found) = found else { return };
                    measured.lock().retain(|volume, _| found.contains_key(volume));
                    let listed = found.iter().map(|(volume, one)| (volume, one.volume.origin()));
                    for due in schedule.due(listed, Instant::now()) {
                        let Some(one) = found.get(&due).cloned() else { continue };
                        calls.push(async move {
                            let statistics = volumes.measure(one.volume.clone()).await;
                            (due, one, statistics)
                        });
                    }
                }
                Some((volume, one, statistics)) = calls.next() => {
                    schedule.finished(&volume);
                    match statistics {
                        Ok(Some(statistics)) => self.record_statistics(measured, volume, one, statistics),
                        Ok(None) => {}
                        Err(error) => {
                            let (uid, name) = volume;
                            tracing::debug!(pod = %uid, volume = name, error, "cannot measure a volume");
                        }
                    }
                }
            }
        }
    }

    /// The volumes of all pods whose containers run, or have been started.
    async fn found_volumes(&self) -> BTreeMap<PodVolume, FoundVolume> {
        let running: Vec<(PodUid, Arc<Pod>)> = {
            let local = self.local.lock();
            let running = local.iter().filter(|(_, known)| known.sandbox && known.ended.is_none());
            running.filter_map(|(key, known)| Some((known.uid.clone(), self.pods.get(key)?))).collect()
        };
        let mut with_volumes = Vec::new();
        for (uid, pod) in running {
            if pod.spec.as_ref().is_some_and(|spec| spec.volumes.as_ref().is_some_and(|all| !all.is_empty()))
            {
                // A claim that was removed while its pod runs is not measured.
                let claimed = self.claims.of_pod(&pod).await.unwrap_or_default();
                with_volumes.push((uid, pod, claimed));
            }
        }
        let Some(volumes) = self.volumes.clone() else { return BTreeMap::new() };
        let find = move || {
            let mut found = BTreeMap::new();
            for (uid, pod, claimed) in with_volumes {
                for (name, volume) in volumes.measurable(&pod, &uid, &claimed) {
                    let claim = claim(&pod, &name);
                    found.insert((uid.clone(), name), FoundVolume { pod: pod.clone(), claim, volume });
                }
            }
            found
        };
        // Fails only when the Tokio runtime shuts down.
        spawn_blocking(find).await.unwrap_or_default()
    }

    /// Stores a measurement. An event tells the pod's user when a volume has become abnormal.
    fn record_statistics(
        &self,
        measured: &MeasuredVolumes,
        volume: PodVolume,
        found: FoundVolume,
        statistics: VolumeStatistics,
    ) {
        let name = volume.1.clone();
        let health = statistics.health.clone();
        let now = MeasuredVolume { claim: found.claim, at: Timestamp::now(), statistics };
        let before = measured.lock().insert(volume, now).and_then(|before| before.statistics.health);
        if let Some(message) = news(before.as_ref(), health.as_ref()) {
            self.events.warning(&*found.pod, REASON_ABNORMAL, format!("Volume {name}: {message}"));
        }
    }
}

/// The message about a volume that has become abnormal, or is abnormal for another reason than before.
fn news<'m>(before: Option<&VolumeHealth>, now: Option<&'m VolumeHealth>) -> Option<&'m str> {
    let now = now.filter(|now| now.is_abnormal && before != Some(*now))?;
    Some(&now.message)
}

/// The claim behind a volume of a pod.
fn claim(pod: &Pod, volume: &str) -> Option<ObjectKey> {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claim = claim_of(pod, volumes.find(|one| one.name == volume)?)?;
    Some(ObjectKey::new(pod.metadata.namespace.as_deref().unwrap_or_default(), &claim.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abnormal_volume_is_news_once() {
        let health = |is_abnormal, message: &str| VolumeHealth { is_abnormal, message: message.into() };
        let (good, bad, worse) = (health(false, ""), health(true, "slow"), health(true, "lost"));
        for (before, now, expected) in [
            (None, Some(&bad), Some("slow")),
            (Some(&bad), Some(&bad), None),
            (Some(&bad), Some(&worse), Some("lost")),
            (Some(&bad), Some(&good), None),
            (Some(&good), Some(&bad), Some("slow")),
            (Some(&bad), None, None),
        ] {
            assert_eq!(news(before, now), expected, "{before:?} {now:?}");
        }
    }
}
