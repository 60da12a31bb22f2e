//! The life of a function before it is deployed: scaffold, find a toolchain, build, make a component.
//!
//! Everything here is blocking and knows nothing of a server. The order of reading is the order of use:
//! [`scaffold`] writes a project, with the SDK this binary carries ([`sdk`]); [`project`] reads one;
//! [`toolchain`] says which compiler makes wasm here, and [`stdlib`] gives it a standard library where none
//! came with it; [`build`] runs cargo; [`componentize`] makes a component of what came out.

pub(crate) mod build;
mod cargo;
mod componentize;
mod exit_codes;
pub(crate) mod project;
pub(crate) mod scaffold;
mod sdk;
mod stdlib;
pub(crate) mod toolchain;
