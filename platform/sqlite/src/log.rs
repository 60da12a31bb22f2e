//! The log of a database that one connection writes: synced at each commit, marked before the commit is acknowledged,
//! checkpointed into the data file between commits.

use std::path::Path;

use rusqlite::{Connection, ffi};

use crate::mark::{Mark, MarkError};

/// A database's write-ahead log, as its only writer tracks it.
#[derive(Debug)]
pub struct Log {
    mark: Mark,
    /// Pages in the log after the last commit.
    frames: i64,
    /// Pages in it at which it is checkpointed into the data file.
    frames_max: i64,
}

impl Log {
    /// Checks that the log still has all that was acknowledged, before `database` is opened.
    ///
    /// # Errors
    /// [`MarkError::Damaged`]: opening the database would lose what was acknowledged; nothing was touched.
    pub(crate) fn check(database: &Path) -> Result<Self, MarkError> {
        Ok(Self { mark: Mark::check(database)?, frames: 0, frames_max: i64::MAX })
    }

    /// Configures a writing connection: a commit is durable when it returns, and never runs a checkpoint. `bytes_max`
    /// bounds the log, as far as the checkpoints keep up.
    ///
    /// # Errors
    /// An error of SQLite, for example if the file is not a database. Also when the database that was started before
    /// is no longer the one at its path.
    pub(crate) fn start(&mut self, connection: &Connection, bytes_max: u64) -> rusqlite::Result<()> {
        connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
        // An acknowledged write survives the loss of power: one fsync of the log for each commit.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update_and_check(None, "wal_autocheckpoint", 0, |_| Ok(()))?;
        let page_bytes: u32 = connection.pragma_query_value(None, "page_size", |row| row.get(0))?;
        self.frames_max = i64::try_from(bytes_max / u64::from(page_bytes)).unwrap_or(i64::MAX);
        self.mark.opened().map_err(|error| sqlite_error(&error))
    }

    /// Records the length of the log: after each commit, before it is acknowledged.
    ///
    /// # Errors
    /// An error of its own kind (`SQLITE_READONLY_DBMOVED`): the file was removed or replaced, and the commit is lost
    /// when the file is closed.
    pub fn committed(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        match checkpoint(connection, "NOOP") {
            Ok(frames) => {
                self.frames = frames;
                if let Ok(frames @ 1..) = u64::try_from(frames) {
                    self.mark.advance(frames);
                }
            }
            Err(error) => tracing::debug!(%error, "the length of the log cannot be read"),
        }
        self.check_in_place()
    }

    /// Checks that the database and its log are still the files at their paths: one look at a directory entry.
    ///
    /// # Errors
    /// As [`Log::committed`].
    pub fn check_in_place(&self) -> rusqlite::Result<()> {
        self.mark.check_in_place().map_err(|error| sqlite_error(&error))
    }

    /// Checkpoints the log into the data file when it has grown to its limit, at a time without a waiting commit;
    /// returns whether it did. Pages that the data file could not take stay in the log, and the next call tries
    /// again.
    ///
    /// # Errors
    /// An error of SQLite, most often a full disk.
    pub fn checkpoint_wal_if_due(&self, connection: &Connection) -> rusqlite::Result<bool> {
        let due = self.frames >= self.frames_max;
        if due {
            checkpoint(connection, "PASSIVE")?;
        }
        Ok(due)
    }

    /// Removes the mark after the connection was closed, which checkpointed the log.
    pub fn closed(self) {
        self.mark.remove();
    }
}

/// A failure of the file as SQLite would report it: its own code for a database that was moved.
fn sqlite_error(error: &MarkError) -> rusqlite::Error {
    let code = match error {
        MarkError::Removed { .. } => ffi::SQLITE_READONLY_DBMOVED,
        _ => ffi::SQLITE_CANTOPEN,
    };
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), Some(error.to_string()))
}

/// Runs a checkpoint and returns the number of frames in the log; -1 when there is no log.
fn checkpoint(connection: &Connection, mode: &str) -> rusqlite::Result<i64> {
    let mut statement = connection.prepare_cached(&format!("PRAGMA wal_checkpoint({mode})"))?;
    statement.query_row([], |row| row.get(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_bounded_and_marked() {
        let folder = tempfile::tempdir().unwrap();
        let (path, wal) = (folder.path().join("some.db"), folder.path().join("some.db-wal"));
        let bytes_max = 64 << 10;
        let mut log = Log::check(&path).unwrap();
        let connection = Connection::open(&path).unwrap();
        log.start(&connection, bytes_max).unwrap();
        connection.execute_batch("CREATE TABLE numbers (number)").unwrap();
        let mut folds = 0;
        for number in 0..200 {
            connection.execute("INSERT INTO numbers VALUES (?1)", [number]).unwrap();
            log.committed(&connection).unwrap();
            folds += u32::from(log.checkpoint_wal_if_due(&connection).unwrap());
        }
        assert!(folds > 2, "{folds} folds");
        let bytes = std::fs::metadata(&wal).unwrap().len();
        assert!(bytes < 2 * bytes_max, "{bytes} bytes of log");
        let mark = std::fs::read(folder.path().join("some.db-mark")).unwrap();
        assert!(!mark.is_empty());

        // Not closed, as after a kill: an intact log is accepted; one cut off within the marked length is not.
        assert!(Log::check(&path).is_ok());
        std::fs::write(&wal, &std::fs::read(&wal).unwrap()[..40]).unwrap();
        assert!(matches!(Log::check(&path), Err(MarkError::Damaged { .. })));
        drop(connection);
    }

    /// SQLite itself keeps writing to a file that was removed.
    #[test]
    fn a_commit_to_a_removed_database_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.db");
        let mut log = Log::check(&path).unwrap();
        let connection = Connection::open(&path).unwrap();
        log.start(&connection, 1 << 20).unwrap();
        connection.execute_batch("CREATE TABLE numbers (number)").unwrap();
        log.committed(&connection).unwrap();
        std::fs::remove_file(&path).unwrap();
        connection.execute("INSERT INTO numbers VALUES (1)", []).unwrap();
        let error = log.committed(&connection).unwrap_err();
        assert_eq!(error.sqlite_error().unwrap().extended_code, ffi::SQLITE_READONLY_DBMOVED);
        assert!(error.to_string().contains("was removed or replaced"), "{error}");
        assert!(log.check_in_place().is_err());
        drop(connection);
        log.closed();
        assert!(
            matches!(Log::check(&path), Err(MarkError::Missing { .. })),
            "the next start does not begin empty"
        );
    }
}
