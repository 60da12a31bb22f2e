//! A project: its folder or its one file, its name, and its manifest.
//!
//! `function.yaml` is a Function in kubectl's form without a source, which the build provides. It is optional: by
//! default the function has the package's name, or that of the script's file or folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use mayfly_api::validation;
use serde_json::{Map, Value, json};

use super::script::Script;
use super::sdk;
use crate::failure::{ErrorCode, Failure};

/// File names of the manifest, in order of preference.
const MANIFESTS: [&str; 2] = ["function.yaml", "function.yml"];

/// A project that builds into a function.
#[derive(Clone, Debug)]
pub(crate) struct Project {
    /// The project's folder, absolute.
    pub(crate) dir: PathBuf,
    /// The function's name.
    pub(crate) name: String,
    /// The Function in the manifest (`apiVersion`, `kind`, `metadata`, `spec`); a minimal one without a manifest.
    pub(crate) manifest: Value,
    /// The name of the file that defines the function: `function.yaml`, or `Cargo.toml` without one.
    pub(crate) place: String,
    pub(crate) code: BuildSource,
}

/// The source of a project's build.
#[derive(Clone, Debug)]
pub(crate) enum BuildSource {
    /// A Rust package.
    Cargo,
    Script(Script),
}

impl Project {
    /// Reads the project at a path: a folder, or a script with or without its handler's name.
    pub(crate) fn load(path: &Path) -> Result<Project> {
        if let Some(script) = Script::parse(path) {
            let file = opened(&script.file)?;
            let stem = script.stem()?.to_owned();
            return Self::of_script(Script { file, ..script }, &stem);
        }
        let dir = opened(path)?;
        if dir.join("Cargo.toml").is_file() {
            return Self::of_cargo(dir);
        }
        if let Some(script) = Script::in_folder(&dir) {
            let folder = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Self::of_script(script, &folder);
        }
        Err(Failure::error(
            ErrorCode::FileError,
            format!(
                "{} is not a project: it has no Cargo.toml, no handler.py and no handler.js or .ts",
                dir.display()
            ),
            "name a project's folder or a script, or make one: mayfly new rust NAME, or python, js, ts",
        ))
    }

    /// Whether a folder contains a function manifest beside its code.
    pub(crate) fn has_manifest(dir: &Path) -> bool {
        MANIFESTS.iter().any(|name| dir.join(name).is_file())
    }

    /// Whether a path refers to a project rather than a component.
    pub(crate) fn is_named_by(path: &Path) -> bool {
        path.is_dir() || Script::parse(path).is_some()
    }

    /// The folder of the project at a path.
    pub(crate) fn folder(path: &Path) -> Result<PathBuf> {
        let script = Script::parse(path);
        let path = script.as_ref().map_or(path, |script| &script.file);
        let found = opened(path)?;
        match script {
            Some(_) => found.parent().map(Path::to_owned).context("a file without a folder"),
            None => Ok(found),
        }
    }

    fn of_cargo(dir: PathBuf) -> Result<Project> {
        let cargo = dir.join("Cargo.toml");
        Self::with_manifest(dir, "Cargo.toml", BuildSource::Cargo, || {
            let package = toml_of(&cargo)?;
            let name =
                package.get("package").and_then(|package| package.get("name")).and_then(|n| n.as_str());
            let Some(name) = name else {
                let what = format!("{} has no package.name: it is a workspace", cargo.display());
                return Err(Failure::error(ErrorCode::Usage, what, "name the folder of a package"));
            };
            Ok(name.to_owned())
        })
    }

    fn of_script(script: Script, name: &str) -> Result<Project> {
        let dir = script.file.parent().context("a file without a folder")?.to_owned();
        let place = script.file_name();
        Self::with_manifest(dir, &place, BuildSource::Script(script), || Ok(name.replace(['.', ' '], "-")))
    }

