//! Opens a database after checking its application id, its version and its integrity.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, OpenFlags, config::DbConfig};

use crate::{Log, mark::MarkError, sibling_path};

/// The longest wait of a statement for an operator's `sqlite3` that holds the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// SQLite treats a shorter file as new.
const PAGE_BYTES_MIN: u64 = 512;

/// The identity of a kind of database and its schema.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseFormat {
    /// `PRAGMA application_id`: distinguishes the file from any other SQLite database.
    pub application_id: i32,
    /// `PRAGMA user_version`: the version of the schema.
    pub version: i64,
    /// The statements that create the tables of a new file.
    pub schema: &'static str,
    /// A table of the schema. A file without an application id that has the version and this table is treated as one
    /// of an early build and gets the id; `None`: it is refused.
    pub early_table: Option<&'static str>,
    /// The behaviour of the program without the file, as the end of a message that proposes to move the file away.
    pub without: &'static str,
}

/// The use of memory and disk by a writing connection.
#[derive(Clone, Copy, Debug)]
pub struct WriterSettings {
    /// SQLite's page cache, in KiB.
    pub cache_kib: i64,
    /// Bytes in the write-ahead log at which it is checkpointed into the data file.
    pub log_bytes_max: u64,
    /// Whether all pages are read and checked when the file is opened. It costs time in proportion to the file.
    pub quick_check: bool,
}

/// The reason why a database cannot be opened. The files are left as they are.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// The content is wrong, or part of what was acknowledged is missing.
    #[error(
        "{path} is damaged ({problem}); nothing was changed: put a backup in its place, or move it away (with the \
         files beside it that share its name){without}"
    )]
    Damaged { path: PathBuf, problem: String, without: &'static str },
    /// Another program's database.
    #[error("{path} is a SQLite database, but not one of Mayfly's: choose another data directory")]
    Foreign { path: PathBuf },
    /// Written by another version of Mayfly.
    #[error(
        "{path} was written in format {found}, and this Mayfly knows format {known}: use the version that wrote it, \
         or put a backup from before the upgrade in its place, or move it away{without}"
    )]
    Version { path: PathBuf, found: i64, known: i64, without: &'static str },
    /// A file could not be read; it may be sound.
    #[error("{path} cannot be opened: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// SQLite refused; the file may be sound.
    #[error("{path} cannot be opened: {source}")]
    Engine { path: PathBuf, source: rusqlite::Error },
}

/// A database that was opened for writing. Closing the connection does not write to the file before
/// [`OpenedDatabase::accept`].
#[derive(Debug)]
pub struct OpenedDatabase {
    /// Its only writing connection.
    pub connection: Connection,
    /// The state of its write-ahead log.
    pub log: Log,
}

impl OpenedDatabase {
    /// Lets the connection checkpoint its log into the data file when it is closed: for a caller that has read the
    /// content and found it sound.
    ///
    /// # Errors
    /// An error of SQLite.
    pub fn accept(self) -> rusqlite::Result<(Connection, Log)> {
        self.connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)?;
        Ok((self.connection, self.log))
    }
}

impl DatabaseFormat {
    /// Opens the database at `path`, or creates it, readable by its owner alone. The caller is its only writer.
    ///
    /// # Errors
    /// [`DatabaseError`]; the files are left as they are.
    pub fn open(&self, path: &Path, settings: WriterSettings) -> Result<OpenedDatabase, DatabaseError> {
        self.refuse_what_sqlite_would_overwrite(path)?;
        let log = Log::check(path).map_err(|error| match error {
            MarkError::Io { path, source } => DatabaseError::Io { path, source },
            damaged => self.damaged(path, damaged.to_string()),
        })?;
        create_private(path).map_err(|source| DatabaseError::Io { path: path.into(), source })?;
        let connection = connect(path).map_err(|error| self.failed(path, error))?;
        self.prepare(connection, log, path, settings)
    }

