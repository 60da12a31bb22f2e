//! The bounds of an evaluation, each with its reason.

/// The maximum length of an expression: a definition has at most a megabyte on AWS, and an expression is one string
/// of it.
pub const EXPRESSION_CHARS_MAX: usize = 256 * 1024;

/// The time limit of an evaluation, in milliseconds. AWS documents none; longer work belongs in a task.
pub const MILLIS_MAX: u64 = 5_000;

/// The maximum number of bytes of strings and lists that an evaluation produces in total, dropped ones included. A
/// state's data is limited to 256 KiB, so this is a thousand times the size of a result.
pub const PRODUCED_BYTES_MAX: usize = 256 * 1024 * 1024;

/// The maximum size of a printed or concatenated value in bytes, shared parts counted each time.
pub(super) const OPERAND_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The maximum number of items of a sequence.
pub(super) const SEQUENCE_MAX: usize = 1_000_000;

/// The maximum nesting of calls: about 1,500 calls of a recursive function that is not tail-recursive.
pub(super) const STACK_DEPTH_MAX: usize = 5_000;

/// The maximum nesting of a result.
pub(super) const RESULT_DEPTH_MAX: usize = 1_000;

/// The maximum number of JSON bytes of a result, shared parts counted each time.
pub(super) const RESULT_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The time after [`MILLIS_MAX`] for which a caller waits before it abandons the evaluation's thread, in
/// milliseconds.
pub(super) const GRACE_MILLIS: u64 = 500;

/// The time for which an expression that looks cheap runs on its caller's thread, in milliseconds, before it starts
/// again on a thread of the pool.
pub(super) const LIGHT_MILLIS: u64 = 50;

/// The number of evaluating threads.
pub(super) const THREADS: usize = 4;

/// The maximum number of abandoned threads that are replaced by new ones.
pub(super) const LOST_THREADS_MAX: usize = 8;
