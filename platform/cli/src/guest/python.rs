//! Components of Python: componentize-py combines CPython, the SDK and the user's modules, with the interpreter in its
//! state after importing them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cargo::Progress;
use super::limits::BuildLimits;
use super::packages::{self, ToolExit, WORLD};
use super::requirements::Requirements;
use super::script::{Script, WORK_FOLDER};

/// Pinned: the SDK's adapter uses the bindings that this version generates.
const COMPONENTIZE_PY: &str = "0.25.1";
/// The Python version in components, for which packages are selected.
const COMPONENT_PYTHON: &str = "3.14";
/// The file with a function's packages, next to its script.
const REQUIREMENTS: &str = "requirements.txt";
/// Python on this machine: componentize-py is a stable-ABI extension for this version or newer.
const HOST_PYTHON: &str = "python3";

const RUN_COMPONENTIZE: &str = "import sys, componentize_py; sys.exit(componentize_py.script())";

pub(super) fn build(
    script: &Script,
    out: &Path,
    limits: &BuildLimits,
    progress: Progress<'_>,
) -> Result<String> {
    let versions = format!("componentize-py {COMPONENTIZE_PY} (CPython {COMPONENT_PYTHON})");
    let toolchain = packages::installed(&format!("componentize-py-{COMPONENTIZE_PY}"), progress, install)?;
    progress(&format!("using {versions}"));
    let sdk = packages::sdk()?;
    let folder = script.file.parent().context("a file without a folder")?;
    let dependencies = dependencies(folder, limits, progress)?;
    let work = tempfile::tempdir()?;
    let entry = work.path().join("entry");
    fs::create_dir(&entry)?;
    fs::write(entry.join("mayfly_entry.py"), entry_module(script)?)?;
    // componentize-py adds the site-packages of an environment to the component's modules: an empty environment makes
    // the result independent of this machine's packages.
    let environment = work.path().join("environment");
    fs::create_dir_all(environment.join("lib/site-packages"))?;

    let mut command = Command::new(HOST_PYTHON);
    command.args(["-c", RUN_COMPONENTIZE, "--quiet"]);
    command.arg("--wit-path").arg(sdk.join("wit")).args(["--world", WORLD, "componentize"]);
    // The user's folder comes first: `own_frames` expects it at /0.
    for path in [Some(folder), Some(&*entry), Some(&*sdk.join("python")), dependencies.as_deref()]
        .into_iter()
        .flatten()
    {
        command.arg("--python-path").arg(path);
    }
    command.arg("mayfly_entry").arg("--output").arg(out);
    command.env("PYTHONPATH", &toolchain).env("VIRTUAL_ENV", &environment).env_remove("PYTHONHOME");
    // A backtrace of componentize-py would hide the user's traceback.
    command.env("RUST_BACKTRACE", "0");
    progress(&format!("loading {} into a snapshot of Python, some ten seconds", script.file_name()));
    let ended =
        packages::run(command, limits, progress).with_context(|| format!("cannot run {HOST_PYTHON}"))?;
    if ended.is_overdue {
        return Err(limits.overdue(script));
    }
    if !ended.status.success() {
        for line in own_frames(&ended.stderr).lines() {
            progress(line);
        }
        let reason = ended.unsaid("componentize-py").unwrap_or_else(|| "its error is above".to_owned());
        bail!("{} could not be loaded; {reason}", script.file_name());
    }
    Ok(versions)
}

/// The module with which componentize-py starts.
fn entry_module(script: &Script) -> Result<String> {
    let (module, handler) = (script.stem()?, &script.handler);
    if module.contains('.') {
        bail!("{} cannot be imported: a module's name has no dots", script.file_name());
    }
    let folder = script.file.parent().unwrap_or(Path::new(""));
    for own in ["mayfly.py", "mayfly/__init__.py"].map(|name| folder.join(name)) {
        if own.is_file() {
            bail!("{} hides the SDK's module mayfly: give it another name", own.display());
        }
    }
    let quoted = |text: &str| serde_json::to_string(text).unwrap_or_default();
    Ok(format!(
        "from mayfly import _adapter\nfrom mayfly._adapter import IncomingHandler\n_adapter.load({}, {})\n",
        quoted(module),
        quoted(handler)
    ))
}