    fn prepare(
        &self,
        connection: Connection,
        mut log: Log,
        path: &Path,
        settings: WriterSettings,
    ) -> Result<OpenedDatabase, DatabaseError> {
        let engine = |error| self.failed(path, error);
        connection.busy_timeout(BUSY_TIMEOUT).map_err(engine)?;
        // Until the file is known to be sound, closing it must not write to it.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(engine)?;
        let identity = self.identity(&connection, path)?;
        if identity != Identity::New && settings.quick_check {
            let check = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get::<_, String>(0));
            let check = check.map_err(engine)?;
            if check != "ok" {
                return Err(self.damaged(path, check));
            }
        }
        start(&connection, &mut log, settings).map_err(engine)?;
        let Self { application_id, version, schema, .. } = self;
        match identity {
            Identity::New => connection.execute_batch(&format!(
                "BEGIN IMMEDIATE; PRAGMA application_id = {application_id}; PRAGMA user_version = {version}; \
                 {schema} COMMIT;"
            )),
            Identity::Early => connection.pragma_update(None, "application_id", application_id),
            Identity::Known => Ok(()),
        }
        .map_err(engine)?;
        Ok(OpenedDatabase { connection, log })
    }

    fn identity(&self, connection: &Connection, path: &Path) -> Result<Identity, DatabaseError> {
        let read = || -> rusqlite::Result<_> {
            let number = |pragma| connection.pragma_query_value(None, pragma, |row| row.get::<_, i64>(0));
            let tables = "SELECT count(*), count(*) FILTER (WHERE name = ?1) FROM sqlite_schema";
            let tables = connection.query_row(tables, [self.early_table], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))
            })?;
            Ok((number("application_id")?, number("user_version")?, tables))
        };
        let found = read().map_err(|error| self.failed(path, error))?;
        match found {
            (0, 0, (0, _)) => Ok(Identity::New),
            (0, version, (_, 1)) if version == self.version => Ok(Identity::Early),
            (application, ..) if application != i64::from(self.application_id) => {
                Err(DatabaseError::Foreign { path: path.into() })
            }
            (_, version, _) if version == self.version => Ok(Identity::Known),
            (_, found, _) => {
                let (known, without) = (self.version, self.without);
                Err(DatabaseError::Version { path: path.into(), found, known, without })
            }
        }
    }

    /// Replaces the writing connection of a database that is open, after a failure.
    ///
    /// # Errors
    /// An error of SQLite; also when the file at the path is not the one that was opened first.
    pub fn reconnect(path: &Path, log: &mut Log, settings: WriterSettings) -> rusqlite::Result<Connection> {
        let connection = connect(path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        start(&connection, log, settings)?;
        Ok(connection)
    }

    /// The error for wrong content of the file.
    #[must_use]
    pub fn damaged(&self, path: &Path, problem: impl Into<String>) -> DatabaseError {
        DatabaseError::Damaged { path: path.into(), problem: problem.into(), without: self.without }
    }

    /// The error for a failure while the file is opened or its content is read.
    #[must_use]
    pub fn failed(&self, path: &Path, error: rusqlite::Error) -> DatabaseError {
        match is_damage(&error) {
            true => self.damaged(path, error.to_string()),
            false => DatabaseError::Engine { path: path.into(), source: error },
        }
    }

    /// SQLite treats a file that is empty, or shorter than a page, as new: it would overwrite the rest of a damaged
    /// one, and delete a log whose data file is missing.
    fn refuse_what_sqlite_would_overwrite(&self, path: &Path) -> Result<(), DatabaseError> {
        let bytes = |path: &Path| match fs::metadata(path) {
            Ok(metadata) => Ok(metadata.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(source) => Err(DatabaseError::Io { path: path.into(), source }),
        };
        match bytes(path)? {
            0 if bytes(&sibling_path(path, "-wal"))? > 0 => {
                Err(self.damaged(path, "it is missing or empty, but its write-ahead log is not"))
            }
            // With a rollback journal its creation was interrupted: SQLite undoes that.
            1..PAGE_BYTES_MIN if bytes(&sibling_path(path, "-journal"))? == 0 => {
                Err(self.damaged(path, "it is only a few bytes long"))
            }
            _ => Ok(()),
        }
    }
}

/// The identity of a file by its header and tables.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Identity {
    /// Nothing was written yet.
    New,
    /// Written by a build that set no application id.
    Early,
    /// Written by this version.
    Known,
}

/// Opens a connection that only reads.
///
/// # Errors
/// An error of SQLite.
pub fn open_reader(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    keep_plans(&connection)?;
    Ok(connection)
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
    Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)
}

/// Compiles a statement once. Without this setting SQLite, whose planner may use the values of parameters, compiles a
/// statement that compares a column with one (`seq > ?`) again for each execution: several times its own cost.
fn keep_plans(connection: &Connection) -> rusqlite::Result<()> {
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map(drop)
}

fn start(connection: &Connection, log: &mut Log, settings: WriterSettings) -> rusqlite::Result<()> {
    keep_plans(connection)?;
    connection.pragma_update(None, "cache_size", -settings.cache_kib)?;
    log.start(connection, settings.log_bytes_max)
}

