//! Builds the examples as components.
//!
//! The build is done by the binary (`mayfly build`), so that users and tests use the same one. This module installs the
//! toolchain, and skips unchanged examples.

use std::{
    hash::{DefaultHasher, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    command::{self, cargo},
    tools,
    workspace::Workspace,
};

/// Debian's packages of a Rust compiler that can build for wasm, the sources of its library, and a linker.
const DEBIAN_TOOLCHAIN: &[&str] = &["rustc-web", "rust-web-src", "lld", "wasi-libc"];
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const RUSTUP_TARGET: &str = "wasm32-wasip2";
/// Folders from which the components are built.
const INPUTS: &[&str] = &["examples", "sdk/rust", "sdk/wit", "platform/cli/src/guest"];

/// Forgets the last build, so that the next [`build`] repeats it.
pub fn forget_build(workspace: &Workspace) {
    let _ = std::fs::remove_file(stamp_file(workspace));
}

/// Builds the components unless they are up to date; returns their folder.
pub fn build(workspace: &Workspace) -> Result<PathBuf> {
    let guests = workspace.guests();
    let stamp = stamp(&workspace.root)?;
    if std::fs::read_to_string(stamp_file(workspace)).is_ok_and(|built| built == stamp) {
        println!("guests: up to date in {}", guests.display());
        return Ok(guests);
    }
    ensure_toolchain()?;
    // With the features of the whole workspace, so that the demo and the tests can reuse the build.
    let mut build = cargo();
    command::run(build.args(["build", "--workspace", "--bin", "mayfly"]).current_dir(&workspace.root))?;
    std::fs::create_dir_all(&guests).with_context(|| format!("cannot make {}", guests.display()))?;
    let mut build = Command::new(workspace.mayfly("debug"));
    build.args(["build", "--workspace"]).arg(workspace.root.join("examples")).arg("--out").arg(&guests);
    // Cargo's variables are for this workspace; guests have their own.
    build.env_remove("CARGO_TARGET_DIR").env_remove("RUSTFLAGS");
    command::forget_own_package(&mut build);
    command::run(build.current_dir(&workspace.root))?;
    std::fs::write(stamp_file(workspace), stamp).context("cannot write the stamp file")?;
    let built =
        std::fs::read_dir(&guests)?.flatten().filter(|e| e.path().extension().is_some_and(|x| x == "wasm"));
    println!("guests: {} components in {}", built.count(), guests.display());
    Ok(guests)
}

/// Fails with the missing packages and the consequences.
fn ensure_toolchain() -> Result<()> {
    if rustup_target_installed() || debian_toolchain_installed() {
        return Ok(());
    }
    if tools::find("rustup").is_some() {
        println!("guests: adding {RUSTUP_TARGET} with rustup");
        match command::quietly(Command::new("rustup").args(["target", "add", RUSTUP_TARGET])) {
            Ok(()) => return Ok(()),
            Err(error) => println!("guests: rustup cannot add it here: {}", first_line(&error)),
        }
    }
    if tools::can_use_apt() {
        match tools::apt_install(DEBIAN_TOOLCHAIN) {
            Ok(()) if debian_toolchain_installed() => return Ok(()),
            Ok(()) => {
                println!("guests: the packages are there, but {DEBIAN_RUSTC} has no sources of its library")
            }
            Err(error) => println!("guests: apt-get cannot install the toolchain: {}", first_line(&error)),
        }
    }
    bail!(
        "no Rust toolchain for wasm: run `rustup target add {RUSTUP_TARGET}`, or on Debian as root \
         `apt-get install {}`. Without it functions cannot be built here; ready components still run",
        DEBIAN_TOOLCHAIN.join(" ")
    )
}

fn rustup_target_installed() -> bool {
    let mut sysroot = Command::new("rustc");
    sysroot.args(["--print", "sysroot"]);
    command::output(&mut sysroot).is_ok_and(|sysroot| {
        Path::new(sysroot.trim()).join("lib/rustlib").join(RUSTUP_TARGET).join("lib").is_dir()
    })
}

fn debian_toolchain_installed() -> bool {
    let mut sysroot = Command::new(DEBIAN_RUSTC);
    sysroot.args(["--print", "sysroot"]);
    let has_sources = command::output(&mut sysroot)
        .is_ok_and(|sysroot| Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/std").is_dir());
    has_sources && (tools::find("wasm-ld").is_some() || tools::find("wasm-ld-14").is_some())
}

fn stamp_file(workspace: &Workspace) -> PathBuf {
    workspace.guests().join(".inputs")
}

/// A fingerprint of all inputs of the components.
fn stamp(root: &Path) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    for input in INPUTS {
        hash_folder(&root.join(input), &mut hasher)?;
    }
    Ok(format!("{:016x}\n", hasher.finish()))
}

fn hash_folder(folder: &Path, hasher: &mut DefaultHasher) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default();
        if path.is_dir() {
            if name != "target" {
                hash_folder(&path, hasher)?;
            }
            continue;
        }
        hasher.write(name.as_encoded_bytes());
        let content = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        hasher.write_usize(content.len());
        hasher.write(&content);
    }
    Ok(())
}

fn first_line(error: &anyhow::Error) -> String {
    format!("{error:#}").lines().take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stamp_follows_the_content_of_inputs_and_nothing_else() {
        let root = std::env::temp_dir().join(format!("mayfly-stamp-{}", std::process::id()));
        let example = root.join("examples/hello/src");
        std::fs::create_dir_all(root.join("examples/target")).unwrap();
        std::fs::create_dir_all(&example).unwrap();
        std::fs::write(example.join("lib.rs"), "one").unwrap();
        let first = stamp(&root).unwrap();
        std::fs::write(root.join("examples/target/output"), "built").unwrap();
        std::fs::write(root.join("README.md"), "words").unwrap();
        assert_eq!(stamp(&root).unwrap(), first);
        std::fs::write(example.join("lib.rs"), "two").unwrap();
        assert_ne!(stamp(&root).unwrap(), first);
        std::fs::remove_dir_all(root).unwrap();
    }
}
