//! The mark: a file of 32 bytes beside the database, rewritten in place.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufReader, Read as _, Seek as _, SeekFrom},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use crate::{
    frames::{self, HEADER_BYTES, Header, Salts},
    sibling_path,
};

const MARK_BYTES: usize = 32;
/// The first bytes of a mark.
const MAGIC: &[u8; 8] = b"MayflyWM";
const BUFFER_BYTES: usize = 256 << 10;

/// The reason why a database must not be opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MarkError {
    /// Acknowledged writes are missing in the log.
    #[error(
        "its write-ahead log had {acknowledged} pages when it was last written, and only the first {whole} of \
         them are intact"
    )]
    Damaged { acknowledged: u64, whole: u64 },
    /// The database was removed, but not the mark of its last commit.
    #[error(
        "it is missing, but it was written before: {mark} is there; to start empty on purpose, remove that file"
    )]
    Missing { mark: PathBuf },
    /// The database or its log was removed or replaced while it was open.
    #[error(
        "{path} was removed or replaced while it was in use: what is written now would be lost; put it back from a \
         backup, then start again"
    )]
    Removed { path: PathBuf },
    /// A file could not be read.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// The acknowledged length of a database's log, kept beside it (`-mark`).
#[derive(Debug)]
pub(crate) struct Mark {
    database: PathBuf,
    /// The database that was opened.
    identity: Option<FileIdentity>,
    wal: PathBuf,
    path: PathBuf,
    files: Option<Files>,
    /// Whether the failure to write the mark was logged.
    write_failure_logged: bool,
}

/// Identifies an open file independently of its path: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity(u64, u64);

impl FileIdentity {
    /// The identity of the file at a path. The file itself must not be opened for that: closing it would release
    /// SQLite's locks.
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self(metadata.dev(), metadata.ino()))
    }
}

#[derive(Debug)]
struct Files {
    wal: File,
    mark: File,
}

/// The content of a mark.
struct MarkContent {
    salts: Salts,
    frames: u64,
}

impl MarkContent {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MARK_BYTES] = bytes.try_into().ok()?;
        let (content, guard) = bytes.split_at(24);
        let (magic, rest) = content.split_at(8);
        let (salts, frames) = rest.split_at(8);
        if magic != MAGIC || guard != Self::guard(content) {
            return None;
        }
        Some(Self { salts: salts.try_into().ok()?, frames: u64::from_le_bytes(frames.try_into().ok()?) })
    }

    fn encode(&self) -> Vec<u8> {
        let content = [&MAGIC[..], &self.salts, &self.frames.to_le_bytes()].concat();
        let guard = Self::guard(&content);
        [&content[..], &guard].concat()
    }

    fn guard(content: &[u8]) -> [u8; 8] {
        let (one, two) = frames::checksum((0, 0), content, false);
        let mut guard = [0; 8];
        guard[..4].copy_from_slice(&one.to_le_bytes());
        guard[4..].copy_from_slice(&two.to_le_bytes());
        guard
    }
}

