//! The bounds of an evaluation, each with its reason.

/// How long an expression may be: a definition of AWS's has at most a megabyte, an expression is one string of it.
pub const EXPRESSION_CHARS_MAX: usize = 256 * 1024;

/// How long an evaluation may take, in milliseconds. AWS names no figure; what takes longer belongs in a task.
pub const MILLIS_MAX: u64 = 5_000;

/// How many bytes of strings and lists an evaluation may produce in all, dropped ones included. A state's data is
/// limited to 256 KiB, so this is a thousand times what an expression can hand on.
pub const PRODUCED_BYTES_MAX: usize = 256 * 1024 * 1024;

/// How many bytes a value may come to that is printed or concatenated, shared parts counted each time.
pub(super) const OPERAND_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How many items a sequence may have.
pub(super) const SEQUENCE_MAX: usize = 1_000_000;

/// How deep calls may nest: about 1,500 calls of a recursive function that is not tail-recursive.
pub(super) const STACK_DEPTH_MAX: usize = 5_000;

/// How deep a value may nest that is handed on.
pub(super) const RESULT_DEPTH_MAX: usize = 1_000;

/// How many bytes of JSON a value may come to that is handed on, shared parts counted each time.
pub(super) const RESULT_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How much longer than [`MILLIS_MAX`] a caller waits before it gives the evaluation's thread up, in milliseconds.
pub(super) const GRACE_MILLIS: u64 = 500;

/// How long an expression that looks cheap may keep its caller's own thread, in milliseconds, before it starts over
/// on a thread of the pool.
pub(super) const LIGHT_MILLIS: u64 = 50;

/// How many threads evaluate at once.
pub(super) const THREADS: usize = 4;

/// How many evaluations may wait for a thread.
pub(super) const QUEUED_MAX: usize = 1024;

/// How many threads may be given up on and still run before no others take their place.
pub(super) const LOST_THREADS_MAX: usize = 8;
