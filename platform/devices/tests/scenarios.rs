//! The tests that `docs/devices-scenarios.md` names exist.

use std::{collections::BTreeSet, fs, path::Path};

/// The names of all functions in the sources below a folder.
fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() && name != "target" && name != "node_modules" {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let after = text.split("fn ").skip(1);
            found.extend(after.filter_map(|rest| rest.split(['(', '<']).next()).map(str::to_owned));
        }
    }
}

#[test]
fn every_named_test_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut known = BTreeSet::new();
    for folder in ["gpu", "platform", "runtime-slurm", "tests", "workflows"] {
        functions(&root.join(folder), &mut known);
    }
    let text = fs::read_to_string(root.join("docs/devices-scenarios.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| scenario"));
    let (mut missing, mut count) = (Vec::new(), 0);
    for row in rows {
        let tests = row.rsplit("| ").next().unwrap_or_default();
        if tests.starts_with("– ") {
            continue;
        }
        // Every second part is between backticks.
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "{row}");
        count += names.len();
        missing.extend(names.into_iter().filter(|name| !known.contains(*name)));
    }
    assert!(count > 100, "{count}");
    assert_eq!(missing, [""; 0]);
}
