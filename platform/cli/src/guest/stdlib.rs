//! A standard library for `wasm32-wasip1`, for a compiler that comes only with the sources of one.
//!
//! It is built once per compiler and kept as a sysroot in the user's cache, so that a project's first build takes
//! seconds instead of a minute.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};

use super::cargo::{self, Progress};
use super::toolchain::RustCompiler;

pub(super) const TARGET: &str = "wasm32-wasip1";

/// Changed when the library is built differently, so that older ones are not used any more.
const RECIPE: &str = "1: opt-level s, no unwinding, no backtraces";

/// A package without code, for which cargo builds the standard library.
const MANIFEST: &str = r#"[package]
name = "sysroot"
version = "0.0.0"
edition = "2024"

[lib]
path = "lib.rs"

[profile.release]
opt-level = "s"
panic = "abort"
codegen-units = 1

[workspace]
"#;

/// The sysroot for this compiler, which is built if missing.
pub(super) fn sysroot(compiler: &RustCompiler, progress: Progress<'_>) -> Result<PathBuf> {
    let folder = cache_folder()?.join("sysroots");
    let key = hex::encode(Sha256::digest(format!("{}{RECIPE}", compiler.verbose_version)));
    let sysroot = folder.join(&key[..16]);
    if sysroot.is_dir() {
        return Ok(sysroot);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let lock = folder.join("lock");
    let lock = File::create(&lock).with_context(|| format!("cannot write {}", lock.display()))?;
    lock.lock().context("cannot lock the cache of standard libraries")?;
    // Another build may have created it meanwhile.
    if !sysroot.is_dir() {
        progress("building the standard library for wasm, once for this compiler: about a minute");
        build(compiler, &folder, &sysroot, progress).context("cannot build the standard library for wasm")?;
    }
    Ok(sysroot)
}

fn build(compiler: &RustCompiler, folder: &Path, sysroot: &Path, progress: Progress<'_>) -> Result<()> {
    let work = tempfile::tempdir_in(folder)?;
    fs::write(work.path().join("Cargo.toml"), MANIFEST)?;
    fs::write(work.path().join("lib.rs"), "#![no_std]\n")?;
    let target_dir = work.path().join("target");
    let mut command = cargo::command(compiler, work.path());
    command
        // Building the library is an unstable feature of cargo.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_DIR", &target_dir)
        .env("CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS", "-Cembed-bitcode=yes")
        .args([
            "build",
            "--release",
            "--target",
            TARGET,
            "-Zbuild-std=std,panic_abort",
            "-Zbuild-std-features=",
        ]);
    cargo::run(command, progress)?;

    let made = work.path().join("sysroot");
    let libraries = made.join("lib/rustlib").join(TARGET).join("lib");
    fs::create_dir_all(&libraries)?;
    for entry in fs::read_dir(target_dir.join(TARGET).join("release/deps"))? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.ends_with(".rlib") && !name.starts_with("libsysroot-") {
            fs::rename(entry.path(), libraries.join(&*name))?;
        }
    }
    // Renamed at the end: an existing sysroot is complete.
    fs::rename(&made, sysroot).with_context(|| format!("cannot make {}", sysroot.display()))
}

/// The folder for files that can be recreated: standard libraries, tool chains.
pub(super) fn cache_folder() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("MAYFLY_CACHE_DIR")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("mayfly")))
        .or_else(|| Some(set("HOME")?.join(".cache/mayfly")))
        .context("cannot find a cache folder for libraries and tool chains: set MAYFLY_CACHE_DIR or HOME")
}
