//! `mayfly new`: writes a project that builds without changes.

use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result};
use mayfly_api::validation;

use super::{packages, sdk};
use crate::failure::{ErrorCode, Failure};

/// The template of a new project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProjectTemplate {
    /// An HTTP handler: requests in, responses out.
    Rust,
    /// An event handler: JSON in, JSON out.
    RustEvent,
    /// A program that ends: files in, files out.
    RustJob,
    /// JSON in, JSON out, like the next two.
    Python,
    JavaScript,
    TypeScript,
    /// An image with an HTTP server.
    Container,
}

impl ProjectTemplate {
    pub(crate) const ALL: [ProjectTemplate; 7] = [
        ProjectTemplate::Rust,
        ProjectTemplate::RustEvent,
        ProjectTemplate::RustJob,
        ProjectTemplate::Python,
        ProjectTemplate::JavaScript,
        ProjectTemplate::TypeScript,
        ProjectTemplate::Container,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            ProjectTemplate::Rust => "rust",
            ProjectTemplate::RustEvent => "rust-event",
            ProjectTemplate::RustJob => "rust-job",
            ProjectTemplate::Python => "python",
            ProjectTemplate::JavaScript => "js",
            ProjectTemplate::TypeScript => "ts",
            ProjectTemplate::Container => "container",
        }
    }

    /// The kind of project, in one word.
    pub(crate) fn makes(self) -> &'static str {
        match self {
            ProjectTemplate::RustJob => "job",
            _ => "function",
        }
    }

    /// The template's files: path and text.
    fn files(self) -> Vec<(&'static str, &'static str)> {
        const MANIFEST: (&str, &str) = ("function.yaml", include_str!("templates/function.yaml.in"));
        let package = |source| {
            vec![("Cargo.toml", include_str!("templates/Cargo.toml.in")), ("src/lib.rs", source), MANIFEST]
        };
        match self {
            ProjectTemplate::Rust => package(include_str!("templates/rust.rs.in")),
            ProjectTemplate::RustEvent => package(include_str!("templates/rust-event.rs.in")),
            ProjectTemplate::RustJob => vec![
                ("Cargo.toml", include_str!("templates/Cargo-job.toml.in")),
                ("src/main.rs", include_str!("templates/rust-job.rs.in")),
                ("job.yaml", include_str!("templates/job.yaml.in")),
            ],
            ProjectTemplate::Python => vec![
                ("handler.py", include_str!("templates/python.py.in")),
                ("test_handler.py", include_str!("templates/python_test.py.in")),
                MANIFEST,
            ],
            ProjectTemplate::JavaScript => vec![
                ("handler.js", include_str!("templates/javascript.js.in")),
                ("handler.test.js", include_str!("templates/javascript_test.js.in")),
                ("package.json", include_str!("templates/package-js.json.in")),
                MANIFEST,
            ],
            ProjectTemplate::TypeScript => vec![
                ("handler.ts", include_str!("templates/typescript.ts.in")),
                ("handler.test.ts", include_str!("templates/typescript_test.ts.in")),
                ("package.json", include_str!("templates/package-ts.json.in")),
                ("tsconfig.json", include_str!("templates/tsconfig.json.in")),
                MANIFEST,
            ],
            ProjectTemplate::Container => vec![
                ("www/cgi-bin/index.cgi", include_str!("templates/container-index.cgi.in")),
                ("server.sh", include_str!("templates/container-server.sh.in")),
                ("test.sh", include_str!("templates/container-test.sh.in")),
                ("Containerfile", include_str!("templates/container-Containerfile.in")),
                ("README.md", include_str!("templates/container-README.md.in")),
            ],
        }
    }

    /// Whether the project is a script rather than a Rust package.
    fn is_script(self) -> bool {
        matches!(self, ProjectTemplate::Python | ProjectTemplate::JavaScript | ProjectTemplate::TypeScript)
    }

    /// A job may be any program: it needs no SDK.
    fn uses_rust_sdk(self) -> bool {
        matches!(self, ProjectTemplate::Rust | ProjectTemplate::RustEvent)
    }
}

impl fmt::Display for ProjectTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ProjectTemplate {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = ProjectTemplate::ALL.map(ProjectTemplate::name).join(", ");
        let found = ProjectTemplate::ALL.into_iter().find(|template| template.name() == name);
        found.with_context(|| format!("there is no template {name:?}; there are {known}"))
    }
}

