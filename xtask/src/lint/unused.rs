//! Finds dependencies that no source file of their crate names: they slow down every build, and are misleading.
//!
//! Sources are searched as text, so a name in a comment counts. The compiler's own lint (`unused_crate_dependencies`)
//! is stricter, but requires each test and example to name the dependencies of the library.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::Value;

use super::rust_files;

/// Packages whose crate name is not their package name with `_` for `-`.
const OTHERWISE_NAMED: &[(&str, &str)] = &[("md-5", "md5"), ("mayfly-sdk", "mayfly")];

/// The dependencies that are listed and not used, for each member of `cargo metadata`.
pub(super) fn unused(metadata: &Value) -> Result<Vec<String>> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let folders = packages.iter().map(folder).collect::<Result<Vec<_>>>()?;
    let mut found = Vec::new();
    for (package, folder) in packages.iter().zip(&folders) {
        let sources = sources(folder, &folders)?;
        let name = package["name"].as_str().unwrap_or_default();
        let listed = package["dependencies"].as_array().into_iter().flatten();
        found.extend(unnamed(listed, &sources).into_iter().map(|(dependency, code)| {
            format!(
                "{name} depends on {dependency}, but no source file names {code}: remove it from its Cargo.toml"
            )
        }));
    }
    Ok(found)
}

fn folder(package: &Value) -> Result<&Path> {
    let manifest = Path::new(package["manifest_path"].as_str().context("a package without a path")?);
    manifest.parent().context("a manifest without a folder")
}

/// All Rust sources of a crate, without those of crates in its folder.
fn sources(folder: &Path, crates: &[&Path]) -> Result<String> {
    let mut files: Vec<PathBuf> = Vec::new();
    rust_files(folder, &mut files)?;
    let inner: Vec<_> = crates.iter().filter(|one| **one != folder && one.starts_with(folder)).collect();
    let mut text = String::new();
    for file in files.iter().filter(|file| !inner.iter().any(|one| file.starts_with(one))) {
        text += &std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    }
    Ok(text)
}

/// The dependencies that the sources do not name, with their crate names.
fn unnamed<'a>(listed: impl Iterator<Item = &'a Value>, sources: &str) -> BTreeSet<(&'a str, String)> {
    let names = listed.filter_map(|dependency| dependency["rename"].as_str().or(dependency["name"].as_str()));
    let coded = names.map(|name| (name, code_name(name)));
    coded.filter(|(_, code)| !says(sources, code)).collect()
}

fn code_name(package: &str) -> String {
    let otherwise = OTHERWISE_NAMED.iter().find(|(name, _)| *name == package);
    otherwise.map_or_else(|| package.replace('-', "_"), |(_, code)| (*code).to_owned())
}

/// Whether the text contains this as a whole word.
fn says(text: &str, word: &str) -> bool {
    let goes_on = |character: char| character.is_alphanumeric() || character == '_';
    let whole = |at: usize| !text[..at].ends_with(goes_on) && !text[at + word.len()..].starts_with(goes_on);
    text.match_indices(word).any(|(at, _)| whole(at))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unused_dependencies_are_found() {
        let sources = "use http_body_util::Full; use old::Name; fn hyper_like() {} use md5::Digest;";
        for (name, rename, is_unnamed) in [
            ("http-body-util", None, false),
            ("http-body", None, true),
            ("hyper", None, true),
            ("md-5", None, false),
            ("new-name", Some("old"), false),
            ("old", Some("renamed"), true),
        ] {
            let listed = [json!({"name": name, "rename": rename})];
            assert_eq!(unnamed(listed.iter(), sources).len(), usize::from(is_unnamed), "{name}");
        }
        // In two sections, reported once.
        let twice = [json!({"name": "hyper"}), json!({"name": "hyper"})];
        assert_eq!(unnamed(twice.iter(), sources).len(), 1);
    }

    #[test]
    fn nested_crates_are_excluded_from_sources() {
        let folder = std::env::temp_dir().join(format!("mayfly-unused-{}", std::process::id()));
        let inner = folder.join("macros");
        for (at, text) in [(&folder, "use outer;"), (&inner, "use inner;")] {
            std::fs::create_dir_all(at.join("src")).unwrap();
            std::fs::write(at.join("src/lib.rs"), text).unwrap();
        }
        let read = sources(&folder, &[&folder, &inner]);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(read.unwrap(), "use outer;");
    }
}