impl Mark {
    /// Checks that the log of a database still has the frames that its mark records, and continues from there.
    ///
    /// Call it before the database is opened, by its only writer. A missing mark, one that a loss of power has torn,
    /// and one of an earlier log record nothing.
    ///
    /// # Errors
    /// [`MarkError::Damaged`]: opening the database would lose acknowledged writes. [`MarkError::Missing`]: opening
    /// it would create an empty one.
    pub(crate) fn check(database: &Path) -> Result<Self, MarkError> {
        let mark = Self {
            database: database.to_owned(),
            identity: None,
            wal: sibling_path(database, "-wal"),
            path: sibling_path(database, "-mark"),
            files: None,
            write_failure_logged: false,
        };
        let read = match fs::read(&mark.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(mark),
            read => read.map_err(|source| MarkError::Io { path: mark.path.clone(), source })?,
        };
        match fs::metadata(database) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(MarkError::Missing { mark: mark.path });
            }
            found => found.map_err(|source| MarkError::Io { path: database.to_owned(), source })?,
        };
        if let Some(reached) = MarkContent::decode(&read) {
            let whole = whole_of(&mark.wal, &reached);
            let whole = whole.map_err(|source| MarkError::Io { path: mark.wal.clone(), source })?;
            if let Some(whole) = whole.filter(|whole| *whole < reached.frames) {
                return Err(MarkError::Damaged { acknowledged: reached.frames, whole });
            }
        }
        Ok(mark)
    }

    /// Records the number of frames in the log, after a commit that is durable and before it is acknowledged.
    ///
    /// If the mark cannot be written, the earlier one remains, which never refuses a sound log; the first failure is
    /// logged.
    pub(crate) fn advance(&mut self, frames: u64) {
        if let Err(error) = self.write(frames) {
            self.files = None;
            if !std::mem::replace(&mut self.write_failure_logged, true) {
                let path = self.path.display();
                tracing::warn!(%path, %error, "cannot write the mark: damage to the write-ahead log would not be detected");
            }
        }
    }

    fn write(&mut self, frames: u64) -> io::Result<()> {
        let files = match &mut self.files {
            Some(files) => files,
            none => none.insert(Files {
                wal: File::open(&self.wal)?,
                mark: OpenOptions::new().write(true).create(true).truncate(false).open(&self.path)?,
            }),
        };
        let mut header = [0; HEADER_BYTES];
        files.wal.read_exact_at(&mut header, 0)?;
        let reached = MarkContent { salts: frames::salts(&header), frames };
        files.mark.write_all_at(&reached.encode(), 0)
    }

    /// Records that the database was opened, perhaps again: its log may be another file.
    ///
    /// # Errors
    /// [`MarkError::Removed`]: this is not the database that was opened before.
    pub(crate) fn opened(&mut self) -> Result<(), MarkError> {
        self.files = None;
        let identity = FileIdentity::of(&self.database);
        let identity = identity.map_err(|source| MarkError::Io { path: self.database.clone(), source })?;
        match self.identity.replace(identity) {
            Some(before) if before != identity => {
                self.identity = Some(before);
                Err(self.removed())
            }
            _ => Ok(()),
        }
    }

    /// Whether the database that was opened, and its log, are still the ones at their paths. A commit to a removed
    /// file succeeds, and is lost when the process ends.
    ///
    /// # Errors
    /// [`MarkError::Removed`], and [`MarkError::Io`] if the files cannot be examined.
    pub(crate) fn check_in_place(&self) -> Result<(), MarkError> {
        let Some(opened) = self.identity else { return Ok(()) };
        match FileIdentity::of(&self.database) {
            Ok(found) if found == opened => {}
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(MarkError::Io { path: self.database.clone(), source });
            }
            Ok(_) | Err(_) => return Err(self.removed()),
        }
        let Some(files) = &self.files else { return Ok(()) };
        let wal = files.wal.metadata().map_err(|source| MarkError::Io { path: self.wal.clone(), source })?;
        if wal.nlink() == 0 { Err(MarkError::Removed { path: self.wal.clone() }) } else { Ok(()) }
    }

    fn removed(&self) -> MarkError {
        MarkError::Removed { path: self.database.clone() }
    }

    /// Removes the mark after the database was closed and its log checkpointed. The mark of a removed database stays,
    /// so that the next start does not create an empty one.
    pub(crate) fn remove(self) {
        let is_in_place = self
            .identity
            .is_none_or(|opened| FileIdentity::of(&self.database).is_ok_and(|found| found == opened));
        if is_in_place && !self.wal.exists() {
            // A mark that remains is of a log that does not exist any more, and is ignored.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The number of the mark's frames that are complete; `None` if the mark is about another log.
fn whole_of(wal: &Path, reached: &MarkContent) -> io::Result<Option<u64>> {
    let mut file = match File::open(wal) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut head = [0; HEADER_BYTES];
    match file.read_exact(&mut head) {
        // SQLite makes an empty log when it opens a database.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    match Header::parse(&head) {
        Some(header) if header.salts == reached.salts => {
            header.intact_frames(BufReader::with_capacity(BUFFER_BYTES, file), reached.frames).map(Some)
        }
        // A later log, or an older one that a loss of power brought back together with its mark.
        Some(_) => Ok(None),
        // The header is damaged: SQLite would treat the log as empty. The first frame's salts tell whether it is this
        // log.
        None => {
            let mut salts = Salts::default();
            file.seek(SeekFrom::Start(HEADER_BYTES as u64 + 8))?;
            match file.read_exact(&mut salts) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
                read => read.map(|()| (salts == reached.salts).then_some(0)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::tests::{FRAME_BYTES, log};

    const SALTS: Salts = *b"saltsalt";

    /// The result of [`Mark::check`] for a log whose mark was set when it had `frames`.
    fn checked(then: &[u8], frames: u64, now: Option<&[u8]>) -> Result<(), (u64, u64)> {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("some.db");
        let mut mark = Mark::check(&database).unwrap();
        fs::write(&database, "content").unwrap();
        fs::write(&mark.wal, then).unwrap();
        mark.advance(frames);
        match now {
            Some(now) => fs::write(&mark.wal, now).unwrap(),
            None => fs::remove_file(&mark.wal).unwrap(),
        }
        match Mark::check(&database) {
            Ok(_) => Ok(()),
            Err(MarkError::Damaged { acknowledged, whole }) => Err((acknowledged, whole)),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn damage_is_told_from_the_end() {
        let whole = log(SALTS, &[1, 2, 3, 4], false);
        let torn = |at: usize| {
            let mut torn = whole.clone();
            torn[at] ^= 1;
            torn
        };
        assert_eq!(checked(&whole, 4, Some(&whole)), Ok(()));
        for frame in 0..4 {
            let hurt = torn(HEADER_BYTES + frame * FRAME_BYTES + 77);
            assert_eq!(checked(&whole, 4, Some(&hurt)), Err((4, frame as u64)));
            // A mark from before the frame was written, as a loss of power may leave it.
            assert_eq!(checked(&whole, frame as u64, Some(&hurt)), Ok(()));
        }
        assert_eq!(checked(&whole, 4, Some(&whole[..HEADER_BYTES + 2 * FRAME_BYTES])), Err((4, 2)));
        assert_eq!(checked(&whole, 4, Some(&torn(3))), Err((4, 0)), "a header that is not whole");
        assert_eq!(checked(&whole, 4, Some(&torn(20))), Err((4, 0)), "nor are its salts");
    }

    #[test]
    fn another_log_or_none_is_not_its_business() {
        let (before, after) = (log(SALTS, &[1, 2, 3, 4], false), log(*b"saltsalu", &[9], false));
        assert_eq!(checked(&before, 4, None), Ok(()));
        assert_eq!(checked(&before, 4, Some(b"")), Ok(()));
        assert_eq!(checked(&before, 4, Some(&after)), Ok(()));
        // A log that restarts over an earlier one: the old frames behind it do not count.
        let begun = [&after[..], &before[after.len()..]].concat();
        assert_eq!(checked(&before, 4, Some(&begun)), Ok(()));
        assert_eq!(
            checked(&before, 4, Some(&vec![0; before.len()])),
            Ok(()),
            "a file that never got its content"
        );
    }

    #[test]
    fn a_torn_mark_says_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("some.db");
        let mut mark = Mark::check(&database).unwrap();
        fs::write(&database, "content").unwrap();
        fs::write(&mark.wal, log(SALTS, &[1, 2], false)).unwrap();
        mark.advance(2);
        fs::write(&mark.wal, log(SALTS, &[1], false)).unwrap();
        assert!(Mark::check(&database).is_err());
        let bytes = fs::read(&mark.path).unwrap();
        for torn in [&bytes[..31], &[0; MARK_BYTES][..], b""] {
            fs::write(&mark.path, torn).unwrap();
            assert!(Mark::check(&database).is_ok());
        }
    }

    #[test]
    fn a_mark_without_its_database_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("some.db");
        let mut mark = Mark::check(&database).unwrap();
        fs::write(&database, "content").unwrap();
        fs::write(&mark.wal, log(SALTS, &[1, 2], false)).unwrap();
        // SQLite keeps the file open, too, so that no other file can get its inode.
        let _open = File::open(&database).unwrap();
        mark.opened().unwrap();
        mark.advance(2);
        assert!(mark.check_in_place().is_ok());
        fs::remove_file(&database).unwrap();
        assert!(matches!(mark.check_in_place(), Err(MarkError::Removed { .. })));
        assert!(matches!(Mark::check(&database), Err(MarkError::Missing { .. })));
        // Another file in its place is not the one that is open.
        fs::write(&database, "content").unwrap();
        assert!(matches!(mark.check_in_place(), Err(MarkError::Removed { .. })));
        assert!(matches!(mark.opened(), Err(MarkError::Removed { .. })));
        assert!(matches!(mark.check_in_place(), Err(MarkError::Removed { .. })), "also after another try");
        fs::remove_file(&database).unwrap();
        fs::remove_file(&mark.wal).unwrap();
        mark.remove();
        assert!(
            matches!(Mark::check(&database), Err(MarkError::Missing { .. })),
            "a clean stop keeps the mark"
        );
    }

    #[test]
    fn a_removed_log_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("some.db");
        let mut mark = Mark::check(&database).unwrap();
        fs::write(&database, "content").unwrap();
        fs::write(&mark.wal, log(SALTS, &[1, 2], false)).unwrap();
        mark.opened().unwrap();
        mark.advance(2);
        assert!(mark.check_in_place().is_ok());
        fs::remove_file(&mark.wal).unwrap();
        assert!(matches!(mark.check_in_place(), Err(MarkError::Removed { path }) if path == mark.wal));
    }
}
