//! Manifests: objects in YAML or JSON, from files, folders or stdin.

use std::{
    io,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::Value;

use super::{
    bounded_read,
    failure::{ErrorCode, Failure},
};

/// The size limit of a manifest, in bytes, which catches a wrong file before it fills memory.
const MANIFEST_BYTES_MAX: u64 = 32 << 20;

/// One object, and the file it was read from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Document {
    pub(crate) value: Value,
    pub(crate) api_version: String,
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) namespace: Option<String>,
    /// Such as `app.yaml`, or `app.yaml, document 2`.
    pub(crate) source: String,
}

/// The text of a manifest that was read.
fn text_of(content: io::Result<Vec<u8>>, source: &str) -> anyhow::Result<String> {
    let content = content.map_err(|error| {
        let (code, todo) = match error.kind() {
            io::ErrorKind::FileTooLarge => {
                (ErrorCode::InvalidFile, "a component is deployed with: mayfly deploy FILE.wasm")
            }
            _ => (ErrorCode::FileError, ""),
        };
        Failure::new(code, format!("cannot read {source}: {error}"), todo)
    })?;
    String::from_utf8(content).map_err(|_| {
        let what = format!("cannot read {source}: it is not UTF-8 text");
        Failure::error(ErrorCode::InvalidFile, what, "a manifest is YAML or JSON")
    })
}

/// Reads all objects of files, folders (their `.yaml`, `.yml` and `.json` files, sorted by name) and `-` for stdin.
pub(crate) fn read(paths: &[PathBuf], recursive: bool) -> anyhow::Result<Vec<Document>> {
    let mut documents = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            let content = bounded_read::stream(std::io::stdin(), MANIFEST_BYTES_MAX);
            documents.extend(parse(&text_of(content, "stdin")?, "stdin")?);
            continue;
        }
        for file in files(path, recursive)? {
            let source = file.display().to_string();
            let content = bounded_read::file(&file, MANIFEST_BYTES_MAX);
            documents.extend(parse(&text_of(content, &source)?, &source)?);
        }
    }
    if documents.is_empty() {
        let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        return Err(Failure::error(
            ErrorCode::InvalidFile,
            format!("no object in {}", names.join(", ")),
            "a manifest has apiVersion, kind and metadata.name; --recursive also looks into folders below",
        ));
    }
    Ok(documents)
}

fn files(path: &Path, recursive: bool) -> anyhow::Result<Vec<PathBuf>> {
    let metadata = std::fs::metadata(path).map_err(|error| {
        Failure::error(
            ErrorCode::FileError,
            format!("cannot read {}: {error}", path.display()),
            "name a file, a folder, or - for stdin",
        )
    })?;
    if !metadata.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))? {
        let entry = entry?;
        let inner = entry.path();
        // Links to folders are not followed, so that there are no loops.
        if entry.file_type()?.is_dir() {
            if recursive {
                found.extend(files(&inner, true)?);
            }
        } else if inner.extension().is_some_and(|e| e == "yaml" || e == "yml" || e == "json") {
            found.push(inner);
        }
    }
    found.sort();
    Ok(found)
}

/// Parses all objects of a text; a `List` is split into its items.
fn parse(text: &str, source: &str) -> anyhow::Result<Vec<Document>> {
    let mut options = serde_saphyr::Options::default();
    // As in Kubernetes: 0644 is a file mode.
    options.legacy_octal_numbers = true;
    let values: Vec<Value> = serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        let why = super::yaml::problem(&error);
        Failure::error(
            ErrorCode::InvalidFile,
            format!("{source} cannot be read: {why}"),
            "nothing was sent to the server",
        )
    })?;
    let values: Vec<_> = values.into_iter().filter(|value| !value.is_null()).collect();
    let many = values.len() > 1;
    let mut documents = Vec::new();
    for (at, value) in values.into_iter().enumerate() {
        let source = if many { format!("{source}, document {}", at + 1) } else { source.to_owned() };
        let is_list = value["kind"].as_str().is_some_and(|kind| kind.ends_with("List"));
        match value["items"].as_array() {
            Some(items) if is_list => {
                for (at, item) in items.iter().enumerate() {
                    documents.push(document(item.clone(), format!("{source}, item {}", at + 1))?);
                }
            }
            _ => documents.push(document(value, source)?),
        }
    }
    Ok(documents)
}

