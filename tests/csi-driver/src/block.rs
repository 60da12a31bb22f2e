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
/// The file behind a loop device, in the folder of its volume.
const IMAGE: &str = "image";
/// The device file of a placeholder, in the folder of its volume.
const DEVICE: &str = "device";

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

    /// Sets up the device of a volume of this size, in bytes, whose data is in `folder`, and returns its path: that of
    /// the existing one, if the driver stopped before it had stored it.
    pub(crate) fn set_up(self, folder: &Path, bytes: i64) -> Result<PathBuf, Status> {
        if let Some(reason) = self.missing() {
            return Err(Status::failed_precondition(reason));
        }
        let refused = |error: io::Error| Status::internal(format!("cannot set up a block device: {error}"));
        if self == Self::Placeholder {
            let path = folder.join(DEVICE);
            let mode = Mode::from_bits_truncate(0o660);
            let made = mknod(&path, SFlag::S_IFBLK, mode, makedev(PLACEHOLDER.0, PLACEHOLDER.1));
            return match made {
                Ok(()) | Err(nix::errno::Errno::EEXIST) => Ok(path),
                Err(error) => Err(refused(error.into())),
            };
        }
        let image = folder.join(IMAGE);
        let file = File::options().create(true).truncate(false).write(true).open(&image).map_err(refused)?;
        file.set_len(u64::try_from(bytes).unwrap_or(0)).map_err(refused)?;
        if let Some(device) = loop_devices(&image).map_err(refused)?.into_iter().next() {
            return Ok(device);
        }
        let shown = losetup(&["--find", "--show"], &image).map_err(refused)?;
        Ok(PathBuf::from(shown.trim()))
    }

    /// Releases the device of the volume whose data is in `folder`, if there is one.
    pub(crate) fn release(self, folder: &Path) -> Result<(), Status> {
        let released = match self {
            // Not the stored path: after a restart of the machine it can be the device of another volume.
            Self::Loop => loop_devices(&folder.join(IMAGE)).and_then(|devices| {
                devices.iter().try_for_each(|device| losetup(&["--detach"], device).map(drop))
            }),
            Self::Placeholder | Self::Unsupported => match fs::remove_file(folder.join(DEVICE)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            },
        };
        let refused =
            |error: io::Error| format!("cannot release the device of {}: {error}", folder.display());
        released.map_err(|error| Status::internal(refused(error)))
    }
}

/// The loop devices that are set up for a file.
fn loop_devices(image: &Path) -> io::Result<Vec<PathBuf>> {
    let shown = losetup(&["--list", "--noheadings", "--output", "NAME", "--associated"], image)?;
    Ok(shown.lines().map(|line| PathBuf::from(line.trim())).collect())
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
