//! Patches that know the shape of a kind.

mod strategic;

pub(crate) use strategic::strategic;
