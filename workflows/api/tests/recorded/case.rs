//! The recordings: where they are and how they read.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

/// One recorded case: calls in order, and what AWS answered by the name of the step.
#[derive(Deserialize)]
pub(crate) struct Case {
    /// `<folder>/<case>`.
    #[serde(skip)]
    pub(crate) name: String,
    pub(crate) calls: Vec<RecordedCall>,
    pub(crate) expected: Map<String, Value>,
}

#[derive(Deserialize)]
pub(crate) struct RecordedCall {
    pub(crate) operation: String,
    pub(crate) params: Value,
}

/// `MAYFLY_TESTDATA`, or `shared/testdata` beside the repository.
fn testdata() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/testdata");
    let folder = std::env::var_os("MAYFLY_TESTDATA").map_or(beside, PathBuf::from);
    let recorded = folder.join("aws-recorded");
    recorded.is_dir().then_some(recorded)
}

/// All cases, sorted by name; none where the test data is not there.
pub(crate) fn load() -> Option<Vec<Case>> {
    let root = testdata()?;
    let mut cases = Vec::new();
    for folder in fs::read_dir(&root).expect("the folder lists").flatten() {
        for file in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            let text = fs::read_to_string(file.path()).expect("the case reads");
            let mut case: Case = serde_json::from_str(&text).expect("the case parses");
            let stem = file.path().with_extension("");
            case.name = stem.strip_prefix(&root).expect("below the root").display().to_string();
            cases.push(case);
        }
    }
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    Some(cases)
}
