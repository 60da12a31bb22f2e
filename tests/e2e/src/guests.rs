//! The components of the examples, as `cargo xtask guests` builds them.

use std::path::PathBuf;

/// The component of an example, or why there is none.
pub fn guest(name: &str) -> Result<PathBuf, String> {
    let component = folder()?.join(format!("{name}.wasm"));
    match component.is_file() {
        true => Ok(component),
        false => Err(format!("{} is not there: cargo xtask guests", component.display())),
    }
}

fn folder() -> Result<PathBuf, String> {
    match std::env::var_os("MAYFLY_GUESTS") {
        Some(folder) => Ok(folder.into()),
        None => Ok(crate::up::target_directory().map_err(|error| error.to_string())?.join("guests")),
    }
}
