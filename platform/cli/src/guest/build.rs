//! Builds a project, or every package of a workspace, into components.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cargo::{self, Guest, Metadata, Progress};
use super::componentize::{ModuleShape, componentize};
use super::limits::BuildLimits;
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
    /// The component's size, in bytes.
    pub(crate) bytes: u64,
    /// A readable description of the toolchain.
    pub(crate) toolchain: String,
}

/// Builds the project at a path: its component is `target/mayfly/<name>.wasm` in a cargo package, `.mayfly/<name>.wasm`
/// beside a script. `limits` are those of a script; cargo has none, because its build scripts may write sources, which
/// would cancel the build that they are part of.
pub(crate) fn build(
    path: &Path,
    release: bool,
    limits: &BuildLimits,
    progress: Progress<'_>,
) -> Result<BuiltComponent> {
    let project = Project::load(path)?;
    match &project.code {
        BuildSource::Cargo => build_package(&project, release, progress),
        BuildSource::Script(script) => build_script(&project, script, limits, progress),
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

fn build_script(
    project: &Project,
    script: &Script,
    limits: &BuildLimits,
    progress: Progress<'_>,
) -> Result<BuiltComponent> {
    let out = project.dir.join(WORK_FOLDER);
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    // Nothing in this folder should be committed to a repository.
    fs::write(out.join(".gitignore"), "*\n").with_context(|| format!("cannot write to {}", out.display()))?;
    let _lock = lock(&out, progress)?;
    let draft = tempfile::NamedTempFile::new_in(&out)?;
    let toolchain = script.build(draft.path(), limits, progress)?;
    let bytes = draft.path().metadata()?.len();
    let path = out.join(format!("{}.wasm", project.name));
    draft.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(BuiltComponent { name: project.name.clone(), path, bytes, toolchain })
}

/// Waits until no other build works in this folder: npm and pip write to it. Released on drop.
fn lock(folder: &Path, progress: Progress<'_>) -> Result<File> {
    let path = folder.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            progress("waiting for another build in this folder");
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        // A file system without locks is no reason to build nothing.
        Ok(()) | Err(TryLockError::Error(_)) => {}
    }
    Ok(file)
}

/// Builds every package of a workspace that produces a component, to `<out>/<package>.wasm`.
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
        bail!("no package in {} produces a component", dir.display());
    }
    let files = builder.compile(&dir, &guests, progress)?;
    guests.iter().zip(&files).map(|(guest, file)| builder.finish(guest, &guest.package, file, out)).collect()
}

struct Builder {
    toolchain: Toolchain,
    release: bool,
    /// The sysroot with a standard library, if the compiler has none.
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

    /// Compiles guests of one workspace; returns the wasm file of each.
    fn compile(&self, dir: &Path, guests: &[Guest], progress: Progress<'_>) -> Result<Vec<PathBuf>> {
        // Libraries are built together, so that cargo compiles them in parallel; programs one by one, since each needs
        // a separate linker argument.
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
                // The startup code that calls `main`; a compiler with the target includes its own.
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
                // The compiler has no startup objects and no libc for this target.
                "-Clink-self-contained=no".to_owned(),
                format!("-Clink-arg=-L{}", libc.display()),
                format!("--sysroot={}", sysroot.display()),
            ];
            // Paths may contain spaces, and flags of other variables must not precede these.
            command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        }
        command
    }

    /// Converts a wasm file to a component and writes it to the output folder.
    fn finish(&self, guest: &Guest, name: &str, wasm: &Path, out: &Path) -> Result<BuiltComponent> {
        let content = fs::read(wasm).with_context(|| format!("cannot read {}", wasm.display()))?;
        let component = componentize(content, guest.shape).with_context(|| format!("building {name}"))?;
        fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
        let path = out.join(format!("{name}.wasm"));
        // Written atomically, since readers (mayfly dev, a test) may read at any time.
        let draft = tempfile::NamedTempFile::new_in(out)?;
        fs::write(draft.path(), &component).with_context(|| format!("cannot write to {}", out.display()))?;
        draft.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let bytes = component.len() as u64;
        Ok(BuiltComponent { name: name.to_owned(), path, bytes, toolchain: self.toolchain.describe() })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_build_waits_for_another_one_in_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = lock(folder.path(), &mut |line| panic!("the first waits: {line}")).unwrap();
        let (told, waits) = mpsc::channel();
        let path = folder.path().to_owned();
        let second = std::thread::spawn(move || {
            let file = lock(&path, &mut |line| told.send(line.to_owned()).unwrap()).unwrap();
            drop(file);
        });
        assert_eq!(waits.recv().unwrap(), "waiting for another build in this folder");
        drop(first);
        second.join().unwrap();
    }
}
