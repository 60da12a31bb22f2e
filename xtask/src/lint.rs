//! The checks of the code that run before its tests.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::{
    command::{self, cargo},
    tools,
    workspace::{self, Workspace},
};

use crate::floors;

mod clippy_lists;
mod names;
mod unused;

pub(crate) const HELP: &str = "\
Runs every check, also after one has failed, and says at the end which failed:
  fmt      cargo fmt --check, on the platform, the SDK and the examples
  house    nothing marked unfinished, no test that never runs, no dependency that no source names, one way to
           lay out modules, no type name defined twice, no clock in a plan, `Debug` for every public type,
           no clippy.toml of a crate without the rules of the workspace's; long files are reported
  floors   cargo xtask floors
  clippy   cargo clippy --workspace --all-targets -- -D warnings
  deny     cargo deny check bans licenses sources; cargo-deny is built on demand (some minutes)

  cargo xtask lint [CHECK…]

Advisories are not checked: their database is a git repository that cannot be fetched everywhere.";

/// The release of cargo-deny that deny.toml is written for.
const CARGO_DENY_VERSION: &str = "^0.20";
/// Files with more lines are reported: they may have several topics.
const FILE_LINES_MAX: usize = 500;
/// Code that must not be committed. Split, so that this file does not match itself.
const LEFT_OVERS: &[(&str, &str)] = &[
    (concat!("todo", "!("), "finish it, or make it an error that a user can act on"),
    (concat!("unimplemented", "!("), "finish it, or make it an error that a user can act on"),
    (concat!("dbg", "!("), "log it, or remove it"),
    (concat!("#[ign", "ore"), "print `SKIPPED <name>: <reason>` at run time (see CONTRIBUTING.md)"),
    (concat!("// TO", "DO"), "do it, or file an issue"),
    (concat!("FIX", "ME"), "do it, or file an issue"),
];

/// Time is an argument of the functions in files named `plan.rs`. Whole crates without a clock have a clippy.toml.
const CLOCKLESS: &str = "plan.rs";
const CLOCK_READS: [&str; 3] = ["Instant::now(", "SystemTime::now(", "Timestamp::now("];

/// The lint that every library turns on: a public type without `Debug` cannot be part of one that has it.
const DEBUG_LINT: &str = "missing_debug_implementations";
/// Folders of libraries without [`DEBUG_LINT`]: guest code.
const DEBUG_EXEMPT: [&str; 2] = ["sdk", "examples"];

/// The platform, the SDK and the examples.
const MANIFESTS: [&str; 3] = ["Cargo.toml", "sdk/rust/Cargo.toml", "examples/Cargo.toml"];

enum Outcome {
    Passed,
    Skipped(String),
}

type Check = fn(&Workspace) -> Result<Outcome>;

const CHECKS: &[(&str, Check)] =
    &[("fmt", fmt), ("house", house), ("floors", floors), ("clippy", clippy), ("deny", deny)];

pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if let Some(unknown) = arguments.iter().find(|one| !CHECKS.iter().any(|(name, _)| name == one)) {
        bail!("unknown check {unknown:?}: see `cargo xtask lint --help`");
    }
    let workspace = Workspace::locate()?;
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        if !arguments.is_empty() && !arguments.iter().any(|one| one == name) {
            continue;
        }
        match check(&workspace) {
            Ok(Outcome::Passed) => println!("lint: {name} passed"),
            Ok(Outcome::Skipped(why)) => println!("lint: SKIPPED {name}: {why}"),
            Err(error) => {
                println!("lint: {name} failed: {error:#}");
                failed.push(*name);
            }
        }
    }
    if !failed.is_empty() {
        bail!("lint failed: {}", failed.join(", "));
    }
    Ok(())
}

fn fmt(workspace: &Workspace) -> Result<Outcome> {
    if !command::works("rustfmt", &["--version"]) {
        return Ok(Outcome::Skipped("rustfmt is not installed: rustup component add rustfmt".into()));
    }
    for manifest in manifests(workspace) {
        let mut fmt = cargo();
        fmt.args(["fmt", "--all", "--check", "--manifest-path"]).arg(&manifest);
        command::quietly(&mut fmt)
            .with_context(|| format!("run `cargo fmt --all` in {}", manifest.display()))?;
    }
    Ok(Outcome::Passed)
}

