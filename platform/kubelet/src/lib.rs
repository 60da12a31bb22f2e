//! One node made to match its pods.
