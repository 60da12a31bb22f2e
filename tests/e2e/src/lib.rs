//! End-to-end tests: the real binary, driven by real clients.
