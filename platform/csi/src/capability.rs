//! The capability of a volume in CSI's form: how it is to be used.

use crate::proto::{
    VolumeCapability,
    volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode},
};

/// The capability of a volume with these Kubernetes access modes: as a block device, or as a file system of a type
/// (empty: the driver's choice) mounted with `mount_flags`.
pub fn capability(
    block: bool,
    fs_type: &str,
    mount_flags: Vec<String>,
    access_modes: &[String],
) -> VolumeCapability {
    let has = |mode: &str| access_modes.iter().any(|one| one == mode);
    let mode = match () {
        () if has("ReadWriteMany") => Mode::MultiNodeMultiWriter,
        () if has("ReadOnlyMany") && !has("ReadWriteOnce") => Mode::MultiNodeReaderOnly,
        // Drivers without SINGLE_NODE_MULTI_WRITER support only this mode.
        () => Mode::SingleNodeWriter,
    };
    let access = match block {
        true => AccessType::Block(BlockVolume {}),
        false => AccessType::Mount(MountVolume {
            fs_type: fs_type.to_owned(),
            mount_flags,
            volume_mount_group: String::new(),
        }),
    };
    VolumeCapability { access_mode: Some(AccessMode { mode: mode.into() }), access_type: Some(access) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_modes_are_those_that_every_driver_knows() {
        for (modes, expected) in [
            (&["ReadWriteOnce"][..], Mode::SingleNodeWriter),
            (&["ReadWriteOncePod"], Mode::SingleNodeWriter),
            (&["ReadOnlyMany"], Mode::MultiNodeReaderOnly),
            (&["ReadWriteOnce", "ReadOnlyMany"], Mode::SingleNodeWriter),
            (&["ReadWriteOnce", "ReadWriteMany"], Mode::MultiNodeMultiWriter),
        ] {
            let modes: Vec<String> = modes.iter().map(|mode| (*mode).to_owned()).collect();
            let found = capability(false, "", Vec::new(), &modes).access_mode.unwrap();
            assert_eq!(found.mode(), expected, "{modes:?}");
        }
    }
}
