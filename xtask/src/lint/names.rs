//! Type names that are defined more than once: one concept has one word, and one word one concept.
//!
//! Only names that other modules can use are counted (`pub`, `pub(crate)`, …), and no tests: a private type is read
//! beside its uses. `duplicate_names.txt` lists the names that are still defined more than once. The list can only
//! get shorter: a name that is not on it fails the check, and so does an entry that is no longer true.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::rust_files;

/// Conventions of the workspace: each crate or plan has its own.
const CONVENTIONS: &[&str] = &["Config", "Error", "Step"];
const KNOWN: &str = include_str!("duplicate_names.txt");
/// Folders whose types are not part of the platform.
const OUTSIDE: &[&str] = &["sdk", "examples", "tests", "benches"];

/// Messages for the names that the list does not allow, and for entries of the list that are no longer needed.
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
    Ok(compare(&defined, KNOWN))
}

fn compare(defined: &BTreeMap<String, Vec<String>>, known: &str) -> Vec<String> {
    let known: BTreeSet<&str> = known.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let is_duplicate = |name: &str| defined.get(name).is_some_and(|files| files.len() > 1);
    let new = defined.iter().filter(|(name, files)| {
        files.len() > 1 && !CONVENTIONS.contains(&name.as_str()) && !known.contains(name.as_str())
    });
    let new =
        new.map(|(name, files)| format!("{name} is defined {} times ({})", files.len(), files.join(", ")));
    let stale = known
        .iter()
        .filter(|name| !is_duplicate(name))
        .map(|name| format!("{name} is defined once now: take it off xtask/src/lint/duplicate_names.txt"));
    new.chain(stale).collect()
}

/// The names of the structs, enums and traits that a file's other modules can use.
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
        Some(&rest[..end.unwrap_or(rest.len())])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_found_whatever_their_visibility() {
        let text = "pub struct A<T>(T);\n  pub(crate) enum B {\npub(in crate::x) trait C: D {\nstruct Private;\n\
                    pub fn structure() {}\npub use a::struct_like;\n";
        assert_eq!(definitions(text).collect::<Vec<_>>(), ["A", "B", "C"]);
    }

    #[test]
    fn the_list_can_only_get_shorter() {
        let files = |count: usize| vec!["a.rs".to_owned(); count];
        let defined: BTreeMap<String, Vec<String>> = [("Once", 1), ("Known", 2), ("New", 2), ("Error", 9)]
            .map(|(name, n)| (name.into(), files(n)))
            .into();
        let messages = compare(&defined, "Known\nOnce\n");
        assert_eq!(messages.len(), 2, "{messages:?}");
        assert!(messages[0].starts_with("New is defined 2 times"), "{messages:?}");
        assert!(messages[1].starts_with("Once is defined once now"), "{messages:?}");
    }
}
