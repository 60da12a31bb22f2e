//! Definitions: files in the Amazon States Language, JSON or YAML; or tasks, which are compiled to it.

use std::{io::Read as _, path::Path};

use anyhow::Context as _;
use mayfly_workflows_language::{tasks, value::Value};
use serde::{Deserialize, de::IgnoredAny};

use super::ordered::Ordered;
use crate::{
    failure::{ErrorCode, Failure},
    format, yaml,
};

/// The largest file that is read. The API accepts definitions of 1 MiB; comments and YAML syntax need more space.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// Reads a file, or stdin (`-`), and returns the definition as JSON text.
pub(super) fn read(path: &Path) -> anyhow::Result<String> {
    refuse_folder(path)?;
    let source = source(path);
    let mut text = String::new();
    if path.as_os_str() == "-" {
        std::io::stdin().take(FILE_BYTES_MAX).read_to_string(&mut text).context("cannot read stdin")?;
        return compiled(to_json(&text, &source)?, &source);
    }
    let unreadable = |error: std::io::Error| {
        let what = format!("cannot read {source}: {error}");
        Failure::new(
            ErrorCode::FileError,
            what,
            "name a file with a state machine in JSON or YAML, or - for stdin",
        )
    };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let bytes = file.metadata().map_err(unreadable)?.len();
    if bytes > FILE_BYTES_MAX {
        let what = format!("{source} has {}, more than a definition may have", format::bytes(bytes));
        return Err(Failure::error(ErrorCode::InvalidFile, what, "the largest definition is 1 MiB"));
    }
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(unreadable)?;
    compiled(to_json(&text, &source)?, &source)
}

/// Compiles a document of tasks to a definition; any other text is returned unchanged.
fn compiled(json: String, source: &str) -> anyhow::Result<String> {
    if !Value::parse(&json).is_ok_and(|document| tasks::is_tasks(&document)) {
        return Ok(json);
    }
    // Strict, since duplicate task names would silently lose a task.
    let document = Value::parse_strict(&json).map_err(|error| {
        Failure::error(
            ErrorCode::InvalidFile,
            format!("{source} cannot be read: {error}"),
            "nothing was sent to the server",
        )
    })?;
    let definition = tasks::compile(&document).map_err(|problems| {
        let problems: Vec<_> =
            problems.iter().map(|one| format!("  {}: {}", one.location, one.message)).collect();
        Failure::error(
            ErrorCode::InvalidFile,
            format!("the tasks of {source} cannot be compiled:\n{}", problems.join("\n")),
            "nothing was sent to the server",
        )
    })?;
    Ok(serde_json::to_string_pretty(&definition)?)
}

/// Refuses a folder, which is valid only for deploying a function.
pub(super) fn refuse_folder(path: &Path) -> anyhow::Result<()> {
    match path.as_os_str() != "-" && path.is_dir() {
        true => Err(Failure::error(
            ErrorCode::FileError,
            format!("{} is a folder", path.display()),
            "name the file with the state machine in it",
        )),
        false => Ok(()),
    }
}

/// The file's name for errors.
pub(super) fn source(path: &Path) -> String {
    if path.as_os_str() == "-" { "stdin".into() } else { path.display().to_string() }
}

/// Converts YAML to JSON and keeps the order of members. JSON is unchanged.
fn to_json(text: &str, source: &str) -> anyhow::Result<String> {
    let json = serde_json::from_str::<IgnoredAny>(text);
    let error = match json {
        Ok(_) => {
            refuse_manifest(text, source)?;
            return Ok(text.to_owned());
        }
        Err(error) => error,
    };
    let nothing_sent = "nothing was sent to the server";
    let is_yaml = source.ends_with(".yaml") || source.ends_with(".yml");
    if !is_yaml && (source.ends_with(".json") || text.trim_start().starts_with('{')) {
        return Err(Failure::error(
            ErrorCode::InvalidFile,
            format!("{source} is not JSON: {error}"),
            nothing_sent,
        ));
    }
    let value: Ordered = yaml::read(text).map_err(|why| {
        Failure::new(ErrorCode::InvalidFile, format!("{source} cannot be read: {why}"), nothing_sent)
    })?;
    if !matches!(value, Ordered::Object(_)) {
        let todo = "a state machine has StartAt and States";
        return Err(Failure::error(
            ErrorCode::InvalidFile,
            format!("{source} contains no state machine"),
            todo,
        ));
    }
    let json = serde_json::to_string_pretty(&value)?;
    refuse_manifest(&json, source)?;
    Ok(json)
}

