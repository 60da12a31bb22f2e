//! Statistics of volumes in the forms of upstream's summary and metrics. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use mayfly_api::k8s::jiff::Timestamp;
use mayfly_runtime::PodUid;
use serde_json::{Value, json};

use super::{MeasuredVolume, PodVolume};
use crate::volumes::statistics::VolumeStatistics;

/// The value of a metric; `None`: the volume has no such figure.
type Figure = fn(&VolumeStatistics) -> Option<u64>;

/// Upstream's metrics of claims, with their help texts.
const METRICS: [(&str, &str, Figure); 7] = [
    ("available_bytes", "Number of available bytes in the volume", |one| Some(one.bytes.available)),
    ("capacity_bytes", "Capacity in bytes of the volume", |one| Some(one.bytes.total)),
    (
        "health_status_abnormal",
        "Abnormal volume health status. The count is either 1 or 0. 1 indicates the volume is unhealthy, 0 indicates \
         volume is healthy",
        |one| one.health.as_ref().map(|health| u64::from(health.is_abnormal)),
    ),
    ("inodes", "Maximum number of inodes in the volume", |one| Some(one.inodes.total)),
    ("inodes_free", "Number of free inodes in the volume", |one| Some(one.inodes.available)),
    ("inodes_used", "Number of used inodes in the volume", |one| Some(one.inodes.used)),
    ("used_bytes", "Number of used bytes in the volume", |one| Some(one.bytes.used)),
];

/// The elements of `volume` of each pod in the summary.
pub(crate) fn summaries(measured: &BTreeMap<PodVolume, MeasuredVolume>) -> BTreeMap<PodUid, Vec<Value>> {
    let mut pods: BTreeMap<PodUid, Vec<Value>> = BTreeMap::new();
    for ((uid, name), volume) in measured {
        pods.entry(uid.clone()).or_default().push(summary(name, volume));
    }
    pods
}

fn summary(name: &str, volume: &MeasuredVolume) -> Value {
    let VolumeStatistics { bytes, inodes, health } = &volume.statistics;
    let at = time_of(volume);
    let mut shown = json!({"name": name, "time": at,
        "capacityBytes": bytes.total, "availableBytes": bytes.available, "usedBytes": bytes.used,
        "inodes": inodes.total, "inodesFree": inodes.available, "inodesUsed": inodes.used});
    if let Some(claim) = &volume.claim {
        shown["pvcRef"] = json!({"name": claim.name, "namespace": claim.namespace});
    }
    if let Some(health) = health {
        shown["volumeHealthStats"] = json!({"abnormal": health.is_abnormal});
    }
    shown
}

/// The time of a measurement in whole seconds, as Kubernetes writes times.
fn time_of(volume: &MeasuredVolume) -> String {
    Timestamp::from_second(volume.at.as_second()).unwrap_or_default().to_string()
}

/// The metrics `kubelet_volume_stats_*` in Prometheus' text format: one sample for each claim, however many pods use
/// it.
pub(crate) fn metrics(measured: &BTreeMap<PodVolume, MeasuredVolume>) -> String {
    let mut seen = BTreeSet::new();
    let claims: Vec<_> = measured
        .values()
        .filter_map(|volume| Some((volume.claim.as_ref()?, &volume.statistics)))
        .filter(|(claim, _)| seen.insert((*claim).clone()))
        .collect();
    let mut text = String::new();
    for (name, help, figure) in METRICS {
        let samples = claims.iter().filter_map(|(claim, statistics)| Some((claim, figure(statistics)?)));
        let mut samples = samples.peekable();
        if samples.peek().is_none() {
            continue;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# HELP kubelet_volume_stats_{name} [ALPHA] {help}\n# TYPE kubelet_volume_stats_{name} gauge"
        );
        for (claim, value) in samples {
            // Names of objects need no escapes.
            let (namespace, claim) = (&claim.namespace, &claim.name);
            let labels = format!("namespace=\"{namespace}\",persistentvolumeclaim=\"{claim}\"");
            let _ = writeln!(text, "kubelet_volume_stats_{name}{{{labels}}} {value}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use mayfly_api::ObjectKey;

    use super::*;
    use crate::volumes::statistics::{UnitUsage, VolumeHealth};

    fn volume(claim: Option<&str>, used: u64, is_abnormal: Option<bool>) -> MeasuredVolume {
        let statistics = VolumeStatistics {
            bytes: UnitUsage { total: 100, available: 100 - used, used },
            inodes: UnitUsage { total: 10, available: 9, used: 1 },
            health: is_abnormal.map(|is_abnormal| VolumeHealth { is_abnormal, message: String::new() }),
        };
        let claim = claim.map(|name| ObjectKey::new("ns", name));
        MeasuredVolume { claim, at: Timestamp::from_millisecond(1_500).unwrap(), statistics }
    }

    fn measured() -> BTreeMap<PodVolume, MeasuredVolume> {
        let of = |pod: &str, name: &str| (PodUid(pod.into()), name.to_owned());
        BTreeMap::from([
            (of("a", "data"), volume(Some("shared"), 40, Some(true))),
            (of("a", "inline"), volume(None, 1, None)),
            (of("b", "data"), volume(Some("shared"), 40, Some(true))),
            (of("b", "own"), volume(Some("own"), 7, None)),
        ])
    }

    #[test]
    fn the_summary_names_claims() {
        let pods = summaries(&measured());
        assert_eq!(
            pods[&PodUid("a".into())],
            [
                json!({"name": "data", "time": "1970-01-01T00:00:01Z", "capacityBytes": 100, "availableBytes": 60,
                    "usedBytes": 40, "inodes": 10, "inodesFree": 9, "inodesUsed": 1,
                    "pvcRef": {"name": "shared", "namespace": "ns"}, "volumeHealthStats": {"abnormal": true}}),
                json!({"name": "inline", "time": "1970-01-01T00:00:01Z", "capacityBytes": 100,
                    "availableBytes": 99, "usedBytes": 1, "inodes": 10, "inodesFree": 9, "inodesUsed": 1}),
            ]
        );
        assert_eq!(pods[&PodUid("b".into())].len(), 2);
    }

    #[test]
    fn a_claim_has_one_sample_of_each_metric() {
        let text = metrics(&measured());
        let used: Vec<_> = text.lines().filter(|line| line.contains("used_bytes")).collect();
        assert_eq!(
            used,
            [
                "# HELP kubelet_volume_stats_used_bytes [ALPHA] Number of used bytes in the volume",
                "# TYPE kubelet_volume_stats_used_bytes gauge",
                "kubelet_volume_stats_used_bytes{namespace=\"ns\",persistentvolumeclaim=\"shared\"} 40",
                "kubelet_volume_stats_used_bytes{namespace=\"ns\",persistentvolumeclaim=\"own\"} 7",
            ]
        );
        let abnormal: Vec<_> = text.lines().filter(|line| line.contains("_abnormal{")).collect();
        assert_eq!(
            abnormal,
            [
                "kubelet_volume_stats_health_status_abnormal{namespace=\"ns\",persistentvolumeclaim=\"shared\"} 1"
            ]
        );
        assert_eq!(metrics(&BTreeMap::new()), "");
    }
}
