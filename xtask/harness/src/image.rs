//! Images for the demo and the benchmarks, as `docker save` writes them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::command;

/// An image of the host's static busybox.
pub fn busybox(folder: &Path, name: &str) -> Result<PathBuf> {
    let bin = folder.join("rootfs/bin");
    fs::create_dir_all(&bin)?;
    fs::copy("/bin/busybox", bin.join("busybox")).context("no static busybox at /bin/busybox")?;
    for applet in ["sh", "sleep", "true", "wget"] {
        std::os::unix::fs::symlink("busybox", bin.join(applet))?;
    }
    archive(folder, name, &["/bin/sleep", "1d"])
}

/// An image of the HTTP server in `source`, a Rust program without dependencies, linked statically.
pub fn hello_server(folder: &Path, source: &Path, name: &str) -> Result<PathBuf> {
    let bin = folder.join("rootfs/bin");
    fs::create_dir_all(&bin)?;
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition", "2024", "-O", "-C", "target-feature=+crt-static", "-o"]);
    command::run(rustc.arg(bin.join("hello")).arg(source))?;
    archive(folder, name, &["/bin/hello"])
}

/// An archive of the folder's `rootfs`.
fn archive(folder: &Path, name: &str, command: &[&str]) -> Result<PathBuf> {
    let run = |program: &str, arguments: &[&str]| {
        command::output(Command::new(program).args(arguments).current_dir(folder))
    };
    run("tar", &["-C", "rootfs", "-cf", "layer.tar", "."])?;
    let sum = run("sha256sum", &["layer.tar"])?;
    let hex = sum.split(' ').next().unwrap_or_default();
    ensure!(hex.len() == 64, "sha256sum printed {sum:?}");
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({"architecture": architecture, "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": command},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{hex}")]}});
    fs::write(folder.join("config.json"), config.to_string())?;
    let manifest = json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
    fs::write(folder.join("manifest.json"), manifest.to_string())?;
    run("tar", &["-cf", "image.tar", "manifest.json", "config.json", "layer.tar"])?;
    Ok(folder.join("image.tar"))
}
