//! Finds type names that are defined more than once: each concept has one name, and each name one concept.
//!
//! Only names that other modules can use are counted (`pub`, `pub(crate)`, …), those of tests included: a private type is
//! read next to its uses.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::rust_files;

/// Names that each crate or plan may define, by convention.
const CONVENTIONS: &[&str] = &["Config", "Error", "Step"];
/// Folders whose types are not part of the platform or its tests.
const OUTSIDE: &[&str] = &["sdk", "examples", "benches"];
/// Names of test harnesses that are not unique yet, and how often each is defined. Do not add one: rename the type after
/// what it does.
const NOT_YET_UNIQUE: &[(&str, usize)] = &[("Api", 2), ("Start", 2)];

/// A message for each name that is defined more than once and is not a convention.
pub(super) fn duplicates(root: &Path) -> Result<Vec<String>> {
    let mut files: Vec<PathBuf> = Vec::new();
    rust_files(root, &mut files)?;
    let mut defined: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files {
        let inside = file.strip_prefix(root).unwrap_or(&file);
        if inside.components().any(|part| OUTSIDE.iter().any(|outside| part.as_os_str() == *outside)) {
            continue;
        }
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        for name in definitions(&text) {
            defined.entry(name.to_owned()).or_default().push(inside.display().to_string());
        }
    }
    Ok(messages(&defined))
}

fn messages(defined: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let permitted = |name: &str| {
        let known = NOT_YET_UNIQUE.iter().find(|(known, _)| *known == name);
        known.map_or(1, |(_, count)| *count)
    };
    let duplicates = defined
        .iter()
        .filter(|(name, files)| files.len() > permitted(name) && !CONVENTIONS.contains(&name.as_str()));
    let message = |(name, files): (&String, &Vec<String>)| {
        format!("{name} is defined {} times ({})", files.len(), files.join(", "))
    };
    duplicates.map(message).collect()
}

/// The names of the structs, enums and traits that are visible outside a file's module.
fn definitions(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let line = line.trim_start().strip_prefix("pub")?;
        let line = match line.strip_prefix('(') {
            Some(restricted) => restricted.split_once(')')?.1,
            None => line,
        };
        let line = line.strip_prefix(' ')?;
        let rest = ["struct ", "enum ", "trait "].iter().find_map(|keyword| line.strip_prefix(keyword))?;
        let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_');
        // The name is a parameter of a macro (`$name`) where this is empty.
        Some(&rest[..end.unwrap_or(rest.len())]).filter(|name| !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_found_whatever_their_visibility() {
        let text = "pub struct A<T>(T);\n  pub(crate) enum B {\npub(in crate::x) trait C: D {\nstruct Private;\n\
                    pub fn structure() {}\npub use a::struct_like;\npub struct $name(u64);\n";
        assert_eq!(definitions(text).collect::<Vec<_>>(), ["A", "B", "C"]);
    }

    #[test]
    fn duplicate_type_names_are_found_unless_conventional() {
        let files = |count: usize| vec!["a.rs".to_owned(); count];
        let defined: BTreeMap<String, Vec<String>> =
            [("Once", 1), ("Twice", 2), ("Error", 9), NOT_YET_UNIQUE[0]]
                .map(|(name, n)| (name.into(), files(n)))
                .into();
        assert_eq!(messages(&defined), ["Twice is defined 2 times (a.rs, a.rs)"]);
    }
}
