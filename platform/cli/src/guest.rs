//! The life of a function before it is deployed: scaffold, find a toolchain, build, make a component.
//!
//! Everything here is blocking and knows nothing of a server. The order of reading is the order of use:
//! [`scaffold`] writes a project, with the SDK this binary carries ([`sdk`]); [`project`] reads one;
//! [`toolchain`] says which compiler makes wasm here, and [`stdlib`] gives it a standard library where none
//! came with it; [`build`] runs cargo; [`componentize`] makes a component of what came out. Functions in other languages are a
//! [`script`]: their tool chains are fetched as [`packages`], for [`python`] and [`javascript`].

pub(crate) mod build;
mod cargo;
mod componentize;
mod exit_codes;
mod javascript;
mod packages;
pub(crate) mod project;
mod python;
pub(crate) mod scaffold;
pub(crate) mod script;
mod sdk;
mod stdlib;
pub(crate) mod toolchain;
