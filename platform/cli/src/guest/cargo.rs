//! Runs cargo and reads its output.

use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::componentize::ModuleShape;
use super::toolchain::RustCompiler;

/// Receives each line of output of cargo and the compiler, including errors, to show it to the user.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(&str);

/// Environment variables that must not affect the build of a guest.
const NOT_FOR_GUESTS: [&str; 7] = [
    "RUSTFLAGS",
    "CARGO_ENCODED_RUSTFLAGS",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_BOOTSTRAP",
    "CARGO_BUILD_TARGET",
    "CARGO_MANIFEST_DIR",
];

/// The command for cargo with this compiler, in this folder.
pub(super) fn command(compiler: &RustCompiler, dir: &Path) -> Command {
    let mut command = Command::new(&compiler.cargo);
    command.current_dir(dir).env("RUSTC", &compiler.rustc);
    for name in NOT_FOR_GUESTS {
        command.env_remove(name);
    }
    if std::io::stderr().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    command
}

/// Runs a build and returns its standard output. Other output goes to `progress`.
pub(super) fn run(command: Command, progress: Progress<'_>) -> Result<String> {
    run_to(command, progress, "cargo build failed", "the compiler's messages are above")
}

/// Runs cargo. `failed` is the error message, and `see` says where the reason was printed.
fn run_to(mut command: Command, progress: Progress<'_>, failed: &str, see: &str) -> Result<String> {
    let program = Path::new(command.get_program()).display().to_string();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let mut stdout = child.stdout.take().expect("piped");
    // Both pipes must be read, otherwise cargo blocks when one is full.
    let reader = thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = Vec::new();
    while stderr.read_until(b'\n', &mut line)? > 0 {
        progress(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
    let status = child.wait()?;
    let text = reader.join().expect("reading does not panic")?;
    if !status.success() {
        bail!("{failed} ({status}); {see}");
    }
    Ok(text)
}

/// The packages of a project or a workspace.
#[derive(Deserialize)]
pub(super) struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    manifest_path: PathBuf,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// A target of a package that can become a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Guest {
    pub(super) package: String,
    /// The package's id in cargo's flags: a dependency may have the same name.
    pub(super) id: String,
    pub(super) manifest: PathBuf,
    pub(super) target: String,
    pub(super) shape: ModuleShape,
}

impl Metadata {
    /// Reads the metadata of the package in this folder.
    pub(super) fn of(compiler: &RustCompiler, dir: &Path, progress: Progress<'_>) -> Result<Metadata> {
        let mut command = command(compiler, dir);
        command.args(["metadata", "--no-deps", "--format-version", "1"]);
        // Nothing is compiled here, so an error is about a Cargo.toml.
        let text = run_to(command, progress, "cargo cannot read the Cargo.toml", "its message is above")
            .with_context(|| format!("cannot read the project in {}", dir.display()))?;
        serde_json::from_str(&text).context("cargo metadata is not as expected")
    }

    /// The target of the manifest's package that becomes a component.
    pub(super) fn guest(&self, manifest: &Path) -> Result<Guest> {
        let package =
            self.packages.iter().find(|package| package.manifest_path == manifest).with_context(|| {
                format!("{} is a workspace, not a package; build it with --workspace", manifest.display())
            })?;
        package.guest().with_context(|| {
            format!(
                "{} produces no component: a function needs\n  [lib]\n  crate-type = [\"cdylib\"]\nin its Cargo.toml, \
                 a job a src/main.rs",
                package.name
            )
        })
    }

    /// The targets of the whole workspace that become components.
    pub(super) fn guests(&self) -> Vec<Guest> {
        let members = self.packages.iter().filter(|package| self.workspace_members.contains(&package.id));
        members.filter_map(Package::guest).collect()
    }
}

impl Package {
    /// The package's id as a package specification (cargo 1.77 and later), otherwise its name.
    fn specification(&self) -> &str {
        if self.id.starts_with("path+file://") { &self.id } else { &self.name }
    }

    /// A package's library if it is a cdylib, otherwise its program.
    fn guest(&self) -> Option<Guest> {
        let of_kind = |kind: &str| self.targets.iter().find(|target| target.kind.iter().any(|k| k == kind));
        let (target, shape) = match of_kind("cdylib") {
            Some(target) => (target, ModuleShape::Library),
            None => (of_kind("bin")?, ModuleShape::Program),
        };
        Some(Guest {
            package: self.name.clone(),
            id: self.specification().to_owned(),
            manifest: self.manifest_path.clone(),
            target: target.name.clone(),
            shape,
        })
    }
}

/// The path of a target's wasm file, from cargo's `--message-format=json` output.
pub(super) fn artifact(messages: &str, guest: &Guest) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        manifest_path: Option<PathBuf>,
        target: Option<Target>,
        #[serde(default)]
        filenames: Vec<PathBuf>,
    }
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok())
        .filter(|message| message.reason == "compiler-artifact")
        .filter(|message| message.manifest_path.as_ref() == Some(&guest.manifest))
        .filter(|message| message.target.as_ref().is_some_and(|target| target.name == guest.target))
        .flat_map(|message| message.filenames)
        .find(|file| file.extension().is_some_and(|extension| extension == "wasm"))
        .with_context(|| format!("cargo built {} but produced no .wasm file", guest.package))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(targets: &str) -> Metadata {
        let text = format!(
            r#"{{"packages": [{{"id": "a#0", "name": "a-b", "manifest_path": "/w/a/Cargo.toml",
                "targets": {targets}}}], "workspace_members": ["a#0"]}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn libraries_are_functions_and_programs_are_jobs() {
        let library = r#"{"name": "a_b", "kind": ["cdylib"]}"#;
        let program = r#"{"name": "a-b", "kind": ["bin"]}"#;
        let plain = r#"{"name": "a_b", "kind": ["lib"]}"#;
        let cases = [
            (format!("[{library}]"), Some(ModuleShape::Library)),
            (format!("[{program}]"), Some(ModuleShape::Program)),
            (format!("[{program}, {library}]"), Some(ModuleShape::Library)),
            (format!("[{plain}]"), None),
        ];
        for (targets, shape) in cases {
            let found = metadata(&targets).guests();
            assert_eq!(found.first().map(|guest| guest.shape), shape, "{targets}");
        }
    }

    #[test]
    fn a_package_is_named_by_its_id() {
        for (id, expected) in [
            ("path+file:///w/serde#0.1.0", "path+file:///w/serde#0.1.0"),
            ("serde 0.1.0 (path+file:///w/serde)", "serde"),
        ] {
            let package = Package {
                id: id.into(),
                name: "serde".into(),
                manifest_path: "/w/serde/Cargo.toml".into(),
                targets: vec![Target { name: "serde".into(), kind: vec!["cdylib".into()] }],
            };
            assert_eq!(package.guest().unwrap().id, expected);
        }
    }

    #[test]
    fn what_makes_no_component_is_told_what_it_lacks() {
        let plain = metadata(r#"[{"name": "a_b", "kind": ["lib"]}]"#);
        let error = plain.guest(Path::new("/w/a/Cargo.toml")).unwrap_err().to_string();
        assert!(error.contains("crate-type = [\"cdylib\"]"), "{error}");
        let error = plain.guest(Path::new("/w/Cargo.toml")).unwrap_err().to_string();
        assert!(error.contains("--workspace"), "{error}");
    }

    #[test]
    fn the_artifact_is_the_one_of_the_target() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/other/Cargo.toml","target":{"name":"a_b","kind":["cdylib"]},"filenames":["/no.wasm"]}"#,
            "\nnot json\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"build-script-build","kind":["custom-build"]},"filenames":["/no"]}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"a_b","kind":["cdylib"]},"filenames":["/t/a_b.d","/t/a_b.wasm"]}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let guest = Guest {
            package: "a-b".into(),
            id: "a-b".into(),
            manifest: "/w/a/Cargo.toml".into(),
            target: "a_b".into(),
            shape: ModuleShape::Library,
        };
        assert_eq!(artifact(messages, &guest).unwrap(), Path::new("/t/a_b.wasm"));
        assert!(artifact("", &guest).is_err());
    }
}
