//! Locates the test data.

use std::path::PathBuf;

/// A folder of the test data: under `MAYFLY_TESTDATA`, or else next to the repository. `None`, with a message, if it
/// does not exist.
pub(crate) fn testdata(folder: &str) -> Option<PathBuf> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/testdata");
    let root = std::env::var_os("MAYFLY_TESTDATA").map_or_else(beside, PathBuf::from);
    let folder = root.join(folder);
    if !folder.is_dir() {
        eprintln!("skipped: no test data at {}", folder.display());
        return None;
    }
    Some(folder)
}
