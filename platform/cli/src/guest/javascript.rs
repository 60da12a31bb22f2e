//! Components of JavaScript and TypeScript: esbuild bundles the module with the SDK's adapter, componentize-js combines
//! the bundle and the StarlingMonkey engine, in its state after loading the bundle.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::cargo::Progress;
use super::limits::BuildLimits;
use super::packages::{self, ToolExit, WORLD};
use super::script::Script;

/// Pinned: the adapter relies on this version's fetch event, and `sdk/wit` contains the version of wasi:http that it
/// exports.
const COMPONENTIZE_JS: &str = "0.23.0";
const ESBUILD: &str = "0.28.2";

/// The package that is part of the SDK; an entry for it in `package.json` is ignored.
const SDK_PACKAGE: &str = "mayfly";

pub(super) fn build(
    script: &Script,
    out: &Path,
    limits: &BuildLimits,
    progress: Progress<'_>,
) -> Result<String> {
    let versions = format!("componentize-js {COMPONENTIZE_JS} (StarlingMonkey), esbuild {ESBUILD}");
    let name = format!("componentize-js-{COMPONENTIZE_JS}-esbuild-{ESBUILD}");
    let toolchain = packages::installed(&name, progress, install)?;
    progress(&format!("using {versions}"));
    let folder = script.file.parent().context("a file without a folder")?;
    install_dependencies(folder, limits, progress)?;
    let sdk = packages::sdk()?;
    // Node.js resolves packages from the folder of the importing program.
    let program = toolchain.join("build.mjs");
    packages::put_file(&sdk.join("js/build.mjs"), &program)?;
    packages::put_file(&sdk.join("js/stack.js"), &toolchain.join("stack.mjs"))?;
    let job = json!({
        "source": script.file, "handler": script.handler, "sdk": sdk.join("js"), "wit": sdk.join("wit"), "world": WORLD,
        "out": out,
    });
    progress(&format!("loading {} into a snapshot of the engine, some ten seconds", script.file_name()));
    let mut command = Command::new("node");
    command.arg(&program).arg(job.to_string());
    let ended = packages::run(command, limits, progress).with_context(node_is_missing)?;
    if ended.is_overdue {
        return Err(limits.overdue(script));
    }
    for line in ended.stderr.trim_end().lines() {
        progress(line);
    }
    if !ended.status.success() {
        let reason = ended.unsaid("node").unwrap_or_else(|| "its error is above".to_owned());
        bail!("{} could not be built; {reason}", script.file_name());
    }
    Ok(versions)
}

fn node_is_missing() -> &'static str {
    "node and npm are not there: functions in JavaScript need them to be built (https://nodejs.org, or apt-get install \
     nodejs npm)"
}

fn npm(folder: &Path) -> Command {
    let mut command = Command::new("npm");
    command.current_dir(folder).args([
        "install",
        "--no-audit",
        "--no-fund",
        "--no-progress",
        "--loglevel",
        "error",
    ]);
    command
}

fn run_npm(command: Command, limits: &BuildLimits, progress: Progress<'_>) -> Result<ToolExit> {
    packages::run(command, limits, progress).with_context(node_is_missing)
}

fn install(folder: &Path, progress: Progress<'_>) -> Result<()> {
    progress(&format!(
        "fetching componentize-js {COMPONENTIZE_JS} and esbuild {ESBUILD} by npm, once: 400 MB on disk"
    ));
    fs::write(folder.join("package.json"), "{\"private\": true}\n")?;
    let mut command = npm(folder);
    command
        .arg(format!("@bytecodealliance/componentize-js@{COMPONENTIZE_JS}"))
        .arg(format!("esbuild@{ESBUILD}"));
    // Not cancelled by a save: the next build needs it as well.
    let ended = run_npm(command, &BuildLimits::default(), progress)?;
    if !ended.status.success() {
        bail!("npm cannot fetch componentize-js {COMPONENTIZE_JS}: {}", last_error(&ended.stderr));
    }
    Ok(())
}

/// Installs the dependencies in `package.json`, unless `node_modules` is newer. Install scripts do not run: the native
/// code that they compile cannot be used in a function.
fn install_dependencies(folder: &Path, limits: &BuildLimits, progress: Progress<'_>) -> Result<()> {
    let file = folder.join("package.json");
    let text = match fs::read_to_string(&file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        text => text.with_context(|| format!("cannot read {}", file.display()))?,
    };
    let package: Value = serde_json::from_str(&text).context("package.json is not JSON")?;
    if !has_dependencies(&package) {
        return Ok(());
    }
    let modified = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let installed = modified(&folder.join("node_modules/.package-lock.json"));
    if installed.is_some() && installed >= modified(&file) {
        return Ok(());
    }
    progress("fetching the packages of package.json by npm");
    let mut command = npm(folder);
    command.arg("--ignore-scripts");
    let ended = run_npm(command, &limits.without_time(), progress)?;
    if !ended.status.success() {
        bail!("package.json: npm cannot install its packages: {}", last_error(&ended.stderr));
    }
    Ok(())
}

fn has_dependencies(package: &Value) -> bool {
    package["dependencies"]
        .as_object()
        .is_some_and(|packages| packages.keys().any(|name| name != SDK_PACKAGE))
}

/// npm's first error that is a sentence; the error code comes before it.
fn last_error(stderr: &str) -> String {
    let errors = stderr.lines().filter_map(|line| line.trim().strip_prefix("npm error "));
    let sentence = errors.clone().find(|line| !line.starts_with("code ") && !line.starts_with("errno "));
    sentence.or(stderr.lines().last()).unwrap_or("no reason given").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packages_besides_the_sdk_are_installed() {
        for (package, expected) in [
            (json!({}), false),
            (json!({"dependencies": {}}), false),
            (json!({"dependencies": {"mayfly": "file:.mayfly/sdk/js"}}), false),
            (json!({"devDependencies": {"esbuild": "0.28"}}), false),
            (json!({"dependencies": {"ms": "2"}}), true),
        ] {
            assert_eq!(has_dependencies(&package), expected, "{package}");
        }
    }

    #[test]
    fn a_package_file_that_cannot_be_read_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let install = || install_dependencies(folder.path(), &BuildLimits::default(), &mut |_| {});
        install().unwrap();
        for (content, expected) in [(&b"{\"name\": \"\xff\"}"[..], "cannot read"), (b"{", "is not JSON")] {
            fs::write(folder.path().join("package.json"), content).unwrap();
            let error = format!("{:#}", install().unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn npms_sentence_is_shown() {
        let stderr = "npm error code E404\nnpm error 404 Not Found - no-such-package\nnpm error 404\n";
        assert_eq!(last_error(stderr), "404 Not Found - no-such-package");
    }
}
