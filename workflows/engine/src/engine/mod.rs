//! The handle others hold.
