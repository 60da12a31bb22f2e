//! The use of a volume, which its file system reports: FlexVolume drivers have no call for it.

use std::path::Path;

use mayfly_csi::proto::{VolumeUsage, volume_usage::Unit};
use mayfly_flexvolume::mounts::is_mount_point;
use nix::sys::statvfs::statvfs;
use tonic::Status;

/// Total, available and used units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UsageAmounts {
    pub(crate) total: u64,
    available: u64,
    used: u64,
}

/// The use of a mounted file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileSystemUse {
    pub(crate) bytes: UsageAmounts,
    inodes: UsageAmounts,
}

impl FileSystemUse {
    /// Blocks.
    ///
    /// # Errors
    /// `NOT_FOUND`: nothing is mounted at the path. `INTERNAL`: the file system does not answer.
    pub(crate) fn of(path: &Path) -> Result<Self, Status> {
        if !is_mount_point(path) {
            return Err(Status::not_found(format!("nothing is mounted at {}", path.display())));
        }
        let found = statvfs(path);
        let found = found.map_err(|error| Status::internal(format!("{}: {error}", path.display())))?;
        let amounts = |total: u64, available: u64, free: u64, unit: u64| UsageAmounts {
            total: total.saturating_mul(unit),
            available: available.saturating_mul(unit),
            used: total.saturating_sub(free).saturating_mul(unit),
        };
        Ok(Self {
            bytes: amounts(
                found.blocks(),
                found.blocks_available(),
                found.blocks_free(),
                found.fragment_size(),
            ),
            inodes: amounts(found.files(), found.files_available(), found.files_free(), 1),
        })
    }

    pub(crate) fn usage(self) -> Vec<VolumeUsage> {
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let usage = |amounts: UsageAmounts, unit: Unit| VolumeUsage {
            available: number(amounts.available),
            total: number(amounts.total),
            used: number(amounts.used),
            unit: unit.into(),
        };
        vec![usage(self.bytes, Unit::Bytes), usage(self.inodes, Unit::Inodes)]
    }
}
