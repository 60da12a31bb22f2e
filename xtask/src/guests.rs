//! The task that builds the examples as components.

use anyhow::{Result, bail};
use mayfly_xtask_harness::{guests, workspace::Workspace};

pub(crate) const HELP: &str = "\
Makes sure that a toolchain for wasm is there, builds the mayfly binary, and with it the examples, into
target/guests/*.wasm. Does nothing when neither the examples nor the SDK nor the way of building changed.

  cargo xtask guests [--force]

The toolchain is rustup's target wasm32-wasip2, or Debian's rustc for the web with the sources of its
standard library; the latter is installed when we are root and no other is there.";

pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let force = match arguments {
        [] => false,
        [one] if one == "--force" => true,
        _ => bail!("guests takes --force, not {arguments:?}"),
    };
    let workspace = Workspace::locate()?;
    if force {
        guests::forget_build(&workspace);
    }
    guests::build(&workspace)?;
    Ok(())
}
