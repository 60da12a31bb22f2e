//! The steps before a deployment: create a project, find a tool chain, build, make a component.
//!
//! All code here blocks and is independent of a server. In the order of use: [`scaffold`] writes a project, with the
//! SDK that this binary contains ([`sdk`]); [`project`] reads one; [`toolchain`] selects a compiler that produces
//! wasm, and [`stdlib`] gives it a standard library if it has none; [`build`] runs cargo; [`componentize`] makes a
//! component of the result. Functions in other languages are a [`script`]: their tool chains are fetched as
//! [`packages`], for [`python`] and [`javascript`].

pub(crate) mod build;
mod cargo;
pub(crate) mod componentize;
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
