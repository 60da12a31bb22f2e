//! Components of jobs: if a definition refers to a `.wasm` file, the file is uploaded, and the path is replaced by its
//! digest.

use std::{collections::BTreeSet, path::Path};

use anyhow::Context as _;
use mayfly_runtime::component::inspect;
use serde_json::Value;

use crate::{
    artifact,
    bounded_read::{self, CONTENT_BYTES_MAX},
    component,
    failure::{ErrorCode, Failure},
    session::Session,
};

/// The resource of tasks whose `Component` is uploaded.
const JOB_RUN: &str = "arn:aws:states:::job:run";

/// Uploads the components that a definition refers to by path, and replaces the paths by digests. Paths are relative to
/// the definition's folder.
pub(super) async fn upload(definition: String, file: &Path, session: &Session) -> anyhow::Result<String> {
    let Ok(parsed) = serde_json::from_str::<Value>(&definition) else { return Ok(definition) };
    let mut paths = BTreeSet::new();
    gather(&parsed, &mut paths);
    let folder = if file.as_os_str() == "-" { Path::new("") } else { file.parent().unwrap_or(Path::new("")) };
    // All files are checked before the first upload.
    for path in &paths {
        check(&folder.join(path))?;
    }
    let mut definition = definition;
    for path in paths {
        let component = folder.join(path);
        let digest = artifact::push(session.server().await?, &component).await?;
        definition = named(&definition, path, &digest.to_string());
    }
    Ok(definition)
}

/// Refuses a missing file, and one that cannot run as a job: its task would fail only when it is reached.
fn check(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    if !path.is_file() {
        return Err(Failure::error(
            ErrorCode::FileError,
            format!("the definition names the component {shown}, which does not exist"),
            "build it first: mayfly build",
        ));
    }
    let content =
        bounded_read::file(path, CONTENT_BYTES_MAX).with_context(|| format!("cannot read {shown}"))?;
    let content = component::of_content(content, path)?;
    let report = inspect(&content).map_err(|refused| {
        Failure::new(
            ErrorCode::InvalidFile,
            format!("{shown} cannot run as a job: {refused}"),
            "mayfly build makes a component of a project",
        )
    })?;
    match report.http() {
        None => Ok(()),
        Some(world) => Err(Failure::error(
            ErrorCode::InvalidFile,
            format!("{shown} is a function ({world}), and job:run runs programs to their end"),
            "deploy it and call it with lambda:invoke, or build it as a program (mayfly new rust-job NAME)",
        )),
    }
}

/// Collects the paths in job tasks, at any depth.
fn gather<'a>(value: &'a Value, paths: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(members) => {
            let resource = members.get("Resource").and_then(Value::as_str).unwrap_or_default();
            if resource.starts_with(JOB_RUN) {
                let arguments = ["Parameters", "Arguments"].into_iter().filter_map(|name| members.get(name));
                let component = arguments.filter_map(|arguments| arguments.get("Component")?.as_str());
                paths.extend(component.filter(|path| path.ends_with(".wasm")));
            }
            members.values().for_each(|member| gather(member, paths));
        }
        Value::Array(items) => items.iter().for_each(|item| gather(item, paths)),
        _ => {}
    }
}

/// Replaces a path by a digest; the rest of the text is unchanged.
fn named(definition: &str, path: &str, digest: &str) -> String {
    let quoted = |text: &str| Value::from(text).to_string();
    definition.replace(&quoted(path), &quoted(digest))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_components_of_jobs_are_paths() {
        let task = |resource: &str, component: &str| json!({"Type": "Task", "Resource": resource, "Arguments": {"Component": component}});
        let definition = json!({"States": {
            "A": task("arn:aws:states:::job:run.sync", "a.wasm"),
            "B": {"Type": "Map", "ItemProcessor": {"States": {"C": task("arn:aws:states:::job:run", "sub/c.wasm")}}},
            "D": task("arn:aws:states:::job:run.sync", "sha256:00"),
            "E": task("arn:aws:states:::lambda:invoke", "e.wasm"),
        }});
        let mut paths = BTreeSet::new();
        gather(&definition, &mut paths);
        assert_eq!(paths, BTreeSet::from(["a.wasm", "sub/c.wasm"]));
        let text = "{ \"x\": \"a.wasm\",\n \"y\": \"not a.wasm\" }";
        assert_eq!(named(text, "a.wasm", "sha256:11"), "{ \"x\": \"sha256:11\",\n \"y\": \"not a.wasm\" }");
    }
}
