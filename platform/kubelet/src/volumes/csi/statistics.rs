//! Statistics of published volumes, as their drivers measure them (upstream: `csi_metrics.go`).

use std::{collections::BTreeMap, path::Path};

use mayfly_csi::proto::{
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, VolumeUsage, volume_usage::Unit,
};

use super::{CsiRecord, CsiVolumeError, CsiVolumes, KIND, text};
use crate::volumes::{
    journal,
    statistics::{UnitUsage, VolumeHealth, VolumeStatistics},
};

/// A volume that was published for a pod, or is being published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublishedVolume(CsiRecord);

impl PublishedVolume {
    pub(crate) fn driver(&self) -> &str {
        &self.0.driver
    }
}

impl CsiVolumes {
    /// The published volumes of a pod, by the names in its spec. `root`: the folder of all pods. Blocks.
    pub(in crate::volumes) fn published(&self, root: &Path, uid: &str) -> BTreeMap<String, PublishedVolume> {
        let records = journal::read_all::<CsiRecord>(&root.join(uid), KIND).into_iter();
        let named = records.filter_map(|(path, record)| Some((journal::volume_of(&path, KIND)?, record)));
        named.map(|(name, record)| (name, PublishedVolume(record))).collect()
    }

    /// Asks the driver of a volume for its statistics; `None`: the driver does not offer them.
    pub(in crate::volumes) async fn measure(
        &self,
        volume: &PublishedVolume,
    ) -> Result<Option<VolumeStatistics>, CsiVolumeError> {
        let record = &volume.0;
        let driver = self.driver(&record.driver)?;
        if !driver.node.stats {
            return Ok(None);
        }
        let request = NodeGetVolumeStatsRequest {
            volume_id: record.handle.clone(),
            volume_path: text(&record.target),
            staging_target_path: record.staging.as_deref().map(text).unwrap_or_default(),
        };
        let answer = driver.node_get_volume_stats(request).await?;
        if answer.usage.is_empty() && !driver.node.condition {
            return Err(driver.invalid_response("NodeGetVolumeStats", "without any usage".to_owned()).into());
        }
        Ok(Some(statistics(answer, driver.node.condition)))
    }
}

/// The statistics in a driver's answer. Its condition counts only if the driver has the capability for it.
fn statistics(answer: NodeGetVolumeStatsResponse, tells_condition: bool) -> VolumeStatistics {
    let mut found = VolumeStatistics::default();
    for usage in answer.usage {
        match usage.unit() {
            Unit::Bytes => found.bytes = amounts(&usage),
            Unit::Inodes => found.inodes = amounts(&usage),
            Unit::Unknown => {}
        }
    }
    let condition = answer.volume_condition.filter(|_| tells_condition);
    found.health = condition
        .map(|condition| VolumeHealth { is_abnormal: condition.abnormal, message: condition.message });
    found
}

fn amounts(usage: &VolumeUsage) -> UnitUsage {
    let amount = |signed: i64| u64::try_from(signed).unwrap_or(0);
    UnitUsage { total: amount(usage.total), available: amount(usage.available), used: amount(usage.used) }
}

#[cfg(test)]
mod tests {
    use mayfly_csi::proto::VolumeCondition;

    use super::*;

    #[test]
    fn amounts_and_conditions_are_those_of_the_driver() {
        let usage = |unit: Unit, [total, available, used]: [i64; 3]| VolumeUsage {
            unit: unit.into(),
            total,
            available,
            used,
        };
        let answer = NodeGetVolumeStatsResponse {
            usage: vec![
                usage(Unit::Inodes, [10, 7, 3]),
                usage(Unit::Bytes, [100, 60, -1]),
                usage(Unit::Unknown, [1, 1, 1]),
            ],
            volume_condition: Some(VolumeCondition { abnormal: true, message: "a disk is lost".into() }),
        };
        let expected = VolumeStatistics {
            bytes: UnitUsage { total: 100, available: 60, used: 0 },
            inodes: UnitUsage { total: 10, available: 7, used: 3 },
            health: Some(VolumeHealth { is_abnormal: true, message: "a disk is lost".into() }),
        };
        assert_eq!(statistics(answer.clone(), true), expected);
        assert_eq!(statistics(answer, false).health, None, "the driver does not have the capability");
    }
}
