//! Opens and writes Mayfly's SQLite databases, each a file with one writer: the object store, the workflow journal, the
//! catalog of state machines.
//!
//! **Opening.** A database has an application id and a schema version ([`DatabaseFormat`]). A file of another program,
//! of another version, or with damage is refused, with a message that says what can be done, and is left as it is.
//!
//! **The write-ahead log.** When SQLite opens a database it reads the log up to the first frame whose checksum is
//! wrong, and takes that for the end: a crash tears the log's tail, and what is torn was never acknowledged. A frame
//! in the middle that was damaged later looks the same, and every commit behind it would be lost without an error.
//! The log alone cannot distinguish the two: a transaction that was rolled back (a full disk) leaves whole frames,
//! with the right salts, behind the end. Therefore a mark beside the database holds how many frames the log had after
//! the last commit that was durable. When the database is opened again, that many frames have to be whole; if not, it
//! is refused before SQLite has touched anything.
//!
//! The mark costs no fsync. It is written into the kernel's memory after the commit's own fsync and before the
//! commit is acknowledged, so a process that is killed leaves it exact; after a loss of power it may be an older
//! one. It can never be ahead of what is on the disk, so nothing sound is refused: not a torn tail, not a log that
//! was begun anew (its salts differ), not a backup of the data file alone (there is no log then). Not detected: damage
//! to frames of the last moments before a loss of power, together with that loss.
//!
//! The writer checkpoints the log into the data file, between commits, when the log has grown to its limit.
//!
//! **Belongs here:** opening, the checks of a file, the mark, the reading of the log
//! (<https://sqlite.org/fileformat2.html#walformat>), the durability of commits, group commit, checkpoints.
//! **Does not belong here:** tables, or any database's content. Start at [`DatabaseFormat`].

#![warn(missing_debug_implementations)]

mod format;
mod frames;
mod gathering;
mod log;
mod mark;

pub use format::{DatabaseError, DatabaseFormat, OpenedDatabase, WriterSettings, open_reader};
pub use gathering::GroupCommitPolicy;
pub use log::Log;

use std::path::{Path, PathBuf};

/// The path of a file that lies beside a database and shares its name.
fn sibling_path(database: &Path, suffix: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
