//! The trace of a run: one line for each event of the store, each fault and each operation.

use std::{collections::VecDeque, fmt::Display, time::Duration};

/// Lines that are kept to be shown with a failure.
const KEPT_MAX: usize = 60;

/// Counts and hashes all lines, and keeps the last.
#[derive(Debug)]
pub struct RunTrace {
    last: VecDeque<String>,
    hash: u64,
    lines: u64,
    /// Every line is also printed.
    is_printed: bool,
}

/// What identifies a run: equal for the same seed, different for different ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceDigest {
    pub lines: u64,
    pub hash: u64,
}

impl RunTrace {
    pub fn new(is_printed: bool) -> Self {
        Self { last: VecDeque::new(), hash: FNV_BASIS, lines: 0, is_printed }
    }

    /// `at`: since the beginning of the run.
    pub fn line(&mut self, at: Duration, what: impl Display) {
        let line = format!("{:10.4} {what}", at.as_secs_f64());
        self.hash = fnv(self.hash, line.as_bytes());
        self.lines += 1;
        if self.is_printed {
            #[expect(clippy::print_stdout, reason = "the replay of a seed shows its trace")]
            {
                println!("{line}");
            }
        }
        if self.last.len() == KEPT_MAX {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }

    pub fn digest(&self) -> TraceDigest {
        TraceDigest { lines: self.lines, hash: self.hash }
    }

    pub fn last(&self) -> impl Iterator<Item = &String> {
        self.last.iter()
    }
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// A short hash of bytes, for a line of the trace.
pub fn hash(bytes: &[u8]) -> u64 {
    fnv(FNV_BASIS, bytes)
}
