//! The files whose changes require a new deployment of an application: those that `mayfly dev` watches.

use std::path::{Path, PathBuf};

use super::{
    glob::Glob,
    manifest::{ComponentSource, FileMapping, SpinApp},
};

/// The sources of an application, relative to the manifest's folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct AppSources {
    /// The manifest, and the components without a build command.
    files: Vec<PathBuf>,
    /// Folders whose content a component reads.
    folders: Vec<PathBuf>,
    /// Patterns below a folder, for a component's files or the sources of its build.
    patterns: Vec<(PathBuf, Glob)>,
    /// Folders of builds without patterns: every file that is not a build product is a source.
    builds: Vec<PathBuf>,
}

impl AppSources {
    /// # Errors
    /// A pattern that cannot be read.
    pub(crate) fn of(app: &SpinApp, manifest: &Path) -> anyhow::Result<Self> {
        let mut sources = Self::default();
        sources.files.extend(manifest.file_name().map(PathBuf::from));
        for component in &app.components {
            for mapping in &component.files {
                match mapping {
                    FileMapping::Pattern(pattern) => {
                        sources.patterns.push((PathBuf::new(), Glob::parse(pattern)?));
                    }
                    FileMapping::Placed { source, .. } => sources.folders.push(plain(Path::new(source))),
                }
            }
            match (&component.build, &component.source) {
                (Some(build), _) => {
                    let folder = plain(build.workdir.as_deref().unwrap_or(Path::new("")));
                    if build.watch.is_empty() {
                        sources.builds.push(folder.clone());
                    }
                    for pattern in &build.watch {
                        sources.patterns.push((folder.clone(), Glob::parse(pattern)?));
                    }
                }
                (None, ComponentSource::File(file)) => sources.files.push(plain(file)),
                (None, ComponentSource::Url { .. }) => {}
            }
        }
        Ok(sources)
    }

    /// Whether a change of this file requires a deployment. `path` is relative to the manifest's folder; `is_code`: it
    /// is neither a build product nor an editor's backup.
    pub(crate) fn contain(&self, path: &Path, is_code: bool) -> bool {
        let matches = |(folder, glob): &(PathBuf, Glob)| {
            path.strip_prefix(folder).is_ok_and(|inner| glob.matches(inner))
        };
        self.files.iter().any(|file| file == path)
            || self.folders.iter().any(|folder| path.starts_with(folder))
            || self.patterns.iter().any(matches)
            || is_code && self.builds.iter().any(|folder| path.starts_with(folder))
    }
}

/// Removes `.` components.
fn plain(path: &Path) -> PathBuf {
    path.components().filter(|part| *part != std::path::Component::CurDir).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spin::manifest;

    const MANIFEST: &str = r#"
spin_manifest_version = 2
[application]
name = "shop"
[[trigger.http]]
route = "/a"
component = "a"
[[trigger.http]]
route = "/b"
component = "b"
[[trigger.http]]
route = "/c"
component = "c"
[component.a]
source = "a/target/a.wasm"
files = ["pages/*.html", { source = "assets", destination = "/" }]
[component.a.build]
command = "cargo build"
workdir = "a"
watch = ["src/**/*.rs", "Cargo.toml"]
[component.b]
source = "./b.wasm"
[component.c]
source = "c/dist/c.wasm"
[component.c.build]
command = "npm run build"
workdir = "c"
"#;

    #[test]
    fn sources_are_what_a_deployment_reads() {
        let app = manifest::parse(MANIFEST, "spin.toml").unwrap();
        let sources = AppSources::of(&app, Path::new("/shop/spin.toml")).unwrap();
        for (path, is_code, expected) in [
            ("spin.toml", true, true),
            ("a/src/deep/lib.rs", true, true),
            ("a/Cargo.toml", true, true),
            ("a/README.md", true, false),
            ("a/target/a.wasm", false, false),
            ("pages/index.html", true, true),
            ("pages/index.css", true, false),
            ("assets/deep/x.png", true, true),
            ("b.wasm", false, true),
            ("c/index.js", true, true),
            ("c/dist/c.wasm", false, false),
            ("other/notes.txt", true, false),
        ] {
            assert_eq!(sources.contain(Path::new(path), is_code), expected, "{path}");
        }
    }
}