/// The existing ones of [`MANIFESTS`].
fn manifests(workspace: &Workspace) -> impl Iterator<Item = PathBuf> {
    MANIFESTS.iter().map(|manifest| workspace.root.join(manifest)).filter(|manifest| manifest.exists())
}

fn floors(_: &Workspace) -> Result<Outcome> {
    floors::run(&[])?;
    Ok(Outcome::Passed)
}

fn clippy(workspace: &Workspace) -> Result<Outcome> {
    if !command::works("cargo-clippy", &["--version"]) {
        return Ok(Outcome::Skipped("clippy is not installed: rustup component add clippy".into()));
    }
    let mut clippy = cargo();
    clippy
        .args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])
        .current_dir(&workspace.root);
    command::run(&mut clippy)?;
    Ok(Outcome::Passed)
}

fn deny(workspace: &Workspace) -> Result<Outcome> {
    if let Err(error) = ensure_cargo_deny() {
        return Ok(Outcome::Skipped(format!("cargo-deny cannot be installed here: {error:#}")));
    }
    let mut deny = Command::new(tools::find("cargo-deny").context("cargo-deny is not where cargo put it")?);
    // cargo-deny reads the manifests of all crates, including those for other systems, which no build has fetched.
    command::run(cargo().args(["fetch", "--locked"]).current_dir(&workspace.root))?;
    deny.args(["--log-level", "warn", "--offline", "check", "--hide-inclusion-graph"]);
    deny.args(["bans", "licenses", "sources"]).current_dir(&workspace.root);
    command::run(&mut deny)?;
    Ok(Outcome::Passed)
}

fn ensure_cargo_deny() -> Result<()> {
    if tools::find("cargo-deny").is_some() {
        return Ok(());
    }
    println!("lint: building cargo-deny (once; some minutes) into {}", tools::folder()?.display());
    // Unoptimised: it runs for seconds, and the build is slow on small machines.
    tools::cargo_install("cargo-deny", &["--version", CARGO_DENY_VERSION, "--debug", "--no-default-features"])
}

/// The project's own checks on source text.
fn house(workspace: &Workspace) -> Result<Outcome> {
    let mut files = Vec::new();
    rust_files(&workspace.root, &mut files)?;
    let mut left_over = 0;
    for file in files {
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let inside = file.strip_prefix(&workspace.root).unwrap_or(&file);
        let shown = inside.display();
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            println!("house: {shown} has {lines} lines: is there a second idea in it?");
        }
        if is_module_in_its_folder(inside) {
            println!("house: {shown}: a module's file lies beside its folder, as <name>.rs");
            left_over += 1;
        }
        if lacks_debug_lint(inside, &text) {
            println!("house: {shown}: add #![warn({DEBUG_LINT})], so that every public type has Debug");
            left_over += 1;
        }
        for (number, what, advice) in left_overs(&text) {
            println!("house: {shown}:{number}: {what} is left over: {advice}");
            left_over += 1;
        }
        for (number, read) in clock_reads(inside, &text) {
            println!("house: {shown}:{number}: {read}) reads a clock: make the time an argument");
            left_over += 1;
        }
    }
    for duplicate in names::duplicates(&workspace.root)? {
        println!("house: {duplicate}");
        left_over += 1;
    }
    for line in clippy_lists::incomplete(&workspace.root, &workspace.metadata)? {
        println!("house: {line}");
        left_over += 1;
    }
    for manifest in manifests(workspace) {
        for unused in unused::unused(&workspace::metadata(&manifest)?)? {
            println!("house: {unused}");
            left_over += 1;
        }
    }
    if left_over > 0 {
        bail!("{left_over} left-over(s)");
    }
    Ok(Outcome::Passed)
}

/// Tests are exempt: there, cargo treats each file next to the folders as a separate test. `file` is a path
/// within the workspace, which may itself lie below a `src`.
fn is_module_in_its_folder(file: &Path) -> bool {
    file.ends_with("mod.rs") && file.components().any(|part| part.as_os_str() == "src")
}