/// Writes a project into a folder that is empty or does not exist.
pub(crate) fn new_project(template: ProjectTemplate, dir: &Path, name: &str) -> Result<()> {
    validation::function_name(name).map_err(|rule| {
        Failure::new(
            ErrorCode::Usage,
            format!("{name:?} cannot be a function's name: {rule}"),
            "choose another, such as hello-1; --dir names the directory",
        )
    })?;
    if let Ok(mut entries) = fs::read_dir(dir)
        && entries.next().is_some()
    {
        let what = format!("{} exists and is not empty", dir.display());
        return Err(Failure::error(ErrorCode::FileError, what, "nothing was written; name another --dir"));
    }
    let package = package_name(name);
    let write = |path: &str, text: &str| -> Result<()> {
        let file = dir.join(path);
        let parent = file.parent().expect("a file lies in a folder");
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        let text = text.replace("{{package}}", &package).replace("{{name}}", name);
        fs::write(&file, &text).with_context(|| format!("cannot write {}", file.display()))?;
        if text.starts_with("#!") {
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    };
    for (path, text) in template.files() {
        write(path, text)?;
    }
    if template == ProjectTemplate::Container {
        return Ok(());
    }
    if template.is_script() {
        write(
            ".gitignore",
            "node_modules/\n__pycache__/\n# Written by mayfly new and mayfly build.\n/.mayfly\n",
        )?;
        return packages::write_sdk(&dir.join(sdk::FOLDER));
    }
    write(".gitignore", "/target\n# Written by mayfly build.\n/.mayfly\n")?;
    if template.uses_rust_sdk() {
        write("Cargo.lock", sdk::LOCKFILE)?;
        sdk::refresh(dir)?;
    }
    Ok(())
}

/// A valid package name: cargo refuses leading digits and Rust's keywords, which function names may contain.
fn package_name(name: &str) -> String {
    const TAKEN: [&str; 12] = [
        "test",
        "core",
        "std",
        "alloc",
        "proc-macro",
        "deps",
        "build",
        "examples",
        "incremental",
        "mayfly",
        "mayfly-sdk",
        "self",
    ];
    if name.starts_with(|c: char| c.is_ascii_digit()) || TAKEN.contains(&name) || is_keyword(name) {
        return format!("fn-{name}");
    }
    name.to_owned()
}

fn is_keyword(name: &str) -> bool {
    const KEYWORDS: &str = "abstract as async await become box break const continue crate do dyn else enum extern false \
        final fn for gen if impl in let loop macro match mod move mut override priv pub ref return self static struct \
        super trait true try type typeof unsafe unsized use virtual where while yield";
    KEYWORDS.split_whitespace().any(|keyword| keyword == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::project::Project;

    #[test]
    fn a_new_container_is_tested_without_a_server() {
        let dir = tempfile::tempdir().unwrap();
        new_project(ProjectTemplate::Container, dir.path(), "shop").unwrap();
        let test = std::process::Command::new("sh").arg("test.sh").current_dir(dir.path()).output().unwrap();
        assert!(test.status.success() && test.stdout == b"ok\n", "{test:?}");
        let readme = fs::read_to_string(dir.path().join("README.md")).unwrap();
        assert!(readme.contains("mayfly deploy --image shop:1") && !readme.contains("{{"), "{readme}");
        let handler = fs::metadata(dir.path().join("www/cgi-bin/index.cgi")).unwrap();
        assert_eq!(handler.permissions().mode() & 0o111, 0o111);
    }

    #[test]
    fn a_new_project_is_one() {
        for template in
            ProjectTemplate::ALL.into_iter().filter(|template| *template != ProjectTemplate::Container)
        {
            let parent = tempfile::tempdir().unwrap();
            let dir = parent.path().join("deep/er");
            new_project(template, &dir, "shop").unwrap();
            let project = Project::load(&dir).unwrap();
            assert_eq!(project.name, "shop");
            assert_eq!(project.uses_carried_sdk().unwrap(), template.uses_rust_sdk());
            let written: Vec<String> = template
                .files()
                .iter()
                .map(|(file, _)| fs::read_to_string(dir.join(file)).unwrap())
                .collect();
            assert!(written.iter().all(|text| !text.contains("{{")), "{written:?}");
            let says_its_name = if template.is_script() { "shop: takes an event" } else { "name = \"shop\"" };
            assert!(written[0].contains(says_its_name));
            assert_eq!(dir.join(".mayfly/sdk/js/index.d.ts").is_file(), template.is_script());
            assert_eq!(dir.join(".mayfly/sdk/src/lib.rs").is_file(), template.uses_rust_sdk());
        }
    }

    #[test]
    fn nothing_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("precious"), "").unwrap();
        let error = new_project(ProjectTemplate::Rust, dir.path(), "shop").unwrap_err().to_string();
        assert!(error.contains("not empty\n  nothing was written"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn names_are_checked_before_anything_is_written() {
        let parent = tempfile::tempdir().unwrap();
        for name in ["", "Hello", "a_b", "-a", "a.b", "../x"] {
            let dir = parent.path().join("new");
            assert!(new_project(ProjectTemplate::Rust, &dir, name).is_err(), "{name}");
            assert!(!dir.exists());
        }
        for (name, package) in
            [("hello", "hello"), ("3d", "fn-3d"), ("test", "fn-test"), ("match", "fn-match")]
        {
            assert_eq!(package_name(name), package);
        }
    }

    #[test]
    fn templates_have_names() {
        for template in ProjectTemplate::ALL {
            assert_eq!(template.to_string().parse::<ProjectTemplate>().unwrap(), template);
        }
        let error = "cobol".parse::<ProjectTemplate>().unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no template \"cobol\"; there are rust, rust-event, rust-job, python, js, ts, container"
        );
    }
}