/// The command `python3 -m pip install` into a folder.
fn pip(target: &Path) -> Command {
    let mut command = Command::new(HOST_PYTHON);
    command.args([
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--no-warn-script-location",
    ]);
    command.args(["--progress-bar", "off", "--target"]).arg(target);
    command
}

fn install(folder: &Path, progress: Progress<'_>) -> Result<()> {
    progress(&format!("fetching componentize-py {COMPONENTIZE_PY} by pip, once: 17 MB"));
    let mut command = pip(folder);
    command.args(["--only-binary=:all:", &format!("componentize-py=={COMPONENTIZE_PY}")]);
    // Not cancelled by a save: the next build needs it as well.
    let ended = run_pip(command, &BuildLimits::default(), progress)?;
    if !ended.status.success() {
        bail!("pip cannot fetch componentize-py {COMPONENTIZE_PY}: {}", last_error(&ended.stderr));
    }
    Ok(())
}

fn run_pip(command: Command, limits: &BuildLimits, progress: Progress<'_>) -> Result<ToolExit> {
    let ended = packages::run(command, limits, progress).with_context(|| {
        format!("{HOST_PYTHON} is not there: functions in Python need it to be built (apt-get install python3 python3-pip)")
    })?;
    if ended.stderr.contains("No module named pip") {
        bail!("{HOST_PYTHON} has no pip, which fetches componentize-py (apt-get install python3-pip)");
    }
    Ok(ended)
}

/// The packages of `requirements.txt`, downloaded when the file, or a file that it refers to, has changed.
fn dependencies(folder: &Path, limits: &BuildLimits, progress: Progress<'_>) -> Result<Option<PathBuf>> {
    let Some(requirements) = Requirements::read(folder, REQUIREMENTS)? else { return Ok(None) };
    let digest = requirements.digest(COMPONENT_PYTHON);
    let place = folder.join(WORK_FOLDER).join(format!("python-{}", &digest[..16]));
    if place.is_dir() {
        return Ok(Some(place));
    }
    let parent = folder.join(WORK_FOLDER);
    fs::create_dir_all(&parent)?;
    let work = tempfile::tempdir_in(&parent)?;
    let target = work.path().join("packages");
    progress("fetching the packages of requirements.txt by pip");
    let mut command = pip(&target);
    // Only platform-independent wheels: a component contains no native code.
    command.args(["--only-binary=:all:", "--platform", "any", "--implementation", "py", "--abi", "none"]);
    command.args(["--python-version", COMPONENT_PYTHON, "--requirement", REQUIREMENTS]);
    // Paths of requirements are relative to it.
    command.current_dir(folder);
    let ended = run_pip(command, &limits.without_time(), progress)?;
    if !ended.status.success() {
        bail!("requirements.txt: {}", refused_package(&ended.stderr));
    }
    fs::rename(&target, &place).with_context(|| format!("cannot make {}", place.display()))?;
    Ok(Some(place))
}

fn refused_package(stderr: &str) -> String {
    // pip then also says that it found no matching distribution, whatever the package is.
    if let Some(line) = stderr.lines().find(|line| line.contains("after connection broken by")) {
        return format!("pip cannot reach the package index: {}", line.trim());
    }
    let found = stderr
        .lines()
        .find_map(|line| line.trim().strip_prefix("ERROR: No matching distribution found for "));
    match found {
        Some(package) => format!(
            "{package} has no wheel in plain Python: a package with native code cannot be part of a component (if it \
             is not native, check its name and version)"
        ),
        None => last_error(stderr),
    }
}

/// The last line that pip marks as an error.
fn last_error(stderr: &str) -> String {
    let mut errors = stderr.lines().filter_map(|line| line.trim().strip_prefix("ERROR: "));
    errors.next_back().or(stderr.lines().last()).unwrap_or("no reason given").to_owned()
}

