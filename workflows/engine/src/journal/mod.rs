//! What has happened, kept.
