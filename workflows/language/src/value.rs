//! JSON values that keep the order of their keys and share their parts.
