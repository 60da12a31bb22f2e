//! The Mayfly binary: roles, configuration, commands.
fn main() {}
