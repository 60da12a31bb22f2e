//! Volumes as block devices: files of the host behind loop devices.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::Command,
};

use mayfly_csi::proto::{VolumeCapability, volume_capability::AccessType};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use tonic::Status;

/// The kernel's interface that allocates loop devices.
const LOOP_CONTROL: &str = "/dev/loop-control";
/// The numbers of a placeholder: a loop device that is not set up.
const PLACEHOLDER: (u64, u64) = (7, 250);

/// The block devices of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockDevices {
    /// Block volumes are refused.
    #[default]
    Unsupported,
    /// Loop devices of the kernel, set up by `losetup`.
    Loop,
    /// Device files without a device, for tests of the calls and their order on kernels without loop devices.
    Placeholder,
}

impl BlockDevices {
    /// The reason why the driver refuses block volumes on this machine; `None`: it supports them.
    pub fn missing(self) -> Option<String> {
        match self {
            Self::Unsupported => Some("this driver is not configured for block devices".into()),
            Self::Loop if !Path::new(LOOP_CONTROL).exists() => {
                Some(format!("the kernel has no loop devices: {LOOP_CONTROL} does not exist"))
            }
            // A listing needs no rights and no free device.
            Self::Loop => Command::new("losetup").arg("--list").output().err().map(|error| {
                format!("loop devices are set up by losetup (util-linux), which cannot be run: {error}")
            }),
            Self::Placeholder => None,
        }
    }

    /// Sets up the device of a volume of this size, in bytes, whose data is in `folder`, and returns its path.
    pub(crate) fn set_up(self, folder: &Path, bytes: i64) -> Result<PathBuf, Status> {
        if let Some(reason) = self.missing() {
            return Err(Status::failed_precondition(reason));
        }
        let refused = |error: io::Error| Status::internal(format!("cannot set up a block device: {error}"));
        if self == Self::Placeholder {
            let path = folder.join("device");
            let mode = Mode::from_bits_truncate(0o660);
            let made = mknod(&path, SFlag::S_IFBLK, mode, makedev(PLACEHOLDER.0, PLACEHOLDER.1));
            return match made {
                Ok(()) | Err(nix::errno::Errno::EEXIST) => Ok(path),
                Err(error) => Err(refused(error.into())),
            };
        }
        let image = folder.join("image");
        let file = File::options().create(true).truncate(false).write(true).open(&image).map_err(refused)?;
        file.set_len(u64::try_from(bytes).unwrap_or(0)).map_err(refused)?;
        let shown = losetup(&["--find", "--show"], &image).map_err(refused)?;
        Ok(PathBuf::from(shown.trim()))
    }

    /// Releases a device.
    pub(crate) fn release(self, device: &Path) -> Result<(), Status> {
        let released = match self {
            Self::Loop => losetup(&["--detach"], device).map(drop),
            Self::Placeholder | Self::Unsupported => fs::remove_file(device),
        };
        released.map_err(|error| Status::internal(format!("cannot release {}: {error}", device.display())))
    }
}

/// Runs `losetup` and returns its output.
fn losetup(arguments: &[&str], path: &Path) -> io::Result<String> {
    let output = Command::new("losetup").args(arguments).arg(path).output()?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// Whether a volume is to be used as a block device.
pub(crate) fn is_block(capability: Option<&VolumeCapability>) -> bool {
    capability.is_some_and(|one| matches!(one.access_type, Some(AccessType::Block(_))))
}
