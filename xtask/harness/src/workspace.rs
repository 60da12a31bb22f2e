//! The paths of the sources and the build outputs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command::{self, cargo};

/// The clone that the running task works on.
#[derive(Debug)]
pub struct Workspace {
    /// The folder of the root `Cargo.toml`.
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
    /// `cargo metadata --no-deps`: the members and their direct dependencies.
    pub metadata: Value,
}

impl Workspace {
    /// Finds the workspace of the program that cargo runs.
    pub fn locate() -> Result<Self> {
        // At run time instead of by `env!`: several clones may share a build cache.
        let own = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = own.ancestors().find(|folder| folder.join("Cargo.lock").is_file());
        let root =
            root.with_context(|| format!("no Cargo.lock in or above {}", own.display()))?.to_path_buf();
        let metadata = metadata(&root.join("Cargo.toml"))?;
        let target =
            metadata["target_directory"].as_str().context("cargo metadata names no target_directory")?;
        Ok(Self { target: target.into(), root, metadata })
    }

    /// The folder of the components built from the examples.
    pub fn guests(&self) -> PathBuf {
        self.target.join("guests")
    }

    /// The mayfly binary of a build profile (`debug`, `release`, `dist`).
    pub fn mayfly(&self, profile: &str) -> PathBuf {
        self.target.join(profile).join("mayfly")
    }
}

/// The members of the workspace that this manifest belongs to, and their direct dependencies.
pub fn metadata(manifest: &Path) -> Result<Value> {
    let mut cargo = cargo();
    cargo.args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"]).arg(manifest);
    let text = command::output(&mut cargo)?;
    serde_json::from_str(&text).context("cargo metadata printed no JSON")
}
