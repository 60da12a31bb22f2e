//! Where the test data is.

use std::path::PathBuf;

/// A folder of the test data: under `MAYFLY_TESTDATA`, else beside the repository.
/// None, and said so, when it is not there.
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