/// Refuses the manifest of an object: the command needs only the definition.
fn refuse_manifest(json: &str, source: &str) -> anyhow::Result<()> {
    #[derive(Deserialize)]
    struct Manifest {
        #[serde(rename = "apiVersion")]
        _api_version: IgnoredAny,
        kind: String,
    }
    // Other documents are validated by the API.
    let Ok(Manifest { kind, .. }) = serde_json::from_str(json) else { return Ok(()) };
    let file = if source == "stdin" { "-" } else { source };
    Err(Failure::error(
        ErrorCode::InvalidFile,
        format!("{source} is a manifest of kind {kind}, not a state machine"),
        format!("apply it: mayfly apply -f {file}"),
    ))
}

/// The workflow name for a file: `order` for `order.asl.json`. `None` for stdin.
pub(super) fn name_of_file(path: &Path) -> Option<String> {
    if path.as_os_str() == "-" {
        return None;
    }
    let stem = path.file_stem()?.to_string_lossy();
    Some(stem.strip_suffix(".asl").unwrap_or(&stem).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yaml_becomes_json_in_the_same_order() {
        let yaml = "# an order\nStartAt: Z\nStates:\n  Z: {Type: Pass, Next: A}\n  A:\n    Type: Wait\n    Seconds: 3\n    \
                    End: true\n    Comment: \"yes\"\n";
        let json = to_json(yaml, "f.yaml").unwrap();
        let packed: String = json.split_whitespace().collect();
        assert_eq!(
            packed,
            r#"{"StartAt":"Z","States":{"Z":{"Type":"Pass","Next":"A"},"A":{"Type":"Wait","Seconds":3,"End":true,"Comment":"yes"}}}"#
        );
    }

    #[test]
    fn text_that_is_no_number_for_everyone_stays_text() {
        let yaml =
            "Default: No\nNo: yes\nEnd: true\nZip: 010\nBig: 1_000\nSeconds: 3\nRate: 1.5\nLong: 1e3\n";
        let json: serde_json::Value = serde_json::from_str(&to_json(yaml, "f.yaml").unwrap()).unwrap();
        let expected = serde_json::json!({"Default": "No", "No": "yes", "End": true, "Zip": "010", "Big": "1_000",
                                          "Seconds": 3, "Rate": 1.5, "Long": 1000.0});
        assert_eq!(json, expected);
    }

    #[test]
    fn a_folder_is_told_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("is a folder"), "{error}");
    }

    #[test]
    fn tasks_become_states() {
        let yaml = "tasks:\n  b: {function: g, dependencies: [a]}\n  a: {function: f}\n";
        let json = compiled(to_json(yaml, "f.yaml").unwrap(), "f.yaml").unwrap();
        let definition: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(definition["States"]["a"]["Next"], "b");
        for (text, expected) in [
            (
                "tasks: {a: {function: f, dependencies: [b]}}",
                "/tasks/a/dependencies[0]: there is no task \"b\"",
            ),
            (r#"{"tasks": {"a": {"function": "f"}, "a": {"function": "g"}}}"#, "Duplicate field 'a'"),
        ] {
            let error = compiled(to_json(text, "f").unwrap(), "f").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(compiled("{ \"StartAt\": 1}".into(), "f").unwrap(), "{ \"StartAt\": 1}");
    }

    #[test]
    fn json_stays_as_it_is() {
        let json = "{ \"StartAt\":\"Z\",\n\"A\": 1.0 }\n";
        for source in ["f.json", "f.yaml", "f", "stdin"] {
            assert_eq!(to_json(json, source).unwrap(), json);
        }
    }

    #[test]
    fn what_is_neither_is_told_with_its_place() {
        for (text, source, expected) in [
            ("{\"a\": }", "f.json", "f.json is not JSON: expected value at line 1 column 7"),
            ("{\"a\": 1,}", "stdin", "stdin is not JSON"),
            ("a: 1\na: 2", "f.yaml", "f.yaml cannot be read: line 2 column 1: the key `a` is there twice"),
            ("a: [", "f.yml", "f.yml cannot be read"),
            ("words", "f.asl", "no state machine"),
            ("apiVersion: mayfly.dev/v1\nkind: Workflow", "f.yaml", "f.yaml is a manifest of kind Workflow"),
            ("{\"apiVersion\": \"v1\", \"kind\": \"Pod\"}", "f.json", "f.json is a manifest of kind Pod"),
        ] {
            let error = to_json(text, source).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_file_names_its_workflow() {
        for (path, expected) in [
            ("a/order.json", Some("order")),
            ("order.asl.yaml", Some("order")),
            ("a.b.json", Some("a.b")),
            ("-", None),
        ] {
            assert_eq!(name_of_file(Path::new(path)).as_deref(), expected);
        }
    }
}