    /// `name` returns the function's name if the manifest has none, and `place` is the file with that name.
    fn with_manifest(
        dir: PathBuf,
        place: &str,
        code: BuildSource,
        name: impl FnOnce() -> Result<String>,
    ) -> Result<Project> {
        let own = MANIFESTS.iter().find(|name| dir.join(name).is_file());
        let place = own.map_or(place, |name| *name).to_owned();
        let manifest = match own {
            Some(name) => read_manifest(&dir.join(name))?,
            None => {
                // Package names permit more characters than function names.
                let name = name()?.to_ascii_lowercase().replace('_', "-");
                json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": name}, "spec": {}})
            }
        };
        let name = manifest["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        validation::function_name(&name).map_err(|rule| {
            let what = format!("{place}: the function's name {name:?} is not valid: {rule}");
            Failure::new(ErrorCode::InvalidFile, what, "set metadata.name in function.yaml")
        })?;
        Ok(Project { dir, name, manifest, place, code })
    }

    /// Whether the project depends on the embedded SDK, as a project created by `mayfly new` does.
    pub(super) fn uses_carried_sdk(&self) -> Result<bool> {
        if !matches!(self.code, BuildSource::Cargo) {
            return Ok(false);
        }
        let manifest = toml_of(&self.dir.join("Cargo.toml"))?;
        let path = ["dependencies", "mayfly-sdk", "path"]
            .iter()
            .try_fold(&toml::Value::Table(manifest), |at, key| at.get(key))
            .cloned();
        Ok(path.is_some_and(|path| path.as_str() == Some(sdk::FOLDER)))
    }
}

/// The absolute path of a file or a folder that exists.
fn opened(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(|error| {
        let what = format!("cannot open {}: {error}", path.display());
        Failure::error(
            ErrorCode::FileError,
            what,
            "name a project's folder or a script; mayfly new makes one",
        )
    })
}

fn read_manifest(file: &Path) -> Result<Value> {
    let place = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {place}"))?;
    let invalid = |what: String, todo| Failure::new(ErrorCode::InvalidFile, what, todo);
    let mut manifest: Value = serde_saphyr::from_str(&text)
        .map_err(|error| invalid(format!("{place} is not one YAML document: {error}"), "correct it"))?;
    if manifest["kind"] != "Function" || manifest["apiVersion"] != "mayfly.dev/v1" {
        let todo = "write apiVersion: mayfly.dev/v1 and kind: Function";
        return Err(invalid(format!("{place} must be a Function"), todo).into());
    }
    if manifest["spec"].is_null() {
        manifest["spec"] = Value::Object(Map::new());
    }
    if !manifest["spec"]["source"].is_null() {
        let todo = "leave it out; to deploy another component use mayfly apply";
        return Err(invalid(format!("{place} has spec.source, but the build provides it"), todo).into());
    }
    Ok(manifest)
}

