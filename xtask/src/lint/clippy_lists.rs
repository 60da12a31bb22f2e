//! Finds crates with a clippy.toml of their own that lacks a line of the workspace's: clippy reads only the nearest one.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

const FILE: &str = "clippy.toml";

/// A message for each line of the workspace's clippy.toml that is missing in the one of a member of `cargo metadata`.
pub(super) fn incomplete(root: &Path, metadata: &Value) -> Result<Vec<String>> {
    let workspace = std::fs::read_to_string(root.join(FILE)).context("the workspace has no clippy.toml")?;
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().context("cargo metadata lists no packages")? {
        let manifest = Path::new(package["manifest_path"].as_str().context("a package without a path")?);
        let own = manifest.with_file_name(FILE);
        if let Ok(text) = std::fs::read_to_string(&own) {
            let shown = own.strip_prefix(root).unwrap_or(&own).display();
            found.extend(missing(&workspace, &text).map(|line| format!("{shown} lacks {line:?} of {FILE}")));
        }
    }
    Ok(found)
}

/// The lines of `workspace`, other than comments, that `own` does not have.
fn missing<'t>(workspace: &'t str, own: &'t str) -> impl Iterator<Item = &'t str> {
    let rules = workspace.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    rules.filter(|rule| !own.lines().any(|line| line.trim() == *rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_rule_is_found() {
        let workspace = "# why\nlimit = 4\nmethods = [\n    { path = \"a\" },\n    { path = \"b\" },\n]\n";
        let own = "# other\nlimit = 4\nmethods = [\n  { path = \"a\" },\n  { path = \"c\" },\n]\n";
        assert_eq!(missing(workspace, own).collect::<Vec<_>>(), ["{ path = \"b\" },"]);
        assert_eq!(missing(workspace, workspace).count(), 0);
    }
}
