//! Compiled components on disk: the engine's output and a trailer with a checksum, which detects a damaged or foreign
//! file before it is mapped as machine code.
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

use crate::ComponentWorld;

/// Must be incremented when the file format or the compilation changes.
pub(super) const VERSION: u32 = 2;
const MAGIC: &[u8; 8] = b"mayfly-1";
const TRAILER_BYTES: usize = 24;
/// The maximum number of files remembered as verified; beyond it, all are verified again.
const REMEMBERED_MAX: usize = 100_000;

/// A verified file: complete, and written by this host.
pub(super) struct Checked {
    pub(super) path: PathBuf,
    pub(super) world: ComponentWorld,
    pub(super) bytes: u64,
}

/// Identifies the content of a file: changes whenever the file is written.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

/// Appends the trailer.
pub(super) fn append_trailer(mut machine_code: Vec<u8>, world: ComponentWorld) -> Vec<u8> {
    let length = machine_code.len() as u64;
    let checksum = crc32fast::hash(&machine_code);
    machine_code.extend_from_slice(MAGIC);
    machine_code.extend_from_slice(&length.to_le_bytes());
    machine_code.extend_from_slice(&checksum.to_le_bytes());
    machine_code.extend_from_slice(&[code(world), 0, 0, 0]);
    machine_code
}

/// An opened file whose content has not been read yet.
pub(super) struct Opened {
    path: PathBuf,
    file: File,
    identity: Identity,
}

/// Files that this process has verified.
static VERIFIED: LazyLock<Mutex<HashMap<Identity, ComponentWorld>>> = LazyLock::new(Mutex::default);

/// Opens a compiled file without reading its content.
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

    /// Verifies the trailer; [`io::ErrorKind::InvalidData`] if it does not match. The whole file is read once per
    /// process, which takes time proportional to its size; afterwards its identity is enough.
    pub(super) fn check(mut self) -> io::Result<Checked> {
        let (path, bytes) = (self.path, self.identity.bytes);
        if let Some(world) = VERIFIED.lock().get(&self.identity).copied() {
            return Ok(Checked { path, world, bytes });
        }
        let mut content = Vec::with_capacity(usize::try_from(bytes).unwrap_or_default());
        self.file.read_to_end(&mut content)?;
        let world = opened(&content).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
        let mut verified = VERIFIED.lock();
        if verified.len() >= REMEMBERED_MAX {
            verified.clear();
        }
        verified.insert(self.identity, world);
        Ok(Checked { path, world, bytes })
    }
}

/// Whether opening or mapping failed because file descriptors or memory are exhausted: a retry may succeed.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    error.kind() == io::ErrorKind::OutOfMemory
        || matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN))
}

/// The world, if the trailer matches the content.
fn opened(content: &[u8]) -> Result<ComponentWorld, &'static str> {
    let (machine_code, trailer) =
        content.split_last_chunk::<TRAILER_BYTES>().ok_or("the file is too short")?;
    let (magic, rest) = trailer.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err("the file has no trailer of this version");
    }
    let length = (machine_code.len() as u64).to_le_bytes();
    if rest[..8] != length {
        return Err("the length differs from the one in the trailer");
    }
    if rest[8..12] != crc32fast::hash(machine_code).to_le_bytes() {
        return Err("the checksum does not match the content");
    }
    [
        ComponentWorld::HttpWasi0_2,
        ComponentWorld::HttpWasi0_3,
        ComponentWorld::CommandWasi0_2,
        ComponentWorld::CommandWasi0_3,
    ]
    .into_iter()
    .find(|world| code(*world) == rest[12])
    .ok_or("the trailer names an unknown world")
}

fn code(world: ComponentWorld) -> u8 {
    match world {
        ComponentWorld::HttpWasi0_2 => 1,
        ComponentWorld::HttpWasi0_3 => 2,
        ComponentWorld::CommandWasi0_2 => 3,
        ComponentWorld::CommandWasi0_3 => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_byte_is_detected() {
        let sealed = append_trailer(vec![7; 1000], ComponentWorld::HttpWasi0_3);
        assert_eq!(opened(&sealed), Ok(ComponentWorld::HttpWasi0_3));
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
