//! A lock on a file beside the data file, so that only one process opens a store at a time.
//!
//! The kernel releases it at any end of the process, so a lock file that a crash leaves behind is no obstacle. The file
//! itself stays: removing it would let two processes hold locks on two files of one name.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read as _, Seek as _, Write as _},
    path::Path,
    time::Duration,
};

/// The number of attempts to take a held lock, and the pause between them. A child process that the last holder was
/// starting holds the lock until its exec, which takes milliseconds.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);

pub(crate) struct Lock {
    _file: File,
}

pub(crate) enum LockError {
    /// Another process holds the lock; its id, if it could be read.
    Held {
        pid: Option<u32>,
    },
    Io(io::Error),
}

impl Lock {
    pub(crate) fn acquire(path: &Path) -> Result<Self, LockError> {
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = open.map_err(LockError::Io)?;
        let mut locked = file.try_lock();
        for _ in 0..TRIES {
            if !matches!(locked, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::thread::sleep(PAUSE);
            locked = file.try_lock();
        }
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                // The holder may not have written its id yet: then it stays unknown.
                let _ = file.take(32).read_to_string(&mut text);
                return Err(LockError::Held { pid: text.trim().parse().ok() });
            }
            Err(TryLockError::Error(error)) => return Err(LockError::Io(error)),
        }
        Self::sign(&mut file).map_err(LockError::Io)?;
        Ok(Self { _file: file })
    }

    fn sign(file: &mut File) -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    }
}