/// Creates a data file that does not exist yet, for its owner alone: it holds Secrets and users' data. SQLite gives
/// the files beside it the same mode.
fn create_private(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Whether a failure means that the file's content is wrong, rather than that it could not be read or written now.
fn is_damage(error: &rusqlite::Error) -> bool {
    use rusqlite::{
        Error as E,
        ErrorCode::{DatabaseCorrupt, NotADatabase},
    };
    let misread = matches!(
        error,
        E::InvalidColumnType(..) | E::FromSqlConversionFailure(..) | E::IntegralValueOutOfRange(..)
    );
    misread || matches!(error.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const FORMAT: DatabaseFormat = DatabaseFormat {
        application_id: 0x4d61_7954,
        version: 3,
        schema: "CREATE TABLE numbers (number INTEGER NOT NULL) STRICT;",
        early_table: Some("numbers"),
        without: " to start empty",
    };
    const SETTINGS: WriterSettings =
        WriterSettings { cache_kib: 64, log_bytes_max: 64 << 10, quick_check: true };

    fn refused(path: &Path) -> String {
        let before = fs::read(path).unwrap();
        let error = FORMAT.open(path, SETTINGS).expect_err("refused").to_string();
        assert_eq!(fs::read(path).unwrap(), before, "{error}");
        error
    }

    fn created(path: &Path) {
        let (connection, mut log) = FORMAT.open(path, SETTINGS).unwrap().accept().unwrap();
        connection.execute("INSERT INTO numbers VALUES (7)", []).unwrap();
        log.committed(&connection).unwrap();
        connection.close().unwrap();
        log.closed();
    }

    fn sql(path: &Path, statements: &str) {
        Connection::open(path).unwrap().execute_batch(statements).unwrap();
    }

    #[test]
    fn a_new_file_is_private_and_opens_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.db");
        created(&path);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let (connection, _) = FORMAT.open(&path, SETTINGS).unwrap().accept().unwrap();
        let number: i64 = connection.query_row("SELECT number FROM numbers", [], |row| row.get(0)).unwrap();
        assert_eq!(number, 7);
        assert_eq!(
            open_reader(&path).unwrap().query_row("PRAGMA user_version", [], |row| row.get(0)),
            Ok(3_i64)
        );
    }

    #[test]
    fn statements_are_compiled_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.db");
        created(&path);
        let (writer, _) = FORMAT.open(&path, SETTINGS).unwrap().accept().unwrap();
        writer.execute_batch("CREATE TABLE rows (id INTEGER PRIMARY KEY, owner, number)").unwrap();
        writer.execute_batch("CREATE UNIQUE INDEX by_owner ON rows (owner, number)").unwrap();
        for connection in [writer, open_reader(&path).unwrap()] {
            let later = "SELECT id FROM rows WHERE owner = ?1 AND number > ?2 ORDER BY number";
            let mut later = connection.prepare(later).unwrap();
            for number in 0..3 {
                assert!(!later.exists([1, number]).unwrap());
            }
            assert_eq!(later.get_status(rusqlite::StatementStatus::RePrepare), 0);
        }
    }

    #[test]
    fn files_of_others_and_of_other_versions_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.db");
        created(&path);
        sql(&path, "PRAGMA user_version = 4");
        assert!(refused(&path).contains("format 4, and this Mayfly knows format 3"));
        sql(&path, "PRAGMA user_version = 3; PRAGMA application_id = 9");
        assert!(refused(&path).contains("not one of Mayfly's"));
        // An early build set no application id.
        sql(&path, "PRAGMA application_id = 0");
        FORMAT.open(&path, SETTINGS).unwrap();
        sql(&path, "PRAGMA application_id = 0; DROP TABLE numbers; CREATE TABLE others (number)");
        assert!(refused(&path).contains("not one of Mayfly's"));
    }

    #[test]
    fn damage_is_refused_with_what_can_be_done() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.db");
        fs::write(&path, "short").unwrap();
        let told = refused(&path);
        assert!(told.contains("only a few bytes long") && told.ends_with("to start empty"), "{told}");
        fs::write(&path, "no database, but long enough ".repeat(100)).unwrap();
        assert!(refused(&path).contains("is damaged"));
        fs::write(&path, "").unwrap();
        fs::write(folder.path().join("some.db-wal"), "left").unwrap();
        assert!(refused(&path).contains("write-ahead log is not"));
    }
}