fn toml_of(file: &Path) -> Result<toml::Table> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    text.parse().with_context(|| format!("cannot read {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn project(cargo: &str, manifest: Option<&str>) -> Result<Project> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("Cargo.toml"), cargo).unwrap();
        if let Some(manifest) = manifest {
            fs::write(dir.path().join("function.yaml"), manifest).unwrap();
        }
        Project::load(dir.path())
    }

    const PACKAGE: &str = "[package]\nname = \"My_Shop\"\n";

    #[test]
    fn the_manifest_names_the_function_and_the_package_otherwise() {
        let manifest =
            "apiVersion: mayfly.dev/v1\nkind: Function\nmetadata: {name: shop}\nspec: {isolation: reuse}\n";
        let named = project(PACKAGE, Some(manifest)).unwrap();
        assert_eq!(named.name, "shop");
        assert_eq!(named.manifest["spec"], json!({"isolation": "reuse"}));
        assert_eq!(project(PACKAGE, None).unwrap().name, "my-shop");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let function = "apiVersion: mayfly.dev/v1\nkind: Function\n";
        let cases = [
            (PACKAGE, Some("kind: Pod\n".to_owned()), "must be a Function"),
            (
                PACKAGE,
                Some(format!("{function}metadata: {{name: A_B}}\n")),
                "function.yaml: the function's name \"A_B\" is not valid",
            ),
            ("[package]\nname = \"é\"\n", None, "Cargo.toml: the function's name \"é\" is not valid"),
            (PACKAGE, Some(format!("{function}metadata: {{}}\n")), "\"\" is not valid"),
            (
                PACKAGE,
                Some(format!("{function}metadata: {{name: a}}\nspec: {{source: {{image: x}}}}\n")),
                "has spec.source, but the build provides it",
            ),
            (PACKAGE, Some("a: [\n".to_owned()), "not one YAML document"),
            ("[workspace]\n", None, "it is a workspace"),
            ("[package", None, "cannot read"),
        ];
        for (cargo, manifest, expected) in cases {
            let error = format!("{:#}", project(cargo, manifest.as_deref()).unwrap_err());
            assert!(error.contains(expected), "{expected:?} is not in {error:?}");
        }
        let error = Project::load(tempfile::tempdir().unwrap().path()).unwrap_err().to_string();
        assert!(error.contains("mayfly new rust NAME"), "{error}");
    }

    #[test]
    fn a_script_is_a_project_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("My_Shop");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("handler.py"), "").unwrap();
        fs::write(folder.join("other.mjs"), "").unwrap();
        let load = |path: &str| Project::load(&folder.join(path)).unwrap();
        assert_eq!(load("").name, "my-shop");
        assert_eq!(
            (load("handler.py").name, load("other.mjs:main").name),
            ("handler".into(), "other".into())
        );
        let BuildSource::Script(script) = load("other.mjs:main").code else { panic!("a script") };
        assert_eq!(script.handler, "main");
        assert_eq!(Project::folder(&folder.join("handler.py:x")).unwrap(), folder.canonicalize().unwrap());
        let manifest = "apiVersion: mayfly.dev/v1\nkind: Function\nmetadata: {name: shop}\n";
        fs::write(folder.join("function.yaml"), manifest).unwrap();
        assert_eq!((load("").name, load("handler.py").name), ("shop".into(), "shop".into()));
        assert!(Project::load(&folder.join("none.py")).is_err());
    }

    #[test]
    fn a_project_with_an_sdk_of_its_own_is_left_alone() {
        for (dependency, carried) in [
            ("mayfly-sdk = { path = \".mayfly/sdk\" }", true),
            ("mayfly-sdk = { path = \"../../sdk/rust\" }", false),
            ("mayfly-sdk = \"0.1\"", false),
            ("", false),
        ] {
            let cargo = format!("{PACKAGE}\n[dependencies]\n{dependency}\n");
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("Cargo.toml"), cargo).unwrap();
            let project = Project::load(dir.path()).unwrap();
            assert_eq!(project.uses_carried_sdk().unwrap(), carried, "{dependency}");
        }
    }

    #[test]
    fn the_examples_are_valid_projects() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        let mut seen = 0;
        for folder in fs::read_dir(examples).unwrap().flatten().map(|entry| entry.path()) {
            if !folder.join("function.yaml").is_file() {
                continue;
            }
            let project = Project::load(&folder).unwrap();
            assert_eq!(project.name, folder.file_name().unwrap().to_str().unwrap());
            let mut written = project.manifest["spec"].clone();
            written["source"] = json!({"image": "any"});
            let spec: mayfly_api::FunctionSpec = serde_json::from_value(written.clone()).unwrap();
            assert!(mayfly_api::validation::function(&project.name, &spec).is_empty(), "{}", project.name);
            assert_kept(&written, &serde_json::to_value(spec).unwrap(), &project.name);
            seen += 1;
        }
        assert!(seen > 10, "{seen}");
    }

    /// Checks that written fields are preserved by reading.
    fn assert_kept(written: &Value, read: &Value, place: &str) {
        match (written, read) {
            (Value::Object(written), Value::Object(read)) => {
                for (key, value) in written {
                    let place = format!("{place}.{key}");
                    assert_kept(value, read.get(key).unwrap_or_else(|| panic!("{place} is unknown")), &place);
                }
            }
            (Value::Array(written), Value::Array(read)) => {
                for (value, read) in written.iter().zip(read) {
                    assert_kept(value, read, place);
                }
            }
            _ => assert_eq!(written, read, "{place}"),
        }
    }
}
