//! A compiled component on the disk: the engine's output, and behind it a seal by which a damaged or a
//! foreign file is known before it is mapped as machine code.
//!
//! ```text
//! machine code (ELF) │ magic, 8 bytes │ length, 8 │ CRC-32, 4 │ world, 1 │ 3 zeros
//! ```

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::World;

/// Changes with the format of the files and with the way they are compiled.
pub(super) const VERSION: u32 = 2;
const MAGIC: &[u8; 8] = b"mayfly-1";
const SEAL_BYTES: usize = 24;
/// The maximum number of files whose checksum is remembered; beyond it all are checked again.
const REMEMBERED_MAX: usize = 100_000;

/// A file that is whole and ours.
pub(super) struct Checked {
    pub(super) path: PathBuf,
    pub(super) world: World,
    pub(super) bytes: u64,
}

/// The identity of one state of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

/// Adds the seal.
pub(super) fn seal(mut machine_code: Vec<u8>, world: World) -> Vec<u8> {
    let length = machine_code.len() as u64;
    let checksum = crc32fast::hash(&machine_code);
    machine_code.extend_from_slice(MAGIC);
    machine_code.extend_from_slice(&length.to_le_bytes());
    machine_code.extend_from_slice(&checksum.to_le_bytes());
    machine_code.extend_from_slice(&[code(world), 0, 0, 0]);
    machine_code
}

/// A file that was opened, and not read yet.
pub(super) struct Opened {
    path: PathBuf,
    file: File,
    identity: Identity,
}

/// Files that were checked since this process began.
static SEEN: LazyLock<Mutex<HashMap<Identity, World>>> = LazyLock::new(Mutex::default);

/// Opens a compiled file. Quick.
pub(super) fn open(path: &Path) -> io::Result<Opened> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let identity = Identity {
        device: metadata.dev(),
        inode: metadata.ino(),
        bytes: metadata.len(),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    };
    Ok(Opened { path: path.to_owned(), file, identity })
}

impl Opened {
    pub(super) fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    /// Checks the seal; [`io::ErrorKind::InvalidData`] if it does not fit. The whole file is read once per process,
    /// which takes as long as it is large; afterwards its identity is enough.
    pub(super) fn check(mut self) -> io::Result<Checked> {
        let (path, bytes) = (self.path, self.identity.bytes);
        if let Some(world) = SEEN.lock().get(&self.identity).copied() {
            return Ok(Checked { path, world, bytes });
        }
        let mut content = Vec::with_capacity(usize::try_from(bytes).unwrap_or_default());
        self.file.read_to_end(&mut content)?;
        let world = opened(&content).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
        let mut seen = SEEN.lock();
        if seen.len() >= REMEMBERED_MAX {
            seen.clear();
        }
        seen.insert(self.identity, world);
        Ok(Checked { path, world, bytes })
    }
}

/// Whether a file cannot be had because the process or the machine has too much of something in use: in a moment it may
/// be there.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    error.kind() == io::ErrorKind::OutOfMemory
        || matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN))
}

/// The world, if the seal fits the content.
fn opened(content: &[u8]) -> Result<World, &'static str> {
    let (machine_code, seal) = content.split_last_chunk::<SEAL_BYTES>().ok_or("it is too short")?;
    let (magic, rest) = seal.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err("it has no seal of this version");
    }
    let length = (machine_code.len() as u64).to_le_bytes();
    if rest[..8] != length {
        return Err("it has another length than its seal says");
    }
    if rest[8..12] != crc32fast::hash(machine_code).to_le_bytes() {
        return Err("its content does not have the checksum of its seal");
    }
    [World::HttpWasi0_2, World::HttpWasi0_3, World::CommandWasi0_2, World::CommandWasi0_3]
        .into_iter()
        .find(|world| code(*world) == rest[12])
        .ok_or("its seal names no known world")
}

fn code(world: World) -> u8 {
    match world {
        World::HttpWasi0_2 => 1,
        World::HttpWasi0_3 => 2,
        World::CommandWasi0_2 => 3,
        World::CommandWasi0_3 => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_byte_breaks_the_seal() {
        let sealed = seal(vec![7; 1000], World::HttpWasi0_3);
        assert_eq!(opened(&sealed), Ok(World::HttpWasi0_3));
        for at in 0..sealed.len() - 3 {
            let mut damaged = sealed.clone();
            damaged[at] ^= 0x10;
            assert!(opened(&damaged).is_err(), "byte {at}");
        }
        for length in 0..sealed.len() {
            assert!(opened(&sealed[..length]).is_err(), "cut to {length}");
        }
    }
}