fn document(value: Value, source: String) -> anyhow::Result<Document> {
    let text = |pointer: &str| -> anyhow::Result<String> {
        match value.pointer(pointer).and_then(Value::as_str) {
            Some(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => {
                let field = pointer[1..].replace('/', ".");
                let todo = "an object has apiVersion, kind and metadata.name; nothing was sent to the server";
                Err(Failure::error(ErrorCode::InvalidFile, format!("{source}: {field} is missing"), todo))
            }
        }
    };
    let (api_version, kind, name) = (text("/apiVersion")?, text("/kind")?, text("/metadata/name")?);
    let namespace = value["metadata"]["namespace"].as_str().map(str::to_owned);
    Ok(Document { api_version, kind, name, namespace, value, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> anyhow::Result<Vec<String>> {
        Ok(parse(text, "f.yaml")?
            .into_iter()
            .map(|d| format!("{}/{} ({})", d.kind, d.name, d.source))
            .collect())
    }

    #[test]
    fn documents_lists_and_json() {
        for (text, expected) in [
            ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", &["Pod/a (f.yaml)"][..]),
            (
                "---\napiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\n# nothing\n---\napiVersion: v1\nkind: Node\n\
                 metadata: {name: b}\n",
                &["Pod/a (f.yaml, document 1)", "Node/b (f.yaml, document 2)"],
            ),
            (r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}"#, &["Pod/a (f.yaml)"]),
            (
                "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod, metadata: {name: a}}\n",
                &["Pod/a (f.yaml, item 1)"],
            ),
            ("", &[]),
            ("---\n---\n", &[]),
        ] {
            assert_eq!(names(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn what_is_missing_is_named_with_its_place() {
        for (text, expected) in [
            ("kind: Pod\nmetadata: {name: a}", "f.yaml: apiVersion is missing"),
            ("apiVersion: v1\nkind: Pod", "f.yaml: metadata.name is missing"),
            ("apiVersion: v1\nkind: [", "f.yaml cannot be read"),
            ("apiVersion: v1\nkind: Pod\nkind: Node", "the key `kind` is there twice"),
            ("just words", "apiVersion is missing"),
        ] {
            let error = parse(text, "f.yaml").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn octal_modes_and_quoted_numbers() {
        let text =
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {mode: 0644, text: \"0644\", port: 8080}";
        let spec = &parse(text, "f").unwrap()[0].value["spec"];
        assert_eq!(*spec, serde_json::json!({"mode": 420, "text": "0644", "port": 8080}));
    }

    #[test]
    fn folders() {
        let folder = tempfile::tempdir().unwrap();
        let pod = |name: &str| format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\n");
        std::fs::create_dir(folder.path().join("inner")).unwrap();
        for (file, name) in [("b.yaml", "b"), ("a.yml", "a"), ("note.txt", "x"), ("inner/c.json", "c")] {
            std::fs::write(folder.path().join(file), pod(name)).unwrap();
        }
        let names = |recursive| -> Vec<_> {
            let read = read(&[folder.path().to_owned()], recursive).unwrap();
            read.into_iter().map(|document| document.name).collect()
        };
        assert_eq!(names(false), ["a", "b"]);
        assert_eq!(names(true), ["a", "b", "c"]);
        let error = read(&[folder.path().join("nothing")], false).unwrap_err().to_string();
        assert!(error.contains("nothing"), "{error}");
        std::fs::write(folder.path().join("empty.yaml"), "").unwrap();
        assert!(
            read(&[folder.path().join("empty.yaml")], false).unwrap_err().to_string().contains("no object")
        );
    }
}
