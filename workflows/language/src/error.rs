//! States errors: the name and the cause.
