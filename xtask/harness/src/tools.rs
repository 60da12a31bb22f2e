//! Programs that a task needs and may install, and their folder.

use std::{ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::command::{self, cargo};

/// The folder of programs that cargo builds for xtask, outside the target directory, so that `cargo clean` keeps them.
pub fn folder() -> Result<PathBuf> {
    if let Some(chosen) = std::env::var_os("MAYFLY_TOOLS") {
        return Ok(chosen.into());
    }
    let cache = match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("HOME is not set: set MAYFLY_TOOLS to a folder")?)
                .join(".cache")
        }
    };
    Ok(cache.join("mayfly-tools"))
}

/// `PATH` with the folder of tools in front.
pub fn search_path() -> Result<OsString> {
    let own = folder()?.join("bin");
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths(std::iter::once(own).chain(std::env::split_paths(&inherited)))?)
}

/// The path of a program, in the folder of tools or on the PATH; `None` if it is missing.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = search_path().ok()?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Builds and installs a program with cargo. `arguments` choose version, profile and features.
pub fn cargo_install(package: &str, arguments: &[&str]) -> Result<()> {
    let folder = folder()?;
    let mut install = cargo();
    install.args(["install", package, "--locked", "--root"]).arg(&folder).args(arguments);
    // A separate target directory: an interrupted build continues, and the workspace's own is unaffected.
    let build = folder.join("build");
    install.env("CARGO_TARGET_DIR", &build);
    command::run(&mut install)?;
    // Frees about a gigabyte.
    let _ = std::fs::remove_dir_all(build);
    Ok(())
}

/// Whether this process is root on a machine with apt.
pub fn can_use_apt() -> bool {
    is_root() && find("apt-get").is_some()
}

/// Whether this process is root.
pub fn is_root() -> bool {
    command::output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// Installs Debian packages, quietly. Only when [`can_use_apt`] says so.
pub fn apt_install(packages: &[&str]) -> Result<()> {
    println!("installing Debian packages: {}", packages.join(" "));
    if apt(&["install", "-y", "--no-install-recommends"], packages).is_ok() {
        return Ok(());
    }
    // The package lists are old or missing.
    apt(&["update"], &[])?;
    apt(&["install", "-y", "--no-install-recommends"], packages)
}

/// The only program that a build of Mayfly needs besides cargo and a linker: its allocator is written in C, with a
/// Makefile.
pub fn ensure_make() -> Result<()> {
    if find("make").is_some() {
        return Ok(());
    }
    if !can_use_apt() {
        anyhow::bail!("make is not on the PATH, and Mayfly's allocator is built with it: install make");
    }
    apt_install(&["make"]).context("make, which Mayfly's allocator is built with, is missing")
}

fn apt(arguments: &[&str], packages: &[&str]) -> Result<()> {
    let mut apt = Command::new("apt-get");
    apt.arg("-qq").args(arguments).args(packages).env("DEBIAN_FRONTEND", "noninteractive");
    command::quietly(&mut apt)
}
