//! A project's folder: what it is called, and what its manifest says.
//!
//! `function.yaml` is a Function as kubectl would apply it, without a source: building gives it one. A
//! project may do without; then its package's name is the function's.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use mayfly_api::validation;
use serde_json::{Map, Value, json};

use super::sdk;

/// The manifest's names, in order of preference.
const MANIFESTS: [&str; 2] = ["function.yaml", "function.yml"];

/// A project that builds into a function.
#[derive(Clone, Debug)]
pub(crate) struct Project {
    /// Its folder, absolute.
    pub(crate) dir: PathBuf,
    /// The function's name.
    pub(crate) name: String,
    /// The Function as its manifest has it (`apiVersion`, `kind`, `metadata`, `spec`); without a manifest,
    /// the least there is to say.
    pub(crate) manifest: Value,
    /// The name of the file that says so: `function.yaml`, or `Cargo.toml` without one.
    pub(crate) place: String,
}

impl Project {
    /// Reads the project in a folder.
    pub(crate) fn load(dir: &Path) -> Result<Project> {
        let dir = dir.canonicalize().with_context(|| format!("cannot open {}", dir.display()))?;
        let cargo = dir.join("Cargo.toml");
        if !cargo.is_file() {
            bail!(
                "{} is no project: it has no Cargo.toml. Name a project's folder, or make one: mayfly new rust NAME",
                dir.display()
            );
        }
        let own = MANIFESTS.iter().find(|name| dir.join(name).is_file());
        let place = own.map_or("Cargo.toml", |name| *name).to_owned();
        let manifest = match own {
            Some(name) => read_manifest(&dir.join(name))?,
            None => {
                let package = toml_of(&cargo)?;
                let name =
                    package.get("package").and_then(|package| package.get("name")).and_then(|n| n.as_str());
                let Some(name) = name else {
                    bail!(
                        "{} has no package.name: it is a workspace; name the folder of a package",
                        cargo.display()
                    )
                };
                // A package may be called what a function may not.
                let name = name.to_ascii_lowercase().replace('_', "-");
                json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": name}, "spec": {}})
            }
        };
        let name = manifest["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        validation::function_name(&name)
            .map_err(|rule| anyhow::anyhow!("{place}: the function's name {name:?} is not valid: {rule}"))?;
        Ok(Project { dir, name, manifest, place })
    }

    /// Whether it depends on the SDK that the binary carries (a project made by `mayfly new` does).
    pub(super) fn uses_carried_sdk(&self) -> Result<bool> {
        let manifest = toml_of(&self.dir.join("Cargo.toml"))?;
        let path = ["dependencies", "mayfly-sdk", "path"]
            .iter()
            .try_fold(&toml::Value::Table(manifest), |at, key| at.get(key))
            .cloned();
        Ok(path.is_some_and(|path| path.as_str() == Some(sdk::FOLDER)))
    }
}

fn read_manifest(file: &Path) -> Result<Value> {
    let place = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {place}"))?;
    let mut manifest: Value =
        serde_saphyr::from_str(&text).with_context(|| format!("{place} is not one YAML document"))?;
    if manifest["kind"] != "Function" || manifest["apiVersion"] != "mayfly.dev/v1" {
        bail!("{place} must be a Function: apiVersion: mayfly.dev/v1, kind: Function");
    }
    if manifest["spec"].is_null() {
        manifest["spec"] = Value::Object(Map::new());
    }
    if !manifest["spec"]["source"].is_null() {
        bail!(
            "{place}: leave out spec.source, it is what gets built; to deploy something else use mayfly apply"
        );
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
                "leave out spec.source",
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

    /// What is written is known: it is still there after reading.
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
