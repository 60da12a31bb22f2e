//! Sleeping without a task.
