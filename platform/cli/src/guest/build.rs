//! Building a project, or every package of a workspace, into components.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cargo::{self, Guest, Metadata, Progress};
use super::componentize::{ModuleShape, componentize};
use super::project::{BuildSource, Project};
use super::script::{Script, WORK_FOLDER};
use super::toolchain::{Toolchain, Way};
use super::{sdk, stdlib};

/// A component that was built.
#[derive(Clone, Debug)]
pub(crate) struct BuiltComponent {
    /// The project's name, or the package's within a workspace.
    pub(crate) name: String,
    /// The component's file.
    pub(crate) path: PathBuf,
    /// Its size.
    pub(crate) bytes: u64,
    /// Which toolchain made it, for people.
    pub(crate) toolchain: String,
}

/// Builds the project that a path names: its component is `target/mayfly/<name>.wasm` in a cargo package,
/// `.mayfly/<name>.wasm` beside a script.
pub(crate) fn build(path: &Path, release: bool, progress: Progress<'_>) -> Result<BuiltComponent> {
    let project = Project::load(path)?;
    match &project.code {
        BuildSource::Cargo => build_package(&project, release, progress),
        BuildSource::Script(script) => build_script(&project, script, progress),
    }
}

fn build_package(project: &Project, release: bool, progress: Progress<'_>) -> Result<BuiltComponent> {
    let builder = Builder::new(Toolchain::detect()?, release, progress)?;
    if project.uses_carried_sdk()? && sdk::refresh(&project.dir)? {
        progress("wrote the SDK of this version of mayfly to .mayfly/sdk");
    }
    let metadata = Metadata::of(&builder.toolchain.compiler, &project.dir, progress)?;
    let guest = metadata.guest(&project.dir.join("Cargo.toml"))?;
    let wasm = builder.compile(&project.dir, std::slice::from_ref(&guest), progress)?;
    let out = project.dir.join("target/mayfly");
    builder.finish(&guest, &project.name, &wasm[0], &out)
}

fn build_script(project: &Project, script: &Script, progress: Progress<'_>) -> Result<BuiltComponent> {
    let out = project.dir.join(WORK_FOLDER);
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    // Nothing in this folder belongs into a repository.
    fs::write(out.join(".gitignore"), "*\n").with_context(|| format!("cannot write to {}", out.display()))?;
    let draft = tempfile::NamedTempFile::new_in(&out)?;
    let toolchain = script.build(draft.path(), progress)?;
    let bytes = draft.path().metadata()?.len();
    let path = out.join(format!("{}.wasm", project.name));
    draft.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(BuiltComponent { name: project.name.clone(), path, bytes, toolchain })
}

/// Builds every package of a workspace that makes a component, to `<out>/<package>.wasm`.
pub(crate) fn build_workspace(
    dir: &Path,
    out: &Path,
    release: bool,
    progress: Progress<'_>,
) -> Result<Vec<BuiltComponent>> {
    let dir = dir.canonicalize().with_context(|| format!("cannot open {}", dir.display()))?;
    let builder = Builder::new(Toolchain::detect()?, release, progress)?;
    let guests = Metadata::of(&builder.toolchain.compiler, &dir, progress)?.guests();
    if guests.is_empty() {
        bail!("no package in {} makes a component", dir.display());
    }
    let files = builder.compile(&dir, &guests, progress)?;
    guests.iter().zip(&files).map(|(guest, file)| builder.finish(guest, &guest.package, file, out)).collect()
}

struct Builder {
    toolchain: Toolchain,
    release: bool,
    /// The standard library, where the compiler has none.
    sysroot: Option<PathBuf>,
}

impl Builder {
    fn new(toolchain: Toolchain, release: bool, progress: Progress<'_>) -> Result<Builder> {
        progress(&format!("using {}", toolchain.describe()));
        let sysroot = match toolchain.way {
            Way::BuildStd { .. } => Some(stdlib::sysroot(&toolchain.compiler, progress)?),
            Way::Wasip2 | Way::Wasip1 => None,
        };
        Ok(Builder { toolchain, release, sysroot })
    }

    /// Compiles guests of one workspace; gives the wasm file of each.
    fn compile(&self, dir: &Path, guests: &[Guest], progress: Progress<'_>) -> Result<Vec<PathBuf>> {
        // All libraries at once, so that cargo compiles them side by side; programs one by one, since each
        // has a linker argument of its own.
        let mut messages = String::new();
        let libraries: Vec<_> = guests.iter().filter(|guest| guest.shape == ModuleShape::Library).collect();
        if !libraries.is_empty() {
            let mut command = self.command("build", dir);
            command.arg("--lib");
            for guest in &libraries {
                command.args(["--package", &guest.id]);
            }
            messages += &cargo::run(command, progress)?;
        }
        for guest in guests.iter().filter(|guest| guest.shape == ModuleShape::Program) {
            let mut command = self.command("rustc", dir);
            command.args(["--package", &guest.id, "--bin", &guest.target]);
            if let Way::BuildStd { libc, .. } = &self.toolchain.way {
                // The startup code that calls `main`; a compiler with the target has its own.
                command.arg("--").arg(format!("-Clink-arg={}", libc.join("crt1-command.o").display()));
            }
            messages += &cargo::run(command, progress)?;
        }
        guests.iter().map(|guest| cargo::artifact(&messages, guest)).collect()
    }

    fn command(&self, subcommand: &str, dir: &Path) -> Command {
        let mut command = cargo::command(&self.toolchain.compiler, dir);
        command.args([subcommand, "--message-format=json-render-diagnostics"]);
        command.args(["--target", self.toolchain.target()]);
        if self.release {
            command.arg("--release");
        }
        if let (Way::BuildStd { linker, libc }, Some(sysroot)) = (&self.toolchain.way, &self.sysroot) {
            let flags = [
                "-Clinker-flavor=wasm-ld".to_owned(),
                format!("-Clinker={}", linker.display()),
                // The compiler has no objects and no libc of its own for this target.
                "-Clink-self-contained=no".to_owned(),
                format!("-Clink-arg=-L{}", libc.display()),
                format!("--sysroot={}", sysroot.display()),
            ];
            // Paths may have spaces in them, and no other variable's flags may come before these.
            command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        }
        command
    }

    /// Makes a component of a wasm file and writes it to the output folder.
    fn finish(&self, guest: &Guest, name: &str, wasm: &Path, out: &Path) -> Result<BuiltComponent> {
        let content = fs::read(wasm).with_context(|| format!("cannot read {}", wasm.display()))?;
        let component = componentize(content, guest.shape).with_context(|| format!("building {name}"))?;
        fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
        let path = out.join(format!("{name}.wasm"));
        // Written atomically: a reader (mayfly dev, a test) may read at any time.
        let draft = tempfile::NamedTempFile::new_in(out)?;
        fs::write(draft.path(), &component).with_context(|| format!("cannot write to {}", out.display()))?;
        draft.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let bytes = component.len() as u64;
        Ok(BuiltComponent { name: name.to_owned(), path, bytes, toolchain: self.toolchain.describe() })
    }
}
