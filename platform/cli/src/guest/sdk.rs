//! The Rust SDK embedded in this binary, so that projects build without Mayfly's sources.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use include_dir::{Dir, DirEntry, include_dir};
use sha2::{Digest as _, Sha256};

/// The path of a project's copy of the SDK, relative to the project. Its `Cargo.toml` depends on this path.
pub(super) const FOLDER: &str = ".mayfly/sdk";

static SOURCES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/rust/src");
static MACROS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/rust/macros/src");
const MANIFEST: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../sdk/rust/Cargo.toml"));
const MACROS_MANIFEST: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../sdk/rust/macros/Cargo.toml"));
/// The versions with which the SDK was tested; a new project starts with them.
pub(super) const LOCKFILE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../sdk/rust/Cargo.lock"));

/// The file that identifies the version of a copy.
const STAMP: &str = ".digest";

/// Writes the copy, unless the project already has the same one. Returns whether it was written.
pub(super) fn refresh(project: &Path) -> Result<bool> {
    let folder = project.join(FOLDER);
    let digest = digest();
    if fs::read_to_string(folder.join(STAMP)).is_ok_and(|stamp| stamp == digest) {
        return Ok(false);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot replace {}", folder.display()))?;
    }
    for (path, contents) in files() {
        let file = folder.join(path);
        let parent = file.parent().expect("a file lies in a folder");
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        fs::write(&file, contents).with_context(|| format!("cannot write {}", file.display()))?;
    }
    // Written last: an interrupted copy is written again.
    fs::write(folder.join(STAMP), digest).with_context(|| format!("cannot write {}", folder.display()))?;
    Ok(true)
}

/// All files of the SDK by their path in the copy.
fn files() -> Vec<(String, &'static [u8])> {
    let mut files = vec![
        ("Cargo.toml".to_owned(), MANIFEST.as_bytes()),
        ("macros/Cargo.toml".to_owned(), MACROS_MANIFEST.as_bytes()),
    ];
    collect("src", &SOURCES, &mut files);
    collect("macros/src", &MACROS, &mut files);
    files.sort();
    files
}

fn collect(prefix: &str, dir: &'static Dir<'static>, files: &mut Vec<(String, &'static [u8])>) {
    for entry in dir.entries() {
        match entry {
            DirEntry::Dir(inner) => collect(prefix, inner, files),
            DirEntry::File(file) => {
                files.push((format!("{prefix}/{}", file.path().display()), file.contents()));
            }
        }
    }
}

fn digest() -> String {
    let mut hasher = Sha256::new();
    for (path, contents) in files() {
        hasher.update(path.as_bytes());
        hasher.update([0]);
        hasher.update(contents.len().to_le_bytes());
        hasher.update(contents);
    }
    hex::encode(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_carries_the_sdk_as_it_is() {
        let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/rust");
        let mut on_disk = vec!["Cargo.toml".to_owned(), "macros/Cargo.toml".to_owned()];
        let mut folders = vec!["src".to_owned(), "macros/src".to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(sdk.join(&folder)).unwrap().flatten() {
                let path = format!("{folder}/{}", entry.file_name().display());
                if entry.path().is_dir() { folders.push(path) } else { on_disk.push(path) }
            }
        }
        on_disk.sort();
        let carried: Vec<String> = files().into_iter().map(|(path, _)| path).collect();
        assert_eq!(carried, on_disk);
        for (path, contents) in files() {
            assert!(fs::read(sdk.join(&path)).unwrap() == contents, "{path} differs: build again");
        }
    }

    #[test]
    fn a_copy_is_written_once_and_replaced_when_it_differs() {
        let project = tempfile::tempdir().unwrap();
        assert!(refresh(project.path()).unwrap());
        assert!(!refresh(project.path()).unwrap());
        let folder = project.path().join(FOLDER);
        fs::write(folder.join(STAMP), "of another version").unwrap();
        fs::write(folder.join("src/gone.rs"), "").unwrap();
        assert!(refresh(project.path()).unwrap());
        assert!(!folder.join("src/gone.rs").exists());
        assert!(folder.join("src/lib.rs").exists());
    }
}
