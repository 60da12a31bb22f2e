//! Patches that use the schema of a kind.

mod strategic;

pub(crate) use strategic::strategic;
