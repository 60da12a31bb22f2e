//! Choice rules, compiled once.