/// Python's own error in the output of componentize-py: without the frames of the adapter and of importlib, and with
/// the user's files named as in the project.
fn own_frames(stderr: &str) -> String {
    let python = stderr.split("\n\nCaused by:").next().unwrap_or(stderr);
    let python = python.split_once("AssertionError: ").map_or(python, |(_, rest)| rest);
    let mut kept: Vec<String> = Vec::new();
    let (mut in_frame, mut dropped) = (false, false);
    for line in python.lines() {
        if line.starts_with("  File \"") {
            in_frame = true;
            dropped = ["mayfly_entry.py\"", "/mayfly/_", "\"/python/importlib/", "\"<frozen "]
                .iter()
                .any(|own| line.contains(own));
        } else if !line.starts_with("    ") {
            (in_frame, dropped) = (false, false);
        }
        if !(in_frame && dropped) {
            kept.push(line.replace("File \"/0/", "File \""));
        }
    }
    let has_frames = kept.iter().any(|line| line.starts_with("  File \""));
    kept.retain(|line| has_frames || !line.starts_with("Traceback "));
    kept.join("\n").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_syntax_error_keeps_its_place_only() {
        let stderr = "Traceback (most recent call last):\n  File \"/x/bin/componentize-py\", line 8, in <module>\n    \
            sys.exit(script())\n             ^^^^^^^^\nAssertionError: Traceback (most recent call last):\n  File \
            \"/1/mayfly_entry.py\", line 3, in <module>\n    _adapter.load(\"handler\", \"handle\")\n    ~~~~^^^\n  File \
            \"/2/mayfly/_adapter.py\", line 37, in load\n    loaded = 1\n  File \"<frozen importlib._bootstrap>\", line \
            1406, in _gcd_import\n  File \"/0/handler.py\", line 2\n    return {\"a\": 1\n           ^\nSyntaxError: \
            '{' was never closed\n\n\nCaused by:\n    SyntaxError: '{' was never closed (handler.py, line 2)\n";
        assert_eq!(
            own_frames(stderr),
            "Traceback (most recent call last):\n  File \"handler.py\", line 2\n    return {\"a\": 1\n           \
             ^\nSyntaxError: '{' was never closed"
        );
        let missing = "AssertionError: Traceback (most recent call last):\n  File \"/1/mayfly_entry.py\", line 3, in \
            <module>\n    _adapter.load()\nLookupError: handler.py has no function 'handle'; it has main\n";
        assert_eq!(own_frames(missing), "LookupError: handler.py has no function 'handle'; it has main");
    }

    #[test]
    fn a_module_that_hides_the_sdk_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let entry = |name: &str| entry_module(&Script::parse(&folder.path().join(name)).unwrap());
        assert!(entry("handler.py").unwrap().contains("_adapter.load(\"handler\", \"handle\")"));
        assert!(entry("a.b.py").unwrap_err().to_string().contains("has no dots"));
        fs::write(folder.path().join("mayfly.py"), "").unwrap();
        for name in ["mayfly.py", "handler.py"] {
            let error = entry(name).unwrap_err().to_string();
            assert!(error.contains("mayfly.py hides the SDK's module"), "{error}");
        }
    }

    #[test]
    fn a_refused_package_is_named() {
        let stderr = "ERROR: Could not find a version that satisfies the requirement numpy (from versions: none)\n\
                      ERROR: No matching distribution found for numpy==2.0\n";
        assert!(refused_package(stderr).starts_with("numpy==2.0 has no wheel in plain Python"));
        assert_eq!(refused_package("WARNING: x\nERROR: no network\n"), "no network");
        let offline = "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('refused')': \
                       /simple/humanize/\nERROR: No matching distribution found for humanize\n";
        assert!(
            refused_package(offline).starts_with("pip cannot reach the package index: WARNING: Retrying")
        );
    }
}
