//! Folders as tar files: folders with equal content give equal bytes. Blocks.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Component, Path},
};

use tar::{Archive, Builder, EntryType, Header, HeaderMode};

/// Entries that one folder may have.
const ENTRIES_MAX: usize = 100_000;
/// The size that each entry counts in addition to its content, so that many empty files count as well.
const ENTRY_BYTES: u64 = 4096;

fn refused(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// The permission bit of files that their owner may execute.
const EXECUTABLE: u32 = 0o100;

/// Packs a folder: files and folders in the order of their names, no links, no times, no owners. Of the permissions only
/// whether a file is executable is kept.
pub(super) fn pack(folder: &Path, into: impl io::Write, bytes_max: u64) -> io::Result<()> {
    let mut packing = Packing { builder: Builder::new(into), bytes_left: bytes_max, entries: 0 };
    packing.builder.mode(HeaderMode::Deterministic);
    packing.folder(folder, Path::new(""))?;
    packing.builder.finish()
}

struct Packing<W: io::Write> {
    builder: Builder<W>,
    bytes_left: u64,
    entries: usize,
}

impl<W: io::Write> Packing<W> {
    fn folder(&mut self, folder: &Path, name: &Path) -> io::Result<()> {
        let mut entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            self.entries += 1;
            if self.entries > ENTRIES_MAX {
                return Err(refused(format!("it has more than {ENTRIES_MAX} entries")));
            }
            let (path, name) = (entry.path(), name.join(entry.file_name()));
            // Symbolic links are not followed: they could point anywhere on the node.
            let metadata = fs::symlink_metadata(&path)?;
            if metadata.is_dir() {
                let mut header = header(EntryType::Directory, 0);
                self.builder.append_data(&mut header, &name, io::empty())?;
                self.folder(&path, &name)?;
            } else if metadata.is_file() {
                let left = self.bytes_left.checked_sub(metadata.len());
                self.bytes_left = left.ok_or_else(|| refused("it is larger than this node collects"))?;
                let mut header = header(EntryType::Regular, metadata.len());
                if metadata.permissions().mode() & EXECUTABLE != 0 {
                    header.set_mode(0o755);
                }
                self.builder.append_data(&mut header, &name, fs::File::open(&path)?)?;
            }
        }
        Ok(())
    }
}

fn header(kind: EntryType, bytes: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(bytes);
    header.set_mode(if kind == EntryType::Directory { 0o755 } else { 0o644 });
    header.set_mtime(0);
    header
}

/// Unpacks a folder. Refuses entries that are neither files nor folders, and paths that lead outside.
pub(super) fn unpack(tar: &Path, into: &Path, bytes_max: u64) -> io::Result<()> {
    fs::create_dir_all(into)?;
    let mut left = bytes_max;
    for (at, entry) in Archive::new(fs::File::open(tar)?).entries()?.enumerate() {
        let mut entry = entry?;
        let name = entry.path()?.into_owned();
        if at >= ENTRIES_MAX {
            return Err(refused(format!("it has more than {ENTRIES_MAX} entries")));
        }
        if !name.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            return Err(refused(format!("{} leads outside", name.display())));
        }
        let path = into.join(&name);
        match entry.header().entry_type() {
            EntryType::Directory => fs::create_dir_all(&path)?,
            EntryType::Regular | EntryType::Continuous => {
                let rest = left.checked_sub(entry.size());
                left = rest.ok_or_else(|| refused(format!("it is larger than {bytes_max} bytes")))?;
                fs::create_dir_all(path.parent().unwrap_or(into))?;
                let mut file = fs::File::create(&path)?;
                io::copy(&mut entry, &mut file)?;
                if entry.header().mode()? & EXECUTABLE != 0 {
                    file.set_permissions(fs::Permissions::from_mode(0o755))?;
                }
            }
            other => {
                return Err(refused(format!(
                    "{} is neither a file nor a folder ({other:?})",
                    name.display()
                )));
            }
        }
    }
    Ok(())
}

/// The approximate size of a folder on the disk: the lengths of its files, and a constant for every entry.
pub(super) fn bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of_entry = |entry: fs::DirEntry| match entry.metadata() {
        // The metadata of a link itself, not of its target.
        Ok(metadata) if metadata.is_dir() => bytes(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.map(|entry| of_entry(entry).saturating_add(ENTRY_BYTES)).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(folder: &Path) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        pack(folder, &mut bytes, 1000)?;
        Ok(bytes)
    }

    #[test]
    fn folders_come_back_as_they_were_and_equal_ones_are_equal() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::create_dir_all(one.join("sub/empty")).unwrap();
        fs::write(one.join("sub/b"), "b").unwrap();
        fs::write(one.join("a"), "aa").unwrap();
        fs::set_permissions(one.join("a"), fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", one.join("link")).unwrap();
        let bytes = packed(&one).unwrap();
        let tar = folder.path().join("tar");
        fs::write(&tar, &bytes).unwrap();
        unpack(&tar, &two, 1000).unwrap();
        assert_eq!(fs::read_to_string(two.join("sub/b")).unwrap(), "b");
        let mode = |name: &str| fs::metadata(two.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("a"), mode("sub/b") & EXECUTABLE), (0o755, 0), "only a is executable");
        assert!(two.join("sub/empty").is_dir() && !two.join("link").exists());
        assert_eq!(packed(&two).unwrap(), bytes);
        assert!(unpack(&tar, &folder.path().join("three"), 2).is_err(), "three bytes are more than two");
        fs::write(two.join("large"), [0; 2000]).unwrap();
        assert!(packed(&two).is_err());
    }

    #[test]
    fn nothing_leads_outside() {
        let folder = tempfile::tempdir().unwrap();
        let tar = folder.path().join("tar");
        for (name, kind) in [("../out", EntryType::Regular), ("link", EntryType::Symlink)] {
            let mut header = header(kind, 0);
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_link_name("/etc").unwrap();
            header.set_cksum();
            let mut builder = Builder::new(fs::File::create(&tar).unwrap());
            builder.append(&header, io::empty()).unwrap();
            builder.finish().unwrap();
            let into = folder.path().join("into");
            assert_eq!(unpack(&tar, &into, 10).unwrap_err().kind(), io::ErrorKind::InvalidData, "{name}");
            assert!(!folder.path().join("out").exists());
        }
    }
}
