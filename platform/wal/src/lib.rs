//! SQLite's write-ahead log, for who alone writes a database: how far it has to reach, and how long it may grow.
//!
//! When SQLite opens a database it reads the log up to the first frame whose checksum is wrong, and takes that for
//! the end: a crash tears the log's tail, and what is torn was never acknowledged. But a frame in the middle that
//! was damaged later looks the same, and every commit behind it, acknowledged or not, would be gone without a word.
//!
//! The log itself cannot tell one from the other, not even with what lies behind the bad frame: a transaction that
//! was given up (a full disk) leaves whole frames, with the right salts, behind the end. So whoever writes a
//! database keeps a mark beside it: how many frames the log had after the last commit that was durable. When
//! the log is opened again, that many have to be whole; if not, it is refused, before SQLite has touched anything.
//!
//! The mark costs no fsync. It is written into the kernel's memory after the commit's own fsync and before the
//! commit is acknowledged, so a process that is killed leaves it exact; after a loss of power it may be an older
//! one. It can never be ahead of what is on the disk, so nothing sound is refused: not a torn tail, not a log that
//! was begun anew (its salts differ), not a backup of the data file alone (there is no log then). What it cannot
//! see is damage, together with a loss of power, to frames of the last moments before it.
//!
//! The log is folded into the data file by its writer, between commits, once it has grown to a bound.
//!
//! **Belongs here:** the mark, the walk along the log (<https://sqlite.org/fileformat2.html#walformat>), what makes
//! commits durable and how many writes share one, the folding.
//! **Does not belong here:** tables, or any database's content. Start at [`Log`].

mod frames;
mod gathering;
mod log;
mod mark;

pub use gathering::GroupCommitPolicy;
pub use log::Log;
pub use mark::Error;

/// Whether a failure means that the file's content is wrong, rather than that it could not be read or written now.
pub fn is_damage(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    matches!(error.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase))
}