/// Whether the file is the root of a library that must turn on [`DEBUG_LINT`], and does not. `file` is a path within the
/// workspace.
fn lacks_debug_lint(file: &Path, text: &str) -> bool {
    let is_exempt = DEBUG_EXEMPT.iter().any(|folder| file.starts_with(folder));
    file.ends_with("src/lib.rs") && !is_exempt && !text.contains(DEBUG_LINT)
}

/// The reason of a test that another test runs in a separate process.
const CHILD_OF_A_TEST: &str = "= \"the child of ";

/// The line number, the found text, and advice.
fn left_overs(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let lines = text.lines().enumerate();
    lines
        .flat_map(|(at, line)| {
            let here = move |mark| line.contains(mark) && !line.contains(CHILD_OF_A_TEST);
            let found = LEFT_OVERS.iter().filter(move |(mark, _)| here(*mark));
            found.map(move |(mark, advice)| (at + 1, *mark, *advice))
        })
        .collect()
}

/// Reads of a clock where time is an argument, with their line numbers. Tests are exempt.
fn clock_reads(file: &Path, text: &str) -> Vec<(usize, &'static str)> {
    let is_test = file.file_stem().is_some_and(|stem| stem.to_string_lossy().contains("test"));
    if is_test || !file.ends_with(CLOCKLESS) {
        return Vec::new();
    }
    let code = text.lines().enumerate().take_while(|(_, line)| line.trim_start() != "mod tests {");
    code.filter_map(|(at, line)| {
        let read = CLOCK_READS.into_iter().find(|read| line.contains(*read))?;
        Some((at + 1, read))
    })
    .collect()
}

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let kind = entry.file_type()?;
        if kind.is_dir() && name != "target" && !name.as_encoded_bytes().starts_with(b".") {
            rust_files(&path, files)?;
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn left_over_markers_are_found_with_their_line() {
        let text = format!("fn main() {{\n    {}\"later\");\n}}\n", LEFT_OVERS[0].0);
        let found = left_overs(&text);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0, found[0].1), (2, LEFT_OVERS[0].0));
        assert!(left_overs("fn todo() {} // to do: nothing\n").is_empty());
        let child = |reason: &str| left_overs(&format!("{} {reason}", LEFT_OVERS[3].0)).len();
        assert_eq!((child("= \"the child of a_test\"]"), child("= \"slow\"]")), (0, 1));
    }

    #[test]
    fn modules_lie_beside_their_folders() {
        let lies_in_it = |file: &str| is_module_in_its_folder(Path::new(file));
        assert!(lies_in_it("platform/store/src/index/mod.rs"));
        assert!(
            !lies_in_it("platform/store/src/index.rs") && !lies_in_it("platform/store/tests/support/mod.rs")
        );
    }

    #[test]
    fn libraries_without_the_debug_lint_are_found() {
        let lacks = |file: &str, text| lacks_debug_lint(Path::new(file), text);
        assert!(lacks("platform/store/src/lib.rs", "mod store;\n"));
        assert!(!lacks("platform/store/src/lib.rs", "#![warn(missing_debug_implementations)]\nmod store;\n"));
        assert!(!lacks("platform/store/src/store.rs", "") && !lacks("sdk/rust/src/lib.rs", ""));
    }

    #[test]
    fn reads_of_a_clock_are_found_in_plans_but_not_in_their_tests() {
        let text =
            "fn now() {\n    Instant::now();\n}\n#[cfg(test)]\nmod tests {\n    Timestamp::now();\n}\n";
        let found = |file: &str| clock_reads(Path::new(file), text);
        assert_eq!(found("platform/scheduler/src/plan.rs"), [(2, "Instant::now(")]);
        assert!(found("platform/gateway/src/load.rs").is_empty());
    }

    #[test]
    fn lint_finds_its_own_source_and_it_is_clean() {
        let mut files = Vec::new();
        rust_files(Path::new(env!("CARGO_MANIFEST_DIR")), &mut files).unwrap();
        assert!(files.iter().any(|file| file.ends_with("src/lint.rs")));
        assert_eq!(left_overs(include_str!("lint.rs")), []);
    }
}
