//! The steps before a deployment: create a project, find a tool chain, build, create a component.
//!
//! All code here blocks and is independent of a server. In the order of use: [`scaffold`] writes a project, with the
//! SDK that is embedded in this binary ([`sdk`]); [`project`] reads one; [`toolchain`] selects a compiler that produces
//! wasm, and [`stdlib`] builds a standard library for it if needed; [`build`] runs cargo; [`componentize`] turns the
//! result into a component. Functions in other languages are a [`script`]: their tool chains are downloaded as
//! [`packages`], for [`python`] and [`javascript`]. Their code runs during the build, within [`limits`].

pub(crate) mod build;
mod cargo;
pub(crate) mod componentize;
mod exit_codes;
mod javascript;
pub(crate) mod limits;
mod packages;
mod process_tree;
pub(crate) mod project;
mod python;
mod requirements;
pub(crate) mod scaffold;
pub(crate) mod script;
mod sdk;
#[cfg(test)]
mod sdk_tests;
mod stdlib;
pub(crate) mod toolchain;
