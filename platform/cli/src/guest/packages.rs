//! Tool chains from package registries: downloaded once by the language's package manager into the user's cache, so
//! that later builds need no network.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;

use anyhow::{Context, Result};
use include_dir::{Dir, include_dir};
use rustix::process::Signal;
use sha2::{Digest as _, Sha256};

use super::cargo::Progress;
use super::limits::{BuildLimits, Interruption, LimitWatch};
use super::stdlib::cache_folder;

static PYTHON_SDK: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/python/mayfly");
static JS_SDK: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/js");
static WIT: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../sdk/wit");

/// The world of `sdk/wit` that scripts are built for.
pub(super) const WORLD: &str = "function";

/// The folder of a tool chain, which is installed if missing. `install` fills a temporary folder that is then renamed:
/// an interrupted installation leaves nothing that a later build would take for complete.
pub(super) fn installed(
    name: &str,
    progress: Progress<'_>,
    install: impl FnOnce(&Path, Progress<'_>) -> Result<()>,
) -> Result<PathBuf> {
    let folder = cache_folder()?.join("toolchains");
    let place = folder.join(name);
    if place.is_dir() {
        return Ok(place);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let lock = folder.join("lock");
    let lock = File::create(&lock).with_context(|| format!("cannot write {}", lock.display()))?;
    lock.lock().context("cannot lock the cache of tool chains")?;
    // Another build may have installed it meanwhile.
    if !place.is_dir() {
        remove_unfinished(&folder);
        let work = tempfile::Builder::new().prefix(UNFINISHED_PREFIX).tempdir_in(&folder)?;
        let made = work.path().join("toolchain");
        fs::create_dir(&made)?;
        install(&made, progress)?;
        fs::rename(&made, &place).with_context(|| format!("cannot make {}", place.display()))?;
    }
    Ok(place)
}

/// The start of the names of folders in which tool chains are being installed.
const UNFINISHED_PREFIX: &str = ".unfinished-";

/// Removes what interrupted installations left: hundreds of megabytes each. The lock of the cache is held, so no other
/// installation is running. What cannot be removed stays.
fn remove_unfinished(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED_PREFIX.as_bytes()) {
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// Makes a file of a tool chain equal to one of the SDK. Builds that run at the same time never see a part of it.
pub(super) fn put_file(from: &Path, to: &Path) -> Result<()> {
    let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if fs::read(to).is_ok_and(|present| present == content) {
        return Ok(());
    }
    let write = || -> Result<()> {
        let folder = to.parent().context("a file without a folder")?;
        // The mode follows the user's umask, as that of the other files.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        let mut draft = tempfile::Builder::new().permissions(open).tempfile_in(folder)?;
        draft.write_all(&content)?;
        draft.persist(to)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", to.display()))
}

/// Extracts the SDKs of Python and JavaScript and the WIT files that are embedded in this binary: `python/mayfly`,
/// `js`, `wit`.
pub(super) fn sdk() -> Result<PathBuf> {
    let mut hasher = Sha256::new();
    for dir in [&PYTHON_SDK, &JS_SDK, &WIT] {
        hash(dir, &mut hasher);
    }
    let digest = hex::encode(hasher.finalize());
    installed(&format!("sdk-{}", &digest[..16]), &mut |_| {}, |folder, _| {
        write_sdk(folder)?;
        extract(&WIT, &folder.join("wit"))
    })
}

/// Writes the SDKs for an editor, and for tests that run without a server.
pub(super) fn write_sdk(folder: &Path) -> Result<()> {
    extract(&PYTHON_SDK, &folder.join("python/mayfly"))?;
    extract(&JS_SDK, &folder.join("js"))
}

fn extract(dir: &Dir<'_>, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    dir.extract(folder).with_context(|| format!("cannot write {}", folder.display()))
}

fn hash(dir: &Dir<'_>, hasher: &mut Sha256) {
    for file in dir.files() {
        hasher.update(file.path().as_os_str().as_encoded_bytes());
        hasher.update([0]);
        hasher.update(file.contents().len().to_le_bytes());
        hasher.update(file.contents());
    }
    for dir in dir.dirs() {
        hash(dir, hasher);
    }
}

/// The exit status and stderr of a program of a tool chain.
pub(super) struct ToolExit {
    pub(super) status: ExitStatus,
    pub(super) stderr: String,
    /// Whether it was ended because its time was over.
    pub(super) is_overdue: bool,
}

impl ToolExit {
    /// The reason of a failure that the program itself did not write: it was ended by a signal.
    pub(super) fn unsaid(&self, program: &str) -> Option<String> {
        use std::os::unix::process::ExitStatusExt as _;
        let signal = self.status.signal()?;
        let memory = if signal == Signal::KILL.as_raw() { "; was the machine out of memory?" } else { "" };
        Some(format!("{program} was ended by signal {signal}{memory}"))
    }
}

/// Runs a program to its end or its limits. Each line of its stdout goes to `progress`.
///
/// # Errors
/// The program could not be started, or its output not be read.
pub(super) fn run(
    mut command: Command,
    limits: &BuildLimits,
    progress: Progress<'_>,
) -> std::io::Result<ToolExit> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let watch = LimitWatch::start(child.id(), limits);
    let mut errors = child.stderr.take().expect("piped");
    // Both pipes must be read, otherwise the program blocks when one is full.
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        errors.read_to_end(&mut bytes).map(|_| bytes)
    });
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = Vec::new();
    while output.read_until(b'\n', &mut line)? > 0 {
        progress(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
    let status = child.wait()?;
    let is_overdue = watch.stop() == Some(Interruption::Overdue);
    let stderr = reader.join().expect("reading does not panic")?;
    Ok(ToolExit { status, stderr: String::from_utf8_lossy(&stderr).into_owned(), is_overdue })
}

#[cfg(test)]
mod tests {
    use super::super::limits::BuildTimeout;
    use super::*;

    #[test]
    fn both_outputs_are_read_to_their_end() {
        let mut command = Command::new("sh");
        command.args(["-c", "yes out | head -n 20000; yes err | head -n 20000 >&2; exit 3"]);
        let mut lines = 0;
        let ended = run(command, &BuildLimits::default(), &mut |_| lines += 1).unwrap();
        assert_eq!((lines, ended.stderr.len()), (20_000, 80_000));
        assert_eq!((ended.status.code(), ended.is_overdue), (Some(3), false));
    }

    /// A program that starts another one, which keeps the output open.
    fn endless() -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo started; wait"]);
        command
    }

    #[test]
    fn a_program_ends_with_its_descendants_at_its_limit() {
        let limits = BuildLimits::from(BuildTimeout { build_timeout: "200ms".parse().unwrap() });
        let ended = run(endless(), &limits, &mut |_| {}).unwrap();
        assert!(ended.is_overdue && !ended.status.success());
    }

    #[test]
    fn a_program_ends_when_the_build_is_cancelled() {
        let limits = BuildLimits::default();
        let cancelled = limits.clone();
        let ended = run(endless(), &limits.without_time(), &mut |_| cancelled.cancel()).unwrap();
        assert!(!ended.is_overdue && !ended.status.success());
    }

    #[test]
    fn a_program_that_was_killed_is_named() {
        let killed = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            run(command, &BuildLimits::default(), &mut |_| {}).unwrap().unsaid("node")
        };
        let expected = "node was ended by signal 9; was the machine out of memory?";
        assert_eq!(killed("kill -KILL $$").as_deref(), Some(expected));
        assert_eq!(killed("exit 1"), None);
    }

    #[test]
    fn interrupted_installations_are_removed_and_complete_ones_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        for name in [".unfinished-abc/toolchain", "componentize-py-1", "sdk-1"] {
            fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        remove_unfinished(folder.path());
        let mut left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().flatten().map(|one| one.file_name()).collect();
        left.sort();
        assert_eq!(left, ["componentize-py-1", "sdk-1"]);
    }

    #[test]
    fn a_file_of_a_tool_chain_is_replaced_as_a_whole() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
        let inode = || fs::metadata(&to).unwrap().ino();
        fs::write(&from, "1").unwrap();
        put_file(&from, &to).unwrap();
        let first = inode();
        put_file(&from, &to).unwrap();
        assert_eq!(inode(), first, "an equal file is not written");
        // A reader that opened the file before has its whole content.
        let mut reader = File::open(&to).unwrap();
        fs::write(&from, "22").unwrap();
        put_file(&from, &to).unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), fs::read_to_string(&to).unwrap().as_str()), ("1", "22"));
    }

    #[test]
    fn the_sdk_has_what_builds_need() {
        let folder = tempfile::tempdir().unwrap();
        write_sdk(folder.path()).unwrap();
        for file in ["python/mayfly/_adapter.py", "js/adapter.js", "js/build.mjs", "js/index.d.ts"] {
            assert!(folder.path().join(file).is_file(), "{file}");
        }
        assert!(WIT.get_file("world.wit").is_some() && WIT.get_file("deps/http.wit").is_some());
    }
}
